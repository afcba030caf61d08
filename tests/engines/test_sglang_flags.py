"""Flags of the server are read off the source of the SGLang that will be started."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_dmd2.engines.sglang.flags import check_flags, known_flags

SERVER_ARGS = """
        parser.add_argument(
            "--model-path",
            type=str,
        )
        parser.add_argument("--host", default="--not-a-flag of its own")
        option_prefixes=("--component-precisions.", "--component_precisions."),
"""
PIPELINE = """
            f"--{prefix_with_dot}vae-tiling",
            f"--{other}nothing",
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A stand-in for the engine's Python, which says where its sglang is."""
    root = tmp_path / "sglang"
    for folder, text in (("runtime/server_args", SERVER_ARGS), ("configs/pipeline_configs", PIPELINE)):
        (root / "multimodal_gen" / folder).mkdir(parents=True)
        (root / "multimodal_gen" / folder / "some.py").write_text(text)
    file = tmp_path / "python"
    file.write_text(f'#!/bin/sh\necho "{root}"\n')
    file.chmod(0o755)
    return file


def test_the_names_in_the_source(python: Path) -> None:
    assert known_flags(python) == {"model-path", "host", "component-precisions.", "vae-tiling"}


def test_known_flags_pass(python: Path) -> None:
    check_flags(python, ("--host", "x", "--component-precisions.vae", "fp32", "--vae-tiling"))
    check_flags(Path("/nowhere"), ())


@pytest.mark.parametrize("name", ["vae-tilin", "vae-tiling.x", "component-precisions", "no-vae-tiling", "not-a-flag"])
def test_a_flag_that_the_server_would_ignore_is_refused_with_the_nearest(python: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"^--sglang-{name}: neither .* nor of SGLang's server in {python}; the nea"):
        check_flags(python, ("--host", "x", f"--{name}", "3"))


def test_a_source_of_another_form_is_told(python: Path, tmp_path: Path) -> None:
    (tmp_path / "sglang/multimodal_gen/runtime/server_args/some.py").unlink()
    with pytest.raises(ValueError, match=f"--sglang-python {python}: cannot find the flags .*leave them out"):
        check_flags(python, ("--host", "x"))
