"""The whole kill matrix, and kills at random moments: `make kill-matrix`, `make soak`."""

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

from tests.faults.chain import VICTIMS, Cell, Chain, command, every_cell, finish, prepare

LENGTH = 10  # cells, or random kills, of one run
STARTING = 20.0  # seconds from a start in which a random kill may come
TRAINING = 3.0  # and from the first phase on, in which three of four come; ten of them are less than the whole run


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--soak", action="store_true", help="kill at random moments instead")
    parser.add_argument("--kills", type=int, default=50, help="random kills (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the random kills (default: 0)")
    parser.add_argument("--log", type=Path, help="file that the log is written to when all went well")
    arguments = parser.parse_args(argv)
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
        else:
            matrix(workspace, say)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    say("every run ended with the bits of the one that nobody disturbed, and left nothing behind")
    if arguments.log:
        arguments.log.parent.mkdir(parents=True, exist_ok=True)
        arguments.log.write_text("\n".join(lines) + "\n")
    return 0


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
