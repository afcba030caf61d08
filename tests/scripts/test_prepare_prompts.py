"""The command that prepares prompts: files, summary, refusals in one line, and what it asks the hub for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles_dmd2.data.pinned import MANIFEST, verify_split
from scripts.prepare_prompts import main

ROOT = Path(__file__).parents[2]
COUNTS = ["--num-test", "4", "--num-eval", "2"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "mine.txt"
    path.write_bytes("\r\n".join([*(f"prompt {i} caf\u00e9" for i in range(20)), "", "prompt 3 cafe\u0301"]).encode())
    return path


def test_files_summary_and_the_same_on_another_locale(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--source", str(source), "--output", str(tmp_path / "a"), *COUNTS, "--expect-prompts", "21"]) == 0
    told = capsys.readouterr().out
    for part in ("21 prompts in 22 lines", "1 blank, 21 ended in CR LF", "1 duplicates", "kept        20: 1 brought"):
        assert part in told, told
    hashes = verify_split(tmp_path / "a")
    assert all(digest in told for digest in hashes.values())
    words = [sys.executable, "scripts/prepare_prompts.py", "--source", str(source), "--output", str(tmp_path / "b")]
    plain = {**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONHASHSEED": "1"}
    done = subprocess.run([*words, *COUNTS], cwd=ROOT, env=plain, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert verify_split(tmp_path / "b") == hashes


@pytest.mark.parametrize("name", ["train", "test", "eval_media"])
def test_other_content_than_expected_is_refused_by_name_before_anything_is_written(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    words = ["--source", str(source), *COUNTS]
    assert main([*words, "--output", str(tmp_path / "a")]) == 0
    pins = [f"{key}={value}" for key, value in verify_split(tmp_path / "a").items()]
    expected = [*words, "--output", str(tmp_path / "b"), "--expect-sha256"]
    assert main([*expected, *pins]) == 0
    capsys.readouterr()
    (tmp_path / "b").rename(tmp_path / "c")
    wrong = next(pin for pin in pins if pin.startswith(f"{name}="))
    assert main([*expected, *(pin if pin != wrong else f"{name}={'0' * 64}" for pin in pins)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --expect-sha256 {name}={'0' * 64}: {name}.jsonl of mine.txt has SHA-256")
    assert error.count("\n") == 1
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--expect-prompts", "248221"], "--expect-prompts 248221: mine.txt has 21"),
        (["--num-test", "19"], "--num-test 19: 20 prompts are too few"),
        (["--source", "no.txt"], "--source no.txt: no such file"),
        (["--expect-sha256", "train=12"], "'train=12': give train=SHA256"),
        (["--expect-sha256", f"all={'0' * 64}"], "give train=SHA256"),
        (["--seed", "-1"], "invalid _count value"),
    ],
)
def test_refused(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    try:
        code: object = main(["--source", str(source), "--output", str(tmp_path / "out"), *COUNTS, *words])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_from_the_hub_with_the_commit_that_it_came_from(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "hub" / "models--a--b" / "snapshots" / "0123abcd" / "data" / "mine.txt"
    cached.parent.mkdir(parents=True)
    source.rename(cached)
    asked: list[object] = []

    def download(*words: object, **named: object) -> str:
        asked.extend([words, named])
        return str(cached)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    words = ["--hub-repository", "a/b", "--hub-file", "data/mine.txt", "--hub-revision", "v1", "--hub-type", "dataset"]
    assert main([*words, "--output", str(tmp_path / "out"), *COUNTS]) == 0
    assert asked == [("a/b", "data/mine.txt"), {"repo_type": "dataset", "revision": "v1"}]
    origin = json.loads((tmp_path / "out" / MANIFEST).read_text())["source"]
    assert origin.pop("sha256")
    assert origin == {"file": "data/mine.txt", "repository": "datasets/a/b", "revision": "0123abcd"}


def test_without_a_network(tmp_path: Path) -> None:
    """The library's own refusal, offline and with an empty cache."""
    words = [sys.executable, "scripts/prepare_prompts.py", "--output", str(tmp_path / "out")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    for part in ("--hub-repository gdhe17/Self-Forcing", "vidprom_filtered_extended.txt cannot be fetched", "--source"):
        assert part in done.stderr
    assert not (tmp_path / "out").exists()
