"""What wandb is told: by a stand-in everywhere, and by the package itself, offline, where it is installed."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import train_diffusion
from miles_dmd2.config import parse
from miles_dmd2.sinks.wandb import WandbSink

ROOT = Path(__file__).parents[2]


class Service(ModuleType):
    """Notes the calls in order; `init` may fail, and so may every `log`."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[tuple[str, Any]] = []
        self.init_error: Exception | None = None
        self.log_error: Exception | None = None

    def init(self, **named: Any) -> Service:
        self.calls.append(("init", named))
        if self.init_error is not None:
            raise self.init_error
        return self

    def define_metric(self, name: str, **named: Any) -> None:
        self.calls.append(("define", (name, named)))

    def log(self, values: dict[str, float]) -> None:
        self.calls.append(("log", values))
        if self.log_error is not None:
            raise self.log_error

    def finish(self) -> None:
        self.calls.append(("finish", None))


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    made = Service()
    monkeypatch.setitem(sys.modules, "wandb", made)
    return made


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_the_rollout_is_the_step_of_every_key(service: Service, tmp_path: Path, mode: str) -> None:
    sink = WandbSink("project", mode, tmp_path, {"lr": 1.0})
    sink.phase(0, "generate")
    sink.metrics(3, {"actor/dmd2_x0_mean_step1": 0.5})
    sink.close()
    (_, named), *rest = service.calls
    assert (named["project"], named["mode"], named["config"]) == ("project", mode, {"lr": 1.0})
    assert named["resume"] == "allow"
    assert rest == [
        ("define", ("rollout", {})),
        ("define", ("*", {"step_metric": "rollout"})),
        ("log", {"rollout": 3, "actor/dmd2_x0_mean_step1": 0.5}),
        ("finish", None),
    ]


def test_a_resumed_run_has_the_id_that_was_kept_and_another_run_another(service: Service, tmp_path: Path) -> None:
    for directory in ("one", "one", "two"):
        (tmp_path / directory).mkdir(exist_ok=True)
        WandbSink("project", "offline", tmp_path / directory, {})
    first, again, other = (named["id"] for call, named in service.calls if call == "init")
    assert first == again == (tmp_path / "one" / "wandb_id").read_text()
    assert other != first
    assert first.isalnum()


def sinks_of(tmp_path: Path) -> Any:
    for name in ("pipeline", "run"):
        (tmp_path / name).mkdir()
    words = {"--hf-checkpoint": "pipeline", "--prompt-data": "p.txt", "--run-dir": "run"}
    flags = [part for flag, name in words.items() for part in (flag, str(tmp_path / name))]
    parsed = parse([*flags, "--num-rollout", "2", "--rollout-batch-size", "10", "--use-wandb"])
    return train_diffusion.sinks(parsed.config, 0)


@pytest.mark.parametrize("when", ["init", "log"])
def test_a_service_that_is_gone_is_reported_once_and_the_file_has_every_row(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    setattr(service, f"{when}_error", OSError("no route to host"))
    with caplog.at_level(logging.WARNING):
        group = sinks_of(tmp_path)
        for rollout_id in range(2):
            group.metrics(rollout_id, {"critic/lr": 1.0})
        group.close()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"rollout": 0, "critic/lr": 1.0}, {"rollout": 1, "critic/lr": 1.0}]
    told = {
        "init": "wandb does not log: OSError('no route to host')",
        "log": "WandbSink stopped logging after an error in metrics: OSError('no route to host')",
    }
    assert [record.message for record in caplog.records] == [told[when]]
    assert [call for call, _ in service.calls].count("log") == (0 if when == "init" else 1)


OFFLINE = """
import sys
from pathlib import Path
from miles_dmd2.sinks.wandb import WandbSink
for rollout in range(2):
    sink = WandbSink("project", "offline", Path(sys.argv[1]), {"lr": 1.0})
    sink.metrics(rollout, {"critic/critic_loss": 0.25})
    sink.close()
"""


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is an extra that is not installed here")
def test_the_package_itself_offline_and_resumed(tmp_path: Path) -> None:
    """Two files of one id, each with what was logged."""
    command = [sys.executable, "-c", OFFLINE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    kept = (tmp_path / "wandb_id").read_text()
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*-{kept}/run-{kept}.wandb"))
    assert len(files) == 2
    assert all(b"critic/critic_loss" in file.read_bytes() for file in files)
