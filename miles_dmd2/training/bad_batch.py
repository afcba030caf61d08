"""The batch of a step that was not finite, kept so that the step can be computed again.

A directory holds what every rank trained on (`samples_<rank>.safetensors` and `.json`), the group's state just before
the step (as a checkpoint has it), and `batch.json`: which step, and how to build the trainer. The state of an adapter
is without its base, so that one's digest is there too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from miles_dmd2.config.memory import TRAINED
from miles_dmd2.models.checkpoint import component_digest
from miles_dmd2.training.checkpoint import write_file
from miles_dmd2.types import RolloutSample, ScoreRow, WeightVersion

FORMAT = "miles_dmd2 bad batch 2"
FACTS = "batch.json"
_PLAIN = ("sample_id", "prompt", "seed", "stop_step", "reward")


@dataclass(frozen=True, slots=True)
class BadBatch:
    """`samples` of all ranks, in the window's order; `scores`: what the actor was handed, empty for a critic."""

    samples: list[RolloutSample]
    scores: dict[int, ScoreRow]
    facts: Mapping[str, Any]


def write_samples(directory: Path, rank: int, samples: Sequence[RolloutSample], scores: Mapping[int, ScoreRow]) -> None:
    """One rank's part. Tensors keep their bits, NaN included."""
    tensors: dict[str, Tensor] = {}
    records = []
    for i, sample in enumerate(samples):
        tensors |= {f"{i}/x_k": sample.x_k, f"{i}/x0": sample.x0, f"{i}/sigmas": sample.sigmas}
        tensors |= {f"{i}/cond/{name}": value for name, value in sample.cond.items()}
        record = {name: getattr(sample, name) for name in _PLAIN}
        record["weight_version"] = [sample.weight_version.step, sample.weight_version.kind]
        if (row := scores.get(sample.sample_id)) is not None:
            tensors |= {f"{i}/x0_real": row.x0_real, f"{i}/x0_fake": row.x0_fake}
            record["score_sigma"] = row.score_sigma
        records.append(record)
    held = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}
    write_file(directory / f"samples_{rank:05d}.safetensors", held)
    (directory / f"samples_{rank:05d}.json").write_text(json.dumps(records, indent=1) + "\n")


def write_facts(directory: Path, facts: Mapping[str, Any]) -> None:
    """OSError also where the base of an adapter is gone: it is read to its end here, on a few steps of a run."""
    base = None if facts["settings"]["lora"] is None else component_digest(Path(facts["checkpoint"]), TRAINED)
    text = json.dumps({"format": FORMAT, **facts, "base_sha256": base}, indent=1, default=str)
    (directory / FACTS).write_text(text + "\n")


def read_bad_batch(directory: Path) -> BadBatch:
    """ValueError, one line: not such a directory, or not complete."""
    try:
        facts = json.loads((directory / FACTS).read_text())
        if facts["format"] != FORMAT:
            raise ValueError(f"format {facts['format']!r}")
        samples: list[RolloutSample] = []
        scores: dict[int, ScoreRow] = {}
        for rank in range(facts["world_size"]):
            tensors = load_file(directory / f"samples_{rank:05d}.safetensors")
            records = json.loads((directory / f"samples_{rank:05d}.json").read_text())
            for i, record in enumerate(records):
                sample, row = _sample(record, {name: t for name, t in tensors.items() if name.startswith(f"{i}/")})
                samples.append(sample)
                if row is not None:
                    scores[sample.sample_id] = row
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(
            f"{directory} is not a complete bad batch ({error!r}); give one of RUN_DIR/bad_batches"
        ) from error
    return BadBatch(samples, scores, facts)


def check_base(facts: Mapping[str, Any], checkpoint: Path) -> None:
    """ValueError: the transformer there is not the base of the adapter whose step this is."""
    kept = facts["base_sha256"]
    if kept is None:
        return
    found = component_digest(checkpoint, TRAINED)
    if found != kept:
        raise ValueError(
            f"--hf-checkpoint {checkpoint}: another transformer (SHA-256 {found[:12]}) than the base of this step's "
            f"adapter ({kept[:12]}); give that one"
        )


def _sample(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[RolloutSample, ScoreRow | None]:
    own = {name.partition("/")[2]: tensor for name, tensor in tensors.items()}
    cond = {name.removeprefix("cond/"): tensor for name, tensor in own.items() if name.startswith("cond/")}
    step, kind = record["weight_version"]
    sample = RolloutSample(
        **{name: record[name] for name in _PLAIN},
        sigmas=own["sigmas"],
        x_k=own["x_k"],
        x0=own["x0"],
        cond=cond,
        weight_version=WeightVersion(step, kind),
    )
    if "score_sigma" not in record:
        return sample, None
    return sample, ScoreRow(own["x0_real"], own["x0_fake"], record["score_sigma"])


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
