"""--debug-rollout-only: engines with a checkpoint's own weights, and no trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from miles_dmd2.config import Config
from miles_dmd2.driver import Evaluation, RequestSource, eval_only, rollouts_only
from miles_dmd2.observability import Sink


def rollout_only(config: Config, source: RequestSource, evaluation: Evaluation, sink: Callable[[], Sink]) -> list[str]:
    """Rollouts or one eval. Returns a line for each eval whose files are not complete; all that can be is written.

    `sink` is called when all processes are up.
    """
    from miles_dmd2.cluster.launch import launch
    from miles_dmd2.models.reference import check_transformer, swapped

    checkpoint, reference = config.model.hf_checkpoint, config.rollout.reference_transformer
    with ExitStack() as stack:
        if reference is not None:
            part = check_transformer(checkpoint, reference)
            root = stack.enter_context(swapped(checkpoint, part, config.run.run_dir.resolve() / "reference"))
            config = config.model_copy(update={"model": config.model.model_copy(update={"hf_checkpoint": root})})
        engines, _ = stack.enter_context(launch(config, (), None))
        if config.rollout.debug_rollout_only == "eval":
            eval_only(evaluation, engines, sink())
        else:
            rollouts_only(range(config.rollout.num_rollout), source, engines, sink())
        return engines.media_failures
