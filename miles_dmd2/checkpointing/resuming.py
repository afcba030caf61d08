"""From --load to the checkpoint that a run continues, or to the line that says why it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from miles_dmd2.checkpointing.adapters import check_adapters
from miles_dmd2.checkpointing.manifest import CheckpointError, Manifest, RunFacts, package_versions, read_manifest
from miles_dmd2.checkpointing.saving import complete_steps, step_number
from miles_dmd2.config.checks import find_checkpoint, is_inside, refuse_samples
from miles_dmd2.config.errors import ConfigError, show
from miles_dmd2.config.resume import changes, other_contents
from miles_dmd2.config.schema import Config
from miles_dmd2.types import Role


@dataclass(frozen=True, slots=True)
class Continued:
    """A checkpoint to go on from, and what makes the bits differ from those of an uninterrupted run.

    `facts`: of the run that goes on, as they were compared; large files are read for them.
    """

    manifest: Manifest
    facts: RunFacts
    notes: tuple[str, ...]


def continue_from(path: Path, config: Config, roles: Mapping[str, Role], facts: RunFacts) -> Continued:
    """The checkpoint at or below `path`, verified, and fit for this run. `roles`: of the trainers by name.

    ConfigError or CheckpointError, one line with what to do: see `check`, and the tests for all there are.
    """
    directory = find_checkpoint(path)
    try:
        manifest = read_manifest(directory)
    except CheckpointError as error:
        raise CheckpointError(f"--load {show(path)}: {error}; {_instead(directory)}") from error
    saved = {name: group.adapter for name, group in manifest.groups.items()}
    check_adapters(f"--load {manifest.directory}", saved, {name: facts.adapters.get(name) for name in roles})
    notes = _check_options(manifest, config, facts)
    _check_groups(manifest, roles)
    _check_position(manifest, config)
    _check_media(manifest, config)
    now = {**package_versions(), **facts.machine}
    notes += [
        f"the checkpoint was written with {name} {before}, this is {now.get(name, 'nothing')}: bits may differ"
        for name, before in manifest.versions.items()
        if now.get(name) != before
    ]
    return Continued(manifest, facts, tuple(notes))


def sound_beside(damaged: Path) -> Path | None:
    """The newest complete checkpoint beside a damaged one."""
    for other in reversed(complete_steps(damaged.parent)):
        if other.resolve() == damaged.resolve():
            continue
        try:
            read_manifest(other)
        except CheckpointError:
            continue
        return other
    return None


def _instead(damaged: Path) -> str:
    """What to do about a damaged checkpoint."""
    other = sound_beside(damaged)
    if other is not None:
        return f"move {damaged.name} away and give --load {show(other)}, the newest complete one"
    return "no other complete one is there; give another --load, or leave it out and start anew in a new --run-dir"


def _check_options(manifest: Manifest, config: Config, facts: RunFacts) -> list[str]:
    """Options that the numbers depend on are those of the checkpoint, or named; returns notes about these."""
    found = changes(manifest.config, config)
    found |= {
        name: (text, True)
        for name, text in other_contents(manifest.contents, facts.contents, config).items()
        if name not in found
    }
    allowed = {name.replace("-", "_") for name in config.run.allow_config_change}
    refused = [name for name, (_, counts) in found.items() if counts and name not in allowed]
    if refused:
        texts = "; ".join(found[name][0] for name in refused)
        names = " ".join(name.replace("_", "-") for name in refused)
        raise ConfigError(
            f"--load {manifest.directory}: {texts}; use the values of the run it continues, or say "
            f"--allow-config-change {names}"
        )
    return [f"{text}: not the run that was interrupted" if counts else text for text, counts in found.values()]


def _check_groups(manifest: Manifest, roles: Mapping[str, Role]) -> None:
    saved = {name: group.role for name, group in manifest.groups.items()}
    if saved != dict(roles):
        held = ", ".join(f"{name} ({role})" for name, role in saved.items())
        now = ", ".join(f"{name} ({role})" for name, role in roles.items())
        raise ConfigError(
            f"--load {manifest.directory}: holds the trainers {held}, this run has {now}; name them in "
            "--trainer-config as they were"
        )


def _check_media(manifest: Manifest, config: Config) -> None:
    """Eval samples that are in --save-eval-media-dir are of the very run that goes on in its own directories."""
    directory, run_dir = config.evaluation.save_eval_media_dir, config.run.run_dir
    if directory is None:
        return
    before = manifest.config.get("save_eval_media_dir")
    same = isinstance(before, str) and Path(before).resolve() == directory.resolve()
    goes_on = any(is_inside(manifest.directory, own) for own in (run_dir, config.save_dir))
    if not (goes_on and (same or is_inside(directory, run_dir))):
        refuse_samples(directory)


def _check_position(manifest: Manifest, config: Config) -> None:
    """The checkpoint is not behind the run's end, and no later one is in the way."""
    if manifest.rollout > config.rollout.num_rollout:
        raise ConfigError(
            f"--num-rollout {config.rollout.num_rollout}: --load {manifest.directory} has {manifest.rollout} rollouts "
            f"already; use {manifest.rollout} or more"
        )
    later = [step.name for step in config.save_dir.glob("step_*") if (step_number(step) or 0) > manifest.rollout]
    if later:
        raise ConfigError(
            f"--load {manifest.directory}: --save {config.save_dir} holds later checkpoints "
            f"({', '.join(sorted(later)[:3])}), which this run would write again; move them away, or give a new "
            "--run-dir"
        )
