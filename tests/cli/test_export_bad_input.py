"""Bad input to miles-dmd2 export: exit code 2, one line with name, value and remedy, and nothing is written."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from miles_dmd2.checkpointing import config_hash
from miles_dmd2.cli.main import main
from miles_dmd2.models.qwen_image import QwenImageAdapter
from tests.bad_input.bench import Bench
from tests.bad_input.of_checkpoints import FILE, sealed

CASE = Callable[[Bench], Sequence[str]]


@dataclass(frozen=True)
class Case:
    """`make` returns the words beside the sound ones (a flag twice: the later counts); the line holds all of `told`."""

    make: CASE
    told: tuple[str, ...]


@pytest.fixture
def bench(tmp_path: Path, tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """With checkpoints after one and two rollouts, whose files hold no tensors."""
    bench = Bench(tmp_path, tiny_qwen, monkeypatch)
    for completed in (1, 2):
        bench.checkpoint(completed)
    return bench


def step(bench: Bench) -> Path:
    return bench.path / "run" / "checkpoints" / "step_000002"


def damaged(damage: Callable[[Path], object]) -> CASE:
    def make(bench: Bench) -> list[str]:
        damage(step(bench))
        return []

    return make


def options(bench: Bench, **changes: object) -> list[str]:
    def change(content: dict) -> None:
        content["config"].update(changes)
        content["config_hash"] = config_hash(content["config"])

    sealed(step(bench), change)
    return []


def other_base(bench: Bench) -> list[str]:
    adapter = {"rank": 2, "alpha": 2, "target_modules": ["all-linear"], "base_sha256": "abc" * 8}
    sealed(step(bench), lambda content: content["groups"]["actor"].update(adapter=adapter))
    return []


def made(path: Path) -> list[str]:
    path.mkdir(parents=True)
    return []


def sglang_only(bench: Bench) -> list[str]:
    bench.patch.setattr(QwenImageAdapter, "embedded", False)
    return []


def without_prompts(bench: Bench) -> list[str]:
    (bench.path / "prompts.txt").unlink()
    return []


def broken_pipeline(bench: Bench) -> list[str]:
    words = bench.broken(lambda copy: shutil.rmtree(copy / "vae"))
    return [str(word) for word in words]


SOUND = "the newest complete one is"
CASES = {
    "nowhere": Case(lambda b: ["RUN", str(b.path / "none")], ("RUN", "none: no such directory", "give a run or")),
    "no checkpoint": Case(lambda b: ["RUN", str(b.path)], ("RUN", "no complete checkpoint", "give another directory")),
    "cut manifest": Case(damaged(lambda d: (d / "manifest.json").write_text("{")), ("manifest.json", "read", SOUND)),
    "torn": Case(damaged(lambda d: (d / FILE).unlink()), (FILE, "is missing", SOUND, "step_000001")),
    "flipped": Case(damaged(lambda d: (d / FILE).write_bytes(b"x" * 50)), (FILE, "SHA-256", SOUND)),
    "all damaged": Case(
        damaged(lambda d: [(d / FILE).unlink(), shutil.rmtree(d.parent / "step_000001")]), (FILE, "no other complete")
    ),
    "sealed, and no tensors": Case(lambda _: [], ("step_000002", "give another checkpoint")),
    "of another version": Case(
        lambda b: options(b, student_lora_rank=4), ("student_lora_rank", "export it with miles_dmd2 ")
    ),
    "no average": Case(lambda _: ["--weights", "ema"], ("--weights ema", "--student-ema-decay is 0", "use raw")),
    "no such weights": Case(lambda _: ["--weights", "best"], ("--weights", "best", "raw")),
    "output there": Case(lambda b: made(b.path / "student"), ("--output", "student exists", "give another")),
    "sheet there": Case(lambda b: made(b.path / "student.png"), ("--output", "student.png exists", "give another")),
    "output in a file": Case(
        lambda b: ["--output", str(b.file("file", "") / "x")], ("--output", "file: is a file", "give a directory")
    ),
    "pipeline moved": Case(
        lambda b: options(b, hf_checkpoint="/nowhere"), ("--hf-checkpoint /nowhere", "say where it is now")
    ),
    "pipeline broken": Case(broken_pipeline, ("--hf-checkpoint", "has no vae/", "give a complete pipeline")),
    "pipeline of another canvas": Case(
        lambda b: options(b, diffusion_height=40), ("--diffusion-height 40", "the nearest is")
    ),
    "no adapter": Case(lambda _: ["--adapter"], ("--adapter", "it trained all parameters", "leave it out")),
    "adapter's base": Case(other_base, ("--hf-checkpoint", "another transformer", "give that one")),
    "prompts gone": Case(without_prompts, ("--check", "prompts.txt are not there", "give --check-prompts")),
    "family without the engine": Case(sglang_only, ("--check", "qwen_image", "add --no-check")),
    "tolerance": Case(lambda _: ["--check-tolerance", "1"], ("--check-tolerance 1", ">= 0 and < 1")),
    "tolerance no number": Case(lambda _: ["--check-tolerance", "nan"], ("--check-tolerance nan", ">= 0 and < 1")),
    "prompts and no check": Case(
        lambda _: ["--no-check", "--check-prompts", "one"], ("--check-prompts", "leave it out")
    ),
    "device and no check": Case(lambda _: ["--no-check", "--device", "cpu"], ("--device", "leave it out")),
    "no such engine": Case(
        lambda b: ["--check-sglang", str(b.path / "python")],
        ("--check-sglang", "there is no such file", "name the Python"),
    ),
    "engine and no check": Case(
        lambda _: ["--no-check", "--check-sglang", "python"], ("--check-sglang", "leave it out")
    ),
    "unknown flag": Case(lambda _: ["--overwrite"], ("--overwrite", "see miles-dmd2")),
}


@pytest.mark.parametrize("name", CASES)
def test_one_line_and_nothing_is_written(name: str, bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    words = list(CASES[name].make(bench))
    source = str(bench.path / "run")
    if words[:1] == ["RUN"]:
        source, words = words[1], words[2:]
    before = sorted(bench.path.rglob("*"))
    capsys.readouterr()
    assert main(["export", source, "--output", str(bench.path / "student"), *words]) == 2
    err = capsys.readouterr().err
    assert re.fullmatch(r"error: [^\n]+\n", err), err
    for part in CASES[name].told:
        assert part in err, f"{part!r} is not in {err}"
    assert sorted(bench.path.rglob("*")) == before


def test_no_cuda_device(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.patch.setattr("torch.cuda.is_available", lambda: False)
    source = str(bench.path / "run")
    assert main(["export", source, "--output", str(bench.path / "student"), "--device", "cuda"]) == 2
    assert capsys.readouterr().err == (
        "error: --device cuda: no CUDA device is visible on this machine; use cpu, or --no-check\n"
    )


@pytest.mark.parametrize("words", [[], ["export"], ["export", "run"], ["import"]])
def test_half_a_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert re.fullmatch(r"error: [^\n]+; see miles-dmd2[^\n]* --help\n", capsys.readouterr().err)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["export", "--help"])
    assert ended.value.code == 0
    assert "--check-tolerance" in capsys.readouterr().out


def test_the_console_script_is_this_command() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"miles-dmd2": f"{main.__module__}:{main.__name__}"}
