"""The options of a run but SGLang's, in frozen sections. See `schema`, which puts them together."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from miles_dmd2.config.functions import check_form
from miles_dmd2.config.lora import ALL_LINEAR
from miles_dmd2.config.parts import parse_parts, written
from miles_dmd2.config.section import (
    Alone,
    Beta,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
)

LOCAL_BATCH_SIZE = 64
LARGEST_GRID = 1000


class ModelSection(Section):
    """Model and canvas."""

    title: ClassVar[str] = "Model and canvas"

    hf_checkpoint: Path = Field(
        description="diffusers pipeline directory of the teacher; student and critic start from it"
    )
    diffusion_height: PositiveInt | None = Field(None, description="height in pixels (default: the checkpoint's own)")
    diffusion_width: PositiveInt | None = Field(None, description="width in pixels (default: the checkpoint's own)")
    diffusion_num_frames: PositiveInt | None = Field(None, description="frames of a clip (default: the family's own)")
    diffusion_duration: PositiveFloat | None = Field(
        None, description="seconds of a clip instead, of a family with a frame rate of its own, up to what it can make"
    )
    forward_dtype: Literal["fp32", "bf16"] = Field("fp32", description="dtype of forwards; master weights stay fp32")
    gradient_checkpointing: bool = Field(
        False,
        description="keep only the blocks' inputs for backward and compute each block again: less memory, a third "
        "more work",
    )

    @model_validator(mode="after")
    def _one_length(self) -> ModelSection:
        if self.diffusion_num_frames is not None and self.diffusion_duration is not None:
            raise ValueError(
                f"--diffusion-duration {self.diffusion_duration:g}: the length is --diffusion-num-frames "
                f"{self.diffusion_num_frames}; leave one of them out"
            )
        return self


class AlgorithmSection(Section):
    """DMD2."""

    title: ClassVar[str] = "DMD2"

    loss_type: Literal["dmd2"] = Field("dmd2", description="training objective")
    dmd2_student_input: Literal["backward_simulation", "forward_noise"] = Field(
        "backward_simulation",
        description="what the student is trained at: its own rollout from noise, or real latents with noise",
    )
    dmd2_latents: Path | None = Field(
        None, description="forward_noise: real latents with prompts, encoded once (recipes/digits/latents.py)"
    )
    dmd2_student_sample_type: Literal["ode", "sde"] = Field(
        "ode", description="hop between student steps, in training and evals: Euler, or x0 noised afresh (published)"
    )
    dmd2_stop_step: Literal["per_sample", "shared", "last", "round_robin"] = Field(
        "per_sample",
        description="with stop_at_random_step: one draw per sample, one per rollout, always the last step, or "
        "the steps in turn",
    )
    dmd2_critic_loss_space: Literal["velocity", "x0", "eps"] = Field(
        "velocity", description="space of the critic's squared error (x0 weighs it by sigma^2, eps by (1-sigma)^2)"
    )
    dmd2_critic_conditioning: Literal["none", "stop_step"] = Field(
        "none", description="what the critic is told beside the noise level: nothing (published), or the stop step"
    )
    dmd2_normalizer: Literal["sample", "batch"] = Field(
        "sample", description="mean |x0 - x0_real| that divides the DMD gradient: of each sample, or one of the window"
    )
    dmd2_normalizer_eps: PositiveFloat = Field(
        1e-6, description="floor of the normalizer; samples below it are counted as dmd2_degenerate_samples"
    )
    dmd2_teacher_guidance_scale: NonNegativeFloat = Field(
        1.0,
        description="classifier-free guidance of the teacher, uncond + W (cond - uncond); 1: no unconditional forward",
    )
    dmd2_negative_prompt: str | None = Field(
        None, description="prompt of the teacher's unconditional forward (default: the empty prompt)"
    )
    dmd2_critic_scoring: Literal["fused", "original"] = Field(
        "fused",
        description="x0_fake of the critic's last training forward, or of a pass of its own with draws of its own",
    )
    dmd2_score_sigma_law: Literal["uniform", "logit_normal"] = Field(
        "uniform", description="law of the score sigma before range and shift"
    )
    dmd2_score_sigma_logit_mean: Annotated[float, Field(allow_inf_nan=False)] = Field(
        0.0, description="logit_normal: mean of logit(u)"
    )
    dmd2_score_sigma_logit_std: PositiveFloat = Field(1.0, description="logit_normal: standard deviation of logit(u)")
    dmd2_score_sigma_range: tuple[float, float] = Field(
        (0.02, 0.98), description="LO HI: score sigma is spread over it, shifted by --fsdp-flow-shift, clamped to it"
    )
    fsdp_flow_shift: str = Field(
        "1.0",
        description="shift of the trainers' score sigma: K, or visual=K,audio=K where the family has sound (default of "
        "the sound: its release's level beside the picture's)",
    )
    dmd2_part_weights: str = Field(
        "1.0",
        description="weights of the losses of a latent's parts, as visual=1,audio=1; 0, or not named: no loss on it",
    )
    dmd2_critic_steps_per_student_step: PositiveInt | None = Field(
        None,
        description="critic updates between student updates, a multiple of the critic's --num-steps-per-rollout: the "
        "student then learns on each so many rollouts (default: on every rollout)",
    )
    dmd2_critic_warmup_rollouts: NonNegativeInt = Field(0, description="rollouts at the start for the critic alone")
    student_ema_decay: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="decay of the student's average per student update; 0 keeps none"
    )
    student_ema_start: NonNegativeInt = Field(
        0, description="student updates before the average begins; until then it is the student itself"
    )

    @field_validator("dmd2_score_sigma_range")
    @classmethod
    def _inside_the_unit_interval(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 < value[0] < value[1] < 1:
            raise ValueError("LO HI must satisfy 0 < LO < HI < 1, for example 0.02 0.98")
        return value

    @model_validator(mode="after")
    def _without_effect(self) -> AlgorithmSection:
        """An option that would change nothing beside the others is refused."""
        if self.dmd2_teacher_guidance_scale == 1 and self.dmd2_negative_prompt is not None:
            raise ValueError(
                f"--dmd2-negative-prompt {self.dmd2_negative_prompt}: is never read with --dmd2-teacher-guidance-scale "
                "1; leave it out, or raise the scale"
            )
        if (self.dmd2_student_input == "forward_noise") != (self.dmd2_latents is not None):
            raise ValueError(
                "--dmd2-student-input forward_noise: needs real latents; give --dmd2-latents"
                if self.dmd2_latents is None
                else f"--dmd2-latents {self.dmd2_latents}: is never read with --dmd2-student-input "
                "backward_simulation; leave it out, or use forward_noise"
            )
        if self.student_ema_start and not self.student_ema_decay:
            raise ValueError(
                f"--student-ema-start {self.student_ema_start}: no average is kept with --student-ema-decay 0; leave "
                "it out, or set a decay, for example 0.99"
            )
        for name, unset in (("dmd2_score_sigma_logit_mean", 0.0), ("dmd2_score_sigma_logit_std", 1.0)):
            value = getattr(self, name)
            if self.dmd2_score_sigma_law == "uniform" and value != unset:
                raise ValueError(
                    f"--{name.replace('_', '-')} {value}: has no effect with --dmd2-score-sigma-law uniform; leave it "
                    "out, or use logit_normal"
                )
        return self

    @field_validator("fsdp_flow_shift", "dmd2_part_weights", mode="before")
    @classmethod
    def _normal_form(cls, value: object, info: ValidationInfo) -> str:
        values = parse_parts(str(value))
        if info.field_name == "fsdp_flow_shift" and min(values.values()) == 0:
            raise ValueError("a shift must be > 0; 1 changes nothing")
        if not any(values.values()):
            raise ValueError("one of the parts must have a weight above 0, or nothing is trained")
        return written(values)


class RolloutSection(Section):
    """Rollouts."""

    title: ClassVar[str] = "Rollouts"

    num_rollout: PositiveInt = Field(description="rollouts in the whole run")
    prompt_data: Path = Field(description="training prompts: text (one per line) or jsonl with a `prompt` key")
    rollout_batch_size: PositiveInt = Field(description="prompts per rollout")
    n_samples_per_prompt: PositiveInt = Field(1, description="samples per prompt")
    global_batch_size: PositiveInt | None = Field(
        None, description="samples per rollout; must equal rollout-batch-size x n-samples-per-prompt (default: that)"
    )
    diffusion_num_steps: Annotated[int, Field(gt=0, le=LARGEST_GRID)] | None = Field(
        None, description="student steps N (default: 4, or as many as --diffusion-sigmas has)"
    )
    diffusion_sigmas: str | None = Field(
        None,
        description="the student's grid itself, N decreasing sigmas in (0, 1] and perhaps the terminal 0, as "
        "1,0.94,0.83,0.62 (default: from --diffusion-num-steps and --diffusion-flow-shift)",
    )
    diffusion_flow_shift: PositiveFloat = Field(1.0, description="shift of the student's sigma grid")
    diffusion_guidance_scale: float = Field(
        1.0, description="guidance of the student, always 1.0 (unguided); the teacher's: --dmd2-teacher-guidance-scale"
    )
    diffusion_step_strategy: Literal["full", "stop_at_random_step"] = Field(
        "stop_at_random_step", description="run every sample to the end, or stop at the step --dmd2-stop-step says"
    )
    rollout_engine: Literal["local", "sglang"] = Field(
        "local", description="who generates: the embedded engine, or SGLang's diffusion server"
    )
    rollout_num_engines: PositiveInt | None = Field(
        None, description="engines that share the requests (default: 1, or those of --rollout-engine-url)"
    )
    rollout_engine_batch_size: PositiveInt = Field(
        LOCAL_BATCH_SIZE, description="samples per student forward in the local engine"
    )
    rm_type: Literal["none"] = Field("none", description="reward: none (constant 0, no scorer, no decode in training)")
    custom_rm_path: str | None = Field(
        None,
        description="module:function or file.py:function that scores samples, async or not: list[RolloutSample] -> "
        "list[float]; training samples are decoded for it",
    )
    rollout_video_dtype: Literal["uint8", "fp32"] = Field(
        "uint8", description="dtype of decoded media in training and evals: uint8, or fp32 in [0, 1] without rounding"
    )
    debug_rollout_only: Annotated[Literal["train", "eval"] | None, Alone("train")] = Field(
        None, description="no trainers, the checkpoint's own weights: its rollouts (train), or the eval set once (eval)"
    )
    reference_transformer: Path | None = Field(
        None,
        description="with --debug-rollout-only eval: a transformer (or its pipeline) in place of the checkpoint's",
    )
    rollout_seed: Seed | None = Field(None, description="seed of prompt order, noise and stop steps (default: --seed)")

    @field_validator("custom_rm_path")
    @classmethod
    def _module_and_function(cls, value: str | None) -> str | None:
        return check_form(value, "my_rewards:score")

    @field_validator("diffusion_sigmas", mode="before")
    @classmethod
    def _written_alike(cls, value: object) -> object:
        if value is None:
            return None
        parts = value if isinstance(value, list | tuple) else str(value).split(",")
        return ",".join(f"{sigma:.9g}" for sigma in parse_sigmas([str(part) for part in parts])[:-1])

    @field_validator("diffusion_guidance_scale")
    @classmethod
    def _unguided(cls, value: float) -> float:
        if value != 1.0:
            raise ValueError("a few-step student is unguided; leave it at 1.0 (teacher: --dmd2-teacher-guidance-scale)")
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
    save_eval_media_dir: Path | None = Field(
        None,
        description="keep every eval sample in it as a file, in eval_<rollout>/ with an index.jsonl (default: contact "
        "sheets alone)",
    )
    diffusion_fps: PositiveFloat | None = Field(
        None, description="playback rate of clips that are written, in frames per second (default: 8)"
    )
    eval_metrics_path: str | None = Field(
        None,
        description="module:function or file.py:function, called on each eval: list[RolloutSample] -> dict[str, float]",
    )

    @field_validator("eval_metrics_path")
    @classmethod
    def _module_and_function(cls, value: str | None) -> str | None:
        return check_form(value, "recipes.digits.metrics:evaluate")


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
    lora_rank: NonNegativeInt = Field(
        0, description="train a LoRA adapter of this rank on the frozen --hf-checkpoint; 0: all parameters"
    )
    lora_alpha: PositiveInt | None = Field(
        None, description="the adapter counts alpha / rank times (default: the rank, so once)"
    )
    lora_target_modules: tuple[str, ...] = Field(
        (ALL_LINEAR,),
        description=f"linear layers of the network's blocks with an adapter, by the ends of their names, as to_q to_v; "
        f"{ALL_LINEAR}: each of them",
    )

    @field_validator("lora_target_modules")
    @classmethod
    def _some_layer(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError(f"names no layer; give one or more, {ALL_LINEAR}, or leave it out")
        return value


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
    gpu_memory_gb: PositiveFloat | None = Field(
        None, description="memory of one GPU in 10^9 bytes, for the memory plan (default: this machine's; none on cpu)"
    )
    host_memory_gb: PositiveFloat | None = Field(
        None, description="memory of one host, for the memory plan (default: this machine's; none with --ray-address)"
    )
    load_ranks_at_once: PositiveInt | None = Field(
        None,
        description="ranks of a node that load at a time, each with whole fp32 networks on the host (default: all)",
    )
    start_timeout: PositiveFloat | None = Field(
        None, description="seconds for processes to come up (default: 180, with SGLang servers 600)"
    )
    connect_timeout: PositiveFloat = Field(10.0, description="seconds for the cluster at --ray-address to answer")
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
    keep_last: PositiveInt | None = Field(None, description="checkpoints that stay, the newest ones (default: all)")
    keep_best: str | None = Field(
        None, description="also keep the checkpoint with the best eval FIGURE, for example accuracy_ema (default: none)"
    )
    keep_best_mode: Literal["max", "min"] = Field("max", description="whether a larger or a smaller figure is better")
    allow_config_change: tuple[str, ...] = Field(
        (), description="with --load: options that may differ from those of the checkpoint (default: none)"
    )
    dump_bad_batch: bool = Field(
        False, description="keep the samples and weights of the first steps that are not finite in RUN_DIR/bad_batches"
    )
    max_skipped_steps: PositiveInt = Field(3, description="non-finite updates in a row before the run stops")
    max_x0_drift: PositiveFloat | None = Field(
        None,
        description="the run stops if mean |x0 of the trainer - x0 of the engine| of a window is larger (default: 1e-3 "
        "with fp32 forwards, 0.05 with bf16)",
    )
    use_wandb: bool = Field(False, description="log to Weights & Biases")
    wandb_log_num_images: NonNegativeInt = Field(
        8, description="eval samples, pictures or clips, that wandb shows of each eval and kind of weights"
    )
    wandb_project: str = Field("miles_dmd2", description="wandb project")
    wandb_mode: Literal["online", "offline"] = Field("online", description="wandb mode")
    trainer_config: tuple[TrainerEntry, ...] | None = Field(
        None,
        description="YAML file with a list of {name, role, args} (default: critic, then actor); a list in --config",
    )


def parse_sigmas(parts: Sequence[str]) -> tuple[float, ...]:
    """N or N + 1 numbers as the grid `[N + 1]`. ValueError: not numbers in [0, 1] that decrease, also in fp32."""
    try:
        sigmas = [float(part) for part in parts]
    except ValueError:
        raise ValueError("must be numbers with commas between them, for example 1,0.94,0.83,0.62") from None
    sigmas = sigmas if sigmas[-1:] == [0.0] else [*sigmas, 0.0]
    rounded = [struct.unpack("f", struct.pack("f", sigma))[0] if abs(sigma) <= 1 else sigma for sigma in sigmas]
    if not (2 <= len(sigmas) <= LARGEST_GRID + 1 and 0 < rounded[0] <= 1):
        raise ValueError(f"must be 1 to {LARGEST_GRID} sigmas in (0, 1], the largest first")
    if not all(here > there for here, there in pairwise(rounded)):
        raise ValueError("must decrease from one sigma to the next, at most to a terminal 0")
    return tuple(sigmas)
