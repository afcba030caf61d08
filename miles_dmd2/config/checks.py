"""What can be known to fail before anything starts: directories, files, devices. Each fault is one `ConfigError`."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from miles_dmd2.config.errors import ConfigError, show
from miles_dmd2.config.schema import Config

RUN_MARKER = "run.json"  # a run writes it into its directory when all its processes are up
MANIFEST = "manifest.json"  # a checkpoint writes it last: with it, the checkpoint is complete
_STEP = re.compile(r"step_(\d+)")
_LARGEST_HEADER = 100 * 2**20
_WEIGHTED = ("transformer", "vae", "text_encoder")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_BYTES = {  # of a value, by safetensors' name of its dtype; sizes of others are not checked
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


def check_checkpoint(path: Path, known: Mapping[str, Collection[str]], flag: str = "--hf-checkpoint") -> None:
    """A diffusers pipeline directory of a known class whose parts are there, with weights that were not cut short.

    known: pipeline class -> the parts that it must have.
    """
    where = f"{flag} {show(path)}"
    if not path.is_dir():
        what = "is a file" if path.is_file() else "no such directory"
        raise ConfigError(f"{where}: {what}; give the directory of a diffusers pipeline (it holds model_index.json)")
    index = _read_json(path / "model_index.json", where)
    found = index.get("_class_name")
    if not isinstance(found, str) or found not in known:
        classes = ", ".join(sorted(known))
        raise ConfigError(f"{where}: model_index.json has _class_name {show(found)}; this version trains {classes}")
    parts = [name for name, value in index.items() if _is_part(name, value)]
    for name in known[found]:
        if name not in parts:
            raise ConfigError(f"{where}: model_index.json names no {name}; a {found} has one, give a complete pipeline")
    for name in parts:
        _check_part(path, name, where)


def find_checkpoint(path: Path, flag: str = "--load") -> Path:
    """The checkpoint that `path` is, or the newest complete one (`step_*/manifest.json`) in it or its checkpoints/."""
    if not path.is_dir():
        what = "is a file" if path.is_file() else "no such directory"
        raise ConfigError(f"{flag} {show(path)}: {what}; give a run or checkpoint directory")
    if (path / MANIFEST).is_file():
        return path
    steps = [*_steps(path), *_steps(path / "checkpoints")]
    complete = [(number, step) for number, step in steps if (step / MANIFEST).is_file()]
    if not complete:
        partial = (
            f" ({', '.join(step.name for _, step in steps[:3])}: without a manifest, not complete)" if steps else ""
        )
        raise ConfigError(
            f"{flag} {show(path)}: holds no complete checkpoint step_*/{MANIFEST}{partial}; "
            f"give another directory{', or leave it out to start anew' if flag == '--load' else ''}"
        )
    return max(complete)[1]


def check_run_dir(config: Config) -> None:
    """The run's directories can be written, and hold no other run than the one that --load continues."""
    run_dir, save, load = config.run.run_dir, config.save_dir, config.run.load
    for flag, path in (("--run-dir", run_dir), ("--save", save)):
        check_writable(path, flag)
    source = None if load is None else find_checkpoint(load)
    continues_save = source is not None and is_inside(source, save)
    continues_run = continues_save or (source is not None and is_inside(source, run_dir))
    steps = [f"checkpoints/{step.name}" for _, step in _steps(run_dir / "checkpoints")]
    found = [name for name in (RUN_MARKER, MANIFEST) if (run_dir / name).exists()] + steps
    if found and not continues_run:
        instead = f"instead of {show(load)}" if load else "to continue it"
        raise ConfigError(
            f"--run-dir {show(run_dir)}: holds another run ({found[0]}); give a new directory, or "
            f"--load {show(run_dir)} {instead}"
        )
    held = next((step.name for _, step in _steps(save)), None)
    if held and not continues_save:
        raise ConfigError(
            f"--save {show(save)}: holds checkpoints of another run ({held}); give a new directory, or --load "
            f"{show(save)} to continue that run"
        )


def check_writable(path: Path, flag: str) -> None:
    """`path` is a directory that can be written to, or can be made."""
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        what = "is a file" if there == path.absolute() else f"cannot be made, {show(there)} is a file"
        raise ConfigError(f"{flag} {show(path)}: {what}; give a directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {show(path)}: {show(there)} is not writable; give another directory")


def check_eval_media(config: Config) -> None:
    """The directory for eval samples can be written, and holds no other run's: files of one name would be replaced."""
    directory = config.evaluation.save_eval_media_dir
    if directory is None:
        return
    check_writable(directory, "--save-eval-media-dir")
    if config.run.load is None:  # else see checkpointing/resuming.py
        refuse_samples(directory)


def refuse_samples(directory: Path) -> None:
    """ConfigError if eval samples are in it."""
    held = next(iter(sorted(directory.glob("eval_*/index.jsonl"))), None)
    if held is not None:
        raise ConfigError(
            f"--save-eval-media-dir {show(directory)}: holds the samples of another run ({held.parent.name}); give a "
            "directory of its own, files to compare have the same names in both"
        )


def check_devices(config: Config, cpu_count: int, cuda_count: int) -> None:
    """For a run that starts its own Ray on this machine: no more ranks than devices. On cpu a device is a core."""
    cluster = config.cluster
    if cluster.actor_num_nodes > 1:
        raise ConfigError(
            f"--actor-num-nodes {cluster.actor_num_nodes}: a run that starts its own Ray has one node; use 1, or give "
            "--ray-address of a running cluster"
        )
    if cluster.device == "cuda" and cuda_count == 0:
        raise ConfigError("--device cuda: no CUDA device is visible on this machine; use --device cpu")
    count, kind = (cuda_count, "CUDA devices") if cluster.device == "cuda" else (cpu_count, "CPU cores")
    for flag, value in (
        ("--actor-num-gpus-per-node", cluster.actor_num_gpus_per_node),
        ("--num-gpus-per-node", config.devices_per_node),
    ):
        if value > count:
            raise ConfigError(f"{flag} {value}: this machine has {count} {kind}; use {count} or fewer")


def check_packages(config: Config) -> None:
    """What an option needs beyond the project's own dependencies is installed."""
    if config.run.use_wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError("--use-wandb: the package wandb is not installed; pip install wandb, or leave it out")
    for flag, function in (
        ("--eval-metrics-path", config.evaluation.eval_metrics_path),
        ("--custom-rm-path", config.rollout.custom_rm_path),
    ):
        source = (function or "").rpartition(":")[0]
        if source.endswith(".py") and not Path(source).is_file():
            raise ConfigError(
                f"{flag} {function}: no such file {show(source)}; give module:function or file.py:function"
            )


def _is_part(name: str, value: object) -> bool:
    """[library, class]; [null, null] is an optional part that is left out, other values are settings."""
    return not name.startswith("_") and isinstance(value, list) and len(value) == 2 and value[1] is not None


def _check_part(root: Path, name: str, where: str) -> None:
    directory = root / name
    if not directory.is_dir():
        raise ConfigError(f"{where}: has no {name}/, which model_index.json names; give a complete pipeline")
    if name.startswith("scheduler"):
        _read_json(directory / "scheduler_config.json", where)
    elif name.startswith(_WEIGHTED):
        _read_json(directory / "config.json", where)
        _check_weights(directory, where)
    elif not any(directory.iterdir()):
        raise ConfigError(f"{where}: {name}/ is empty; give a complete pipeline")


def _check_weights(directory: Path, where: str) -> None:
    files = sorted(directory.glob("*.safetensors"))
    for index in sorted(directory.glob("*.safetensors.index.json")):
        shards = _read_json(index, where).get("weight_map")
        if not isinstance(shards, Mapping) or not all(isinstance(shard, str) for shard in shards.values()):
            raise ConfigError(f"{where}: {directory.name}/{index.name} has no weight_map; download it again")
        for shard in sorted(set(shards.values())):
            if Path(shard).name != shard:
                raise ConfigError(
                    f"{where}: {directory.name}/{index.name} names {show(shard)}, outside of its directory; download "
                    "it again from a source you trust"
                )
            if not (directory / shard).is_file():
                raise ConfigError(
                    f"{where}: {directory.name}/ has no {shard}, which {index.name} names; download it again"
                )
    if not files:
        pickled = next((file.name for file in sorted(directory.iterdir()) if file.suffix in _PICKLED), None)
        only = f", only {pickled}, a pickle, which is never read" if pickled else ""
        raise ConfigError(
            f"{where}: {directory.name}/ has no .safetensors weights{only}; give a pipeline saved as safetensors"
        )
    for file in files:
        fault = safetensors_fault(file)
        if fault:
            raise ConfigError(f"{where}: {directory.name}/{file.name} {fault}; download or export it again")


def safetensors_fault(file: Path) -> str | None:
    """What is wrong with a safetensors file by its header and size, or None. Layout: JSON length, JSON, tensors."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            if start == b"version ":
                return "is a Git LFS pointer, not weights (git lfs pull)"
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > _LARGEST_HEADER or 8 + length > size:
                return f"is not safetensors, or cut short ({size} bytes)"
            header = json.loads(stream.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        parts = [(*map(_whole, entry["data_offsets"]), name, _tensor_bytes(entry)) for name, entry in tensors.items()]
        fault = _layout_fault(sorted(parts))
        expected = 8 + length + max((part[1] for part in parts), default=0)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError, IndexError):
        return "has a malformed safetensors header"
    if not tensors:
        return "holds no tensors"
    return fault or (None if size == expected else f"has {size} bytes and its header says {expected}")


def parameter_count(directory: Path) -> int:
    """Values in a directory's safetensors files, by their headers, which `check_checkpoint` has found sound."""
    count = 0
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        count += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return count


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"not a size: {value!r}")
    return value


def _tensor_bytes(entry: Mapping[str, Any]) -> int | None:
    """Bytes that a tensor's shape and dtype take; None for a dtype that is not known here."""
    count, dtype = math.prod(map(_whole, entry["shape"])), entry["dtype"]
    if not isinstance(dtype, str):
        raise ValueError(f"not a dtype: {dtype!r}")
    return count * _BYTES[dtype] if dtype in _BYTES else None


def _layout_fault(parts: list[tuple[int, int, str, int | None]]) -> str | None:
    """`parts`: (begin, end, name, bytes by shape) in file order. They follow on each other, each as long as it says."""
    at = 0
    for begin, end, name, wanted in parts:
        if begin != at or end < begin:
            return f"has tensors that overlap or leave a gap (at {show(name)})"
        if wanted is not None and wanted != end - begin:
            return f"gives {show(name)} {end - begin} bytes, its shape takes {wanted}"
        at = end
    return None


def _read_json(file: Path, where: str) -> dict[str, Any]:
    name = f"{file.parent.name}/{file.name}" if file.name != "model_index.json" else file.name
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{where}: has no {name}; give the directory of a complete diffusers pipeline") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {name} is not readable JSON ({error}); download or export it again") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: {name} must be a JSON object, got {show(content)}; download or export it again")
    return content


def _steps(directory: Path) -> Iterator[tuple[int, Path]]:
    """`step_N` directories with their numbers."""
    if directory.is_dir():
        for child in sorted(directory.iterdir()):
            match = _STEP.fullmatch(child.name)
            if match and child.is_dir():
                yield int(match[1]), child


def is_inside(path: Path, directory: Path) -> bool:
    return path.resolve().is_relative_to(directory.resolve())
