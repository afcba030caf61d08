"""The chain of kills where samples come from an SGLang server that the run has started.

A run survives its server: that is started again, and the run is not. So of these victims "http" and "worker", the two
processes of the server, are killed in a run that goes on; all others end it, and it is resumed as with any engine.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.faults.chain import (
    DEADLINE,
    RAY_GONE,
    VICTIMS,
    Cell,
    Chain,
    alive,
    descendants,
    finish,
    rows,
    until,
)
from tests.sglang.sockets import is_open, listening

# "server" is the worker of this project that keeps the server; its own processes are "http" and "worker".
SERVER = ("http", "worker")
SGLANG_VICTIMS = (*VICTIMS, "server", *SERVER)
# Each phase in which the server has work, and each of the server's processes; the client's own death in between.
SGLANG_SELECTION = (
    Cell("http", "sync"),
    Cell("worker", "eval"),
    Cell("driver", "generate"),
    Cell("worker", "generate"),
)
STRIDE = 2  # rollouts from one kill to the next: a server that is killed after generate is missed in the next one
SERVER_PORTS = range(20_000, 30_000)  # what this project chooses; others of the kernel's choice are soon anyone's
FAULTS = ("rollout/faults", "rollout/retries", "rollout/restarts", "rollout/dropped")
_START = "=== miles_dmd2: start"
_OWNED = re.compile(r"/tmp/md2-(?:sglang|run)-[^/\n]+|/dev/shm/[^/\n]+")


def sglang_flags(python: Path) -> tuple[str, ...]:
    return (
        *("--rollout-engine", "sglang", "--sglang-python", str(python)),
        *("--sglang-attention-backend", "torch_sdpa"),
        *("--engine-max-restarts", "10"),  # of one run, which may be killed at several times
    )


def rollouts_for(cells: Sequence[Cell]) -> int:
    """So many that the last kill is not in the last rollout, whose row would miss the restart."""
    return STRIDE * len(cells) + 1


class SGLangChain(Chain):
    """What `Chain` does, over a run with one server of its own."""

    WORKERS = (*Chain.WORKERS, "server")

    def __init__(
        self, workspace: Path, run_dir: Path, rollouts: int, python: Path, say: Callable[[str], None] = print
    ) -> None:
        super().__init__(workspace, run_dir, rollouts, say, sglang_flags(python))
        self.going_on: subprocess.Popen[str] | None = None
        self.restarts = 0  # that were asked for
        self.owned: set[str] = set()  # directories and shared memory of the runs
        self.ports: set[int] = set()

    def disturb(self, cell: Cell, rollout: int) -> None:
        if cell.victim not in SERVER:
            super().disturb(cell, rollout)
            self.going_on = None
            return
        self.going_on = process = self._start()
        what = f"{cell} of rollout {rollout}"
        try:
            workers, family = self._strike(process, self.in_phase(cell, rollout), cell.victim, f"{what} did not come")
            met, starts = self.status(process.pid), self._starts()
            until(
                lambda: not alive([workers[victim] for victim in SERVER]), DEADLINE, f"{what}: of {workers} some live"
            )
            until(lambda: self._starts() > starts or process.poll() is not None, DEADLINE, f"{what}: no new server")
            assert process.poll() is None, process.communicate()[1]
        except BaseException:
            process.kill()
            raise
        self.before += family
        self.restarts += 1
        self.say(f"{what}: killed in {met['phase']} of rollout {met['rollout']}, the run goes on with a new server")

    def end(self) -> None:
        process, self.going_on = self.going_on, None
        if process is None or process.poll() is not None:
            finish(self._command())
            return
        self._workers(descendants(process.pid))
        self.before += descendants(process.pid)
        _, err = process.communicate(timeout=2 * DEADLINE)
        assert process.returncode == 0, err

    def check(self, base: Path) -> None:
        super().check(base)
        counted = [row.get("rollout/restarts", 0) for row in rows(self.run_dir)]
        assert sum(counted) == self.restarts, counted
        left = [path for path in self.owned if Path(path).exists()]
        assert not left, left
        until(lambda: not alive(self.before), RAY_GONE, f"of {self.before} some live on")
        assert not [port for port in self.ports if is_open(port)]

    def rows(self, run_dir: Path) -> list[dict[str, Any]]:
        """Without the counts of what went wrong."""
        return [{key: value for key, value in row.items() if key not in FAULTS} for row in rows(run_dir)]

    def _start(self) -> subprocess.Popen[str]:
        if self.going_on is not None and self.going_on.poll() is None:
            return self.going_on
        return super()._start()

    def _check_told(self, err: str, victim: str) -> None:
        """Of the server's keeper its client tells: it is the one that was waited for."""
        super()._check_told(err, "engine" if victim == "server" else victim)
        assert victim != "server" or "server_0, the process that keeps the server" in err, err

    def _starts(self) -> int:
        return self._server_log().count(_START)

    def _server_log(self) -> str:
        log = self.run_dir / "logs" / "sglang_0.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def _workers(self, processes: Sequence[int]) -> dict[str, int]:
        """With the server's, once it is up. Also notes what these processes hold, to look for it afterwards."""
        found = super()._workers(processes)
        if processes:
            server: dict[str, int] = {}
            until(lambda: server.update(self._server()) or server, DEADLINE, "the server did not answer")
            found |= server
        for pid in {*processes, *found.values()}:
            with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                self._note(pid)
        return found

    def _server(self) -> dict[str, int]:
        """The server's two processes; none while it does not answer."""
        url = re.search(r"http://[0-9.]+:\d+", self._server_log().rpartition(_START)[2])
        if url is None:
            return {}
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{url[0]}/miles_dmd2/capabilities", timeout=10) as reply:
                worker = int(json.load(reply)["worker"]["pid"])
            return {"worker": worker, "http": os.getpgid(worker)}  # which leads the group
        except OSError:
            return {}

    def _note(self, pid: int) -> None:
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        text = "\n".join([*links, Path(f"/proc/{pid}/maps").read_text()])
        self.owned |= set(_OWNED.findall(text))
        self.ports |= {port for _, port in listening(pid) if port in SERVER_PORTS}
