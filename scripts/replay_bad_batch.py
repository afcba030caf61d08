"""Compute a step that was not finite again: python scripts/replay_bad_batch.py RUN_DIR/bad_batches/NAME

Prints one JSON object: each sample's loss, the gradient norm, and which samples are not finite. Needs --dump-bad-batch
in the run that met the step; runs on one process, whatever the run had.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="a directory of RUN_DIR/bad_batches")
    parser.add_argument("--hf-checkpoint", type=Path, help="the run's pipeline, if it is elsewhere now")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args(argv)
    from miles_dmd2.models.registry import build_adapter
    from miles_dmd2.training import init_ranks
    from miles_dmd2.training.bad_batch import read_bad_batch
    from miles_dmd2.training.replay import replay

    try:
        facts = read_bad_batch(arguments.directory).facts
        checkpoint = arguments.hf_checkpoint or facts["checkpoint"]
        adapter = build_adapter(checkpoint, facts["height"], facts["width"], facts["num_frames"])
        step = replay(arguments.directory, adapter, init_ranks(device=arguments.device))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    bad = [sample for sample, loss in step.losses.items() if not math.isfinite(loss)]
    losses = {str(sample): str(loss) for sample, loss in step.losses.items()}
    print(json.dumps({"losses": losses, "gradient_norm": str(step.gradient_norm), "not_finite": bad}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
