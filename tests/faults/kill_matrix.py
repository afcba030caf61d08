"""The whole kill matrix, and kills at random moments: `make kill-matrix`, `make soak`.

The matrix has an axis of engines: --engine sglang runs it over a real SGLang server, with the server's processes among
the victims.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.faults.chain import ROOT, VICTIMS, Cell, Chain, command, every_cell, finish, prepare
from tests.faults.sglang_chain import SGLANG_VICTIMS, STRIDE, SGLangChain, rollouts_for, sglang_flags

LENGTH = 10  # cells, or random kills, of one run
STARTING = 20.0  # seconds from a start in which a random kill may come
TRAINING = 3.0  # and from the first phase on, in which three of four come; ten of them are less than the whole run


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--soak", action="store_true", help="kill at random moments instead")
    parser.add_argument("--kills", type=int, default=50, help="random kills (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the random kills (default: 0)")
    parser.add_argument("--engine", choices=("local", "sglang"), default="local", help="of the matrix (default: local)")
    parser.add_argument("--log-directory", type=Path, help="directory of the log, which is written when all went well")
    arguments = parser.parse_args(argv)
    if arguments.soak and arguments.engine != "local":
        parser.error("--soak: random kills are of runs with --engine local")
    python = sglang_python() if arguments.engine == "sglang" else None
    lines: list[str] = []
    began = time.monotonic()

    def say(text: str) -> None:
        line = f"[{time.monotonic() - began:6.0f} s] {text}"
        lines.append(line)
        print(line, flush=True)

    workspace = Path(tempfile.mkdtemp(prefix="md2-faults-"))
    say(f"Python {platform.python_version()}, {os.cpu_count()} cores, commit {_commit()}")
    try:
        prepare(workspace)
        if arguments.soak:
            soak(workspace, arguments.kills, arguments.seed, say)
        elif python is not None:
            sglang_matrix(workspace, python, say)
        else:
            matrix(workspace, say)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    say("every run ended with the bits of the one that nobody disturbed, and left nothing behind")
    if arguments.log_directory:
        name = "soak.txt" if arguments.soak else "kill_matrix.txt" if python is None else "kill_matrix_sglang.txt"
        arguments.log_directory.mkdir(parents=True, exist_ok=True)
        (arguments.log_directory / name).write_text("\n".join(lines) + "\n")
    return 0


def sglang_python() -> Path:
    """Of the environment that `make setup-sglang` makes, or the one that is named as for `make test-sglang`."""
    named = os.environ.get("MILES_DMD2_SGLANG_PYTHON")
    if named is None:
        words = [sys.executable, str(ROOT / "scripts" / "setup_sglang.py")]
        named = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    return Path(named)


def matrix(workspace: Path, say: Callable[[str], None]) -> None:
    """Runs of `LENGTH` kills, one for each rollout from the second on."""
    cells, rollouts = every_cell(), LENGTH + 2
    say(f"{len(cells)} cells in runs of {rollouts} rollouts")
    finish(command(workspace, workspace / "base", rollouts))
    for first in range(0, len(cells), LENGTH):
        part: list[Cell] = cells[first : first + LENGTH]
        chain = Chain(workspace, workspace / f"chain_{first}", rollouts, say)
        for rollout, cell in enumerate(part, 1):
            chain.disturb(cell, rollout)
        chain.end()
        chain.check(workspace / "base")
        say(f"cells {first + 1} to {first + len(part)} of {len(cells)}: same bits")


def sglang_matrix(workspace: Path, python: Path, say: Callable[[str], None]) -> None:
    """The same over a real server; a kill in every second rollout."""
    cells = every_cell(SGLANG_VICTIMS)
    rollouts = rollouts_for(cells[:LENGTH])
    say(f"{len(cells)} cells with an SGLang server, in runs of {rollouts} rollouts")
    finish(command(workspace, workspace / "base", rollouts, *sglang_flags(python)))
    for first in range(0, len(cells), LENGTH):
        part = cells[first : first + LENGTH]
        chain = SGLangChain(workspace, workspace / f"chain_{first}", rollouts, python, say)
        for i, cell in enumerate(part):
            chain.disturb(cell, 1 + STRIDE * i)
        chain.end()
        chain.check(workspace / "base")
        say(f"cells {first + 1} to {first + len(part)} of {len(cells)}: same bits")


def soak(workspace: Path, kills: int, seed: int, say: Callable[[str], None]) -> None:
    """Kills at moments drawn from `seed`: while Ray starts, between phases, in the middle of anything."""
    draw = random.Random(seed)
    rollouts = 60
    say(f"{kills} kills with seed {seed} in runs of {rollouts} rollouts")
    finish(command(workspace, workspace / "base", rollouts))
    done = 0
    while done < kills:
        chain = Chain(workspace, workspace / f"soak_{done}", rollouts, say)
        for _ in range(min(LENGTH, kills - done)):
            victim, of_training = draw.choice(VICTIMS), draw.random() < 0.75
            seconds = draw.uniform(0.0, TRAINING if of_training else STARTING)
            chain.kill_after(seconds, victim, of_training=of_training)
            done += 1
        chain.end()
        chain.check(workspace / "base")
        say(f"{done} of {kills}: same bits")


def _commit() -> str:
    words = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parent)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
