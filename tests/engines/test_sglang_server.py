"""A server's life: start, identity, death, stop, restart. The server is a stand-in; tests/sglang has the real one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from miles_dmd2.engines.base import EngineError
from miles_dmd2.engines.sglang import process
from miles_dmd2.engines.sglang import server as life_cycle
from miles_dmd2.engines.sglang.process import Ports, free_ports, members_of
from miles_dmd2.engines.sglang.server import ExternalServer, ManagedServer, SGLangLaunch
from tests.engines.engine_stand_in import Handler, make_engine

ROOT = Path(__file__).parents[2]
Start = Callable[..., ManagedServer]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake engine's Python; its path has a space."""
    return make_engine(tmp_path_factory.mktemp("an engine") / "venv")


class Life:
    """Servers of one test; all are stopped after it."""

    def __init__(self, python: Path, directory: Path) -> None:
        self.python, self.directory = python, directory
        self.servers: list[ManagedServer] = []

    def server(self, mode: str = "", name: str = "engine", **changes: Any) -> ManagedServer:
        """One that has not been started."""
        variables = {
            "FAKE": mode,
            "FAKE_RECORD": str(self.directory / f"{name}.json"),
            **changes.pop("environment", {}),
        }
        settings: dict[str, Any] = {
            "python": self.python,
            "model": self.directory / "a pipeline",
            "model_id": "Qwen-Image",
            "arguments": (),
            "log": self.directory / "logs" / f"{name}.log",
            "start_timeout": 30.0,
            "environment": variables,
            **changes,
        }
        self.servers.append(ManagedServer(SGLangLaunch(**settings)))
        return self.servers[-1]

    def record(self, name: str = "engine") -> dict[str, Any]:
        """What the server of this name was started with, as it saw it."""
        record: dict[str, Any] = json.loads((self.directory / f"{name}.json").read_text())
        return record

    def log(self, name: str = "engine") -> str:
        return (self.directory / "logs" / f"{name}.log").read_text()


@pytest.fixture
def life(python: Path, tmp_path: Path) -> Iterator[Life]:
    life = Life(python, tmp_path)
    yield life
    for server in life.servers:
        server.stop()


def ports_of(server: ManagedServer, life: Life) -> list[int]:
    argv = life.record()["argv"]
    http, *others = (int(argv[argv.index(flag) + 1]) for flag in ("--port", "--scheduler-port", "--master-port"))
    assert server.url == f"http://127.0.0.1:{http}"
    return [http, http + 1, *others]


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection may linger
        return probe.connect_ex(("127.0.0.1", port)) != 0


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def test_starts_answers_and_leaves_nothing(life: Life) -> None:
    server = life.server()
    assert server.pid is None
    assert not server.alive()
    server.start()
    pid = server.pid
    assert pid is not None
    assert server.alive()
    assert server.managed
    assert len(members_of(pid)) == 2  # and the worker
    ports = ports_of(server, life)
    assert len(set(ports)) == 4
    assert not any(is_free(port) for port in ports)
    assert life.record()["environ"]["MILES_DMD2_LAUNCH_ID"] == server.launch_id
    temporary = Path(life.record()["environ"]["TMPDIR"])
    assert temporary.is_dir()

    server.stop()
    assert members_of(pid) == []
    assert all(is_free(port) for port in ports)
    assert not temporary.parent.exists()
    assert not server.alive()
    server.stop()  # again


def test_as_a_context_manager(life: Life) -> None:
    with life.server() as server:
        assert server.alive()
        with pytest.raises(EngineError, match="has been started already"):
            server.start()
        assert server.alive()
    assert not server.alive()


def test_the_command_line_passes_unchanged_and_unseen_by_a_shell(life: Life) -> None:
    odd = ("--prompt", "two  words", "$(touch owned)", "; ls", 'it\'s "quoted"', "*", "", "größe", "--", "-x")
    server = life.server(arguments=("--dit-precision", "fp32", *odd))
    server.start()
    http, _, scheduler, master = ports_of(server, life)
    assert life.record()["argv"] == [
        *("--model-path", str(life.directory / "a pipeline"), "--model-id", "Qwen-Image", "--host", "127.0.0.1"),
        *("--port", str(http), "--scheduler-port", str(scheduler), "--master-port", str(master)),
        *("--strict-ports", "--sleep-on-idle", "--dit-precision", "fp32", *odd),
    ]


def test_the_environment_is_the_engines(life: Life, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the trainer's but the plugin can be imported, and no variable makes the server a rank of it."""
    misleading = tmp_path / "sglang"  # in the current directory and in PYTHONPATH
    misleading.mkdir()
    (misleading / "__init__.py").write_text("raise RuntimeError('not the engine's own')")
    monkeypatch.chdir(tmp_path)
    given = {
        **{"PYTHONPATH": str(tmp_path), "PYTHONHOME": "/nowhere", "VIRTUAL_ENV": "/trainer", "OMP_NUM_THREADS": "1"},
        **{"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"},
        **{"no_proxy": "intranet", "HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"},
        **{"CUDA_VISIBLE_DEVICES": "3", "HF_TOKEN": "hf_secret"},
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    server = life.server(threads=5)
    server.start()  # which a proxy would not have let happen

    record = life.record()
    seen = record["environ"]
    assert not {"PYTHONHOME", "VIRTUAL_ENV", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & set(seen)
    assert seen["OMP_NUM_THREADS"] == "5"
    assert seen["HF_HUB_OFFLINE"] == "1"
    assert seen["CUDA_VISIBLE_DEVICES"] == "3"
    assert seen["HF_TOKEN"] == "hf_secret"
    assert seen["no_proxy"] == seen["NO_PROXY"] == "intranet,127.0.0.1,localhost,::1"
    assert seen["PATH"].split(os.pathsep)[0] == str(life.python.parent)
    assert "SGLANG_PLUGINS" not in seen
    assert "hf_secret" not in life.log()

    plugin = Path(seen["PYTHONPATH"])
    assert sorted(file.name.partition("-")[0] for file in plugin.iterdir()) == ["miles_dmd2", "miles_dmd2"]
    assert record["plugins"] == [["miles_dmd2", "miles_dmd2.engines.sglang_plugin:register"]]
    of_the_trainer = {entry for entry in sys.path if "site-packages" in entry}
    assert of_the_trainer
    assert not of_the_trainer & set(record["path"])
    assert str(tmp_path) not in record["path"]


def test_without_threads_the_server_chooses(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    life.server(environment={"HF_HUB_OFFLINE": "0"}).start()
    seen = life.record()["environ"]
    assert "OMP_NUM_THREADS" not in seen
    assert seen["HF_HUB_OFFLINE"] == "0"


def test_a_filter_that_leaves_the_plugin_out_is_refused(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "other, more")
    server = life.server()
    with pytest.raises(ValueError, match="SGLANG_PLUGINS=other, more: leaves out the plugin miles_dmd2; add it"):
        server.start()
    monkeypatch.setenv("SGLANG_PLUGINS", "other,miles_dmd2")
    server.start()


def test_what_does_not_start_says_why(life: Life) -> None:
    server = life.server("crash")
    with pytest.raises(EngineError) as caught:
        server.start()
    text = str(caught.value)
    assert "ended with exit code 1 before it was ready" in text
    assert f"log {life.directory / 'logs' / 'engine.log'}" in text
    assert "RuntimeError: no such model" in text
    assert "a warning in colour" in text
    assert "\x1b" not in text
    assert "Loading: 100%|" in text  # a progress bar's last state
    assert "0%|\r" not in text
    assert server.pid is None
    assert server.tail(1) == "RuntimeError: no such model"
    with (life.directory / "logs" / "engine.log").open("a") as log:
        log.write("more\n" * 50_000 + "the end\n")
    assert server.tail(2) == "more\nthe end"
    assert 60_000 < len(server.tail(50_000)) < 70_000  # of a log that may have grown for days


def test_what_cannot_be_run_says_so(life: Life, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("not a program")
    text.chmod(0o755)
    for python, why in ((tmp_path / "nothing", "No such file"), (text, "Exec format error")):
        with pytest.raises(EngineError, match=f"cannot start {python}: {why}"):
            life.server(python=python).start()


def test_the_deadline(life: Life) -> None:
    server = life.server("slow", start_timeout=1.5)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"not ready after 1.5 s \(--start-timeout\), GET /health: no answer"):
        server.start()
    assert time.monotonic() - began < 60
    assert server.pid is None


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("transformer falls back", "it runs the library's class for transformer"),
        ("no plugin", "it could not load this project's plugin"),
        ("stock", "is up without this project's plugin"),
    ],
)
def test_a_server_that_is_not_what_it_should_be_is_refused(life: Life, mode: str, why: str) -> None:
    server = life.server(mode)
    with pytest.raises(EngineError, match=why):
        server.start()
    assert server.pid is None


def test_a_text_encoder_of_the_library_is_fine(life: Life) -> None:
    assert life.server("text_encoder falls back").start().alive()


@pytest.mark.parametrize("which", ["http", "broker", "scheduler"])
def test_a_taken_port_costs_a_retry(life: Life, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    tries: list[Ports] = []
    with socket.socket() as other:

        def ports() -> Ports:
            tries.append(free_ports())
            if len(tries) == 1:
                taken = {"http": tries[0].http, "broker": tries[0].http + 1, "scheduler": tries[0].scheduler}[which]
                other.bind(("127.0.0.1", taken))
                other.listen()
            return tries[-1]

        monkeypatch.setattr(life_cycle, "free_ports", ports)
        monkeypatch.setattr(life_cycle, "_POLL_ANSWER_SECONDS", 0.2)  # `other` accepts and says nothing
        server = life.server().start()
    assert len(tries) == 2
    assert server.alive()
    assert server.url.endswith(f":{tries[1].http}")
    assert life.log().count("=== miles_dmd2: start") == 2


def test_three_taken_ports_are_an_error(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ports = free_ports()
        same = Ports(other.getsockname()[1], ports.scheduler, ports.master)
        monkeypatch.setattr(life_cycle, "free_ports", lambda: same)
        monkeypatch.setattr(life_cycle, "_POLL_ANSWER_SECONDS", 0.2)  # `other` accepts and says nothing
        server = life.server()
        with pytest.raises(EngineError, match=r"(?s)Address already in use.*\(3 tries, each with other ports\)"):
            server.start()
    assert server.pid is None
    assert life.log().count("=== miles_dmd2: start") == 3


def test_another_server_on_its_port_is_not_taken_for_it(
    life: Life, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A left-over of another run, with the same plugin, answers /health while ours still imports."""
    monkeypatch.setattr(Handler, "worker", subprocess.Popen(["/bin/sleep", "60"]), raising=False)
    monkeypatch.setattr(Handler, "broker", socket.socket(), raising=False)
    monkeypatch.setattr(Handler, "failed", life.directory / "never", raising=False)
    monkeypatch.setattr(Handler, "log_message", lambda *args: None)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        tries = iter([Ports(other.server_port, *(free_ports().scheduler, free_ports().master)), free_ports()])
        monkeypatch.setattr(life_cycle, "free_ports", lambda: next(tries))
        server = life.server().start()
        other.shutdown()
    Handler.worker.kill()
    Handler.worker.wait()
    Handler.broker.close()
    assert "another server has its port" in caplog.text
    assert server.alive()
    assert not server.url.endswith(f":{other.server_port}")


def test_a_dead_worker_is_a_dead_server_at_once(life: Life) -> None:
    server = life.server().start()
    (worker,) = set(members_of(server.pid or 0)) - {server.pid}
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: not server.alive(), 30.0)
    server.restart()
    assert server.alive()


def test_an_unhealthy_server_is_dead(life: Life) -> None:
    server = life.server().start()
    (life.directory / "engine.json.failed").touch()
    assert not server.alive()
    (life.directory / "engine.json.failed").unlink()
    assert server.alive()


def test_restart(life: Life) -> None:
    server = life.server().start()
    before = (server.pid, server.launch_id)
    os.kill(server.pid or 0, signal.SIGKILL)
    wait_for(lambda: not server.alive())
    server.restart()
    assert server.alive()
    assert server.pid != before[0]
    assert server.launch_id != before[1]
    assert members_of(before[0] or 0) == []
    assert life.record()["environ"]["MILES_DMD2_LAUNCH_ID"] == server.launch_id
    first, second = life.log().split("=== miles_dmd2: start ")[1:]
    assert first.startswith("1 of this server")
    assert second.startswith("2 of this server")
    assert server.url in second
    assert "a warning in colour" in first


def test_one_that_ignores_sigterm_is_killed(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life_cycle, "_TERM_SECONDS", 0.5)
    server = life.server("deaf").start()
    pid = server.pid or 0
    began = time.monotonic()
    server.stop()
    assert 0.5 <= time.monotonic() - began < 60
    assert members_of(pid) == []


def test_stop_ends_a_start_that_waits(life: Life) -> None:
    server = life.server("slow")
    errors: list[EngineError] = []

    def start() -> None:
        try:
            server.start()
        except EngineError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    wait_for(lambda: server.pid is not None)
    server.stop()
    thread.join(5)
    assert not thread.is_alive()
    assert "was stopped while it started" in str(errors[0])
    assert server.pid is None


def test_two_at_once(life: Life) -> None:
    servers = [life.server(name=name) for name in ("one", "two")]
    threads = [threading.Thread(target=server.start) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(server.alive() for server in servers)
    assert len({server.url for server in servers}) == 2
    servers[0].stop()
    assert servers[1].alive()


def test_a_server_outlives_the_thread_that_started_it(life: Life) -> None:
    server = life.server()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    time.sleep(0.3)  # the kernel would have killed it at once
    assert server.alive()


@pytest.mark.parametrize("end", ["kill", "exit"])
def test_it_dies_with_its_owner(life: Life, end: str) -> None:
    owner = f"""
import os, signal, sys
from pathlib import Path
from miles_dmd2.engines.sglang.server import ManagedServer, SGLangLaunch
launch = SGLangLaunch(
    python=Path({str(life.python)!r}), model=Path("model"), model_id="Qwen-Image", arguments=(),
    log=Path({str(life.directory / "logs" / "engine.log")!r}), start_timeout=30.0,
    environment={{"FAKE_RECORD": {str(life.directory / "engine.json")!r}}},
)
server = ManagedServer(launch).start()
print(server.pid, flush=True)
if {end!r} == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", owner], capture_output=True, text=True, timeout=60, env=variables)
    assert (done.returncode == -signal.SIGKILL) == (end == "kill"), done.stderr
    pid = int(done.stdout)
    wait_for(lambda: not members_of(pid), 30.0)
    argv = life.record()["argv"]
    http = int(argv[argv.index("--port") + 1])
    assert is_free(http)
    assert is_free(http + 1)
    left = Path(life.record()["environ"]["TMPDIR"]).parent
    assert left.exists() == (end == "kill")
    life.server(name="next").start()  # sweeps
    assert not left.exists()


def test_an_orphan_does_not_start(python: Path, tmp_path: Path) -> None:
    """Its parent died before it could ask the kernel to watch it."""
    launch = [python, ROOT / "miles_dmd2" / "engines" / "sglang_plugin" / "launch.py", "1", "--", "--port", "0"]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert f"started by process {os.getpid()}, not by 1" in done.stderr


def test_an_external_server_is_only_an_address() -> None:
    server = ExternalServer("http://127.0.0.1:30000/")
    assert server.url == "http://127.0.0.1:30000"
    assert server.launch_id is None
    assert not server.managed
    assert server.tail() == ""
    with pytest.raises(EngineError, match="was not started by this run"):
        server.restart()


def test_ports_differ_are_free_and_stay_so() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    seen = [free_ports() for _ in range(50)]
    for ports in seen:
        four = {ports.http, ports.http + 1, ports.scheduler, ports.master}
        assert len(four) == 4
        assert max(four) < low or low < 30_000  # the kernel gives none of them to a connection
        for port in four:
            with socket.socket() as probe:
                probe.bind(("", port))
    assert len({ports.http for ports in seen}) > 40


def test_no_free_port_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy(socket.socket):
        def bind(self, address: Any) -> None:
            raise OSError("address already in use")

    monkeypatch.setattr(process.socket, "socket", Busy)
    with pytest.raises(EngineError, match="no three pairs of free ports from 20000 to 29999"):
        free_ports()
