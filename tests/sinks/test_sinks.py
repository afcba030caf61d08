from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path

import pytest

from miles_dmd2.observability import PhaseClock, SinkGroup, throughput
from miles_dmd2.sinks.console import ConsoleSink
from miles_dmd2.sinks.jsonl import JsonlSink, read_jsonl
from miles_dmd2.sinks.status import StatusSink


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_jsonl_keeps_earlier_rows_on_resume_and_drops_the_ones_that_are_run_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonlSink(path, keep_below=0)
    for rollout_id in range(4):
        first.metrics(rollout_id, {"critic/loss": float(rollout_id)})
    first.close()
    path.write_text(path.read_text() + '{"rollout": 4, "cri')  # a crash in the middle of a write
    resumed = JsonlSink(path, keep_below=2)
    resumed.metrics(2, {"critic/loss": 20.0})
    resumed.close()
    assert [(row["rollout"], row["critic/loss"]) for row in read_jsonl(path)] == [(0, 0.0), (1, 1.0), (2, 20.0)]


def test_jsonl_rows_are_complete_before_the_run_ends(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", keep_below=0)
    sink.metrics(0, {"a/b": 1.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"rollout": 0, "a/b": 1.5}
    sink.close()


def test_console_writes_one_plain_line_per_rollout_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(0, 2, stream)
    sink.phase(0, "generate")
    sink.metrics(0, {"critic/critic_loss": 0.5, "actor/dmd_loss": 0.25, "eval/fd_raw": 3.0, "time/actor": 1.0})
    sink.close()
    assert stream.getvalue() == "[1/2] 1.00 s  critic 0.5  dmd 0.25  |  eval at rollout 0: fd_raw 3\n"


def test_console_shows_phase_losses_and_last_eval_on_a_terminal() -> None:
    stream = Terminal()
    sink = ConsoleSink(0, 4, stream)
    sink.metrics(0, {"critic/critic_loss": 0.5, "eval/fd_raw": 3.0})
    sink.phase(1, "critic")
    sink.metrics(1, {"critic/critic_loss": 0.25})
    shown = stream.getvalue()
    sink.close()
    assert "critic" in shown
    assert "critic 0.25  fd_raw 3" in shown
    assert "2/4" in shown


def test_a_sink_that_raises_is_dropped_with_one_warning_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def phase(self, rollout_id: int, name: str) -> None:
            raise OSError("no space left on device")

        def metrics(self, rollout_id: int, values: object) -> None:
            raise AssertionError("must not be called again")

        def close(self) -> None:
            raise AssertionError("must not be called again")

    stream = io.StringIO()
    group = SinkGroup(Broken(), ConsoleSink(0, 1, stream))
    group.phase(0, "generate")
    group.metrics(0, {})
    group.close()
    assert stream.getvalue().startswith("[1/1]")
    assert [record.message for record in caplog.records] == [
        "Broken stopped logging after an error in phase: OSError('no space left on device')"
    ]


def test_phase_clock_adds_up_and_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 10.0, 12.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = PhaseClock(ConsoleSink(0, 1, io.StringIO()))
    for _ in range(2):
        with clock(0, "sync"):
            pass
    assert clock.take() == {"time/sync": 3.0}
    assert clock.take() == {}


def test_a_phase_that_runs_counts_up_to_where_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 4.0, 9.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = PhaseClock(ConsoleSink(0, 1, io.StringIO()))
    with clock(0, "save"):
        assert clock.take() == {"time/save": 3.0}
    assert clock.take() == {"time/save": 5.0}


def test_throughput_is_of_the_phases_that_train() -> None:
    """An eval and a checkpoint of an hour each slow nothing down."""
    seconds = {"time/sync": 1.0, "time/generate": 4.0, "time/critic": 3.0, "time/actor": 2.0, "time/eval": 3600.0}
    seconds["time/save"] = 3600.0
    found = throughput(20, seconds, ("sync", "generate", "critic", "actor"))
    assert found == {"throughput/generated_per_second": 5.0, "throughput/samples_per_second": 2.0}
    assert throughput(20, {}, ("sync",)) == {}


def test_status_says_what_the_run_is_doing(tmp_path: Path) -> None:
    sink = StatusSink(tmp_path / "status.json")
    said = []
    for step in (lambda: sink.phase(3, "generate"), lambda: sink.metrics(3, {"a": 1.0}), sink.close):
        step()
        status = json.loads((tmp_path / "status.json").read_text())
        said.append((status["rollout"], status["phase"]))
        assert status["pid"] == os.getpid()
        assert status["since"] <= time.time()
    assert said == [(3, "generate"), (3, "generate"), (3, "end")]
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
