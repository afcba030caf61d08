"""Who failed, and how, in one line."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

_GRACE_SECONDS = 5.0  # for the other ranks to report, when one has failed
_NODE_SECONDS = 40.0  # for Ray to notice that a node is gone, if there is another one
_LONGEST_LINE = 1000  # characters of an error on the terminal; all of it is in the log
# What the others of a group say when one of them is gone.
_SYMPTOMS = ("Connection closed by peer", "Connection reset by peer", "NCCL", "remote process exited", "Broken pipe")

# Actor id -> (name, log file). A run starts few, and one driver has one run.
_workers: dict[str, tuple[str, Path]] = {}
# Node id -> host and address: of the cluster as the run's processes were started on it.
_nodes: dict[str, str] = {}


def introduce(actor: Any, name: str, log_directory: Path) -> None:
    """From now on failures of this actor are told with its name and its log, and lost nodes with theirs."""
    _workers[actor._actor_id.hex()] = (name, log_directory / f"{name}.log")
    alive = _alive()
    if not _nodes.keys() & alive.keys():
        _nodes.clear()  # they were of another cluster
    _nodes.update(alive)


def late(refs: Sequence[Any], timeout: float, what: str) -> str:
    """Of calls whose deadline has passed: who has not answered."""
    _, waiting = ray.wait(list(refs), num_returns=len(refs), timeout=0)
    who = ", ".join(_name(ref)[0] for ref in waiting) or "a process"
    logs = sorted({str(log) for _, log in map(_name, waiting) if log})
    where = f"; logs: {', '.join(logs)}" if logs else ""
    return f"{what}: no answer from {who} within {timeout:g} s (--phase-timeout, --start-timeout){where}"


def root_cause(refs: Sequence[Any], first: ray.exceptions.RayError) -> tuple[Any, ray.exceptions.RayError]:
    """Of several calls that failed the one whose process did: a dead one, then one whose error is not the others' echo.

    When one rank is gone, its group's others fail in their next collective, and may do so sooner.
    """
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=_GRACE_SECONDS)
    failed = []
    for ref in done:
        try:
            ray.get(ref)
        except ray.exceptions.RayError as error:
            failed.append((ref, error))
    ranked = sorted(failed, key=lambda pair: _is_echo(pair[1]))
    return ranked[0] if ranked else (refs[0], first)


def told(ref: Any, error: ray.exceptions.RayError) -> str:
    """`critic_1 (pid 12 on 127.0.0.1): ValueError: ...; its log: ...`."""
    name, log = _name(ref)
    text = str(error)
    pid, node = _field("pid", text), _field("ip", text)
    where = f" (pid {pid} on {node})" if pid and node else ""
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        how = f" cannot be reached: {_lost_node() or _cut(summary_of(text))}"
    elif isinstance(error, ray.exceptions.RayTaskError):
        how = f": {_cause(error)}"
    elif isinstance(error, ray.exceptions.RayActorError):
        how = f" died: {_cut(_detail(text))}"
    else:
        how = f": {_cut(summary_of(text))}"
    return f"{name}{where}{how}{f'; its log: {log}' if log else ''}"


def summary_of(text: str) -> str:
    """Ray's own report in one line; where an actor's constructor failed, the error it failed with is the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return lines[-1] if "creation task" in lines[0] else lines[0]


def _lost_node() -> str | None:
    """A node that is gone, or goes while we look. Processes of a lost node are out of reach at once, but Ray calls a
    node dead only after it has missed some health checks, 15 s by default. The driver's own cannot be the one.
    """
    deadline = time.monotonic() + _NODE_SECONDS
    while True:
        gone = _nodes.keys() - _alive().keys()
        if gone:
            return f"its node is lost: {_nodes[min(gone)]}"
        if len(_nodes) < 2 or time.monotonic() >= deadline:
            return None
        time.sleep(0.5)


def _alive() -> dict[str, str]:
    """Node id -> host and address."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return {node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in nodes}


def _name(ref: Any) -> tuple[str, Path | None]:
    return _workers.get(ref.task_id().actor_id().hex(), ("a process", None))


def _is_echo(error: ray.exceptions.RayError) -> int:
    if isinstance(error, ray.exceptions.RayActorError):
        return 0
    return 2 if any(symptom in str(error) for symptom in _SYMPTOMS) else 1


def _field(name: str, text: str) -> str | None:
    """Of Ray's `pid=3, ip=...` or `pid: 3`."""
    found = re.search(rf"\b{name}(?:=|: )([^\s,)]+)", text)
    return found[1] if found else None


def _detail(text: str) -> str:
    found = re.search(r"Worker exit detail: (.+)", text) or re.search(r"because (its node has died.*)", text, re.DOTALL)
    return found[1] if found else summary_of(text)


def _cause(error: ray.exceptions.RayTaskError) -> str:
    cause = error.cause
    text = f"{type(cause).__name__}: {cause}" if cause is not None else str(error)
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > 3:  # an engine's error carries the end of its server's log
        lines = [*lines[:2], "...", lines[-1]]
    return _cut(" ".join(lines))


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..."
