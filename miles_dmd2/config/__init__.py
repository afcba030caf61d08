"""The options of a run: schema, flags and YAML, per-trainer settings, checks before anything starts, the plan."""

from miles_dmd2.config.clock import StudentClock
from miles_dmd2.config.errors import ConfigError
from miles_dmd2.config.flags import ParsedRun, parse
from miles_dmd2.config.options import build_config, flatten
from miles_dmd2.config.plan import Plan, build_plan, plan_yaml, render_plan
from miles_dmd2.config.schema import Config
from miles_dmd2.config.trainers import TrainerSpec, resolve_trainers, student_clock

__all__ = [
    "Config",
    "ConfigError",
    "ParsedRun",
    "Plan",
    "StudentClock",
    "TrainerSpec",
    "build_config",
    "build_plan",
    "flatten",
    "parse",
    "plan_yaml",
    "render_plan",
    "resolve_trainers",
    "student_clock",
]
