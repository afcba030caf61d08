"""The flat view of the schema: one option per field. Flags, YAML keys, `Config` from flat values, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from miles_dmd2.config.errors import ConfigError, nearest, show
from miles_dmd2.config.schema import Config
from miles_dmd2.config.section import LARGEST, LARGEST_SEED, Alone, Section
from miles_dmd2.config.sglang import PassedOn

# What these name may lie elsewhere in a run that goes on, if it is the same: see cli/contents.py.
BY_CONTENT = frozenset(
    {
        "hf_checkpoint",
        "dmd2_latents",
        "prompt_data",
        "custom_rm_path",
        "eval_prompt_data",
        "eval_metrics_path",
    }
)

# A run may be continued with other values of these; all others are part of what the numbers depend on.
RESUME_MAY_CHANGE = frozenset(
    {
        "run_dir",
        "save",
        "save_interval",
        "load",
        "num_rollout",
        "keep_last",
        "keep_best",
        "keep_best_mode",
        "allow_config_change",
        "dump_bad_batch",
        "connect_timeout",
        "eval_interval",
        "probe_tolerance",
        "sglang_python",
        "rollout_engine_url",
        "require_engine_plugin",
        "sglang_allow_untested_version",
        "sglang_weight_sync",
        "sglang_weight_directory",
        "verify_weights_every",
        "engine_request_timeout",
        "engine_attempts",
        "engine_max_in_flight",
        "engine_max_restarts",
        "num_gpus_per_node",
        "gpu_memory_gb",
        "host_memory_gb",
        "load_ranks_at_once",
        "ray_address",
        "cpu_threads",
        "start_timeout",
        "phase_timeout",
        "max_skipped_steps",
        "max_x0_drift",
        "save_eval_media_dir",
        "rollout_video_dtype",
        "custom_rm_path",
        "gradient_checkpointing",  # the same bits: tests/training/test_families.py
        "diffusion_fps",
        "use_wandb",
        "wandb_log_num_images",
        "wandb_project",
        "wandb_mode",
    }
)


@dataclass(frozen=True, slots=True)
class Option:
    """One field of one section. `name` is the field's; `section` the attribute of `Config` that holds it."""

    name: str
    section: str
    title: str
    info: FieldInfo

    @property
    def flag(self) -> str:
        return f"{self.prefix}NAME" if self.prefix else flag_of(self.name)

    @property
    def prefix(self) -> str | None:
        """Of a field that collects another program's flags; None for the others."""
        return next((part.prefix for part in self.info.metadata if isinstance(part, PassedOn)), None)

    @property
    def alone(self) -> str | None:
        """Of a flag that may stand without a value: what it then means."""
        return next((part.value for part in self.info.metadata if isinstance(part, Alone)), None)

    @property
    def description(self) -> str:
        return self.info.description or ""

    @property
    def choices(self) -> tuple[str, ...]:
        return _Shape.of(self.info).choices

    @property
    def is_switch(self) -> bool:
        return _Shape.of(self.info).base is bool

    @property
    def is_pair(self) -> bool:
        return _Shape.of(self.info).is_pair

    @property
    def is_list(self) -> bool:
        return _Shape.of(self.info).is_list

    @property
    def default_in_words(self) -> str:
        default = self.info.default
        if self.is_switch:
            return ("off", "on")[default]
        return " ".join(map(show, default)) if self.is_list else show(default)

    @property
    def metavar(self) -> str:
        words = {int: "INT", float: "NUMBER", str: "TEXT", Path: "PATH", tuple[str, ...]: "TEXT"}
        return words.get(_Shape.of(self.info).base, "FILE.yaml")

    @property
    def valid(self) -> str:
        return valid_values(self.info)


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _options() -> Iterator[Option]:
    for section, field in Config.model_fields.items():
        kind = field.annotation
        assert isinstance(kind, type)
        assert issubclass(kind, Section)
        for name, info in kind.model_fields.items():
            yield Option(name, section, kind.title, info)


OPTIONS: Mapping[str, Option] = {option.name: option for option in _options()}


@dataclass(frozen=True, slots=True)
class _Shape:
    """What an annotation allows, without its `| None`."""

    base: Any
    constraints: tuple[Any, ...]
    choices: tuple[str, ...]

    @classmethod
    def of(cls, info: FieldInfo) -> _Shape:
        annotation: Any = info.annotation
        constraints = list(info.metadata)
        if get_origin(annotation) in (Union, UnionType):
            annotation = next(kind for kind in get_args(annotation) if kind is not NoneType)
        for part in getattr(annotation, "__metadata__", ()):  # Annotated inside of the optional
            constraints += part.metadata if isinstance(part, FieldInfo) else [part]
            annotation = annotation.__origin__
        choices = tuple(get_args(annotation)) if get_origin(annotation) is Literal else ()
        return cls(annotation, tuple(constraints), choices)

    @property
    def is_pair(self) -> bool:
        return bool(self.base == tuple[float, float])

    @property
    def is_list(self) -> bool:
        return bool(self.base == tuple[str, ...])


def valid_values(info: FieldInfo, *, upper: bool = False) -> str:
    """What a field takes, in words: "a whole number > 0"; with `upper` also how large a whole number may be."""
    shape = _Shape.of(info)
    if shape.choices:
        return "one of " + ", ".join(shape.choices) if len(shape.choices) > 1 else shape.choices[0]
    if shape.is_pair:
        return "two numbers"
    if shape.is_list:
        return "one or more words"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    text = words.get(shape.base, "a list of trainers")
    bounds = [
        f"{sign} {getattr(part, name)}"
        for part in shape.constraints
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if getattr(part, name, None) is not None and (upper or getattr(part, name) not in (LARGEST, LARGEST_SEED))
    ]
    return f"{text} {' and '.join(bounds)}" if bounds else text


def build_config(values: Mapping[str, object], origins: Mapping[str, str] | None = None) -> Config:
    """Flat field names to `Config`; `origins` says where a value was written, for messages. ConfigError: a fault."""
    sections: dict[str, dict[str, object]] = {name: {} for name in Config.model_fields}
    for name, value in values.items():
        if name not in OPTIONS:
            raise ConfigError(f"{show(name)}: no such option; the nearest is {nearest(name, OPTIONS)}")
        sections[OPTIONS[name].section][name] = value
    try:
        return Config.model_validate(sections)
    except ValidationError as error:
        raise _first_fault(error, values, origins or {}) from None


def _first_fault(error: ValidationError, values: Mapping[str, object], origins: Mapping[str, str]) -> ConfigError:
    faults = sorted(error.errors(include_url=False), key=_is_absent)
    fault = faults[0]
    if _is_absent(fault):
        names = [str(one["loc"][-1]) for one in faults if _is_absent(one)]
        option = OPTIONS[names[0]]
        also = f"; also required: {', '.join(flag_of(name) for name in names[1:])}" if names[1:] else ""
        return ConfigError(f"{option.flag} is required: {option.description}{also}")
    if len(fault["loc"]) < 2:  # a check over several options: its message names them
        return ConfigError(str(fault["ctx"]["error"]))
    name = str(fault["loc"][1])
    origin = f" ({origins[name]})" if name in origins else ""
    return ConfigError(f"{flag_of(name)} {show(values.get(name))}{origin}: {reason(fault, OPTIONS[name].info)}")


def _is_absent(fault: Any) -> bool:
    """A required option that was not given; of a list that is too short, pydantic calls its elements missing."""
    return fault["type"] == "missing" and len(fault["loc"]) == 2


def reason(fault: Any, info: FieldInfo) -> str:
    """Why pydantic refused a value of this field, and what it takes."""
    if fault["type"] == "value_error":
        text = str(fault["ctx"]["error"])
        return text.replace("must not be true or false", f"must be {valid_values(info)}")
    return f"must be {valid_values(info, upper=fault['type'] == 'less_than_equal')}"


def flatten(config: Config) -> dict[str, Any]:
    """Field name -> plain value (as JSON and YAML know them), in the order of the schema. `build_config` inverts it."""
    plain = config.model_dump(mode="json")
    return {name: plain[option.section][name] for name, option in OPTIONS.items()}


def may_change(*runs: Mapping[str, Any]) -> frozenset[str]:
    """The options that may differ between a run and one that continues it, given both as flat configs."""
    free = RESUME_MAY_CHANGE | BY_CONTENT
    for flat in runs:
        trainers = flat.get("trainer_config") or []
        schedules = {entry["args"].get("lr_schedule", flat.get("lr_schedule")) for entry in trainers}
        if not schedules <= {"constant"}:
            free -= {"num_rollout"}
        if flat.get("rollout_engine") == "sglang":  # one sample at a time: no batch depends on the number of servers
            free |= {"rollout_num_engines"}
    return free
