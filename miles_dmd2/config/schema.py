"""Every option of a run, in frozen sections. A field name in kebab-case is its flag; its description is its help text.

Field names are unique over all sections, because flags and YAML keys are flat. No torch or ray here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, model_validator

from miles_dmd2.config.parts import VISUAL, parse_parts
from miles_dmd2.config.sections import (
    DEFAULT_TRAINERS,
    LOCAL_BATCH_SIZE,
    AlgorithmSection,
    ClusterSection,
    EvalSection,
    ModelSection,
    RolloutSection,
    RunSection,
    TrainerSection,
    parse_sigmas,
)
from miles_dmd2.config.sglang import SGLangSection, check_local, check_sglang

# Mean |x0 of the trainer - x0 of the engine| that a run may have, by dtype of the forwards: see docs/running.md.
MAX_X0_DRIFT = {"fp32": 1e-3, "bf16": 0.05}
START_TIMEOUT = {"local": 180.0, "sglang": 600.0}  # a server imports for a minute or two on a busy machine
DEFAULT_STEPS = 4
FALLBACK_FPS = 8.0


class Config(BaseModel):
    """A whole run. What a `None` stands for is said by the properties; `resolved` writes it into the fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelSection
    algorithm: AlgorithmSection
    rollout: RolloutSection
    evaluation: EvalSection
    sglang: SGLangSection
    trainer: TrainerSection
    cluster: ClusterSection
    run: RunSection

    @property
    def canvas(self) -> tuple[int | None, int | None, int | None, float | None]:
        """Height, width, and frames or seconds; None stands for the family's own."""
        model = self.model
        return model.diffusion_height, model.diffusion_width, model.diffusion_num_frames, model.diffusion_duration

    @property
    def samples_per_rollout(self) -> int:
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt

    @property
    def rollout_seed(self) -> int:
        return self.run.seed if self.rollout.rollout_seed is None else self.rollout.rollout_seed

    @property
    def save_dir(self) -> Path:
        return self.run.run_dir / "checkpoints" if self.run.save is None else self.run.save

    @property
    def num_ranks(self) -> int:
        """Devices that trainers and engines share, over all nodes: the ranks of a trainer unless it has fewer."""
        return self.cluster.actor_num_nodes * self.cluster.actor_num_gpus_per_node

    @property
    def num_engines(self) -> int:
        return self.rollout.rollout_num_engines or len(self.sglang.rollout_engine_url) or 1

    @property
    def start_timeout(self) -> float:
        return self.cluster.start_timeout or START_TIMEOUT[self.rollout.rollout_engine]

    @property
    def max_x0_drift(self) -> float:
        return self.run.max_x0_drift or MAX_X0_DRIFT[self.model.forward_dtype]

    @property
    def threads(self) -> int:
        """torch threads of a worker."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.cluster.cpu_threads or max(1, cores // self.cluster.actor_num_gpus_per_node)

    @property
    def devices_per_node(self) -> int:
        return self.cluster.num_gpus_per_node or self.cluster.actor_num_gpus_per_node

    @property
    def explicit_sigmas(self) -> tuple[float, ...] | None:
        """The `[N+1]` values of --diffusion-sigmas, terminal 0 included."""
        text = self.rollout.diffusion_sigmas
        return None if text is None else parse_sigmas(text.split(","))

    @property
    def num_steps(self) -> int:
        """The student's N."""
        own = self.explicit_sigmas
        return len(own) - 1 if own else self.rollout.diffusion_num_steps or DEFAULT_STEPS

    @property
    def score_shift(self) -> float:
        """The picture's."""
        return parse_parts(self.algorithm.fsdp_flow_shift)[VISUAL]

    @property
    def part_shifts(self) -> dict[str, float]:
        """Score shifts of parts beside the picture, where they are not the release's."""
        shifts = parse_parts(self.algorithm.fsdp_flow_shift)
        return {name: shift for name, shift in shifts.items() if name != VISUAL}

    @property
    def part_weights(self) -> dict[str, float]:
        return parse_parts(self.algorithm.dmd2_part_weights)

    @property
    def stop_law(self) -> Literal["full", "per_sample", "shared", "round_robin"]:
        """--diffusion-step-strategy and --dmd2-stop-step in one word."""
        law = self.algorithm.dmd2_stop_step
        return "full" if self.rollout.diffusion_step_strategy == "full" or law == "last" else law

    @property
    def eval_every(self) -> int:
        """Evals are due at rollout 0, at its multiples, and after the last rollout."""
        return self.evaluation.eval_interval or self.rollout.num_rollout

    @property
    def eval_media(self) -> tuple[Path | None, int | None]:
        """Where eval samples go as files (None: nowhere), and how many of each eval (None: all)."""
        if self.evaluation.save_eval_media_dir is not None:
            return self.evaluation.save_eval_media_dir, None
        if self.rollout.debug_rollout_only == "eval":  # which is run for its files
            return self.run.run_dir / "eval", None
        shown = self.run.wandb_log_num_images if self.run.use_wandb else 0
        return (self.run.run_dir / "eval", shown) if shown and self.evaluation.eval_prompt_data else (None, None)

    @property
    def playback_fps(self) -> float:
        return self.evaluation.diffusion_fps or FALLBACK_FPS

    @property
    def keeps_ema(self) -> bool:
        return self.algorithm.student_ema_decay > 0

    def resolved(self) -> Config:
        """The same run with every derived default written out: what --dry-run prints and a checkpoint records."""
        law = "last" if self.stop_law == "full" else self.algorithm.dmd2_stop_step
        return self.model_copy(
            update={
                "algorithm": self.algorithm.model_copy(update={"dmd2_stop_step": law}),
                "rollout": self.rollout.model_copy(
                    update={
                        "global_batch_size": self.samples_per_rollout,
                        "rollout_seed": self.rollout_seed,
                        "rollout_num_engines": self.num_engines,
                        "diffusion_num_steps": self.num_steps,
                    }
                ),
                "cluster": self.cluster.model_copy(
                    update={"num_gpus_per_node": self.devices_per_node, "start_timeout": self.start_timeout}
                ),
                "run": self.run.model_copy(
                    update={
                        "save": self.save_dir,
                        "max_x0_drift": self.max_x0_drift,
                        "trainer_config": self.run.trainer_config or DEFAULT_TRAINERS,
                    }
                ),
            }
        )

    @model_validator(mode="after")
    def _cross_section(self) -> Config:
        self._check_batch()
        self._check_stop_step()
        self._check_grid()
        self._check_evaluation()
        self._check_placement()
        self._check_retention()
        self._check_rollout_only()
        if self.rollout.rollout_engine == "local":
            check_local(self.sglang)
        else:
            rollout = self.rollout
            check_sglang(
                self.sglang,
                engines=rollout.rollout_num_engines,
                batch_size_given=rollout.rollout_engine_batch_size != LOCAL_BATCH_SIZE,
                nodes=self.cluster.actor_num_nodes,
            )
            wait, phase = self.sglang.engine_request_timeout, self.cluster.phase_timeout
            if phase <= wait:  # the first late request would end the run instead of being made again
                raise ValueError(
                    f"--phase-timeout {phase:g}: must be more than --engine-request-timeout {wait:g}, or no request "
                    "can be made again; raise one or lower the other"
                )
        return self

    def _check_rollout_only(self) -> None:
        only, reference = self.rollout.debug_rollout_only, self.rollout.reference_transformer
        if reference is not None and only != "eval":
            raise ValueError(
                f"--reference-transformer {reference}: is rendered by --debug-rollout-only eval; add it, or drop this"
            )
        if reference is not None and self.sglang.rollout_engine_url:
            raise ValueError(
                f"--reference-transformer {reference}: servers of --rollout-engine-url hold another one already; "
                "give --sglang-python instead of them"
            )
        if only == "eval" and self.evaluation.eval_prompt_data is None:
            raise ValueError("--debug-rollout-only eval: nothing is evaluated without --eval-prompt-data; give a file")
        if only is not None and self.run.load is not None:
            raise ValueError(
                f"--load {self.run.load}: --debug-rollout-only {only} takes the weights of --hf-checkpoint (which "
                "may be a run's student_raw or student_ema); leave it out"
            )

    def _check_retention(self) -> None:
        run, evaluation = self.run, self.evaluation
        if run.keep_best is None:
            if run.keep_best_mode != "max":
                raise ValueError(
                    f"--keep-best-mode {run.keep_best_mode}: nothing is kept by figure without --keep-best; give it, "
                    "or leave this out"
                )
            return
        if evaluation.eval_prompt_data is None or evaluation.eval_metrics_path is None:
            raise ValueError(
                f"--keep-best {run.keep_best}: there are no eval figures without --eval-prompt-data and "
                "--eval-metrics-path; give both, or leave it out"
            )
        saves = run.save_interval or self.rollout.num_rollout
        if saves % self.eval_every:
            raise ValueError(
                f"--keep-best {run.keep_best}: of the checkpoints every {saves} rollouts some are not evaluated, evals "
                f"are every {self.eval_every}; use an --eval-interval that divides {saves}"
            )

    def _check_batch(self) -> None:
        rollout, total = self.rollout, self.samples_per_rollout
        if rollout.global_batch_size not in (None, total):
            raise ValueError(
                f"--global-batch-size {rollout.global_batch_size}: must equal --rollout-batch-size "
                f"{rollout.rollout_batch_size} x --n-samples-per-prompt {rollout.n_samples_per_prompt} = {total}; "
                f"leave it out or set {total}"
            )

    def _check_stop_step(self) -> None:
        law = self.algorithm.dmd2_stop_step
        explicit = "dmd2_stop_step" in self.algorithm.model_fields_set
        if self.rollout.diffusion_step_strategy == "full" and explicit and law != "last":
            raise ValueError(
                f"--dmd2-stop-step {law}: has no effect with --diffusion-step-strategy full, which always runs to the "
                f"last step; leave it out, or use --diffusion-step-strategy stop_at_random_step"
            )

    def _check_grid(self) -> None:
        rollout, own = self.rollout, self.explicit_sigmas
        if own is None:
            return
        if rollout.diffusion_flow_shift != 1:
            raise ValueError(
                f"--diffusion-flow-shift {rollout.diffusion_flow_shift:g}: is not applied to --diffusion-sigmas "
                f"{rollout.diffusion_sigmas}, which is the grid itself; leave one of them out"
            )
        if rollout.diffusion_num_steps not in (None, len(own) - 1):
            raise ValueError(
                f"--diffusion-num-steps {rollout.diffusion_num_steps}: --diffusion-sigmas {rollout.diffusion_sigmas} "
                f"has {len(own) - 1} steps; leave it out or set {len(own) - 1}"
            )

    def _check_evaluation(self) -> None:
        section = self.evaluation
        if section.eval_prompt_data is not None:
            return
        for name, unset in (
            ("eval_interval", None),
            ("eval_samples_per_prompt", 1),
            ("eval_metrics_path", None),
            ("save_eval_media_dir", None),
        ):
            value = getattr(section, name)
            if value != unset:
                raise ValueError(
                    f"--{name.replace('_', '-')} {value}: nothing is evaluated without --eval-prompt-data; "
                    f"give a prompt file, or leave it out"
                )

    def _check_placement(self) -> None:
        cluster, engines = self.cluster, self.num_engines
        if not cluster.colocate:
            raise ValueError("--no-colocate: separate devices are not available in this version; leave --colocate on")
        if self.devices_per_node < cluster.actor_num_gpus_per_node:
            raise ValueError(
                f"--num-gpus-per-node {self.devices_per_node}: fewer than --actor-num-gpus-per-node "
                f"{cluster.actor_num_gpus_per_node}; raise it to {cluster.actor_num_gpus_per_node}, or leave it out"
            )
        if engines > self.num_ranks and not self.sglang.rollout_engine_url:
            raise ValueError(
                f"--rollout-num-engines {engines}: more than the {self.num_ranks} devices of --actor-num-nodes "
                f"{cluster.actor_num_nodes} x --actor-num-gpus-per-node {cluster.actor_num_gpus_per_node}; "
                f"use {self.num_ranks} or fewer"
            )
