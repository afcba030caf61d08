"""Another transformer in a checkpoint's pipeline, to be rendered beside it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from miles_dmd2.models.weights import safetensors_shapes

_PART = "transformer"


def check_transformer(checkpoint: Path, given: Path) -> Path:
    """The transformer directory that `given` is or, being a pipeline, has.

    ValueError: it has no weights, or not the names and shapes of the checkpoint's own.
    """
    directory = given / _PART if (given / "model_index.json").is_file() else given
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory} has no config.json; give a transformer's directory, or a pipeline's")
    wanted, found = safetensors_shapes(checkpoint / _PART), safetensors_shapes(directory)
    names = sorted(wanted.keys() ^ found.keys())
    if names:
        has = "it has" if names[0] in found else "it lacks"
        raise ValueError(f"is not the transformer of {checkpoint}: {has} {names[0]} ({len(names)} names differ)")
    other = next((name for name, shape in wanted.items() if found[name] != shape), None)
    if other is not None:
        raise ValueError(
            f"is not the transformer of {checkpoint}: {other} is {list(found[other])}, and {list(wanted[other])} there"
        )
    return directory


@contextmanager
def swapped(checkpoint: Path, transformer: Path, directory: Path) -> Iterator[Path]:
    """A pipeline below `directory` for the length of the block: links to the checkpoint's parts, and to this one.

    It keeps the last two parts of the checkpoint's path, by which an engine may know the family.
    """
    checkpoint = checkpoint.resolve()
    root = directory / checkpoint.parent.name / checkpoint.name
    try:
        root.mkdir(parents=True)
        for part in checkpoint.iterdir():
            (root / part.name).symlink_to(part)
        (root / _PART).unlink()
        (root / _PART).symlink_to(transformer.resolve())
        yield root
    finally:
        shutil.rmtree(directory, ignore_errors=True)
