"""What a run will do, in numbers, before it does it: groups, batch arithmetic, forwards per student update."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import yaml

from miles_dmd2.config.clock import StudentClock
from miles_dmd2.config.memory import MemoryPlan, memory_tree
from miles_dmd2.config.options import OPTIONS, flatten
from miles_dmd2.config.schema import Config
from miles_dmd2.config.sglang import SHARED_MEMORY
from miles_dmd2.config.trainers import TrainerSpec, student_clock


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One trainer group. `updates` is of the whole run; `micro_batches` of one update on each rank."""

    name: str
    role: str
    ranks: int
    placement: str
    updates: int
    updates_per_rollout: int
    window_size: int
    samples_per_rank: int
    micro_batch_size: int
    micro_batches: int
    lr: float
    trains: str


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """Transformer passes of one student update, that is of the rollouts that lead to it, counted in samples.

    engine: student forwards of the rollouts, samples x (k + 1) in the mean over the stop step k (1 on real
    latents). critic and student:
    forwards, each with its backward. teacher: forwards, two per sample when guided. scoring: forwards of the critic
    for the scores alone, none when they are its last step's. cost: all in forwards of one window, a backward counted
    as 2 (H3: 5 x 2.5 + 5 x 3 + 1 + 3 = 31.5).
    """

    engine: float
    critic: int
    teacher: int
    student: int
    scoring: int
    cost: float


@dataclass(frozen=True, slots=True)
class Plan:
    """A run in numbers. `evals`: at rollout 0, every `eval_every`, after the last; each per `eval_kinds`.

    `rollout_only`: "train" or "eval" for a run without trainers, which has no groups.
    """

    rollout_only: str | None
    rollouts: int
    prompts_per_rollout: int
    samples_per_prompt: int
    samples_per_rollout: int
    windows: int
    window_size: int
    engine: str
    engines: int
    engine_placement: str
    engine_details: str
    student_steps: int
    sample_type: str
    student_input: str
    sigmas: tuple[float, ...]
    stop_law: str
    student_clock: str
    score_sigma: str
    groups: tuple[GroupPlan, ...]
    forwards_per_update: ForwardPlan
    evals: int
    eval_every: int
    eval_kinds: tuple[str, ...]
    checkpoints: int
    notes: tuple[str, ...]


def build_plan(
    config: Config, trainers: Sequence[TrainerSpec], notes: Sequence[str] = (), *, clips: bool = True
) -> Plan:
    """The plan of a resolved run. Pure arithmetic: nothing is opened, nothing is started.

    `notes`: more of them. `clips`: whether samples have more than one frame.
    """
    rollout, per_node = config.rollout, config.cluster.actor_num_gpus_per_node
    critic = next(trainer for trainer in trainers if trainer.role == "critic")
    only = rollout.debug_rollout_only
    evals = -(-rollout.num_rollout // config.eval_every) + 1 if only is None else int(only == "eval")
    if config.evaluation.eval_prompt_data is None:
        evals = 0
    kinds: tuple[str, ...] = ("raw", "ema") if config.keeps_ema and only is None else ("raw",)
    return Plan(
        rollout_only=only,
        rollouts=0 if only == "eval" else rollout.num_rollout,
        prompts_per_rollout=rollout.rollout_batch_size,
        samples_per_prompt=rollout.n_samples_per_prompt,
        samples_per_rollout=config.samples_per_rollout,
        windows=critic.num_steps_per_rollout,
        window_size=critic.window_size,
        engine=rollout.rollout_engine,
        engines=config.num_engines,
        engine_placement=" ".join(config.sglang.rollout_engine_url) or _placement(config.num_engines, per_node),
        engine_details=_engine_details(config),
        student_steps=config.num_steps,
        sample_type=config.algorithm.dmd2_student_sample_type,
        student_input=config.algorithm.dmd2_student_input,
        sigmas=config.explicit_sigmas or student_sigmas(config.num_steps, rollout.diffusion_flow_shift),
        stop_law=config.stop_law,
        student_clock=_student_clock(student_clock(config, trainers)),
        score_sigma=_score_sigma(config),
        groups=tuple(_group(trainer, per_node) for trainer in trainers) if only is None else (),
        forwards_per_update=_forwards(config, trainers),
        evals=evals,
        eval_every=config.eval_every,
        eval_kinds=kinds if evals else (),
        checkpoints=-(-rollout.num_rollout // (config.run.save_interval or rollout.num_rollout)) if only is None else 0,
        notes=(*_notes(config, trainers, clips), *notes),
    )


def student_sigmas(num_steps: int, shift: float) -> tuple[float, ...]:
    """The student's grid (`algo.sigma_grid`, in float64): u = 1 - i / N through the shift, then 0."""
    us = [1 - i / num_steps for i in range(num_steps)]
    return (*(shift * u / (1 + (shift - 1) * u) for u in us), 0.0)


def _group(trainer: TrainerSpec, per_node: int) -> GroupPlan:
    return GroupPlan(
        name=trainer.name,
        role=trainer.role,
        ranks=trainer.num_ranks,
        placement=_placement(trainer.num_ranks, per_node),
        updates=trainer.total_updates,
        updates_per_rollout=trainer.num_steps_per_rollout,
        window_size=trainer.window_size,
        samples_per_rank=trainer.samples_per_rank,
        micro_batch_size=trainer.micro_batch_size,
        micro_batches=trainer.micro_batches,
        lr=trainer.lr,
        trains="all parameters" if trainer.lora is None else str(trainer.lora),
    )


def _placement(count: int, per_node: int) -> str:
    """Rank r is on device r % per_node of node r // per_node."""
    full, rest = divmod(count, per_node)
    parts = [f"nodes 0-{full - 1}" if full > 1 else "node 0"] if full else []
    last = [f"node {full}"] if rest else []
    return ", ".join(
        f"{nodes} {'devices' if held > 1 else 'device'} {f'0-{held - 1}' if held > 1 else '0'}"
        for nodes, held in [*((part, per_node) for part in parts), *((part, rest) for part in last)]
    )


def _engine_details(config: Config) -> str:
    if config.rollout.rollout_engine == "local":
        return f"batches of {config.rollout.rollout_engine_batch_size}"
    own = config.sglang
    parts = [
        f"{own.engine_max_in_flight} requests in flight each, {own.engine_attempts} tries of "
        f"{own.engine_request_timeout:g} s",
        "weights in requests"
        if own.sglang_weight_sync == "tensor"
        else f"weights as files in {own.sglang_weight_directory or SHARED_MEMORY}",
        "checked after each sync"
        if own.verify_weights_every == 1
        else f"checked after the first and every {own.verify_weights_every} syncs",
    ]
    if own.sglang_python is not None:
        parts.insert(0, f"started with {own.sglang_python}, up to {own.engine_max_restarts} restarts each")
    if own.sglang_args:
        parts.append(f"server flags {shlex.join(own.sglang_args)}")
    return ", ".join(parts)


def _forwards(config: Config, trainers: Sequence[TrainerSpec]) -> ForwardPlan:
    interval = student_clock(config, trainers).interval
    samples, steps = interval * config.samples_per_rollout, config.num_steps
    per_sample = float(steps) if config.stop_law == "full" else (steps + 1) / 2
    engine = samples * (1.0 if _real_latents(config) else per_sample)
    critic = interval * sum(t.window_size * t.num_steps_per_rollout for t in trainers if t.role == "critic")
    student = sum(t.window_size * t.num_steps_per_rollout for t in trainers if t.role == "actor")
    teacher = student * (1 if config.algorithm.dmd2_teacher_guidance_scale == 1 else 2)
    scoring = student if config.algorithm.dmd2_critic_scoring == "original" else 0
    cost = (engine + 3 * critic + scoring + teacher + 3 * student) / student
    return ForwardPlan(
        engine=engine, critic=critic, teacher=teacher, student=student, scoring=scoring, cost=round(cost, 3)
    )


def _student_clock(clock: StudentClock) -> str:
    every = "every rollout" if clock.interval == 1 else f"every {clock.interval} rollouts"
    return f"{every} after {clock.warmup} for the critic alone" if clock.warmup else every


def _real_latents(config: Config) -> bool:
    return config.algorithm.dmd2_student_input == "forward_noise"


def _score_sigma(config: Config) -> str:
    algorithm = config.algorithm
    low, high = algorithm.dmd2_score_sigma_range
    mean, std = algorithm.dmd2_score_sigma_logit_mean, algorithm.dmd2_score_sigma_logit_std
    shift = config.score_shift
    logit = algorithm.dmd2_score_sigma_law == "logit_normal"
    law = f"logit-normal ({mean:g}, {std:g})" if logit else "uniform"
    own = "".join(f", {name} {value:g}" for name, value in config.part_shifts.items())
    text = f"{law} in [{low:g}, {high:g}], shift {shift:g}{own}"
    if shift == 1:
        return text
    end = high if shift > 1 else low
    place = (end / (shift + (1 - shift) * end) - low) / (high - low)  # of [low, high] what the shift takes to the end
    below = min(max(place, 0.0), 1.0)
    if logit and 0 < below < 1:
        below = NormalDist(mean, std).cdf(math.log(below / (1 - below)))
    clamped = 1 - below if shift > 1 else below
    return f"{text}, clamped ({clamped:.1%} of the draws at {end:g})"


def _without_effect(config: Config, trainers: Sequence[TrainerSpec]) -> list[str]:
    """Notes on options that were chosen and change nothing in this run."""
    notes = []
    algorithm, rollouts = config.algorithm, config.rollout.num_rollout
    chosen = {
        "--dmd2-student-sample-type": (algorithm.dmd2_student_sample_type, "ode"),
        "--dmd2-stop-step": (algorithm.dmd2_stop_step, "per_sample"),
        "--diffusion-flow-shift": (f"{config.rollout.diffusion_flow_shift:g}", "1"),
    }
    idle = ", ".join(f"{flag} {value}" for flag, (value, default) in chosen.items() if value != default)
    if idle and config.num_steps == 1:
        notes.append(f"a student of one step has no hop, stops at step 0 and has the grid 1, 0: no effect of {idle}")
    start, updates = algorithm.student_ema_start, student_clock(config, trainers).steps(rollouts)
    if start >= updates:
        notes.append(
            f"--student-ema-start {start}: the student takes {updates} steps in this run, so its average never begins "
            "and is the student itself"
        )
    return notes


def _notes(config: Config, trainers: Sequence[TrainerSpec], clips: bool) -> tuple[str, ...]:
    critic = next(trainer for trainer in trainers if trainer.role == "critic")
    random_stop = config.stop_law != "full" and config.num_steps > 1
    told = config.algorithm.dmd2_critic_conditioning == "stop_step"
    notes = _without_effect(config, trainers)
    if random_stop and not told:
        notes.append(
            "one critic for all stop steps that is not told which (published setting); if the student gets worse, try "
            "--dmd2-critic-conditioning stop_step"
        )
    if (_real_latents(config), config.algorithm.dmd2_student_sample_type) == (True, "ode") and config.num_steps > 1:
        notes.append(
            "forward_noise with ode: noised data has the spread sqrt((1-s)^2 std^2 + s^2), the inputs of a right ODE "
            "student s + (1-s) std: it is trained at other inputs than it will see; sde has no such gap"
        )
    if told and not random_stop:
        notes.append(
            "--dmd2-critic-conditioning stop_step tells the critic a constant: every sample stops at the last step"
        )
    if (config.algorithm.dmd2_critic_steps_per_student_step or critic.num_steps_per_rollout) == 1:
        notes.append("the critic takes one step per student step; DMD2 takes several (5): --num-steps-per-rollout")
    if config.explicit_sigmas and config.explicit_sigmas[0] != 1:
        notes.append(
            f"--diffusion-sigmas starts at {config.explicit_sigmas[0]:g}: rollouts scale the initial noise by it, "
            "plain diffusers pipelines do not"
        )
    only = config.rollout.debug_rollout_only
    if only is not None:
        what = "the eval set is rendered once" if only == "eval" else "the rollouts are generated"
        notes.append(f"--debug-rollout-only {only}: {what}, with the checkpoint's own weights; no trainer is started")
    if config.eval_media[0] is not None and config.evaluation.diffusion_fps is None and clips:
        notes.append(
            f"clips are written to play at {config.playback_fps:g} frames per second, for want of --diffusion-fps; "
            "sound that was made for another rate will not fit"
        )
    if config.rollout_seed != config.run.seed:
        notes.append(
            f"--rollout-seed {config.rollout_seed} is not --seed {config.run.seed}: runs that differ in --seed alone "
            "share prompt order, noise and stop steps"
        )
    if config.cluster.actor_num_nodes > 1 and config.sglang.sglang_python is not None:
        notes.append(
            "servers on other nodes than the first listen on their node's address, and SGLang's sockets unpickle what "
            "anyone sends there: use a network that no one else can reach"
        )
    if not config.save_dir.is_relative_to(config.run.run_dir):
        notes.append(f"checkpoints go to --save {config.save_dir}, outside of --run-dir {config.run.run_dir}")
    return tuple(notes)


def render_plan(plan: Plan) -> str:
    """The plan for a reader: at most 25 lines."""
    if plan.rollout_only is not None:
        return _render_rollout_only(plan)
    forwards = plan.forwards_per_update
    sigmas = [f"{sigma:.4f}" for sigma in plan.sigmas[:-1]]
    shown = ", ".join(sigmas if len(sigmas) <= 8 else [*sigmas[:4], "...", *sigmas[-3:]])
    lines = [
        f"Plan: {plan.rollouts} rollouts of {plan.samples_per_rollout} samples ({plan.prompts_per_rollout} prompts x "
        f"{plan.samples_per_prompt}), in {plan.windows} windows of {plan.window_size}",
        f"  student      {plan.student_steps} steps, sigmas {shown}, 0; stop step {plan.stop_law}, "
        f"{plan.sample_type} hops; a step on {plan.student_clock}",
        *(["  input        real latents with noise (forward_noise)"] if plan.student_input == "forward_noise" else []),
        f"  score sigma  {plan.score_sigma}",
        f"  engines      {plan.engines} {plan.engine} on {plan.engine_placement}; {plan.engine_details}",
    ]
    for group in plan.groups:
        lines.append(
            f"  {group.name:<12} {group.role} on {group.placement}; updates of {group.window_size} samples = "
            f"{group.ranks} ranks x {group.micro_batches} micro-batches x {group.micro_batch_size}; "
            f"{group.updates_per_rollout} a rollout, {group.updates} in all, lr {group.lr:g}"
            f"{'' if group.trains == 'all parameters' else f'; {group.trains}'}"
        )
    lines += [
        f"  per update   engine {forwards.engine:g} forwards, critic {forwards.critic} with backward"
        f"{f' and {forwards.scoring} to score' if forwards.scoring else ''}, teacher {forwards.teacher}, student "
        f"{forwards.student} with backward (counted in samples)",
        f"  evals        {_evals(plan)}",
        f"  checkpoints  {plan.checkpoints}",
    ]
    return "\n".join(lines + [f"  note: {note}" for note in plan.notes])


def _render_rollout_only(plan: Plan) -> str:
    what = f"{plan.rollouts} rollouts of {plan.samples_per_rollout} samples" if plan.rollouts else "one eval"
    lines = [
        f"Plan: {what}, without trainers",
        f"  model        {plan.student_steps} steps, {plan.sample_type} hops, the checkpoint's own weights",
        f"  engines      {plan.engines} {plan.engine} on {plan.engine_placement}; {plan.engine_details}",
    ]
    return "\n".join(lines + [f"  note: {note}" for note in plan.notes])


def _evals(plan: Plan) -> str:
    if not plan.evals:
        return "none (no --eval-prompt-data)"
    every = f", every {plan.eval_every}" if plan.eval_every < plan.rollouts else ""
    return (
        f"{plan.evals} with {' and '.join(plan.eval_kinds)} weights: before the first{every} and after the last rollout"
    )


def plan_yaml(config: Config, plan: Plan, memory: MemoryPlan | None = None) -> str:
    """The resolved options, by section, and the plan under `plan`: one YAML document that --config reads back.

    `memory`: what each node runs and holds, in the plan under `nodes`.
    """
    flat = flatten(config.resolved())
    parts = []
    for section in dict.fromkeys(option.section for option in OPTIONS.values()):
        options = [option for option in OPTIONS.values() if option.section == section]
        body = {option.name.replace("_", "-"): flat[option.name] for option in options}
        parts.append(f"# {options[0].title}\n{_dump(body)}")
    derived = _plain(asdict(plan)) | ({} if memory is None else {"nodes": memory_tree(memory)})
    parts.append(f"# Derived from the options above; --config does not read it\n{_dump({'plan': derived})}")
    return "\n".join(parts)


def _dump(value: Any) -> str:
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return text


class _Dumper(yaml.SafeDumper):
    """Lists of numbers on one line, no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_list(dumper: _Dumper, value: list[Any]) -> yaml.Node:
    flow = all(isinstance(item, int | float | str) and len(str(item)) < 24 for item in value)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=flow)


_Dumper.add_representer(list, _represent_list)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name.replace("_", "-"): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value
