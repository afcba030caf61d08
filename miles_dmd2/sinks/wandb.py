"""Weights & Biases, imported only when asked for."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class WandbSink:
    """Logs against an explicit `rollout` step, so that keys of any depth share one axis.

    Eval samples are shown when their files and index are there, which is some time after their eval.
    """

    def __init__(
        self,
        project: str,
        mode: str,
        run_dir: Path,
        config: Mapping[str, Any],
        media: Path | None = None,
        shown: int = 0,
        start: int = 0,
    ) -> None:
        """media: directory of eval samples, of which `shown` of each eval and kind are logged, from rollout `start`."""
        try:
            import wandb
        except ImportError as error:
            raise ValueError("--use-wandb needs the wandb package: pip install 'miles-dmd2[wandb]'") from error
        kept = run_dir / "wandb_id"  # a resumed run goes on in the same wandb run
        if not kept.exists():
            kept.write_text(secrets.token_hex(4))
        self._run = wandb.init(
            project=project,
            mode=mode,
            dir=str(run_dir),
            name=run_dir.name,
            config=dict(config),
            id=kept.read_text().strip(),
            resume="allow",
        )
        self._wandb, self._media, self._shown = wandb, media, shown
        self._logged: set[tuple[int, str]] = set()
        # Indexes of evals that a stopped run had made and this one makes again: not until they are written anew.
        found = [] if media is None else media.glob("eval_*/index.jsonl")
        self._before = {index: index.stat().st_mtime_ns for index in found if _rollout(index) >= start}
        self._start = start
        self._unreadable: set[Path] = set()
        self._run.define_metric("rollout")
        self._run.define_metric("*", step_metric="rollout")

    def phase(self, rollout_id: int, name: str) -> None:
        """Phases are for people."""

    def metrics(self, rollout_id: int, values: Mapping[str, float]) -> None:
        self._run.log({"rollout": rollout_id, **values})
        self._log_media()

    def close(self) -> None:
        """Returns when everything is uploaded, media too. The engines have written their last file before."""
        try:
            self._log_media()
        finally:
            self._run.finish()

    def _log_media(self) -> None:
        """Those that are written since the last call, under the rollout of their eval."""
        if self._media is None or not self._shown:
            return
        for index in sorted(self._media.glob("eval_*/index.jsonl")):
            rollout_id = _rollout(index)
            if self._before.get(index) == index.stat().st_mtime_ns:
                continue
            try:
                entries = [json.loads(line) for line in index.read_text(encoding="utf-8").splitlines()]
            except (OSError, ValueError) as error:  # figures go on
                if index not in self._unreadable:
                    logger.warning("wandb shows no media of %s: %s", index.parent.name, error)
                self._unreadable.add(index)
                continue
            for kind in dict.fromkeys(entry["kind"] for entry in entries):
                if rollout_id < self._start or (rollout_id, kind) in self._logged:
                    continue
                self._logged.add((rollout_id, kind))
                chosen = [entry for entry in entries if entry["kind"] == kind][: self._shown]
                shown = [self._one(index.parent / entry["file"], entry["prompt"]) for entry in chosen]
                self._run.log({"rollout": rollout_id, f"eval_media/{kind}": shown})

    def _one(self, file: Path, caption: str) -> Any:
        if file.suffix == ".png":
            return self._wandb.Image(str(file), caption=caption)
        return self._wandb.Video(str(file), caption=caption, format="mp4")


def _rollout(index: Path) -> int:
    return int(index.parent.name.removeprefix("eval_"))
