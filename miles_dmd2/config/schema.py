"""Every option of a run, in frozen sections. A field name in kebab-case is its flag; its description is its help text.

Field names are unique over all sections, because flags and YAML keys are flat. No torch or ray here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

LARGEST = 2**31 - 1
LARGEST_SEED = 2**63 - 1
PositiveInt = Annotated[int, Field(gt=0, le=LARGEST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST)]
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]


# Values that documents and other versions know, and this one does not: refused with a reason, never ignored.
NOT_AVAILABLE = {
    ("dmd2_student_sample_type", "sde"): "not available yet; use ode",
    ("rollout_engine", "sglang"): "not available in this version; use local",
}


class Section(BaseModel):
    """Options of one subject. `title` heads its group in --help."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
    title: ClassVar[str] = ""

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_what_would_be_misread(cls, value: object, info: ValidationInfo) -> object:
        """Pydantic reads true as 1, Path("") is the current directory, and no path holds a NUL."""
        name = info.field_name or ""
        if isinstance(value, str):
            if (name, value) in NOT_AVAILABLE:
                raise ValueError(NOT_AVAILABLE[name, value])
            if not value.strip():
                raise ValueError("is empty; give a value or leave it out")
            if "\0" in value:
                raise ValueError("holds a NUL character")
        of_bool = name in cls.model_fields and cls.model_fields[name].annotation is bool
        parts = value if isinstance(value, list | tuple) else [value]
        if not of_bool and any(isinstance(part, bool) for part in parts):
            raise ValueError("must not be true or false")
        if of_bool and not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value


class ModelSection(Section):
    """Model and canvas."""

    title: ClassVar[str] = "Model and canvas"

    hf_checkpoint: Path = Field(
        description="diffusers pipeline directory of the teacher; student and critic start from it"
    )
    diffusion_height: PositiveInt | None = Field(None, description="height in pixels (default: the checkpoint's own)")
    diffusion_width: PositiveInt | None = Field(None, description="width in pixels (default: the checkpoint's own)")
    diffusion_num_frames: PositiveInt | None = Field(None, description="frames of a clip (default: the family's own)")
    forward_dtype: Literal["fp32", "bf16"] = Field("fp32", description="dtype of forwards; master weights stay fp32")


class AlgorithmSection(Section):
    """DMD2."""

    title: ClassVar[str] = "DMD2"

    loss_type: Literal["dmd2"] = Field("dmd2", description="training objective")
    dmd2_student_sample_type: Literal["ode"] = Field(
        "ode", description="transition between student steps during backward simulation (sde is not available yet)"
    )
    dmd2_stop_step: Literal["per_sample", "shared", "last"] = Field(
        "per_sample",
        description="with stop_at_random_step: one draw per sample, one per rollout, or always the last step",
    )
    dmd2_critic_loss_space: Literal["velocity", "x0", "eps"] = Field(
        "velocity", description="space of the critic's squared error (x0 weighs it by sigma^2, eps by (1-sigma)^2)"
    )
    dmd2_critic_conditioning: Literal["none", "stop_step"] = Field(
        "none", description="what the critic is told beside the noise level: nothing (published), or the stop step"
    )
    dmd2_score_sigma_range: tuple[float, float] = Field(
        (0.02, 0.98), description="LO HI: score sigma is uniform in it, shifted by --fsdp-flow-shift, clamped to it"
    )
    fsdp_flow_shift: str = Field(
        "1.0", description="shift of the trainers' score sigma: K, or visual=K (audio=K where the family has sound)"
    )
    student_ema_decay: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="decay of the student's average per student update; 0 keeps none"
    )

    @field_validator("dmd2_score_sigma_range")
    @classmethod
    def _inside_the_unit_interval(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 < value[0] < value[1] < 1:
            raise ValueError("LO HI must satisfy 0 < LO < HI < 1, for example 0.02 0.98")
        return value

    @field_validator("fsdp_flow_shift", mode="before")
    @classmethod
    def _normal_form(cls, value: object) -> str:
        return str(parse_flow_shift(str(value)))


class RolloutSection(Section):
    """Rollouts."""

    title: ClassVar[str] = "Rollouts"

    num_rollout: PositiveInt = Field(description="rollouts in the whole run")
    prompt_data: Path = Field(description="training prompts: text (one per line) or jsonl with a `prompt` key")
    rollout_batch_size: PositiveInt = Field(description="prompts per rollout")
    n_samples_per_prompt: PositiveInt = Field(1, description="samples per prompt")
    global_batch_size: PositiveInt | None = Field(
        None, description="samples per rollout; must equal rollout-batch-size x n-samples-per-prompt (default: it)"
    )
    diffusion_num_steps: Annotated[int, Field(gt=0, le=1000)] = Field(4, description="student steps N")
    diffusion_flow_shift: PositiveFloat = Field(1.0, description="shift of the student's sigma grid")
    diffusion_guidance_scale: float = Field(
        1.0, description="guidance of student and teacher; other values than 1.0 (unguided) are not available yet"
    )
    diffusion_step_strategy: Literal["full", "stop_at_random_step"] = Field(
        "stop_at_random_step", description="run every sample to the end, or stop at the step --dmd2-stop-step says"
    )
    rollout_engine: Literal["local"] = Field(
        "local", description="who generates: the embedded engine (sglang is not available in this version)"
    )
    rollout_num_engines: PositiveInt = Field(1, description="engines that share the requests")
    rollout_engine_batch_size: PositiveInt = Field(64, description="samples per student forward in the local engine")
    rm_type: Literal["none"] = Field("none", description="reward: none (constant 0, no scorer, no decode in training)")
    rollout_seed: Seed | None = Field(None, description="seed of prompt order, noise and stop steps (default: --seed)")

    @field_validator("diffusion_guidance_scale")
    @classmethod
    def _unguided(cls, value: float) -> float:
        if value != 1.0:
            raise ValueError("guidance is not available yet; leave it at 1.0")
        return value


class EvalSection(Section):
    """Evaluation."""

    title: ClassVar[str] = "Evaluation"

    eval_prompt_data: Path | None = Field(None, description="fixed eval prompts; none: no eval")
    eval_interval: PositiveInt | None = Field(
        None,
        description="eval every so many rollouts, beside rollout 0 and after the last (default: only those)",
    )
    eval_samples_per_prompt: PositiveInt = Field(1, description="samples per eval prompt, with seeds fixed for the run")
    eval_metrics_path: str | None = Field(
        None,
        description="module:function or file.py:function, called on each eval: list[RolloutSample] -> dict[str, float]",
    )

    @field_validator("eval_metrics_path")
    @classmethod
    def _module_and_function(cls, value: str | None) -> str | None:
        source, _, function = (value or "").rpartition(":")
        named = source.endswith(".py") or all(part.isidentifier() for part in source.split("."))
        if value is not None and not (named and function.isidentifier()):
            raise ValueError("must be module:function or file.py:function, for example recipes.digits.metrics:evaluate")
        return value


class TrainerSection(Section):
    """Optimizer and batches; each may be overridden per trainer."""

    title: ClassVar[str] = "Trainers (each option may be overridden per trainer in --trainer-config)"

    lr: PositiveFloat = Field(2e-6, description="learning rate")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="decay over the trainer's own successful updates of the run"
    )
    lr_warmup_updates: NonNegativeInt = Field(0, description="updates of linear warm-up")
    adam_beta1: Beta = Field(0.9, description="AdamW beta1")
    adam_beta2: Beta = Field(0.999, description="AdamW beta2")
    adam_eps: PositiveFloat = Field(1e-8, description="AdamW epsilon")
    weight_decay: NonNegativeFloat = Field(0.01, description="AdamW weight decay")
    clip_grad: NonNegativeFloat = Field(1.0, description="gradient norm limit; 0 turns clipping off")
    num_steps_per_rollout: PositiveInt = Field(
        5, description="critic: equal windows of the rollout, one update each (the actor always takes one, on the last)"
    )
    micro_batch_size: PositiveInt | None = Field(
        None, description="samples per forward and rank (default: all at once)"
    )


class ClusterSection(Section):
    """Placement."""

    title: ClassVar[str] = "Placement"

    device: Literal["cpu", "cuda"] = Field("cpu", description="a GPU of the flags below is a logical rank on cpu")
    actor_num_nodes: PositiveInt = Field(1, description="nodes that trainers and engines share")
    actor_num_gpus_per_node: PositiveInt = Field(1, description="ranks per node of each trainer group")
    num_gpus_per_node: PositiveInt | None = Field(
        None, description="devices of a node (default: actor-num-gpus-per-node)"
    )
    colocate: bool = Field(True, description="trainer groups and engines share the same devices and take turns")
    ray_address: str | None = Field(None, description="a running cluster, or `auto` (default: start one for this run)")
    cpu_threads: PositiveInt | None = Field(None, description="torch threads per worker (default: cores / ranks)")
    start_timeout: PositiveFloat = Field(180.0, description="seconds for processes to come up")
    phase_timeout: PositiveFloat = Field(3600.0, description="seconds for one generate, train, sync or save")


class TrainerEntry(Section):
    """One entry of --trainer-config. trainers.py says what `args` may hold."""

    name: str
    role: Literal["critic", "actor"]
    args: dict[str, Any] = Field(default_factory=dict)


DEFAULT_TRAINERS = (TrainerEntry(name="critic", role="critic"), TrainerEntry(name="actor", role="actor"))


class RunSection(Section):
    """The run."""

    title: ClassVar[str] = "The run"

    run_dir: Path = Field(Path("runs/dmd2"), description="everything a run writes; must be new, or its own with --load")
    seed: Seed = Field(0, description="seed of every keyed draw")
    save: Path | None = Field(None, description="checkpoint directory (default: RUN_DIR/checkpoints)")
    save_interval: PositiveInt | None = Field(
        None, description="checkpoint every so many rollouts, beside the one at the end (default: only that)"
    )
    load: Path | None = Field(
        None, description="continue from this checkpoint, or from the newest one below this directory"
    )
    max_skipped_steps: PositiveInt = Field(3, description="non-finite updates in a row before the run stops")
    use_wandb: bool = Field(False, description="log to Weights & Biases")
    wandb_project: str = Field("miles_dmd2", description="wandb project")
    wandb_mode: Literal["online", "offline"] = Field("online", description="wandb mode")
    trainer_config: tuple[TrainerEntry, ...] | None = Field(
        None,
        description="YAML file with a list of {name, role, args} (default: critic, then actor); a list in --config",
    )


class Config(BaseModel):
    """A whole run. What a `None` stands for is said by the properties; `resolved` writes it into the fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelSection
    algorithm: AlgorithmSection
    rollout: RolloutSection
    evaluation: EvalSection
    trainer: TrainerSection
    cluster: ClusterSection
    run: RunSection

    @property
    def canvas(self) -> tuple[int | None, int | None, int | None]:
        """Height, width and frames; None stands for the family's own."""
        model = self.model
        return (model.diffusion_height, model.diffusion_width, model.diffusion_num_frames)

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
    def threads(self) -> int:
        """torch threads of a worker."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.cluster.cpu_threads or max(1, cores // self.cluster.actor_num_gpus_per_node)

    @property
    def devices_per_node(self) -> int:
        return self.cluster.num_gpus_per_node or self.cluster.actor_num_gpus_per_node

    @property
    def score_shift(self) -> float:
        return parse_flow_shift(self.algorithm.fsdp_flow_shift)

    @property
    def stop_law(self) -> Literal["full", "per_sample", "shared"]:
        """--diffusion-step-strategy and --dmd2-stop-step in one word."""
        law = self.algorithm.dmd2_stop_step
        return "full" if self.rollout.diffusion_step_strategy == "full" or law == "last" else law

    @property
    def eval_every(self) -> int:
        """Evals are due at rollout 0, at its multiples, and after the last rollout."""
        return self.evaluation.eval_interval or self.rollout.num_rollout

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
                    update={"global_batch_size": self.samples_per_rollout, "rollout_seed": self.rollout_seed}
                ),
                "cluster": self.cluster.model_copy(update={"num_gpus_per_node": self.devices_per_node}),
                "run": self.run.model_copy(
                    update={"save": self.save_dir, "trainer_config": self.run.trainer_config or DEFAULT_TRAINERS}
                ),
            }
        )

    @model_validator(mode="after")
    def _cross_section(self) -> Config:
        self._check_batch()
        self._check_stop_step()
        self._check_evaluation()
        self._check_placement()
        return self

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

    def _check_evaluation(self) -> None:
        section = self.evaluation
        if section.eval_prompt_data is not None:
            return
        for name, unset in (("eval_interval", None), ("eval_samples_per_prompt", 1), ("eval_metrics_path", None)):
            value = getattr(section, name)
            if value != unset:
                raise ValueError(
                    f"--{name.replace('_', '-')} {value}: nothing is evaluated without --eval-prompt-data; "
                    f"give a prompt file, or leave it out"
                )

    def _check_placement(self) -> None:
        cluster, engines = self.cluster, self.rollout.rollout_num_engines
        if not cluster.colocate:
            raise ValueError("--no-colocate: separate devices are not available in this version; leave --colocate on")
        if self.devices_per_node < cluster.actor_num_gpus_per_node:
            raise ValueError(
                f"--num-gpus-per-node {self.devices_per_node}: fewer than --actor-num-gpus-per-node "
                f"{cluster.actor_num_gpus_per_node}; raise it to {cluster.actor_num_gpus_per_node}, or leave it out"
            )
        if engines > self.num_ranks:
            raise ValueError(
                f"--rollout-num-engines {engines}: more than the {self.num_ranks} devices of --actor-num-nodes "
                f"{cluster.actor_num_nodes} x --actor-num-gpus-per-node {cluster.actor_num_gpus_per_node}; "
                f"use {self.num_ranks} or fewer"
            )


def parse_flow_shift(text: str) -> float:
    """The score shift in `5` or `visual=5`. ValueError: another modality, one twice, not a finite number above 0."""
    shifts: dict[str, float] = {}
    for part in text.split(","):
        modality, equals, number = part.strip().rpartition("=")
        modality = modality.strip() if equals else "visual"
        if modality == "audio":
            raise ValueError("audio: no model family of this version has sound; give visual=K, or K alone")
        if modality != "visual" or modality in shifts:
            raise ValueError("must be K, or visual=K, for example 5 or visual=5")
        try:
            shifts[modality] = float(number)
        except ValueError:
            raise ValueError("must be a number K > 0, or visual=K, for example 5 or visual=5") from None
        if not 0 < shifts[modality] < float("inf"):
            raise ValueError("the shift must be a finite number > 0; 1 changes nothing")
    return shifts["visual"]
