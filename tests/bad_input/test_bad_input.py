"""Bad input, case by case through the entry point: exit code 2, one line with name, value, remedy; nothing starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import train_diffusion
from tests.bad_input.bench import Bench, Case, skeleton
from tests.bad_input.of_checkpoints import CHECKPOINTS
from tests.bad_input.of_data import DATA
from tests.bad_input.of_environment import ENVIRONMENT
from tests.bad_input.of_flags import FLAGS
from tests.bad_input.of_media import MEDIA
from tests.bad_input.of_models import MODELS
from tests.bad_input.of_prompts import PROMPTS
from tests.bad_input.of_trainers import TRAINERS
from tests.bad_input.of_yaml import YAML
from tests.tiny_qwen import build

ROOT = Path(__file__).parents[2]
KINDS = {
    "flags": FLAGS,
    "YAML": YAML,
    "trainer lists": TRAINERS,
    "prompts": PROMPTS,
    "models": MODELS,
    "checkpoints": CHECKPOINTS,
    "data sets": DATA,
    "environment": ENVIRONMENT,
    "media": MEDIA,
}
CASES = {f"{kind}: {name}": case for kind, table in KINDS.items() for name, case in table.items()}
SEEN: dict[str, str] = {}  # what a case was told, without what varies -> the case


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("tiny") / "pipeline")


@pytest.fixture
def bench(tmp_path: Path, pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, pipeline, monkeypatch)


def test_there_are_enough_of_each_kind() -> None:
    assert len(CASES) >= 100
    assert all(len(table) >= 10 for table in KINDS.values()), {kind: len(table) for kind, table in KINDS.items()}


@pytest.mark.parametrize("name", CASES)
def test_one_line_and_nothing_starts(name: str, bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    for start in ("ray.init", "torch.distributed.init_process_group", "train_diffusion.train_and_export"):
        if start != "train_diffusion.train_and_export" or name != "environment: no cluster":
            bench.patch.setattr(start, lambda *_, **__: pytest.fail("something was started"))
    bench.patch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    case = CASES[name]
    command = bench.command(case.make(bench))
    assert train_diffusion.main(command) == 2, capsys.readouterr().err
    line = check_line(case, capsys.readouterr().err)
    told = skeleton(line, bench)
    other = SEEN.setdefault(told, name)
    assert other == name, f"tests the same check as {other}: {line}"


def check_line(case: Case, err: str) -> str:
    assert err.startswith("error: "), err
    assert err.count("\n") == 1, err
    for part in (case.name, case.value, case.remedy):
        assert part in err, f"{part!r} is not in {err}"
    assert "Error:" not in err.replace("ValueError:", "").replace("RecursionError:", ""), err
    return err


# As commands: in a process of its own, which says at its end what it has loaded.
COMMANDS = ["flags: unknown", "YAML: syntax", "models: no index", "checkpoints: truncated", "prompts: none"]
RUN = (
    "import sys, train_diffusion; code = train_diffusion.main(sys.argv[1:]); "
    "print(*(m for m in ('ray', 'torch.distributed') if m in sys.modules)); sys.exit(code)"
)


@pytest.mark.parametrize("name", COMMANDS)
def test_as_a_command(name: str, bench: Bench) -> None:
    case = CASES[name]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *bench.command(case.make(bench))],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=bench.path,
    )
    assert done.returncode == 2, done.stderr
    assert "ray" not in done.stdout.split()
    check_line(case, done.stderr)


def test_the_sound_command_is_accepted(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_diffusion.main([*bench.command([]), "--dry-run"]) == 0
    directory = bench.checkpoint()
    assert train_diffusion.main([*bench.command(["--load", str(directory)]), "--dry-run"]) == 0
    assert capsys.readouterr().err == ""


def test_two_skeletons_differ_by_what_is_checked_alone(bench: Bench) -> None:
    def told(text: str) -> str:
        return skeleton(text, bench)

    assert told("error: --lr 0: must be a number > 0") == told("error: --clip 0.5: must be a number > 0")
    assert told(f"{bench.path}/a.yaml:3: x") == told("/tmp/b/c.yaml:12: x")
    assert told("--lr 0: must be a number > 0") != told("--lr 0: must be a number >= 0")
    assert Counter(map(told, ("a 1", "a 2", "b 1"))) == {"a N": 2, "b N": 1}
