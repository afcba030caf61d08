"""An exported student on a real server, with the plugin and in fp32, against the local engine."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from miles_dmd2.cli.main import main
from miles_dmd2.training import Ranks
from tests.cli.test_export import trained
from tests.families import TINY, Tiny, checkpoints

__all__ = ["checkpoints"]
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


@pytest.mark.parametrize("tiny", TINY, ids=str)
def test_sglang_makes_the_pictures(
    ranks: Ranks,
    tmp_path: Path,
    tiny: Tiny,
    checkpoints: Callable[[Tiny], Path],
    sglang_python: Path,
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> None:
    """Of each family's student, by plain diffusers too, with a grid of its own, which a server without the plugin would
    not take.
    """
    own = {
        "diffusion_sigmas": "1,0.6",
        "diffusion_num_steps": None,
        "diffusion_flow_shift": None,
        "diffusion_height": str(tiny.size[0]),
        "diffusion_width": str(tiny.size[1]),
        "num_rollout": "1",
        **({"diffusion_num_frames": str(tiny.num_frames)} if tiny.num_frames > 1 else {}),
    }
    trained(ranks, tmp_path, checkpoints(tiny), **own)
    words = ["export", str(tmp_path / "run"), "--check-sglang", str(sglang_python), "--output"]
    assert main([*words, str(tmp_path / "student")]) == 0
    plain, served = (line for line in capsys.readouterr().out.splitlines() if line.startswith("checked"))
    assert plain.startswith("checked: 3 pictures of plain diffusers")
    assert served.startswith("checked: 3 pictures of SGLang")
    match = re.search(r"at most (\S+) in latents and (\S+) in pixels", served)
    assert match
    record_property("latents", match[1])
    record_property("pixels", match[2])
    assert 0 < float(match[1]) < 2e-5  # other kernels: 0 would be the same engine twice
    assert float(match[2]) < 1e-4
    rows, columns = 3 * tiny.size[0] + 2 * 2, 3 * tiny.size[1] + 2 * 2
    assert np.asarray(Image.open(tmp_path / "student.png")).shape[1:] == (columns, 3) or tiny.num_frames > 1
    assert np.asarray(Image.open(tmp_path / "student.png")).shape[0] == rows or tiny.num_frames > 1
