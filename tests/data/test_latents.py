"""Real latents on disk: what was written comes back, and nothing else does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from miles_dmd2.config import ConfigError
from miles_dmd2.data.latents import LatentFile, check_latents, read_latents, write_latents

CONTENT = LatentFile(torch.arange(24.0).reshape(3, 4, 2), ("one", "two", "one"), "ab" * 32)


def test_a_round_trip(tmp_path: Path) -> None:
    write_latents(tmp_path / "deep" / "file", CONTENT)
    found = read_latents(tmp_path / "deep" / "file")
    assert torch.equal(found.latents, CONTENT.latents)
    assert (found.prompts, found.vae) == (CONTENT.prompts, CONTENT.vae)
    assert found.rows() == {"one": [0, 2], "two": [1]}


@pytest.mark.parametrize(
    "content",
    [
        replace(CONTENT, prompts=("one",)),
        replace(CONTENT, latents=CONTENT.latents.double()),
        replace(CONTENT, latents=CONTENT.latents / 0),
    ],
)
def test_what_is_no_data_set_is_not_written(tmp_path: Path, content: LatentFile) -> None:
    with pytest.raises(ValueError, match="latents"):
        write_latents(tmp_path / "file", content)
    assert not (tmp_path / "file").exists()


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    write_latents(tmp_path / "file", CONTENT)
    with pytest.raises(ValueError, match="exists already"):
        write_latents(tmp_path / "file", CONTENT)


def changed(path: Path) -> None:
    """One bit of one latent."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "no such file"),
        (lambda path: path.write_bytes(b"nothing"), "not readable as safetensors"),
        (lambda path: save_file({"latents": CONTENT.latents}, path), "holds no latents of the format"),
        (changed, "its content is not what its hash says; encode it again"),
    ],
)
def test_what_was_not_written_is_refused(tmp_path: Path, damage, message: str) -> None:
    path = tmp_path / "file"
    write_latents(path, CONTENT)
    damage(path)
    with pytest.raises(ConfigError, match=f"--dmd2-latents .*{message}"):
        read_latents(path)


@pytest.mark.parametrize(
    ("prompts", "shape", "vae", "message"),
    [
        (["one", "three", "four"], (4, 2), CONTENT.vae, "no latent for 2 of the prompts .*four"),
        (["one"], (4, 3), CONTENT.vae, r"latents are \[4, 2\], this run's are \[4, 3\]"),
        (["one"], (4, 2), "other", "another VAE than that of --hf-checkpoint"),
    ],
)
def test_what_does_not_fit_the_run_is_refused(prompts: list[str], shape, vae: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_latents(Path("file"), CONTENT, prompts, shape, vae)


def test_what_fits_is_taken() -> None:
    check_latents(Path("file"), CONTENT, ["two"], (4, 2), CONTENT.vae)
