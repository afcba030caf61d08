"""docs/families.md followed to the letter for a family that is not here: one adapter file, one line, builder and entry.

In a copy of the tree, so that what is shipped cannot know of it. The contract suites have to pick it up by themselves,
to pass, and to find a mistake in it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
NAME = "aura_flow"
LINE = f'    Family("{NAME}", ("AuraFlowPipeline",), "miles_dmd2.models.{NAME}:AuraFlowAdapter"),\n'
BLOCK = '{"num_mmdit_layers": 1, "num_single_dit_layers": 1}'
ENTRY = f'    Tiny("{NAME}", tiny_{NAME}.build, {BLOCK}, default=(64, 64, 1)),\n'
DEADLINE = 560  # seconds; 50 on a machine that has nothing else to do
SUITES = ("tests/models/test_families.py", "tests/engines/test_families.py", "tests/training/test_families.py")


def after(file: Path, line: str, added: str) -> None:
    text = file.read_text()
    assert text.count(line) == 1, f"{file}: {line!r} is not there once"
    file.write_text(text.replace(line, line + added))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a stranger has after the steps of the page."""
    copy = tmp_path_factory.mktemp("a copy") / "tree"
    unwanted = shutil.ignore_patterns("__pycache__", "added_family", "sglang_environment")
    for directory in ("miles_dmd2", "tests", "recipes", "scripts"):
        shutil.copytree(ROOT / directory, copy / directory, ignore=unwanted)
    for file in ("train_diffusion.py", "pyproject.toml"):
        shutil.copy(ROOT / file, copy / file)
    shutil.copy(HERE / f"{NAME}.py", copy / "miles_dmd2" / "models" / f"{NAME}.py")
    after(copy / "miles_dmd2" / "models" / "registry.py", "FAMILIES = (\n", LINE)
    shutil.copy(HERE / f"tiny_{NAME}.py", copy / "tests" / f"tiny_{NAME}.py")
    after(copy / "tests" / "families.py", "\nTINY = (\n", ENTRY)
    after(copy / "tests" / "families.py", "from tests import ", f"tiny_{NAME}, ")
    return copy


def run(tree: Path, *words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    return done.returncode, done.stdout + done.stderr


def counts(output: str) -> dict[str, int]:
    return {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", output)}


def test_the_contract_suites_pick_it_up_and_pass(tree: Path) -> None:
    status, output = run(tree, *SUITES, "-k", NAME)
    assert status == 0, output[-6000:]
    assert counts(output)["passed"] > 110, output[-2000:]
    assert "failed" not in counts(output)


def test_a_wrong_answer_is_told(tree: Path) -> None:
    """Mutation: the other sign of the velocity."""
    adapter = tree / "miles_dmd2" / "models" / f"{NAME}.py"
    right, line = adapter.read_text(), "return full_precision(velocity)"
    assert right.count(line) == 1
    adapter.write_text(right.replace(line, "return full_precision(-velocity)"))
    status, output = run(tree, SUITES[0], "-k", f"{NAME} and test_velocity_is_what_the_pipelines")
    adapter.write_text(right)
    assert status == 1, output[-3000:]
    assert counts(output) == {"failed": 1}
