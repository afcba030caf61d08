"""An exported student on a real server, with the plugin and in fp32, against the local engine."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from miles_dmd2.cli.main import main
from miles_dmd2.training import Ranks
from tests.cli.test_export import trained

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


def test_sglang_makes_the_pictures(
    ranks: Ranks, tmp_path: Path, qwen_pipeline: Path, sglang_python: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a student with a grid of its own, which a server without the plugin would not take."""
    own = {"diffusion_sigmas": "1,0.6", "diffusion_num_steps": None, "diffusion_flow_shift": None}
    trained(ranks, tmp_path, qwen_pipeline, **own)
    words = ["export", str(tmp_path / "run"), "--check-sglang", str(sglang_python), "--output"]
    assert main([*words, str(tmp_path / "student")]) == 0
    plain, served, _, _ = capsys.readouterr().out.splitlines()
    assert plain.startswith("checked: 3 pictures of plain diffusers")
    assert served.startswith("checked: 3 pictures of SGLang")
    match = re.search(r"at most (\S+) in latents and (\S+) in pixels", served)
    assert match
    assert 0 < float(match[1]) < 2e-5  # other kernels: 0 would be the same engine twice
    assert float(match[2]) < 1e-4
    assert np.asarray(Image.open(tmp_path / "student.png")).shape == (3 * 48 + 2 * 2, 3 * 32 + 2 * 2, 3)
