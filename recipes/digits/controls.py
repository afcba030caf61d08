"""Negative controls: the same loop with one thing broken must not improve the student.

    python recipes/digits/controls.py --steps 1 --num-rollout 150

Runs in this process and without Ray: engine, critic and student are the objects that the workers wrap. `real` is the
algorithm; `flipped` has the DMD gradient's sign reversed; `frozen` stops training the critic after a few rollouts, so
that it goes on describing a student that is gone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from miles_dmd2.algo import dmd_gradient
from miles_dmd2.cluster.launch import trainer_job, worker_settings
from miles_dmd2.cluster.trainer_group import build_trainer
from miles_dmd2.config import parse
from miles_dmd2.data.prompts import load_prompts
from miles_dmd2.data.requests import TrainingRequests, eval_requests, grid
from miles_dmd2.engines.local import LocalEngine
from miles_dmd2.models.registry import build_adapter
from miles_dmd2.training import ActorTrainer, CriticTrainer, init_ranks
from miles_dmd2.types import WeightUpdate
from recipes.digits import metrics, run

KINDS = ("real", "flipped", "frozen")
FROZEN_AFTER = 3  # rollouts
EVAL_PER_DIGIT = 50


def control(kind: str, steps: int, options: Sequence[str] = ()) -> list[dict[str, float]]:
    """Train one kind; returns the averaged student's figures before the first and after the last rollout."""
    run_dir = Path("runs") / "controls"  # named in the settings, never written
    parsed = parse([*run.flags(steps, run_dir, smoke=False, given=options), *options])
    config, (critic_spec, actor_spec) = parsed.config, parsed.trainers
    worker, ranks = worker_settings(config), init_ranks()
    adapter = build_adapter(worker.checkpoint, worker.height, worker.width, worker.num_frames)
    critic = build_trainer(trainer_job(config, critic_spec, worker), adapter, ranks)
    actor = build_trainer(trainer_job(config, actor_spec, worker), adapter, ranks)
    assert isinstance(critic, CriticTrainer)
    assert isinstance(actor, ActorTrainer)
    engine = LocalEngine(adapter, batch_size=config.rollout.rollout_engine_batch_size)
    sigmas = grid(steps, config.rollout.diffusion_flow_shift)
    prompts = load_prompts(config.rollout.prompt_data)
    source = TrainingRequests(
        prompts,
        config.rollout.rollout_batch_size,
        config.rollout.n_samples_per_prompt,
        critic_spec.num_steps_per_rollout,
        sigmas,
        config.stop_law,
        config.rollout_seed,
    )
    fixed = eval_requests(prompts, EVAL_PER_DIGIT, sigmas, config.rollout_seed)

    def serve(update: WeightUpdate) -> LocalEngine:
        engine.load_weights(update, update.payload)
        return engine

    figures = [metrics.evaluate(serve(actor.export_weights()["ema"]).generate(fixed))]
    with ExitStack() as broken:
        if kind == "flipped":
            reverse = mock.patch("miles_dmd2.training.actor.dmd_gradient", lambda *a, **k: -dmd_gradient(*a, **k))
            broken.enter_context(reverse)
        for rollout_id in range(config.rollout.num_rollout):
            if kind == "frozen" and rollout_id == FROZEN_AFTER:
                broken.enter_context(mock.patch.object(critic.optimizer, "step", return_value=0.0))
            windows = source(rollout_id)
            samples = serve(actor.export_weights(["raw"])["raw"]).generate([r for window in windows for r in window])
            ids = [[request.sample_id for request in window] for window in windows]
            _, scores = critic.train(rollout_id, ids, samples)
            last = set(ids[-1])
            actor.train(rollout_id, ids[-1:], [s for s in samples if s.sample_id in last], [scores])
    figures.append(metrics.evaluate(serve(actor.export_weights()["ema"]).generate(fixed)))
    engine.close()
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, choices=(1, 2, 4), default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    chosen, options = parser.parse_known_args(argv)
    print(f"{'':10}{'distance before':>17}{'after':>9}{'accuracy before':>17}{'after':>9}")
    for kind in chosen.kinds:
        before, after = control(kind, chosen.steps, options)
        print(
            f"{kind:10}{before['fd']:17.2f}{after['fd']:9.2f}{before['accuracy']:17.1%}{after['accuracy']:9.1%}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
