"""The console script miles-dmd2: what is done with a run beside training it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NoReturn, cast

from miles_dmd2.checkpointing import CheckpointError
from miles_dmd2.cli.export import TOLERANCE, Check, ExportError, export
from miles_dmd2.config import ConfigError
from miles_dmd2.types import WeightKind

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line. Returns the exit code: 0, 1 (failed), 2 (bad input) or 130 (interrupted)."""
    try:
        given = _parser().parse_args(sys.argv[1:] if argv is None else argv)
        kind = cast("WeightKind | None", given.weights)
        for line in export(
            given.run, given.output, kind, given.hf_checkpoint, _check(given), with_adapter=given.adapter
        ):
            print(line, flush=True)
    except (ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except (ExportError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("\nstopped; nothing was exported", file=sys.stderr)
        return INTERRUPTED
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


def _parser() -> _Parser:
    parser = _Parser(prog="miles-dmd2", description="What is done with a run of train_diffusion.py.")
    commands = parser.add_subparsers(title="commands", metavar="export", required=True)
    ex = commands.add_parser(
        "export",
        help="write a checkpoint's student as a diffusers pipeline",
        description="Write a checkpoint's student as a diffusers pipeline, and check that plain diffusers makes its "
        "pictures. Exit codes: 0 done, 1 failed or not the same pictures, 2 bad input.",
        allow_abbrev=False,
    )
    ex.add_argument("run", type=Path, metavar="RUN", help="run directory (its newest checkpoint is taken), or step_*")
    ex.add_argument("--output", type=Path, required=True, metavar="DIR", help="the pipeline's directory, a new one")
    ex.add_argument("--weights", choices=("raw", "ema"), help="as trained, or averaged (default: ema if kept)")
    ex.add_argument("--hf-checkpoint", type=Path, metavar="DIR", help="the run's pipeline, if it was moved")
    ex.add_argument(
        "--adapter",
        action="store_true",
        help="write the student's LoRA too, as DIR/lora, which diffusers loads on the run's pipeline",
    )
    ex.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare pictures of plain diffusers with those of the local engine, in fp32 (default: on)",
    )
    ex.add_argument(
        "--check-prompts", nargs="+", metavar="TEXT", help="prompts of these pictures (default: the run's first four)"
    )
    ex.add_argument(
        "--check-tolerance",
        type=float,
        metavar="X",
        help=f"greatest difference, in units of the largest latent and of a pixel (default: {TOLERANCE})",
    )
    ex.add_argument(
        "--check-sglang",
        type=Path,
        metavar="PYTHON",
        help="compare SGLang too: its environment's Python",
    )
    ex.add_argument("--device", choices=("cpu", "cuda"), help="for the check (default: cpu)")
    return parser


def _check(given: argparse.Namespace) -> Check | None:
    if not given.check:
        for name in ("check_prompts", "check_tolerance", "check_sglang", "device"):
            if getattr(given, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')}: is for the check; leave it out, or --no-check")
        return None
    tolerance = TOLERANCE if given.check_tolerance is None else given.check_tolerance
    if not 0 <= tolerance < 1:
        raise ConfigError(f"--check-tolerance {tolerance:g}: must be >= 0 and < 1, where all pictures pass")
    device = cast('Literal["cpu", "cuda"]', given.device or "cpu")
    return Check(tuple(given.check_prompts or ()), tolerance, device, given.check_sglang)


if __name__ == "__main__":
    sys.exit(main())
