"""What the files hold that options name: a run that continues another one must read the same, wherever it lies now."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

from miles_dmd2.config import Config, ConfigError, TrainerSpec
from miles_dmd2.data.latents import read_latents
from miles_dmd2.data.metadata import unscored_prompts
from miles_dmd2.data.prompts import load_prompts
from miles_dmd2.models.checkpoint import pipeline_digest


def contents(config: Config, trainers: Sequence[TrainerSpec]) -> dict[str, str]:
    """Option -> SHA-256 in hex of what it names: of prompts, latents and weights, not of their file, so a comment or
    another format changes nothing. Of a trainer with a checkpoint of its own under `trainer_config`. ConfigError.

    What is named by `config.options.BY_CONTENT` is compared by this alone, and may move.
    """
    model, rollout, evaluation = config.model, config.rollout, config.evaluation
    rewards = rollout.custom_rm_path
    found = {
        "hf_checkpoint": pipeline_digest(model.hf_checkpoint),
        "prompt_data": prompts_digest(rollout.prompt_data, "--prompt-data", rewarded=rewards is not None),
    }
    base = model.hf_checkpoint.resolve()
    own = {spec.name: spec.checkpoint for spec in trainers if spec.checkpoint.resolve() != base}
    if own:
        flags = {name: f"trainer {name}: hf-checkpoint" for name in own}
        found["trainer_config"] = _hash({name: pipeline_digest(path, flags[name]) for name, path in own.items()})
    if config.algorithm.dmd2_latents is not None:
        found["dmd2_latents"] = read_latents(config.algorithm.dmd2_latents).digest()
    if evaluation.eval_prompt_data is not None:
        path = evaluation.eval_prompt_data
        found["eval_prompt_data"] = prompts_digest(path, "--eval-prompt-data", rewarded=rewards is not None)
    if rewards is not None:
        found["custom_rm_path"] = function_digest(rewards, "--custom-rm-path")
    if evaluation.eval_metrics_path is not None:
        found["eval_metrics_path"] = function_digest(evaluation.eval_metrics_path, "--eval-metrics-path")
    return found


def prompts_digest(path: Path, flag: str, *, rewarded: bool) -> str:
    """Of the prompts in order, and with a reward function of those that it does not see."""
    unscored = sorted(unscored_prompts(path, flag)) if rewarded else []
    return _hash([load_prompts(path, flag), unscored])


def function_digest(function: str, flag: str) -> str:
    """Of a function's name and its module's source file; what that imports is not looked at. ConfigError: no module."""
    location, _, name = function.rpartition(":")
    file = Path(location) if location.endswith(".py") else _file_of_module(location, function, flag)
    return _hash([name, location if file is None else hashlib.sha256(file.read_bytes()).hexdigest()])


def _file_of_module(module: str, function: str, flag: str) -> Path | None:
    """None for a module without a file, which is part of Python."""
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        spec = None
    if spec is None:
        raise ConfigError(f"{flag} {function}: there is no module {module}; give module:function or file.py:function")
    return Path(spec.origin) if spec.has_location and spec.origin else None


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
