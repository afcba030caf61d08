"""miles-dmd2 export: from a checkpoint to a diffusers pipeline that makes the student's pictures."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from miles_dmd2.checkpointing import CheckpointError, Manifest, SavedGroup, read_manifest, sound_beside
from miles_dmd2.cli.student import check_student, student_grid, student_sampling
from miles_dmd2.config import Config, ConfigError, checks
from miles_dmd2.config.errors import show
from miles_dmd2.config.lora import Lora
from miles_dmd2.config.memory import TRAINED
from miles_dmd2.config.options import build_config
from miles_dmd2.data.prompts import load_prompts
from miles_dmd2.data.requests import eval_requests
from miles_dmd2.models.registry import build_adapter, known_pipelines
from miles_dmd2.types import RolloutRequest, WeightKind

if TYPE_CHECKING:
    from torch import Tensor

    from miles_dmd2.cli.same_pictures import Made
    from miles_dmd2.models.base import ModelAdapter

TOLERANCE = 0.001  # of a value's scale; rounding in fp32 is far below it: docs/export.md
PICTURES = 4


class ExportError(RuntimeError):
    """An export that was not completed, in one line."""


@dataclass(frozen=True, slots=True)
class Check:
    """prompts: none stands for the first of the run's eval prompts, or of its training prompts. sglang: the Python of
    SGLang's environment, to compare a server too.
    """

    prompts: tuple[str, ...]
    tolerance: float
    device: Literal["cpu", "cuda"]
    sglang: Path | None = None


def export(
    source: Path,
    output: Path,
    kind: WeightKind | None,
    pipeline: Path | None,
    check: Check | None,
    *,
    with_adapter: bool = False,
) -> Iterator[str]:
    """Write the student at or below `source` to `output`, which appears when it is complete and has passed `check`;
    yields lines that say what was done. `pipeline`: the run's --hf-checkpoint, if it was moved.
    `with_adapter`: the student's LoRA too, as a file of its own.

    ConfigError or CheckpointError: bad input. ExportError: other pictures than the engine's; a sheet of both is kept.
    """
    sheet = output.parent / f"{output.name}.png" if check else None
    _check_output(output, sheet)
    manifest = _sound(checks.find_checkpoint(source, "RUN"))
    config = _options_of(manifest, pipeline)
    kind = _kind(config, kind)
    adapter = _adapter(config)
    check_student(config, adapter)
    requests = _requests(config, adapter, check) if check else []

    (actor,) = (group for group in manifest.groups.values() if group.role == "actor")
    lora = _lora(actor, adapter, with_adapter)
    trained = _student(manifest, actor, kind)
    weights = trained if lora is None else _merged(adapter, trained, lora)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as aside:
        written = Path(aside) / output.name
        adapter.export_pipeline(weights, student_sampling(config), written)
        if lora is not None and with_adapter:
            _write_adapter(trained, lora, written)
        if check is not None and sheet is not None:
            yield from _compare(adapter, weights, written, requests, check, sheet, with_adapter=with_adapter)
            if requests[0].sigmas[0] != 1:
                yield (
                    f"note: the grid starts at {requests[0].sigmas[0]:g}, by which the engine scales its noise and a "
                    "plain pipeline does not; for the check it did"
                )
        if output.exists():
            raise ExportError(f"{output} was made meanwhile; exports never overwrite")
        written.rename(output)
    yield (
        f"done: {output} is the {'averaged' if kind == 'ema' else 'raw'} student after {manifest.rollout} rollouts and "
        f"{actor.counters['updates']} updates; how it is called is in {output / 'student.json'}"
    )


def _compare(
    adapter: ModelAdapter,
    weights: Mapping[str, Tensor],
    written: Path,
    requests: Sequence[RolloutRequest],
    check: Check,
    sheet: Path,
    *,
    with_adapter: bool,
) -> Iterator[str]:
    """A line for each of those who make the local engine's pictures, and one for the `sheet` of all. ExportError: one
    does not, which is in the sheet, or cannot be asked.
    """
    from miles_dmd2.cli.same_pictures import by_diffusers, by_engine, by_sglang, difference, write_sheet
    from miles_dmd2.engines.base import EngineError

    sides: dict[str, Callable[[], list[Made]]] = {
        "the local engine": partial(by_engine, adapter, weights, requests, check.device),
        "plain diffusers": partial(by_diffusers, written, requests, check.device),
    }
    if with_adapter:
        base = adapter.checkpoint
        sides["diffusers with the adapter"] = partial(by_diffusers, written, requests, check.device, base=base)
    if check.sglang is not None:
        exported = build_adapter(written, adapter.height, adapter.width, adapter.num_frames)
        sides["SGLang"] = partial(by_sglang, exported, requests, check.sglang, written.parent / "sglang.log")
    rows: list[list[Made]] = []
    for name, sample in sides.items():
        try:
            rows.append(sample())
        except EngineError as error:
            raise ExportError(f"--check: {name} could not be asked: {error}") from error
        if len(rows) == 1:
            continue
        found = difference(rows[0], rows[-1])
        by = f"{found.latents:.2g} in latents and {found.pixels:.2g} in pixels (tolerance {check.tolerance:g})"
        if not found.within(check.tolerance):
            write_sheet(rows, sheet)
            raise ExportError(
                f"--check: {name} does not make the pictures of the local engine, it is off by {by}; see the last and "
                f"the first row of {sheet}; nothing else was kept"
            )
        yield f"checked: {len(requests)} pictures of {name} and of the local engine differ by at most {by}"
    write_sheet(rows, sheet)
    yield f"pictures: {sheet}, by rows: {', '.join(sides)}"


def _check_output(output: Path, sheet: Path | None) -> None:
    for path in (output, sheet):
        if path is not None and path.exists():
            raise ConfigError(f"--output {show(output)}: {show(path)} exists; exports never overwrite, give another")
    checks.check_writable(output.parent, "--output")


def _sound(directory: Path) -> Manifest:
    try:
        return read_manifest(directory)
    except CheckpointError as error:
        other = sound_beside(directory)
        instead = "no other complete one is there" if other is None else f"the newest complete one is {show(other)}"
        raise CheckpointError(f"RUN {show(directory)}: {error}; {instead}") from error


def _student(manifest: Manifest, actor: SavedGroup, kind: WeightKind) -> dict[str, Tensor]:
    from miles_dmd2.training.saved_student import saved_student

    try:
        return saved_student([manifest.directory / name for name in actor.files], kind)
    except ValueError as error:
        raise CheckpointError(f"RUN {show(manifest.directory)}: {error}; give another checkpoint") from error


def _lora(actor: SavedGroup, adapter: ModelAdapter, wanted: bool) -> Lora | None:
    """The student's adapter, None if it trained all parameters. ConfigError: none to write, or another base here."""
    from miles_dmd2.models.checkpoint import component_digest

    if actor.adapter is None:
        if wanted:
            raise ConfigError("--adapter: the student has none, it trained all parameters; leave it out")
        return None
    if component_digest(adapter.checkpoint, TRAINED) != actor.adapter.base_sha256:
        raise ConfigError(
            f"--hf-checkpoint {show(adapter.checkpoint)}: has another transformer than the one that the student's "
            "adapter was trained on; give that one"
        )
    return actor.adapter.lora


def _merged(adapter: ModelAdapter, trained: Mapping[str, Tensor], lora: Lora) -> dict[str, Tensor]:
    from miles_dmd2.training.lora import merged

    base = {name: value.detach() for name, value in adapter.load_transformer().named_parameters()}
    return merged({**base, **trained}, lora.scale)


def _write_adapter(trained: Mapping[str, Tensor], lora: Lora, written: Path) -> None:
    from safetensors.torch import save_file

    from miles_dmd2.models.export import ADAPTER_DIRECTORY, ADAPTER_FILE
    from miles_dmd2.training.lora import as_diffusers

    directory = written / ADAPTER_DIRECTORY
    directory.mkdir()
    save_file(as_diffusers(trained, lora.scale), directory / ADAPTER_FILE, metadata={"format": "pt"})


def _options_of(manifest: Manifest, pipeline: Path | None) -> Config:
    """The options of the run that wrote the checkpoint."""
    moved = {} if pipeline is None else {"hf_checkpoint": str(pipeline)}
    try:
        return build_config({**manifest.config, **moved})
    except ConfigError as error:
        raise ConfigError(
            f"RUN {show(manifest.directory)}: was written with options that this version does not have ({error}); "
            f"export it with miles_dmd2 {manifest.versions.get('miles_dmd2', 'of that run')}"
        ) from error


def _kind(config: Config, kind: WeightKind | None) -> WeightKind:
    if kind == "ema" and not config.keeps_ema:
        raise ConfigError("--weights ema: the run kept no average (its --student-ema-decay is 0); use raw")
    return kind or ("ema" if config.keeps_ema else "raw")


def _adapter(config: Config) -> ModelAdapter:
    root = config.model.hf_checkpoint
    if not root.is_dir():
        raise ConfigError(f"--hf-checkpoint {show(root)}: the run's pipeline is not there; say where it is now")
    checks.check_checkpoint(root, known_pipelines())
    try:
        return build_adapter(root, *config.canvas)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"--hf-checkpoint {show(root)}: malformed config.json: {error!r}") from error


def _requests(config: Config, adapter: ModelAdapter, check: Check) -> list[RolloutRequest]:
    """One picture for each prompt, with the seeds of the run's evals."""
    if not adapter.embedded:
        raise ConfigError(f"--check: {adapter.family} is generated by SGLang only; add --no-check")
    if check.sglang is not None:
        from miles_dmd2.engines.sglang.environment import check_version

        try:
            _ = adapter.serving
            check_version(check.sglang, allow_untested=True, flag="--check-sglang")
        except ValueError as error:
            raise ConfigError(str(error)) from error
    if check.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("--device cuda: no CUDA device is visible on this machine; use cpu, or --no-check")
    prompts = list(check.prompts)
    if not prompts:
        evals = config.evaluation.eval_prompt_data
        path = config.rollout.prompt_data if evals is None else evals
        if not path.is_file():
            raise ConfigError(f"--check: the run's prompts {show(path)} are not there; give --check-prompts TEXT ...")
        prompts = load_prompts(path)[:PICTURES]
    sample_type = config.algorithm.dmd2_student_sample_type
    return eval_requests(prompts, 1, student_grid(config), config.rollout_seed, sample_type, video_dtype="fp32")
