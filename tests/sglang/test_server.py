"""The life of a real server: it is ours, it follows its owner, nothing is left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from miles_dmd2.engines.sglang.process import members_of
from miles_dmd2.engines.sglang.server import ManagedServer
from tests.sglang.conftest import FP32, START_SECONDS
from tests.sglang.sockets import is_open, listening

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]  # a busy machine takes minutes to start a server

ROOT = Path(__file__).parents[2]
OWNER = """
import sys, time
from pathlib import Path
from miles_dmd2.engines.sglang.server import ManagedServer, SGLangLaunch

python, model, log, seconds, *arguments = sys.argv[1:]
launch = SGLangLaunch(
    python=Path(python), model=Path(model), model_id="Qwen-Image", arguments=tuple(arguments), log=Path(log),
    start_timeout=float(seconds), threads=1,
)
server = ManagedServer(launch).start()
print(server.pid, flush=True)
time.sleep(600)
"""


def get(server: ManagedServer, path: str) -> dict[str, object]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(server.url + path, timeout=30) as reply:
        answer: dict[str, object] = json.loads(reply.read())
    return answer


def test_it_is_up_and_ours(server: ManagedServer) -> None:
    assert server.alive()
    assert get(server, "/health") == {"status": "ok"}
    answer = get(server, "/miles_dmd2/capabilities")
    assert answer["launch_id"] == server.launch_id
    assert answer["sglang"] == "0.5.23"
    worker = answer["worker"]
    assert isinstance(worker, dict)
    assert worker["pid"] in members_of(server.pid or 0)


def test_it_sleeps_when_idle(server: ManagedServer) -> None:
    """Without --sleep-on-idle the worker turns a core round: a second of CPU time per second."""

    def cpu_seconds() -> float:
        fields = [
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in members_of(server.pid or 0)
        ]
        return sum(int(field[11]) + int(field[12]) for field in fields) / os.sysconf("SC_CLK_TCK")

    before = cpu_seconds()
    time.sleep(3)
    assert cpu_seconds() - before < 0.6


def test_it_listens_on_loopback_only(server: ManagedServer) -> None:
    """But for torch's rendezvous, which always listens on every address."""
    listens = [place for pid in members_of(server.pid or 0) for place in listening(pid)]
    everywhere = [port for address, port in listens if address not in ("127.0.0.1", "::ffff:127.0.0.1", "::1")]
    assert {int(server.url.rpartition(":")[2]) + offset for offset in (0, 1)} <= {port for _, port in listens}
    words = Path(f"/proc/{server.pid}/cmdline").read_text().split("\0")
    assert everywhere == [int(words[words.index("--master-port") + 1])]


@pytest.fixture
def owner(sglang_python: Path, qwen_pipeline: Path, tmp_path: Path) -> subprocess.Popen[str]:
    """Another process with a server of its own."""
    words = [sglang_python, qwen_pipeline, tmp_path / "server.log", START_SECONDS, *FP32]
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, *map(str, words)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.1)


def test_it_dies_with_its_owner(owner: subprocess.Popen[str]) -> None:
    """SIGKILL, which no handler sees. The group has the HTTP process, the worker and Python's resource tracker."""
    assert owner.stdout is not None
    try:
        pid = int(owner.stdout.readline())
        ports = {port for member in members_of(pid) for _, port in listening(member)}
        assert len(ports) > 3  # HTTP, broker, scheduler, rendezvous
        owner.kill()
        wait_for(lambda: not members_of(pid), 60)
        assert not [port for port in ports if 20000 <= port < 30000 and is_open(port)]  # others are anyone's now
    finally:
        owner.kill()
        owner.communicate()


def test_a_killed_worker_is_noticed_and_a_restart_serves_again(server: ManagedServer) -> None:
    worker = get(server, "/miles_dmd2/capabilities")["worker"]
    assert isinstance(worker, dict)
    before, pid = (server.url, server.launch_id), server.pid or 0
    ports = {port for member in members_of(pid) for _, port in listening(member)}
    os.kill(int(worker["pid"]), signal.SIGKILL)
    wait_for(lambda: not server.alive(), 60)
    server.restart()
    assert server.alive()
    assert (server.url, server.launch_id) != before
    assert get(server, "/miles_dmd2/capabilities")["launch_id"] == server.launch_id
    assert members_of(pid) == []
    assert not [port for port in ports if 20000 <= port < 30000 and is_open(port)]  # others are anyone's now
