"""Cells of the ablation: each reaches the trainers, is counted, and is made once."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks import ablation, ablation_report, digits_cells
from benchmarks.ablation_picture import picture
from benchmarks.cells import CellFile, read_rows
from benchmarks.ring_cells import Bench, Cell, Evaluation, RingSettings, requests, run_cell, trainers
from miles_dmd2.config import parse
from miles_dmd2.config.errors import ConfigError
from recipes.digits import run as digits_run

TINY = RingSettings(rollouts=2, windows=2, window=8, real=64, width=16, depth=1, fit_steps=20, judged=64, reference=64)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(TINY)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation, "RingSettings", lambda: TINY)


@pytest.mark.parametrize("cell", ablation.ring_cells([5]), ids=lambda cell: cell.key)
def test_a_cells_options_reach_requests_and_trainers(bench: Bench, cell: Cell) -> None:
    critic, actor = trainers(bench, cell)
    wanted = [request for window in requests(TINY, cell)(0) for request in window]
    assert {request.sample_type for request in wanted} == {"sde" if cell.input == "simulation_sde" else "ode"}
    assert {request.real_latent is None for request in wanted} == {cell.input != "forward_noise"}
    assert critic.scoring == cell.scoring
    assert critic.told_stop_steps == (4 if cell.critic == "told" else None)
    assert (critic.settings.seed, actor.settings.seed, actor.normalizer) == (5, 5, "batch")


@pytest.mark.parametrize("cell", ablation.ring_cells([0]), ids=lambda cell: cell.key)
def test_forwards_are_counted_and_are_those_of_the_options(bench: Bench, cell: Cell) -> None:
    """Of 16 samples a rollout: k + 1 each in the engine, 1 on real points; the last window of 8 is scored."""
    row = run_cell(bench, cell)
    stops = [request.stop_step for i in range(2) for window in requests(TINY, cell)(i) for request in window]
    engine = 16 if cell.input == "forward_noise" else sum(stop + 1 for stop in stops) / 2
    critic = 16 + (8 if cell.scoring == "original" else 0)
    assert row["forwards_per_update"] == {"engine": engine, "critic": critic, "teacher": 8, "student": 8}
    assert row["updates"] == {"critic": 4, "student": 2, "skipped": 0}
    assert [found["rollout"] for found in row["curve"]] == [0, 1, 2]
    assert row["by_step"]["ema"]["ode"][-1] == row["curve"][-1]["ema"]["ode"]
    start = bench.figures(bench.start)
    assert row["curve"][0]["raw"] == start  # nothing was trained yet
    assert row["curve"][-1]["raw"] != start


def test_students_are_measured_at_each_quarter_and_more_often_in_the_last_tenth(bench: Bench) -> None:
    evaluation = Evaluation(bench)
    evaluation.total = 200
    assert [i for i in range(201) if evaluation.due(i)] == [0, 50, 100, 150, 180, 184, 188, 192, 196, 200]


def test_a_cell_depends_on_its_options_and_its_seed_alone(bench: Bench) -> None:
    cell = Cell("simulation_sde", "told", "fused", 0)
    one, two = run_cell(bench, cell), run_cell(bench, cell)
    assert one["curve"] == two["curve"]
    assert run_cell(bench, replace(cell, seed=1))["curve"] != one["curve"]


def test_the_whole_table_is_three_inputs_two_critics_two_scorings_for_each_seed() -> None:
    cells = ablation.ring_cells([0, 1, 2])
    assert len({cell.key for cell in cells}) == len(cells) == 36
    assert [cell.seed for cell in cells] == [0] * 12 + [1] * 12 + [2] * 12


def test_finished_cells_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def fake(bench: Bench, cell: Cell) -> dict[str, Any]:
        made.append(cell.key)
        if len(made) == 3:
            raise KeyboardInterrupt
        return {"curve": [{"ema": {"ode": {"energy": 0.0, "on_mode": 0.0}}}]}

    monkeypatch.setattr(ablation, "run_cell", fake)
    monkeypatch.setattr(ablation, "RingSettings", lambda: TINY)
    out = tmp_path / "deep" / "cells.jsonl"
    command = ["ring", "--seeds", "0", "--rollouts", "2", "--out", str(out)]
    assert ablation.main(command) == 130
    assert [row["key"] for row in read_rows(out)] == ["references", *made[:2]]
    with out.open("a") as file:
        file.write('{"key": "torn')  # the process died in the middle of a line
    assert ablation.main(command) == 0
    assert made[2:] == [made[2], *[cell.key for cell in ablation.ring_cells([0])[2:]]]
    assert len(read_rows(out)) == 13
    assert ablation.main(command) == 0
    assert len(made) == 13


def test_cells_of_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    CellFile(path, asdict(TINY)).append("a", {})
    assert list(CellFile(path, asdict(TINY)).rows) == ["a"]
    with pytest.raises(ConfigError) as error:
        CellFile(path, asdict(replace(TINY, critic_lr=0.5)))
    assert "\n" not in str(error.value)
    for said in (str(path), "critic_lr 0.002, now 0.5", "another --out"):
        assert said in str(error.value)


@pytest.mark.parametrize("line", ["not json", "[]", '{"key": "a"}', '{"key": [], "settings": {}}', "[" * 100_000])
def test_a_line_that_is_no_cell_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "cells.jsonl"
    CellFile(path, {}).append("a", {})
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match="line 2 is no finished cell"):
        read_rows(path)


FOREIGN = {
    "a summary": b'{\n  "steps": 4,\n  "columns": {}\n}',
    "a summary with its newline": b'{\n  "steps": 4\n}\n',
    "one line without its newline": b'{"steps": 4}',
    "no text": b"\x89PNG\r\n\x1a\n\xff\xfe",
    "prose": b"first\nlast",
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.usefixtures("tiny")
def test_a_foreign_file_is_one_line_and_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    path = tmp_path / "summary.json"
    path.write_bytes(content)
    commands = (
        ["report", str(path)],
        ["ring", "--rollouts", "2", "--seeds", "0", "--out", str(path)],
        ["digits", "--seeds", "0", "--out", str(path), "--runs", str(tmp_path / "runs")],
    )
    for command in commands:
        assert ablation.main(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {path}: ")
        assert path.read_bytes() == content
    assert [found.name for found in tmp_path.iterdir()] == ["summary.json"]


def test_only_the_writer_cuts_a_torn_line_and_only_of_a_file_of_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    CellFile(path, {"rate": 1}).append("a", {"said": "é"})
    whole = path.read_bytes()
    torn = whole + b'{"key": "b", "set'
    path.write_bytes(torn)
    assert [row["key"] for row in read_rows(path)] == ["a"]
    with pytest.raises(ConfigError, match="rate 1, now 2"):
        CellFile(path, {"rate": 2})
    assert path.read_bytes() == torn
    assert list(CellFile(path, {"rate": 1}).rows) == ["a"]
    assert path.read_bytes() == whole


def test_an_empty_file_is_one_to_begin(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    path.touch()
    CellFile(path, {}).append("a", {})
    assert [row["key"] for row in read_rows(path)] == ["a"]


def test_a_file_with_a_cell_twice_is_refused_with_its_key(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = read_rows(finished)[1]["key"]
    lines = finished.read_bytes().splitlines(keepends=True)
    finished.write_bytes(b"".join([*lines, lines[1]]))
    before = finished.read_bytes()
    assert ablation.main(["report", str(finished)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: {finished}: line 8 has cell {key} once more; remove one of the two"
    with pytest.raises(ConfigError, match="once more"):
        CellFile(finished, {})
    assert finished.read_bytes() == before


@pytest.mark.usefixtures("tiny")
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ablation.main(["report", str(tmp_path / "none.jsonl")]) == 2
    (tmp_path / "file").write_text("")
    assert ablation.main(["ring", "--rollouts", "2", "--seeds", "0", "--out", str(tmp_path / "file" / "x")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert all(re.match(r"error: .*(none\.jsonl|file/x).*; give ", line) for line in errors), errors
    for wrong in (["--rollouts", "0"], ["--seeds", "-1"], ["--seeds", "x"]):
        with pytest.raises(SystemExit, match="2"):
            ablation.main(["ring", *wrong])


def figures(energy: float) -> dict[str, float]:
    return {"energy": energy, "on_mode": 0.5, "weights_tv": 0.1, "spread": 2.0, "modes": 8}


def a_row(cell: Cell, energy: float) -> dict[str, Any]:
    """One whose averaged student is at `energy`, and whose raw one swings between 3 and 5 times that at the end."""
    both = {"ode": figures(energy), "sde": figures(energy + 1)}
    raw = [{"ode": figures(k * energy), "sde": figures(k * energy)} for k in (9, 3, 5)]
    return {
        **asdict(cell),
        "updates": {"student": 10},
        "forwards_per_update": {"engine": 800.0, "critic": 320.0, "teacher": 64.0, "student": 64.0},
        "seconds": {"cpu": 0.5},
        "by_step": {"ema": {hop: [figures(0.25), found] for hop, found in both.items()}},
        "curve": [{"rollout": at, "ema": both, "raw": raw[i]} for i, at in enumerate((0, 95, 100))],
    }


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    file = CellFile(tmp_path / "cells.jsonl", {})
    both = {hop: figures(0.1) for hop in ("ode", "sde")}
    file.append("references", {"floor": [figures(0.0)] * 2, "teacher_50": figures(0), "teacher": both, "start": both})
    for seed, energy in enumerate((0.010, 0.012, 0.017)):
        for input in ("simulation_ode", "forward_noise"):
            cell = Cell(input, "told", "fused", seed)
            file.append(cell.key, a_row(cell, energy))
    return file.path


def test_the_table_has_mean_and_range_over_seeds_of_each_cell_as_it_is_used(finished: Path) -> None:
    lines = ablation_report.ring_tables(finished).splitlines()
    (simulated,) = [line for line in lines if line.startswith("| simulation_ode, ode |")]
    assert "| told | fused | 13.0 (10.0 to 17.0) | 65.0 (50.0 to 85.0) | 52.0 (40.0 to 68.0) |" in simulated
    assert simulated.endswith("| 250.0 / 13.0 |")
    assert [line.split(" |")[0] for line in lines if line.startswith("| forward_noise, ")] == [
        "| forward_noise, sde",
        "| forward_noise, ode",
    ]
    assert "| simulation_ode | fused | 800 | 320 | 64 | 64 | 1248 | 50 (50 to 50) |" in lines


def test_the_picture_has_a_line_for_each_cell_as_it_is_used(finished: Path, tmp_path: Path) -> None:
    picture(finished, tmp_path / "ring.png")
    with Image.open(tmp_path / "ring.png") as found:
        colours = [[found.getpixel((x, y)) for y in range(found.height)] for x in range(400, 760)]
    blue = [x for x, column in enumerate(colours) if (31, 119, 180) in column]
    # Ticks from 0.001 to 0.1 over 360 pixels: energies of .010, .012, .017 are at 180, 194 and 221.
    assert 174 <= min(blue) <= 176
    assert all(any(abs(x - near) <= 6 for x in blue) for near in (180, 194, 221))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where digits were encoded; a file is written where the encoder would have."""
    paths: list[Path] = []

    def build(path: Path) -> None:
        paths.append(path)
        path.write_text("latents")

    monkeypatch.setattr(digits_cells.latents, "build", build)
    return paths


def test_each_digits_run_is_one_that_the_product_takes(tmp_path: Path, encoded: list[Path]) -> None:
    found = {}
    for run in digits_cells.runs():
        own = run.flags(tmp_path)
        flags = digits_run.flags(2, tmp_path / "run", False, own)
        algorithm = parse([*flags, *own]).config.algorithm
        assert algorithm.dmd2_critic_conditioning == "stop_step"
        found[run.name] = (algorithm.dmd2_student_input, algorithm.dmd2_student_sample_type, run.hops)
        assert algorithm.dmd2_latents == (tmp_path / "latents.safetensors" if run.name == "forward_noise" else None)
        assert len(encoded) == (run.name == "forward_noise")  # not before a run needs them
    assert found == {
        "simulation_ode": ("backward_simulation", "ode", ("ode",)),
        "simulation_sde": ("backward_simulation", "sde", ("sde",)),
        "forward_noise": ("forward_noise", "sde", ("sde", "ode")),
    }


def test_latents_are_there_when_they_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def died(path: Path) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(digits_cells.latents, "build", died)
    with pytest.raises(KeyboardInterrupt):
        digits_cells.real_latents(tmp_path / "runs")
    assert list((tmp_path / "runs").iterdir()) == []
    monkeypatch.setattr(digits_cells.latents, "build", lambda path: path.write_text("whole"))
    path = digits_cells.real_latents(tmp_path / "runs")
    assert path.read_text() == "whole"
    monkeypatch.setattr(digits_cells.latents, "build", died)
    assert digits_cells.real_latents(tmp_path / "runs") == path  # and are not encoded again
    assert [found.name for found in path.parent.iterdir()] == ["latents.safetensors"]


def test_a_run_is_found_again_by_all_that_it_is_made_with() -> None:
    run = digits_cells.runs()[1]
    name = digits_cells.run_name(run, 2, 300, 0)
    assert digits_cells.run_name(replace(run, hops=()), 2, 300, 0) == name
    others = [
        digits_cells.run_name(replace(run, options=(*run.options, "--lr-decay-style", "cosine")), 2, 300, 0),
        digits_cells.run_name(run, 4, 300, 0),
        digits_cells.run_name(run, 2, 301, 0),
        digits_cells.run_name(run, 2, 300, 1),
    ]
    assert len({name, *others}) == 5


def test_a_file_of_runs_with_other_options_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CellFile(tmp_path / "digits.jsonl", digits_cells.settings(2, 300)).append("a", {})
    changed = [replace(run, options=(*run.options, "--seed", "1")) for run in digits_cells.runs()]
    monkeypatch.setattr(digits_cells, "runs", lambda: changed)
    with pytest.raises(ConfigError, match="options"):
        CellFile(tmp_path / "digits.jsonl", digits_cells.settings(2, 300))


def columns_of(fd: float) -> dict[str, dict[str, float]]:
    figures = {"fd": fd, "fd_deviation": 0.1, "fd_to_data": 9.0, "accuracy": 0.9}
    teachers = {"teacher_50": {**figures, "fd": 0.5, "accuracy": 0.96}, "teacher": {**figures, "fd": 30.0}}
    return {**teachers, **dict.fromkeys(("student_start", "student_raw", "student_ema"), figures)}


@dataclass
class Trainings:
    """Stands in for trainings: a finished run directory each; `measured` are the hops beside a student's own."""

    trained: list[Path]
    measured: list[str]
    interrupted: bool = False

    def train(self, run_dir: Path, steps: int, kind: str, seed: int, rollouts: int, more: object) -> None:
        self.trained.append(run_dir)
        (run_dir / "student_raw").mkdir(parents=True)
        own = "ode" if run_dir.name.startswith("simulation_ode") else "sde"
        (run_dir / "student_raw" / "student.json").write_text(json.dumps({"sample_type": own}))
        summary = {
            "columns": columns_of(1.0),
            "floor": {"fd": 0.25, "fd_deviation": 0.03},
            "forwards_per_update": {"counted": {"engine": 320.0}},
            "train_seconds": 7.0,
            "seconds_per_phase": {},
        }
        (run_dir / "summary.json").write_text(json.dumps(summary))

    def measure(self, run_dir: Path, sampling: dict[str, Any], hop: str) -> dict[str, dict[str, float]]:
        assert (hop, sampling) == ("ode", {"sample_type": "sde"})
        self.measured.append(hop)
        if self.interrupted:
            raise KeyboardInterrupt
        return columns_of(2.0)


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch, encoded: list[Path]) -> Trainings:
    found = Trainings([], [])
    monkeypatch.setattr(digits_cells.table, "train", found.train)
    monkeypatch.setattr(digits_cells, "measured", found.measure)
    return found


def test_a_digits_run_is_trained_once_and_measured_with_each_hop(tmp_path: Path, trainings: Trainings) -> None:
    out = tmp_path / "digits.jsonl"
    command = ["digits", "--seeds", "0", "--out", str(out), "--runs", str(tmp_path / "runs")]
    assert ablation.main([*command]) == 0
    rows = {row["key"]: row for row in read_rows(out)}
    assert len(trainings.trained) == 3
    assert len(rows) == 4
    distances = [rows[f"forward_noise/{hop}/seed 0"]["columns"]["student_ema"]["fd"] for hop in ("sde", "ode")]
    assert distances == [1.0, 2.0]
    assert ablation.main([*command]) == 0
    assert len(trainings.trained) == 3
    other = ["--rollouts", "7", "--out", str(tmp_path / "other.jsonl")]  # the later flag wins
    assert ablation.main([*command, *other]) == 0
    assert len(set(trainings.trained)) == 6


def test_the_digits_table_has_what_to_compare_with_and_a_line_for_each_cell(
    tmp_path: Path, trainings: Trainings, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "digits.jsonl"
    assert ablation.main(["digits", "--seeds", "0", "--out", str(out), "--runs", str(tmp_path / "runs")]) == 0
    capsys.readouterr()
    assert ablation.main(["report", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:6] == [
        "| teacher, 50 steps | 0.50 ± 0.10 | 96.0% |",
        "| teacher, the student's steps, ode | 30.00 ± 0.10 | 90.0% |",
        "| floor: data against data | 0.25 ± 0.03 | |",
        "",
    ]
    assert [line.split(" | 0 | ")[0] for line in lines[8:]] == [
        "| simulation_ode | ode",
        "| simulation_sde | sde",
        "| forward_noise | sde",
        "| forward_noise | ode",
    ]
    assert "| forward_noise | ode | 0 | 2.00 | 2.00 | 90.0% | 2.00 | 320 | 7 |" in lines


def test_an_interrupted_measurement_leaves_no_cell_twice(
    tmp_path: Path, trainings: Trainings, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between the two cells of one run: the next start makes the second alone."""
    out = tmp_path / "digits.jsonl"
    command = ["digits", "--seeds", "0", "--out", str(out), "--runs", str(tmp_path / "runs")]
    trainings.interrupted = True
    assert ablation.main(command) == 130
    assert "the same command goes on" in capsys.readouterr().err
    made = [row["key"] for row in read_rows(out)]
    assert made == ["simulation_ode/ode/seed 0", "simulation_sde/sde/seed 0", "forward_noise/sde/seed 0"]
    trainings.interrupted = False
    assert ablation.main(command) == 0
    assert [row["key"] for row in read_rows(out)] == [*made, "forward_noise/ode/seed 0"]
    # With only the first cell gone, only that is made: the other hop is not measured again.
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join([*lines[:2], lines[3]]))
    assert ablation.main(command) == 0
    assert [row["key"] for row in read_rows(out)] == [*made[:2], "forward_noise/ode/seed 0", made[2]]
    assert (len(trainings.trained), len(trainings.measured)) == (3, 2)


def test_a_failed_training_is_one_line_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.py").write_text("raise SystemExit(2)")
    monkeypatch.setattr(digits_cells.table, "HERE", tmp_path)
    runs = tmp_path / "runs"
    assert ablation.main(["digits", "--seeds", "0", "--out", str(tmp_path / "o"), "--runs", str(runs)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"error: .*{runs}/simulation_ode-2-\S* ended with exit code 2; .*", line)
