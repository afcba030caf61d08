"""SGLang servers under Ray: they start together, are known by their addresses, and none outlives its worker."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from run_commands import wait_for

from miles_dmd2.cluster.placement import Placement, place
from miles_dmd2.cluster.runtime import ray_session
from miles_dmd2.cluster.server_worker import RemoteServer, ServerGroup
from miles_dmd2.cluster.settings import EngineSettings, ServerSettings, WorkerSettings
from miles_dmd2.engines.base import EngineError
from miles_dmd2.engines.sglang.pool import SGLangSettings
from miles_dmd2.engines.sglang.process import members_of
from miles_dmd2.observability import RunError

pytestmark = pytest.mark.ray

START_SECONDS = 60.0


@pytest.fixture(scope="module")
def placement() -> Iterator[Placement]:
    with ray_session(None, 2, "cpu"):
        yield place(1, 2, "cpu", timeout=30)


@pytest.fixture
def settings(workspace: Path, tmp_path: Path, engine_python: Callable[[str], Path]) -> EngineSettings:
    worker = WorkerSettings(
        checkpoint=workspace / "pipeline",
        height=32,
        width=32,
        num_frames=None,
        seconds=None,
        forward_dtype="fp32",
        device="cpu",
        threads=1,
        single_node=True,
        log_directory=tmp_path / "logs",
        python_path=tuple(sys.path),
        driver_pid=None,
    )
    servers = ServerSettings((), engine_python(""), ("--log-level", "info"), START_SECONDS, beside_client=2)
    return EngineSettings(worker, 64, None, tmp_path / "eval", SGLangSettings(), servers)


@contextmanager
def started(settings: EngineSettings, placement: Placement, count: int = 2) -> Iterator[ServerGroup]:
    group = ServerGroup.start(count, settings, placement)
    try:
        group.build()
        yield group
    finally:
        group.dispose()


def process_of(server: RemoteServer) -> int:
    """The process group of a server: its worker, whose id it tells, is in it."""
    with urllib.request.urlopen(f"{server.url}/miles_dmd2/capabilities", timeout=10) as reply:
        return os.getpgid(json.load(reply)["worker"]["pid"])


def test_servers_start_restart_and_stop(settings: EngineSettings, placement: Placement) -> None:
    with started(settings, placement) as group:
        servers = [RemoteServer(worker, f"server_{i}", START_SECONDS) for i, worker in enumerate(group.workers)]
        assert len({server.url for server in servers}) == len({server.launch_id for server in servers}) == 2
        assert all(server.url.startswith("http://127.0.0.1:") and server.managed for server in servers)
        groups = [process_of(server) for server in servers]
        logs = settings.worker.log_directory
        assert {file.name for file in logs.iterdir()} == {
            "server_0.log", "server_1.log", "sglang_0.log", "sglang_1.log",
        }  # fmt: skip
        assert "a warning in colour" in servers[0].tail()
        argv = Path(f"/proc/{groups[0]}/cmdline").read_text().split("\0")
        for words in (
            ["--model-path", str(settings.worker.checkpoint)],
            ["--model-id", "Qwen-Image"],
            ["--dit-precision", "fp32"],
            ["--log-level", "info"],
        ):
            assert any(argv[i : i + 2] == words for i in range(len(argv))), words

        first, before = servers[0], (servers[0].url, servers[0].launch_id)
        os.killpg(groups[0], 9)
        wait_for(lambda: not ray.get(group.workers[0].alive.remote(), timeout=20), 20)
        assert ray.get(group.workers[1].alive.remote(), timeout=20)
        first.restart()
        assert first.url != before[0]
        assert first.launch_id not in (before[1], None)
        groups.append(process_of(first))
    wait_for(lambda: not any(members_of(number) for number in groups), 20)


def test_a_server_dies_with_its_worker(settings: EngineSettings, placement: Placement) -> None:
    with started(settings, placement, count=1) as group:
        server = RemoteServer(group.workers[0], "server_0", START_SECONDS)
        number = process_of(server)
        assert members_of(number)
        ray.kill(group.workers[0])
        wait_for(lambda: not members_of(number), 20)
        with pytest.raises(EngineError, match="server_0, the process that keeps the server: "):
            server.restart()
        assert server.tail().startswith("(not to be read: server_0, the process that keeps the server: ")


def test_one_that_cannot_start_ends_the_start_of_all_with_its_reason(
    settings: EngineSettings,
    placement: Placement,
    engine_python: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The other one would take a minute."""
    assert settings.servers is not None
    logs = replace(
        settings.worker, log_directory=settings.worker.log_directory / "slow"
    )  # each is the first of a group
    others = replace(settings, servers=replace(settings.servers, python=engine_python("slow")), worker=logs)
    slow = ServerGroup.start(1, others, placement)
    crash = replace(settings, servers=replace(settings.servers, python=engine_python("crash")))
    both = ServerGroup.start(1, crash, placement)
    both.workers += slow.workers
    assert ray.get([worker.alive.remote() for worker in both.workers], timeout=120) == [False, False]
    began = time.monotonic()
    try:
        with pytest.raises(RunError) as caught:
            both.build()
    finally:
        both.dispose()
        assert time.monotonic() - began < 40
    text = str(caught.value)
    told = (
        r"start of the SGLang servers: server_0 \(pid \d+ on [\d.]+\): EngineError: SGLang server http://127\.0\.0\.1:"
    )
    assert re.match(told, text)
    assert "ended with exit code 1 before it was ready" in text
    assert text.endswith(f" ... RuntimeError: no such model; its log: {settings.worker.log_directory}/server_0.log")
    assert "Traceback" not in text
    assert len(text.splitlines()) == 1
    assert "\nRuntimeError: no such model" in caplog.text  # the log's tail line by line


def test_none_are_started_for_running_servers_or_the_local_engine(settings: EngineSettings) -> None:
    assert settings.servers is not None
    running: Any = replace(settings, servers=replace(settings.servers, urls=("http://127.0.0.1:1",)))
    for other in (running, replace(settings, client=None, servers=None)):
        group = ServerGroup.start(2, other, placement=None)  # type: ignore[arg-type]
        assert group.workers == []
        group.build()
        group.dispose()
