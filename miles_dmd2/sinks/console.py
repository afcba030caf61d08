"""Progress for a person: a bar on a terminal, one plain line per rollout elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TextIO

from tqdm import tqdm

# What a line shows, in order: label and the first metric of the list that exists.
_SHOWN = (
    ("critic", "critic/critic_loss"),
    ("dmd", "actor/dmd_loss"),
    ("gap", "actor/dmd2_score_gap_abs_mean"),
    ("drift", "actor/x0_mean_abs_diff"),
)


class ConsoleSink:
    """`eval_keys`: the eval figures shown behind the losses, as they were last seen."""

    def __init__(self, first: int, total: int, stream: TextIO = sys.stderr) -> None:
        self._stream = stream
        self._total = total
        self._bar = (
            tqdm(total=total, initial=first, file=stream, unit="rollout", dynamic_ncols=True)
            if (stream.isatty())
            else None
        )
        self._eval: dict[str, float] = {}

    def phase(self, rollout_id: int, name: str) -> None:
        if self._bar is not None:
            self._bar.set_description(f"{name:8}")

    def metrics(self, rollout_id: int, values: Mapping[str, float]) -> None:
        fresh = {key.removeprefix("eval/"): value for key, value in values.items() if key.startswith("eval/")}
        self._eval |= fresh
        losses = [f"{label} {values[key]:.3g}" for label, key in _SHOWN if key in values]
        evals = [f"{key} {value:.3g}" for key, value in self._eval.items()]
        done = min(rollout_id + 1, self._total)
        if self._bar is None:
            seconds = sum(value for key, value in values.items() if key.startswith("time/"))
            line = f"[{done}/{self._total}] {seconds:.2f} s  {'  '.join(losses)}"
            if fresh:
                line += f"  |  eval at rollout {rollout_id}: {'  '.join(evals)}"
            print(line, file=self._stream, flush=True)
            return
        self._bar.set_postfix_str("  ".join([*losses, *evals]), refresh=False)
        self._bar.update(done - self._bar.n)
        self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
