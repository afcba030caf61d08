"""Runs whose samples come from SGLang's protocol, spoken by a fake server in this process; and engines that die."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from run_commands import Finished, children, command, environment, wait_for
from safetensors.torch import load

from miles_dmd2.models.qwen_image import QwenImageAdapter
from miles_dmd2.observability.declared import without_machine
from tests.engines.fake_sglang import FakeSGLang, Fault, packed

pytestmark = pytest.mark.ray

Run = Callable[..., Finished]
ROLLOUT = 16  # samples
PROCESS = r"\(pid \d+ on [\d.]+\)"
FAULTS = ("rollout/faults", "rollout/retries", "rollout/restarts", "rollout/dropped")


@contextmanager
def serving(workspace: Path, count: int = 1) -> Iterator[list[FakeSGLang]]:
    """Servers over the pipeline that the runs train."""
    torch.set_num_threads(1)
    adapter = QwenImageAdapter(workspace / "pipeline", 32, 32)
    fakes = [FakeSGLang(adapter).start() for _ in range(count)]
    try:
        yield fakes
    finally:
        for fake in fakes:
            fake.close()


def engine(fakes: list[FakeSGLang], **changes: object) -> dict[str, object]:
    """Options of a run on these servers."""
    return {"rollout_engine": "sglang", "rollout_engine_url": [fake.url for fake in fakes], **changes}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def numbers(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    kept = [without_machine(row) for row in rows]
    return [{k: v for k, v in row.items() if not k.startswith("eval/") and k not in FAULTS} for row in kept]


def error_of(done: Finished) -> str:
    """The one line that tells the user what went wrong."""
    assert done.code == 1, done.err
    assert "Traceback" not in done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    return line


@pytest.fixture(scope="module")
def undisturbed(run: Run, workspace: Path) -> Iterator[Finished]:
    with serving(workspace, 2) as fakes:
        done = run("on sglang", **engine(fakes, sglang_weight_directory=workspace / "weights"))
        assert done.code == 0, done.err
        assert {len(fake.requests) for fake in fakes} != {0}
        assert sum(len(fake.requests) for fake in fakes) == 3 * ROLLOUT
        assert not any(body["rollout_return_generated_output"] for fake in fakes for body in fake.requests)
        assert not any(fake.asleep for fake in fakes)  # awake again for whoever they belong to
        assert {Path(body["model_path"]).parents[1] for body in fakes[0].updates} == {workspace / "weights"}
        assert list((workspace / "weights").iterdir()) == []
        yield done


def test_a_run_on_servers_is_a_run_on_the_local_engine(undisturbed: Finished, base: Finished) -> None:
    """Same seeds, so the same samples, to fp32 rounding (a forward of one sample or of many); AdamW makes it larger."""
    for ours, theirs in zip(undisturbed.rows(), base.rows(), strict=True):
        assert ours["rollout/samples"] == theirs["rollout/samples"] == ROLLOUT
        assert ours["rollout/forwards"] == theirs["rollout/forwards"]
        assert ours["actor/x0_mean_abs_diff"] < 1e-5
        assert [ours[name] for name in FAULTS] == [0, 0, 0, 0]
        assert not set(FAULTS) & theirs.keys()
        assert ours["critic/critic_loss"] == pytest.approx(theirs["critic/critic_loss"], rel=1e-5)
    assert distance(undisturbed.student(), base.student()) < 2e-5  # it has moved by 6e-4


def test_a_guided_teacher_and_an_own_grid_are_those_of_the_local_engine(run: Run, workspace: Path) -> None:
    """The unconditional prompt is encoded by a server, once for the run, before the trainers load."""
    options = {
        "num_rollout": 2,
        "dmd2_teacher_guidance_scale": 3,
        "dmd2_stop_step": "round_robin",
        "diffusion_num_steps": None,
        "diffusion_sigmas": "0.9,0.757",
    }
    local = run("guided", **options)
    assert local.code == 0, local.err
    with serving(workspace) as (fake,):
        done = run("guided on sglang", **options, **engine([fake]))
    assert done.code == 0, done.err
    assert [body["prompt"] for body in fake.requests].count("") == 1
    assert fake.requests[0]["prompt"] == ""
    for ours, theirs in zip(done.rows(), local.rows(), strict=True):
        assert ours["critic/teacher_forwards"] == theirs["critic/teacher_forwards"] == 16
        assert ours["rollout/forwards"] == theirs["rollout/forwards"]  # none of them is the unconditional prompt's
        assert ours["actor/dmd2_teacher_dist_abs_mean"] == pytest.approx(
            theirs["actor/dmd2_teacher_dist_abs_mean"], rel=1e-5
        )
    assert distance(done.student(), local.student()) < 2e-5


def test_when_all_servers_are_dead_the_run_stops_with_a_checkpoint_and_goes_on_to_the_same_bits(
    run: Run, workspace: Path, undisturbed: Finished
) -> None:
    with serving(workspace) as (fake,):
        fake.script.extend([Fault()] * (2 * ROLLOUT + 5) + [Fault(action="die")])
        stopped = run("servers die", **engine([fake]))
        line = error_of(stopped)
        assert re.match(rf"error: rollout: engine_0 {PROCESS}: EngineError: all 1 rollout engines are dead: ", line)
        assert fake.url in line
        assert "To go on from the newest checkpoint:" in stopped.err
        assert [path.name for path in (stopped.directory / "checkpoints").glob("step_*")] == ["step_000002"]
        log = (stopped.directory / "logs" / "driver.log").read_text()
        assert "saving the 2 rollouts done" in log
    with serving(workspace) as fakes:
        done = run("servers die", load=workspace / "servers die", **engine(fakes))
        assert done.code == 0, done.err
        assert len(fakes[0].requests) == ROLLOUT
    for kind in ("raw", "ema"):
        assert distance(undisturbed.student(kind), done.student(kind)) == 0.0
    assert numbers(done.rows()) == numbers(undisturbed.rows())


def test_a_fault_costs_a_retry_and_nothing_else(run: Run, workspace: Path, undisturbed: Finished) -> None:
    with serving(workspace, 2) as fakes:
        fakes[0].script.extend([Fault(), Fault(status=500), Fault(), Fault(action="truncate")])
        done = run("faults", **engine(fakes))
    assert done.code == 0, done.err
    assert [done.rows()[0][name] for name in FAULTS] == [2, 2, 0, 0]
    assert [done.rows()[1][name] for name in FAULTS] == [0, 0, 0, 0]
    assert distance(undisturbed.student(), done.student()) == 0.0


def move_x0(reply: dict[str, Any]) -> None:
    latents = load(reply["dit_trajectory"]["latents"]["data"])["t"]
    latents[1] += 0.25
    reply["dit_trajectory"]["latents"] = packed(latents)


def test_servers_that_compute_something_else_stop_the_run_before_the_step(run: Run, workspace: Path) -> None:
    with serving(workspace) as (fake,):
        fake.script.extend([Fault()] * ROLLOUT)  # the first rollout is right
        fake.script.extend([Fault(edit=move_x0)] * ROLLOUT)
        done = run("drift", save_interval=1, **engine([fake]))
        let_through = run("drift let through", num_rollout=1, max_x0_drift=0.2501, **engine([fake]))
    line = error_of(done)
    told = (
        rf"error: rollout 1, actor training: actor_0 {PROCESS}: DriftError: engine and trainer disagree on rollout 1: "
    )
    assert re.match(told, line)
    assert "mean |x0 - x0 of the engine| is 0.25 (0.25 at stop step 0, 0.25 at stop step 1)" in line
    assert "--max-x0-drift is 0.001" in line
    assert "step_000001" in [path.name for path in (done.directory / "checkpoints").iterdir()]
    assert len(done.rows()) == 1
    assert "To go on from the newest checkpoint:" in done.err
    assert let_through.code == 0, let_through.err


def test_a_server_that_cannot_start_is_one_line_and_a_log(
    run: Run, workspace: Path, engine_python: Callable[[str], Path]
) -> None:
    done = run("no start", rollout_engine="sglang", sglang_python=engine_python("crash"))
    line = error_of(done)
    told = rf"error: start of the SGLang servers: server_0 {PROCESS}: EngineError: SGLang server http://127\.0\.0\.1:"
    assert re.match(told, line)
    assert "ended with exit code 1 before it was ready" in line
    assert "RuntimeError: no such model" in (done.directory / "logs" / "sglang_0.log").read_text()
    assert not (done.directory / "run.json").exists()


def test_a_run_interrupted_while_its_server_starts_leaves_no_process(
    workspace: Path, engine_python: Callable[[str], Path]
) -> None:
    flags: dict[str, object] = {"rollout_engine": "sglang", "sglang_python": engine_python("slow")}
    process = subprocess.Popen(
        command(workspace, "interrupted start", **flags), stderr=subprocess.PIPE, text=True, env=environment()
    )
    log = workspace / "interrupted start" / "logs" / "sglang_0.log"
    try:
        wait_for(lambda: log.is_file() and "Loading" in log.read_text(), 120)
        left = children(process.pid)
        assert any(b"launch_server" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=40)
        assert process.returncode == 130
        assert "Traceback" not in err
        wait_for(lambda: not [pid for pid in left if Path(f"/proc/{pid}").exists()], 10)
    finally:
        process.kill()


DEADLY = '''
import os
import signal
from pathlib import Path

MARK = Path(__file__).with_suffix(".calls")


def figures(samples):
    """Once, with its third call, kills its process, an engine: in the second eval, of raw and averaged weights each."""
    calls = 1 + int(MARK.read_text() or 0)
    MARK.write_text(str(calls))
    if calls == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"count": float(len(samples))}
'''


def test_a_local_engine_that_is_killed_costs_no_finished_rollout(run: Run, base: Finished, workspace: Path) -> None:
    metric = workspace / "metric.py"
    metric.write_text(DEADLY)
    metric.with_suffix(".calls").touch()
    evals: dict[str, object] = {
        "eval_prompt_data": workspace / "prompts.txt",
        "eval_interval": 2,
        "eval_metrics_path": f"{metric}:figures",
    }
    stopped = run("engine dies", **evals)
    assert error_of(stopped).startswith("error: evaluation: ")
    assert [path.name for path in (stopped.directory / "checkpoints").glob("step_*")] == ["step_000002"]
    done = run("engine dies", load=workspace / "engine dies", **evals)
    assert done.code == 0, done.err
    for kind in ("raw", "ema"):
        assert distance(base.student(kind), done.student(kind)) == 0.0
    assert numbers(done.rows())[:3] == numbers(base.rows())
    assert json.loads((done.directory / "summary.json").read_text())["eval"]["count_raw"] == 3
