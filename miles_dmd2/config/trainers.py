"""Per-trainer settings: the flags' values with what `--trainer-config` overrides for one trainer."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import Field, ValidationError

from miles_dmd2.config.clock import StudentClock
from miles_dmd2.config.errors import ConfigError, near_divisors, nearest, show
from miles_dmd2.config.lora import Lora, lora_layers
from miles_dmd2.config.options import reason
from miles_dmd2.config.schema import Config
from miles_dmd2.config.section import PositiveInt
from miles_dmd2.config.sections import DEFAULT_TRAINERS, TrainerEntry, TrainerSection
from miles_dmd2.config.yaml_input import read_yaml
from miles_dmd2.types import Role

FLAG = "--trainer-config"
_ROLES = ("critic", "actor")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_ENTRY_KEYS = ("name", "role", "args")
_OF_LORA = ("lora_alpha", "lora_target_modules")
_WHAT = "a YAML list of {name, role, args}"


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """One trainer group, resolved. `window_size` is the samples of one update over all ranks."""

    name: str
    role: Role
    checkpoint: Path
    lr: float
    lr_schedule: Literal["constant", "linear", "cosine"]
    lr_warmup_updates: int
    total_updates: int  # of the whole run: num_rollout x steps (critic), by the clock (actor); schedules use it
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    weight_decay: float
    clip_grad: float
    num_steps_per_rollout: int
    window_size: int
    num_ranks: int
    micro_batch_size: int  # samples per forward and rank; divides window_size / num_ranks
    lora: Lora | None = None  # None: all parameters are trained

    @property
    def samples_per_rank(self) -> int:
        return self.window_size // self.num_ranks

    @property
    def micro_batches(self) -> int:
        """Forwards (and backwards) of one update on each rank."""
        return self.samples_per_rank // self.micro_batch_size


class TrainerSettings(TrainerSection):
    """What `args` of one trainer may hold: the options of `TrainerSection`, where it starts from, how many ranks."""

    hf_checkpoint: Path = Field(description="diffusers pipeline directory that this trainer starts from")
    num_gpus: PositiveInt = Field(description="ranks, on the first of the shared devices")


ARGS = TrainerSettings.model_fields


def read_trainer_entries(raw: object) -> tuple[TrainerEntry, ...]:
    """`--trainer-config`: a YAML file's path, or the list itself. ConfigError names the file and the trainer."""
    where = FLAG
    if isinstance(raw, str | Path):
        where = f"{FLAG} {raw}"
        raw = read_yaml(Path(raw), FLAG, _WHAT).value
    if not isinstance(raw, Sequence) or isinstance(raw, str) or not raw:
        raise ConfigError(f"{where}: must be {_WHAT}, got {show(raw)}")
    entries = tuple(_read_entry(entry, f"{where}: trainer {index}") for index, entry in enumerate(raw, 1))
    _check_order(entries, where)
    return entries


def resolve_trainers(config: Config) -> tuple[TrainerSpec, ...]:
    """The trainers in training order, their batch arithmetic closed. ConfigError names the trainer and the option."""
    given = config.run.trainer_config or DEFAULT_TRAINERS
    entries = read_trainer_entries([entry.model_dump() for entry in given])
    settings = [_settings(config, entry) for entry in entries]
    pairs = list(zip(entries, settings, strict=True))
    _check_lora_is_read(config, settings)
    critic, steps = next((e.name, s.num_steps_per_rollout) for e, s in pairs if e.role == "critic")
    window = _window(config, steps, f"trainer {critic}")
    clock = _clock(config, steps, f"trainer {critic}")
    return tuple(_resolve(config, entry, own, window, steps, clock) for entry, own in pairs)


def adapter_layers(
    spec: TrainerSpec, shapes: Mapping[str, Sequence[int]], untrained: Collection[str] = ()
) -> dict[str, tuple[int, int]]:
    """`lora_layers` of a trainer's adapter, none without one. ConfigError names the trainer."""
    if spec.lora is None:
        return {}
    try:
        return lora_layers(shapes, spec.lora, untrained)
    except ValueError as error:
        raise ConfigError(f"trainer {spec.name}: {error}") from error


def student_clock(config: Config, trainers: Sequence[TrainerSpec]) -> StudentClock:
    """On which rollouts the student takes its steps."""
    critic = next(trainer for trainer in trainers if trainer.role == "critic")
    return _clock(config, critic.num_steps_per_rollout, f"trainer {critic.name}")


def _clock(config: Config, steps: int, where: str) -> StudentClock:
    """`steps`: the critic's per rollout. ConfigError: they do not divide those per student step; no student step."""
    wanted, warmup = config.algorithm.dmd2_critic_steps_per_student_step, config.algorithm.dmd2_critic_warmup_rollouts
    if wanted is not None and wanted % steps:
        raise ConfigError(
            f"--dmd2-critic-steps-per-student-step {wanted}: must be a multiple of the {steps} critic steps of a "
            f"rollout ({where}: --num-steps-per-rollout {steps}); use {steps * max(1, wanted // steps)} or "
            f"{steps * (wanted // steps + 1)}"
        )
    clock = StudentClock(warmup, (wanted or steps) // steps)
    if not clock.steps(config.rollout.num_rollout):
        raise ConfigError(
            f"--num-rollout {config.rollout.num_rollout}: the student's first step is on rollout "
            f"{warmup + clock.interval} (--dmd2-critic-warmup-rollouts {warmup}, a step on each {clock.interval}. "
            f"rollout after); use {warmup + clock.interval} or more"
        )
    return clock


def _read_entry(raw: object, where: str) -> TrainerEntry:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where}: must be a mapping with the keys {', '.join(_ENTRY_KEYS)}, got {show(raw)}")
    for key in raw:
        if key not in _ENTRY_KEYS:
            raise ConfigError(
                f"{where}: no such key {show(key)}; the nearest is {nearest(str(key), _ENTRY_KEYS)} "
                f"(valid: {', '.join(_ENTRY_KEYS)})"
            )
    name, role, args = raw.get("name"), raw.get("role"), raw.get("args")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: name {show(name)}: must be lower-case letters, digits and _, a letter first, at most 40 long: "
            "metrics and files carry it"
        )
    where = f"{where} ({name})"
    if role not in _ROLES:
        raise ConfigError(f"{where}: role {show(role)}: must be one of {', '.join(_ROLES)}")
    if args is not None and not isinstance(args, Mapping):
        raise ConfigError(f"{where}: args {show(args)}: must be a mapping of options, for example {{lr: 2.0e-6}}")
    return TrainerEntry(name=name, role=cast(Role, role), args=_read_args(args or {}, cast(Role, role), where))


def _read_args(raw: Mapping[object, object], role: Role, where: str) -> dict[str, Any]:
    args: dict[str, object] = {}
    for key, value in raw.items():
        name = str(key).replace("-", "_")
        if name not in ARGS:
            raise ConfigError(
                f"{where}: {show(key)} may not be set per trainer; the nearest that may is {nearest(name, ARGS)} "
                f"(valid: {', '.join(sorted(ARGS))})"
            )
        if name in args:
            raise ConfigError(f"{where}: {show(key)} is given twice, with - and with _; keep one of them")
        args[name] = value
    if role == "actor" and "num_steps_per_rollout" in args:
        raise ConfigError(
            f"{where}: num_steps_per_rollout {show(args['num_steps_per_rollout'])}: is the critic's; the actor always "
            "takes one step, on the last window; leave it out"
        )
    checked = _validate({"hf_checkpoint": ".", "num_gpus": 1, **args}, where).model_dump(mode="json")
    return {name: checked[name] for name in args}


def _validate(values: Mapping[str, object], where: str) -> TrainerSettings:
    try:
        return TrainerSettings.model_validate(values)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        name = str(fault["loc"][0])
        why = reason(fault, ARGS[name])
        raise ConfigError(f"{where}: {name.replace('_', '-')} {show(values.get(name))}: {why}") from None


def _check_order(entries: Sequence[TrainerEntry], where: str) -> None:
    names = [entry.name for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{where}: {names.count(name)} trainers are named {name}; give each its own name")
    roles = [entry.role for entry in entries]
    if roles != list(_ROLES):
        raise ConfigError(
            f"{where}: the roles are {', '.join(roles)}; --loss-type dmd2 trains exactly one critic, then exactly one "
            "actor: list them in this order"
        )


def _settings(config: Config, entry: TrainerEntry) -> TrainerSettings:
    base = {"hf_checkpoint": config.model.hf_checkpoint, "num_gpus": config.num_ranks, **config.trainer.model_dump()}
    return _validate({**base, **entry.args}, f"trainer {entry.name}")


def _resolve(
    config: Config, entry: TrainerEntry, settings: TrainerSettings, window: int, steps: int, clock: StudentClock
) -> TrainerSpec:
    """`window`, `steps`: samples and number of the critic's windows."""
    where = f"trainer {entry.name}"
    _check_ranks(config, settings.num_gpus, window, steps, where)
    micro = _micro_batch(settings, window, where)
    own_steps = steps if entry.role == "critic" else 1
    rollouts = config.rollout.num_rollout
    total = rollouts * steps if entry.role == "critic" else clock.steps(rollouts)
    if settings.lr_warmup_updates >= total:
        raise ConfigError(
            f"{where}: --lr-warmup-updates {settings.lr_warmup_updates}: must be less than this trainer's {total} "
            f"updates of the whole run (--num-rollout {rollouts})"
        )
    return TrainerSpec(
        name=entry.name,
        role=entry.role,
        checkpoint=settings.hf_checkpoint,
        lr=settings.lr,
        lr_schedule=settings.lr_schedule,
        lr_warmup_updates=settings.lr_warmup_updates,
        total_updates=total,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        weight_decay=settings.weight_decay,
        clip_grad=settings.clip_grad,
        num_steps_per_rollout=own_steps,
        window_size=window,
        num_ranks=settings.num_gpus,
        micro_batch_size=micro,
        lora=_lora(config, entry, settings, where),
    )


def _lora(config: Config, entry: TrainerEntry, settings: TrainerSettings, where: str) -> Lora | None:
    """ConfigError: options of an adapter for a trainer without one, or a base that is not the run's."""
    if not settings.lora_rank:
        if unread := next((name for name in _OF_LORA if name in entry.args), None):
            raise ConfigError(
                f"{where}: {unread.replace('_', '-')} {show(entry.args[unread])}: is never read with --lora-rank 0; "
                "leave it out, or give this trainer a rank"
            )
        return None
    own, base = settings.hf_checkpoint, config.model.hf_checkpoint
    if os.path.realpath(own) != os.path.realpath(base):  # Path.resolve raises on a loop of links, not told yet here
        raise ConfigError(
            f"{where}: hf-checkpoint {show(own)}: with --lora-rank {settings.lora_rank} the frozen base is the run's "
            f"--hf-checkpoint {show(base)}; leave it out"
        )
    return Lora(settings.lora_rank, settings.lora_alpha or settings.lora_rank, settings.lora_target_modules)


def _check_lora_is_read(config: Config, settings: Sequence[TrainerSettings]) -> None:
    """ConfigError: flags of an adapter in a run that has none."""
    if any(one.lora_rank for one in settings):
        return
    for name in _OF_LORA:
        value = getattr(config.trainer, name)
        if value != TrainerSection.model_fields[name].default:
            shown = " ".join(value) if isinstance(value, tuple) else str(value)
            raise ConfigError(
                f"--{name.replace('_', '-')} {shown}: is never read with --lora-rank 0; leave it out, or give a rank"
            )


def _window(config: Config, steps: int, where: str) -> int:
    """Samples of each of the `steps` equal windows of a rollout."""
    total = config.samples_per_rollout
    if total % steps:
        rounded = sorted({total - total % steps, total + steps - total % steps} - {0})
        raise ConfigError(
            f"{where}: --num-steps-per-rollout {steps}: does not cut the {total} samples of a rollout into equal "
            f"windows; use {near_divisors(steps, total)}, or (--rollout-batch-size x --n-samples-per-prompt) of "
            f"{' or '.join(str(n) for n in rounded)}"
        )
    return total // steps


def _check_ranks(config: Config, ranks: int, window: int, steps: int, where: str) -> None:
    if ranks > config.num_ranks:
        raise ConfigError(
            f"{where}: num-gpus {ranks}: more than the {config.num_ranks} devices of --actor-num-nodes "
            f"{config.cluster.actor_num_nodes} x --actor-num-gpus-per-node {config.cluster.actor_num_gpus_per_node}; "
            f"use {config.num_ranks} or fewer"
        )
    if window % ranks:
        other_steps = near_divisors(steps, config.samples_per_rollout, also=ranks)
        smaller = "" if other_steps == "none" else f"--num-steps-per-rollout {other_steps}, or "
        raise ConfigError(
            f"{where}: a window of {window} samples ({config.samples_per_rollout} of a rollout / "
            f"--num-steps-per-rollout {steps}) does not divide over {ranks} ranks; use {smaller}"
            f"ranks (--actor-num-gpus-per-node, or num-gpus of this trainer) of {near_divisors(ranks, window)}"
        )


def _micro_batch(settings: TrainerSettings, window: int, where: str) -> int:
    per_rank = window // settings.num_gpus
    micro = settings.micro_batch_size or per_rank
    if per_rank % micro:
        raise ConfigError(
            f"{where}: --micro-batch-size {micro}: does not divide the {per_rank} samples per rank and update "
            f"(window {window} / {settings.num_gpus} ranks); use {near_divisors(micro, per_rank)}"
        )
    return micro
