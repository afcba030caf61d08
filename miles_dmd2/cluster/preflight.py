"""What each node of a running cluster must offer before any actor starts. Each fault is one `ConfigError`, one line."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import resource
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
import torch

import miles_dmd2
from miles_dmd2.cluster.placement import Placement
from miles_dmd2.cluster.runtime import wait
from miles_dmd2.config import Config, ConfigError, TrainerSpec
from miles_dmd2.config.environment import FEWEST_OPEN_FILES, host_bytes
from miles_dmd2.config.memory import GB, Limits, MemoryPlan, check_memory
from miles_dmd2.config.sglang import SHARED_MEMORY
from miles_dmd2.models.memory import plan_memory

# Another version of one of these on one node gives other numbers, or none.
PACKAGES = ("torch", "ray", "diffusers", "transformers", "peft", "safetensors", "numpy")
_MARK = ".miles_dmd2_"
_SMALLEST_SHARED_MEMORY = 2**30  # a container's default of 64 MiB stops NCCL and Ray's object store


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node says of itself. `unseen`: directories in which it does not see the driver's file; `missing`: paths
    that it has not. Sizes in bytes; `device_memory`: of its smallest GPU, None without one; `object_store`: what Ray
    was told to use there.
    """

    name: str
    packages: Mapping[str, str]
    open_files: int
    shared_memory: int
    host_memory: int
    device_memory: int | None
    unseen: tuple[str, ...]
    missing: tuple[str, ...]
    object_store: int


def preflight(config: Config, trainers: Sequence[TrainerSpec], placement: Placement, timeout: float) -> None:
    """Ask every node that the run will use, and compare. ConfigError: a node that will not do, and why."""
    directories = [path.absolute() for path in shared_directories(config)]
    mark = f"{_MARK}{secrets.token_hex(8)}"
    for directory in directories:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / mark).touch()
    try:
        task = ray.remote(num_cpus=0, max_retries=0, max_calls=1)(
            node_facts
        )  # its process ends, and with it CUDA's part
        per_node = config.cluster.actor_num_gpus_per_node
        asked = [
            task.options(scheduling_strategy=placement.options(node * per_node)["scheduling_strategy"]).remote(
                tuple(map(str, directories)), mark, config.cluster.device, needed_paths(config, trainers)
            )
            for node in range(config.cluster.actor_num_nodes)
        ]
        facts: list[NodeFacts] = wait(asked, timeout, "preflight of the nodes")
    finally:
        for directory in directories:
            (directory / mark).unlink(missing_ok=True)
    check_nodes(facts, plan_memory(config, trainers), config)


def shared_directories(config: Config) -> list[Path]:
    """What every node writes to or reads from under the same path, without what lies inside of another."""
    wanted = [config.run.run_dir, config.save_dir]
    for own in (config.sglang.sglang_weight_directory, config.evaluation.save_eval_media_dir):
        wanted += [] if own is None else [own]
    return [path for path in wanted if not any(path != other and path.is_relative_to(other) for other in wanted)]


def needed_paths(config: Config, trainers: Sequence[TrainerSpec]) -> tuple[str, ...]:
    """What processes on any node read."""
    paths = [config.model.hf_checkpoint, *(spec.checkpoint for spec in trainers)]
    for own in (config.sglang.sglang_python, config.algorithm.dmd2_latents):
        paths += [] if own is None else [own]
    return tuple(dict.fromkeys(str(path.absolute()) for path in paths))


def node_facts(directories: Sequence[str], mark: str, device: str, needed: Sequence[str] = ()) -> NodeFacts:
    """Runs on the node. `mark`: a file that the driver has written to each of the directories."""
    memory = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    return NodeFacts(
        name=f"{platform.node()} ({ray.util.get_node_ip_address()})",
        packages=packages(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        shared_memory=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0,
        host_memory=host_bytes(),
        device_memory=min(memory) if memory and device == "cuda" else None,
        unseen=tuple(path for path in directories if not os.path.exists(os.path.join(path, mark))),
        missing=tuple(path for path in needed if not os.path.exists(path)),
        object_store=_object_store(),
    )


def _object_store() -> int:
    """What Ray was started with on this node; 0 outside of Ray."""
    if not ray.is_initialized():
        return 0
    own = ray.get_runtime_context().get_node_id()
    (resources,) = (node["Resources"] for node in ray.nodes() if node["NodeID"] == own)
    return int(resources.get("object_store_memory", 0))


def packages() -> dict[str, str]:
    """Versions in this process's environment; of this package also a digest of its source."""
    source = hashlib.sha256()
    root = Path(miles_dmd2.__file__).parent
    for file in sorted(root.rglob("*.py")):
        source.update(str(file.relative_to(root)).encode() + file.read_bytes())
    own = f"{miles_dmd2.__version__} (source {source.hexdigest()[:12]})"
    return {name: _version(name) for name in PACKAGES} | {"python": platform.python_version(), "miles_dmd2": own}


def check_nodes(facts: Sequence[NodeFacts], memory: MemoryPlan, config: Config) -> None:
    """`facts` in the order of the nodes. ConfigError."""
    for node in facts:
        if node.open_files < FEWEST_OPEN_FILES:
            raise ConfigError(
                f"node {node.name}: ulimit -n {node.open_files}: Ray needs {FEWEST_OPEN_FILES} open files or more; "
                "raise it before `ray start` there"
            )
        if node.unseen:
            raise ConfigError(
                f"node {node.name}: does not see what the driver writes to {node.unseen[0]}; give --run-dir, --save, "
                "--sglang-weight-directory and --save-eval-media-dir on a file system that all nodes share, under one "
                "path"
            )
        if node.missing:
            raise ConfigError(
                f"node {node.name}: has no {node.missing[0]}; --hf-checkpoint, --sglang-python and --dmd2-latents must "
                "be there on every node under one path"
            )
    _check_packages(facts, packages())
    for node, planned in zip(facts, memory.nodes, strict=True):
        needed = max(_SMALLEST_SHARED_MEMORY, *(shared_memory_bytes(phase.host) for phase in planned.phases))
        if node.shared_memory < needed:
            raise ConfigError(
                f"node {node.name}: {SHARED_MEMORY} has {node.shared_memory / GB:.3g} GB free, Ray's object store and "
                f"weights on their way need {needed / GB:.3g} GB; make it larger (--shm-size of a container)"
            )
        stored = max(stored_bytes(phase.host) for phase in planned.phases)
        if node.object_store < stored:
            raise ConfigError(
                f"node {node.name}: Ray's object store has {node.object_store / GB:.3g} GB, weights on their way need "
                f"{stored / GB:.3g} GB; say `ray start --object-store-memory {stored}` there, or more"
            )
    check_memory(memory, limits(facts, config))


def shared_memory_bytes(host: Mapping[str, int]) -> int:
    """Of a phase's host memory what lies in /dev/shm: weights in Ray's object store, and files for the servers."""
    return stored_bytes(host) + host.get(f"weights in {SHARED_MEMORY}", 0)


def stored_bytes(host: Mapping[str, int]) -> int:
    """Of a phase's host memory what lies in Ray's object store; the next weights are there once, and once packed."""
    return host.get("exported weights", 0) + host.get("next exported weights", 0) // 2


def limits(facts: Sequence[NodeFacts], config: Config) -> Limits:
    """The smallest of what the nodes have and what is declared."""
    cluster = config.cluster
    devices: list[float] = [node.device_memory for node in facts if node.device_memory is not None]
    hosts: list[float] = [node.host_memory for node in facts]
    devices += [] if cluster.gpu_memory_gb is None else [cluster.gpu_memory_gb * GB]
    hosts += [] if cluster.host_memory_gb is None else [cluster.host_memory_gb * GB]
    return Limits(min(devices, default=None), min(hosts))


def _check_packages(facts: Sequence[NodeFacts], own: Mapping[str, str]) -> None:
    """`own`: the driver's."""
    for node in facts:
        different = [name for name in own if node.packages.get(name) != own[name]]
        if different:
            name, *more = different
            others = f" (and other {', '.join(more)})" if more else ""
            raise ConfigError(
                f"node {node.name}: has {name} {node.packages.get(name)}, the driver {own[name]}{others}; use one "
                "environment on all nodes"
            )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
