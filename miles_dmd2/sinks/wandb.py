"""Weights & Biases, imported only when asked for."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class WandbSink:
    """Logs against an explicit `rollout` step, so that keys of any depth share one axis."""

    def __init__(self, project: str, mode: str, run_dir: Path, config: Mapping[str, Any]) -> None:
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
        self._run.define_metric("rollout")
        self._run.define_metric("*", step_metric="rollout")

    def phase(self, rollout_id: int, name: str) -> None:
        """Phases are for people."""

    def metrics(self, rollout_id: int, values: Mapping[str, float]) -> None:
        self._run.log({"rollout": rollout_id, **values})

    def close(self) -> None:
        self._run.finish()
