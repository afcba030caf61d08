"""Distill a flow-matching diffusion model into a few-step student: python train_diffusion.py --help."""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_dmd2.checkpointing import (
    CheckpointError,
    Continued,
    IntervalCheckpoints,
    Retention,
    RunFacts,
    continue_from,
    sweep,
)
from miles_dmd2.checkpointing.adapters import SavedAdapter
from miles_dmd2.checkpointing.manifest import schedule_facts
from miles_dmd2.cli.checks import check_canvas, check_family, check_reward_and_reference, check_sglang
from miles_dmd2.cli.contents import contents
from miles_dmd2.cli.rollout_only import rollout_only
from miles_dmd2.cli.student import check_student, student_grid, student_sampling
from miles_dmd2.config import (
    Config,
    ConfigError,
    Plan,
    TrainerSpec,
    build_plan,
    checks,
    flatten,
    parse,
    plan_yaml,
    render_plan,
    student_clock,
)
from miles_dmd2.config.environment import check_environment, host_bytes
from miles_dmd2.config.memory import GB, TRAINED, Limits, MemoryPlan, check_memory, render_memory
from miles_dmd2.data.latents import read_latents
from miles_dmd2.data.metadata import unscored_prompts
from miles_dmd2.data.prompts import load_prompts
from miles_dmd2.data.requests import TrainingRequests, eval_requests
from miles_dmd2.evaluation import FixedEvaluation, NoEvaluation
from miles_dmd2.models.checkpoint import component_digest
from miles_dmd2.models.registry import known_pipelines
from miles_dmd2.observability import RunError, SinkGroup, logger
from miles_dmd2.run_directory import in_use
from miles_dmd2.sinks.console import ConsoleSink
from miles_dmd2.sinks.jsonl import JsonlSink
from miles_dmd2.sinks.status import StatusSink
from miles_dmd2.sinks.summary import summary
from miles_dmd2.sinks.wandb import WandbSink
from miles_dmd2.stopping import StopRequest

if TYPE_CHECKING:
    from miles_dmd2.models.base import ModelAdapter

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line. Returns the exit code: 0, 1 (the run failed), 2 (bad input) or 130 (interrupted)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    stop = StopRequest()
    with stop.listening():
        try:
            parsed = parse(arguments)
            config, trainers = parsed.config, parsed.trainers
            continued, adapter = check(config, trainers)
            plan = build_plan(config, trainers, adapter.notes, clips=adapter.num_frames > 1)
            limits = _limits(config)
            memory = _memory(config, trainers)
            if parsed.dry_run:
                table = textwrap.indent(render_memory(memory, limits), "# ")
                print(f"{plan_yaml(config, plan, memory)}\n{table}", flush=True)
                check_memory(memory, limits)
                return 0
            check_memory(memory, limits)
            print(render_plan(plan), flush=True)
            for note in continued.notes if continued else ():
                print(f"  note: {note}", flush=True)
        except (ConfigError, CheckpointError) as error:
            print(f"error: {error}", file=sys.stderr)
            return BAD_INPUT
        except KeyboardInterrupt:
            print("\nstopped before anything was started", file=sys.stderr)
            return INTERRUPTED
        return run(config, trainers, plan, continued, arguments, stop)


def check(config: Config, trainers: Sequence[TrainerSpec]) -> tuple[Continued | None, ModelAdapter]:
    """All that can be known before a process starts. Returns the checkpoint to continue from, None for a new run, and
    the model family at this canvas.
    """
    known = known_pipelines()
    checks.check_checkpoint(config.model.hf_checkpoint, known)
    for spec in trainers:
        if spec.checkpoint != config.model.hf_checkpoint:
            checks.check_checkpoint(spec.checkpoint, known, flag=f"trainer {spec.name}: hf-checkpoint")
    prompts = load_prompts(config.rollout.prompt_data)
    unscored_prompts(config.rollout.prompt_data)
    if config.evaluation.eval_prompt_data is not None:
        load_prompts(config.evaluation.eval_prompt_data, flag="--eval-prompt-data")
        unscored_prompts(config.evaluation.eval_prompt_data, flag="--eval-prompt-data")
    checks.check_run_dir(config)
    checks.check_eval_media(config)
    checks.check_packages(config)
    check_reward_and_reference(config)
    if config.cluster.ray_address is None:
        checks.check_devices(config, len(os.sched_getaffinity(0)), _cuda_devices(config))
    adapter = check_canvas(config, prompts)
    check_family(config, trainers, adapter)
    if config.rollout.debug_rollout_only is None:
        check_student(config, adapter)
    if config.rollout.rollout_engine == "sglang":
        check_sglang(config, adapter)
    check_environment(config, checks.parameter_count(config.model.hf_checkpoint / "transformer"))
    if config.run.load is None:
        return None, adapter
    roles = {spec.name: spec.role for spec in trainers}
    return continue_from(config.run.load, config, roles, run_facts(config, trainers)), adapter


def run_facts(config: Config, trainers: Sequence[TrainerSpec]) -> RunFacts:
    """What a checkpoint says of this run beside its options."""
    adapters = {spec.name: spec.lora for spec in trainers if spec.lora is not None}
    base = component_digest(config.model.hf_checkpoint, TRAINED) if adapters else ""
    return RunFacts(
        seed=config.run.seed,
        rollout_seed=config.rollout_seed,
        prompts=len(load_prompts(config.rollout.prompt_data)),
        prompts_per_rollout=config.rollout.rollout_batch_size,
        samples_per_rollout=config.samples_per_rollout,
        ema_decay=config.algorithm.student_ema_decay,
        schedules={spec.name: schedule_facts(spec) for spec in trainers},
        contents=contents(config, trainers),
        machine=machine_facts(config),
        adapters={name: SavedAdapter.of(lora, base) for name, lora in adapters.items()},
    )


def machine_facts(config: Config) -> dict[str, str]:
    """What the bits depend on beside options, files and packages."""
    import torch

    from miles_dmd2.engines.sglang.environment import check_version

    facts = {"torch threads": str(config.threads), "machine": platform.machine()}
    if config.cluster.device == "cpu":
        facts["instructions"] = torch.backends.cpu.get_cpu_capability()
    elif config.cluster.ray_address is None:
        facts["GPU"] = torch.cuda.get_device_name(0)
    own = config.sglang
    if own.sglang_python is not None:
        facts["SGLang"] = check_version(own.sglang_python, own.sglang_allow_untested_version)
    return facts


def run(
    config: Config,
    trainers: Sequence[TrainerSpec],
    plan: Plan,
    continued: Continued | None,
    arguments: Sequence[str],
    stop: StopRequest,
) -> int:
    """Train, export the student, write the summary. Whatever happens, no process of the run is left."""
    run_dir = config.run.run_dir
    try:
        held = in_use([("--run-dir", run_dir), ("--save", config.save_dir)])
        with held, _log_file(run_dir / "logs" / "driver.log"):
            if config.rollout.debug_rollout_only is not None:
                source, eval_set = training_requests(config, trainers, plan), evaluation(config, None)
                missing = rollout_only(config, source, eval_set, lambda: started(config, arguments, 0))
            else:
                missing = train_and_export(config, trainers, plan, continued, arguments, stop)
    except KeyboardInterrupt:
        print(f"\nstopped. {how_to_go_on(config, arguments)}", file=sys.stderr)
        return INTERRUPTED
    except ConfigError as error:  # what only a running cluster can tell, before any actor
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except (RunError, CheckpointError, OSError, ValueError) as error:
        print(f"\nerror: {error} (details: {run_dir / 'logs'})\n{how_to_go_on(config, arguments)}", file=sys.stderr)
        return FAILED
    best = "ema" if config.keeps_ema else "raw"
    done = f"the student is {run_dir}/student_{best}, its figures are in {run_dir}/summary.json"
    if config.rollout.debug_rollout_only is not None:
        done = f"nothing was trained; what was generated is in {config.eval_media[0] or run_dir}"
    print(f"done: {done}")
    for failure in missing:  # nothing else is wrong with the run
        print(f"error: {failure} (details: {run_dir / 'logs'})", file=sys.stderr)
    return FAILED if missing else 0


def train_and_export(
    config: Config,
    trainers: Sequence[TrainerSpec],
    plan: Plan,
    continued: Continued | None,
    arguments: Sequence[str],
    stop: StopRequest,
) -> list[str]:
    """Returns a line for each eval whose files are not complete."""
    from miles_dmd2.cluster.launch import launch
    from miles_dmd2.cluster.runtime import fetch
    from miles_dmd2.driver import train
    from miles_dmd2.models.registry import build_adapter

    run_dir, rollouts = config.run.run_dir, config.rollout.num_rollout
    manifest = continued.manifest if continued else None
    start = manifest.rollout if manifest else 0
    sweep(config.save_dir)
    retention = Retention(config.save_dir, config.run.keep_last, config.run.keep_best, config.run.keep_best_mode)
    checkpoints = IntervalCheckpoints(
        config.save_dir,
        config.run.save_interval,
        rollouts,
        options(config),
        continued.facts if continued else run_facts(config, trainers),
        start=start,
        retention=retention,
    )
    with launch(config, trainers, manifest) as (engines, groups):
        sink = started(config, arguments, start)
        weights = train(
            range(start, rollouts),
            training_requests(config, trainers, plan),
            engines,
            groups,
            evaluation(config, retention),
            checkpoints,
            sink,
            stop,
            student_clock(config, trainers),
        )
        adapter = build_adapter(config.model.hf_checkpoint, *config.canvas)
        for kind, update in weights.items():
            tensors = fetch(update, config.cluster.phase_timeout)
            directory = run_dir / f"student_{kind}"
            shutil.rmtree(directory, ignore_errors=True)  # of the run that this one continues
            adapter.export_pipeline(tensors, student_sampling(config), directory)
    write_json(run_dir / "summary.json", summary(run_dir / "metrics.jsonl", config, trainers, plan))
    return engines.media_failures


def training_requests(config: Config, trainers: Sequence[TrainerSpec], plan: Plan) -> TrainingRequests:
    latents = config.algorithm.dmd2_latents
    return TrainingRequests(
        prompts=load_prompts(config.rollout.prompt_data),
        prompts_per_rollout=config.rollout.rollout_batch_size,
        samples_per_prompt=config.rollout.n_samples_per_prompt,
        num_windows=plan.windows,
        sigmas=student_grid(config),
        stop_law=config.stop_law,
        seed=config.rollout_seed,
        sample_type=config.algorithm.dmd2_student_sample_type,
        clock=student_clock(config, trainers),
        real_latents=None if latents is None else read_latents(latents).rows(),
        scored=config.rollout.custom_rm_path is not None,
        unscored=unscored_prompts(config.rollout.prompt_data),
        video_dtype=config.rollout.rollout_video_dtype,
    )


def evaluation(config: Config, retention: Retention | None) -> FixedEvaluation | NoEvaluation:
    section = config.evaluation
    if section.eval_prompt_data is None:
        return NoEvaluation()
    requests = eval_requests(
        load_prompts(section.eval_prompt_data),
        section.eval_samples_per_prompt,
        student_grid(config),
        config.rollout_seed,
        config.algorithm.dmd2_student_sample_type,
        scored=config.rollout.custom_rm_path is not None,
        unscored=unscored_prompts(section.eval_prompt_data, "--eval-prompt-data"),
        video_dtype=config.rollout.rollout_video_dtype,
    )
    watch = None if retention is None else retention.evaluated
    return FixedEvaluation(requests, interval=config.eval_every, last=config.rollout.num_rollout, watch=watch)


def started(config: Config, arguments: Sequence[str], start: int) -> SinkGroup:
    """All processes are up: from now on the directory is this run's."""
    write_json(config.run.run_dir / "run.json", {"options": options(config), "arguments": list(arguments)})
    return sinks(config, start)


def sinks(config: Config, start: int) -> SinkGroup:
    """The metrics file and the status always; a terminal's progress; wandb when asked for."""
    run = config.run
    chosen = SinkGroup(
        JsonlSink(run.run_dir / "metrics.jsonl", keep_below=start),
        StatusSink(run.run_dir / "status.json"),
        ConsoleSink(start, config.rollout.num_rollout),
    )
    if run.use_wandb:
        media, shown = config.eval_media[0], run.wandb_log_num_images
        project, mode = run.wandb_project, run.wandb_mode
        chosen.start("wandb", lambda: WandbSink(project, mode, run.run_dir, options(config), media, shown, start))
    return chosen


def options(config: Config) -> dict[str, Any]:
    """Every option, resolved, as plain JSON values."""
    plain: dict[str, Any] = json.loads(json.dumps(flatten(config.resolved()), default=str))
    return plain


def how_to_go_on(config: Config, arguments: Sequence[str]) -> str:
    """The command that continues this run, or why there is none."""
    if config.rollout.debug_rollout_only is not None:
        return f"Nothing is trained here; start again, with another --run-dir than {config.run.run_dir}."
    if not any(config.save_dir.glob("step_*/manifest.json")):
        if config.run.load is not None:
            return (
                f"No new checkpoint was written; the same command, with a new --run-dir, continues {config.run.load}."
            )
        used = config.run.run_dir
        return f"No checkpoint was written yet (--save-interval); start anew with another --run-dir than {used}."
    kept = _without(arguments, "--load")
    command = shlex.join([sys.executable, sys.argv[0], *kept, "--load", str(config.save_dir)])
    return f"To go on from the newest checkpoint:\n  {command}"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(json.dumps(content, indent=2) + "\n")
    aside.replace(path)


def _without(arguments: Sequence[str], flag: str) -> list[str]:
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip or argument.startswith(f"{flag}="):
            skip = False
        elif argument == flag:
            skip = True
        else:
            kept.append(argument)
    return kept


def _cuda_devices(config: Config) -> int:
    if config.cluster.device != "cuda":
        return 0
    import torch

    return torch.cuda.device_count()


def _memory(config: Config, trainers: Sequence[TrainerSpec]) -> MemoryPlan:
    from miles_dmd2.models.memory import plan_memory

    return plan_memory(config, trainers)


def _limits(config: Config) -> Limits:
    """Bytes of a device and a host: as declared, or this machine's if the run's processes are started on it."""
    cluster = config.cluster
    here = cluster.ray_address is None
    device = cluster.gpu_memory_gb and cluster.gpu_memory_gb * GB
    host = cluster.host_memory_gb and cluster.host_memory_gb * GB
    if device is None and here and cluster.device == "cuda":
        import torch

        device = float(torch.cuda.get_device_properties(0).total_memory)
    return Limits(device, float(host_bytes()) if host is None and here else host)


@contextmanager
def _log_file(path: Path) -> Iterator[None]:
    """The driver's log: failures with their tracebacks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    except Exception:
        logger.exception("the run failed")
        raise
    finally:
        logger.removeHandler(handler)
        handler.close()


if __name__ == "__main__":
    sys.exit(main())
