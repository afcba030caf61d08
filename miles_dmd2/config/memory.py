"""What a run holds in memory, in bytes, per node and phase: arithmetic over shapes, nothing is opened or allocated.

Counted: weights, moments, gradients, what FSDP2 gathers, the engine's copy of every component, host copies of whoever
sleeps, and weights on their way. Not counted: activations, batches, media, libraries. A tenth of each device and host
is kept for those (`RESERVE`); how much a forward needs depends on canvas and micro-batch, and only a run can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from miles_dmd2.config.errors import ConfigError
from miles_dmd2.config.headers import Weight
from miles_dmd2.config.lora import block_of, lora_shapes
from miles_dmd2.config.schema import Config
from miles_dmd2.config.sglang import SHARED_MEMORY
from miles_dmd2.config.trainers import TrainerSpec, adapter_layers

RESERVE = 0.1
GB = 1e9
MASTER = 4  # bytes of a value of master weights, moments, averages and of the frozen teacher
FORWARD = {"fp32": 4, "bf16": 2}
TRAINED = "transformer"
Place = Literal["device", "host"]
Dtype = Literal["fp32", "bf16"]
Width = Callable[[str, str, Dtype], int]  # component, name, dtype of forwards -> bytes of a value; 0: left out
Bytes = dict[str, int]


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase on one node. `device`: of its fullest device. By what it is for, in bytes."""

    name: str
    device: Bytes
    host: Bytes

    def parts(self, place: Place) -> Bytes:
        return self.device if place == "device" else self.host

    def total(self, place: Place) -> int:
        return sum(self.parts(place).values())


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """What runs on a node (role -> its first and last number there) and holds memory in which phase."""

    node: int
    runs: dict[str, tuple[int, int]]
    phases: tuple[Phase, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes of one device and of one host; None: not known, not judged."""

    device: float | None = None
    host: float | None = None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    nodes: tuple[NodeMemory, ...]

    def fullest(self, place: Place) -> tuple[NodeMemory, Phase]:
        pairs = [(node, phase) for node in self.nodes for phase in node.phases]
        return max(pairs, key=lambda pair: pair[1].total(place))


def build_memory(
    config: Config,
    trainers: Sequence[TrainerSpec],
    components: Mapping[str, Sequence[Weight]],
    width: Width | None = None,
    trained: Mapping[str, Sequence[int]] | None = None,
) -> MemoryPlan:
    """`components`: of the checkpoint, see `headers.read_components`; the trained one is `transformer`.

    `width`: of an engine's copy; default: everything in the dtype of the forwards. `trained`: names and shapes of the
    trained network's weights, where they are not the file's. ConfigError: an adapter over layers that it has not.
    """
    shapes = trained or {weight.name: weight.shape for weight in components[TRAINED]}
    adapters = {spec.name: _adapter(spec, shapes) for spec in trainers}
    engine = {name: served_bytes(name, parts, config.model.forward_dtype, width) for name, parts in components.items()}
    nodes = [
        _Node(config, trainers, components[TRAINED], adapters, engine, n) for n in range(config.cluster.actor_num_nodes)
    ]
    return MemoryPlan(tuple(node.memory() for node in nodes))


def _adapter(spec: TrainerSpec, shapes: Mapping[str, Sequence[int]]) -> tuple[Weight, ...]:
    """The parameters of a trainer's adapter in master precision; none for one that trains all parameters."""
    if spec.lora is None:
        return ()
    named = lora_shapes(adapter_layers(spec, shapes), spec.lora.rank)
    return tuple(Weight(name, "F32", shape, MASTER * shape[0] * shape[1]) for name, shape in named.items())


def served_bytes(component: str, weights: Iterable[Weight], dtype: Dtype, width: Width | None = None) -> int:
    """Of one engine's copy; what is not floating point as it is stored."""
    return sum(
        w.values * (FORWARD[dtype] if width is None else width(component, w.name, dtype)) if w.is_float else w.nbytes
        for w in weights
    )


def shard_values(weights: Iterable[Weight], ranks: int) -> int:
    """Values of rank 0, which has most: FSDP2 cuts the first dimension of each tensor as `torch.chunk` does."""
    total = 0
    for weight in weights:
        rows = weight.shape[0] if weight.shape else 1
        total += -(-rows // ranks) * (weight.values // max(rows, 1))
    return total


def unit_values(weights: Iterable[Weight]) -> tuple[int, int]:
    """(values of the largest block, values outside of blocks): the network's own numbered lists are its blocks."""
    units: dict[str, int] = {}
    for weight in weights:
        unit = block_of(weight.name)
        units[unit] = units.get(unit, 0) + weight.values
    outside = units.pop("", 0)
    return max(units.values(), default=0), outside


def sharded(spec: TrainerSpec, dtype: str) -> bool:
    """Whether FSDP2 is around the network: see training/sharding.py."""
    return spec.num_ranks > 1 or FORWARD[dtype] != MASTER


class _Node:
    """The memory of one node: rank r and engine r are on its device r % per_node (cluster/placement.py)."""

    def __init__(
        self,
        config: Config,
        trainers: Sequence[TrainerSpec],
        trained: Sequence[Weight],
        adapters: Mapping[str, Sequence[Weight]],
        engine: Bytes,
        node: int,
    ) -> None:
        self.config, self.trainers, self.trained, self.engine, self.node = config, trainers, trained, engine, node
        self.adapters = adapters
        self.sglang = config.rollout.rollout_engine == "sglang"
        self.on_cpu = config.cluster.device == "cpu"
        self.full = sum(weight.values for weight in trained) * MASTER
        engines = 0 if config.sglang.rollout_engine_url else config.num_engines
        self.runs: dict[str, tuple[int, int]] = {}
        for name, total in [("engines", engines), *((spec.name, spec.num_ranks) for spec in trainers)]:
            per_node = config.cluster.actor_num_gpus_per_node
            first, last = node * per_node, min(total, (node + 1) * per_node) - 1
            if last >= first:
                self.runs[name] = (first, last)

    def memory(self) -> NodeMemory:
        phases = [self._phase(f"start of {spec.name}", None, self._loading(spec)) for spec in self.trainers]
        phases.append(self._phase("generate", "engines", self._sync()))
        for spec in self.trainers:
            phases.append(self._phase(spec.name, spec.name, self._export() if spec.role == "actor" else {}))
        return NodeMemory(self.node, self.runs, tuple(phases))

    def count(self, name: str) -> int:
        first, last = self.runs.get(name, (0, -1))
        return last - first + 1

    def _phase(self, name: str, awake: str | None, passing: Bytes) -> Phase:
        """`awake`: who works in this phase. `passing`: what the host holds beside the copies of sleepers."""
        device = self._device(awake)
        host = {**self._asleep(awake), **self._exported(name), **passing}
        if self.on_cpu:  # the host's memory is the device's
            host |= {f"awake: {what}": size * self.count(str(awake)) for what, size in device.items()}
        return Phase(name, device, host)

    def _device(self, awake: str | None) -> Bytes:
        if awake is None or not self.count(awake):
            return {}
        if awake == "engines":
            return {f"engine {name}": size for name, size in self.engine.items()}
        spec = next(spec for spec in self.trainers if spec.name == awake)
        state = self._state(spec)
        gradients = shard_values(self._optimized(spec), spec.num_ranks) * MASTER
        return {**state, "gradients": gradients, **self._gathered(spec)}

    def _optimized(self, spec: TrainerSpec) -> Sequence[Weight]:
        """What has gradients and moments."""
        return self.adapters[spec.name] or self.trained

    def _state(self, spec: TrainerSpec) -> Bytes:
        """What a rank holds awake and carries to the host to sleep."""
        whole = shard_values(self.trained, spec.num_ranks) * MASTER
        own = shard_values(self._optimized(spec), spec.num_ranks) * MASTER
        state = {"master weights": own, "moments": 2 * own}
        if spec.lora is not None:
            state = {"frozen base": whole, **state}  # a critic's is the teacher
        elif spec.role == "critic":
            state["teacher"] = whole
        if spec.role == "actor" and self.config.keeps_ema:
            state["average"] = own
        return state

    def _gathered(self, spec: TrainerSpec) -> Bytes:
        """Whole units while they compute: the root, one block, and the next one on its way; its gradient in backward,
        in the dtype of the forwards and, for the reduction, in that of the master weights.
        """
        dtype = self.config.model.forward_dtype
        if not sharded(spec, dtype):
            return {}
        block, root = unit_values([*self.trained, *self.adapters[spec.name]])
        with_gradients, _ = unit_values(self._optimized(spec))
        width = FORWARD[dtype]
        gradients = with_gradients * (width + MASTER)
        return {"gathered weights": (root + 2 * block) * width, "gathered gradients": gradients}

    def _asleep(self, awake: str | None) -> Bytes:
        """Host copies. A trainer's stay when it wakes (models/offload.py), and so do an engine's: torch keeps pinned
        memory for the next time. On a CPU a server cannot sleep: its weights stay where they are.
        """
        copies = {
            f"host copy of {spec.name}": sum(self._state(spec).values()) * self.count(spec.name)
            for spec in self.trainers
        }
        if not (self.on_cpu and self.sglang and awake == "engines"):
            copies["host copy of engines"] = sum(self.engine.values()) * self.count("engines")
        return {what: size for what, size in copies.items() if size}

    def _loading(self, spec: TrainerSpec) -> Bytes:
        """Each rank that loads has the whole networks in fp32 before it cuts its part: see training/network.py."""
        networks = 2 if spec.role == "critic" and spec.lora is None else 1
        count = self.count(spec.name)
        return {"loading": min(count, self.config.cluster.load_ranks_at_once or count) * networks * self.full}

    def _exported(self, phase: str) -> Bytes:
        """The student's weights in Ray's object store, on the node of rank 0, from the first export on."""
        if self.node or phase.startswith("start") or not self.trainers:
            return {}
        kinds = 2 if self.config.keeps_ema else 1
        held = {"exported weights": kinds * self.full}
        if self.sglang:
            held |= self._sent(1)
        return held

    def _export(self) -> Bytes:
        """The next weights beside the current ones: in rank 0's own memory, and in the object store."""
        kinds = 2 if self.config.keeps_ema else 1
        return {} if self.node else {"next exported weights": 2 * kinds * self.full}

    def _sent(self, copies: int) -> Bytes:
        """What servers read the weights from: kept so that one that is started again gets them."""
        own = self.config.sglang
        size = copies * self.full // MASTER * FORWARD[self.config.model.forward_dtype]
        if own.sglang_weight_sync == "tensor":
            return {"weights in the client": size}
        directory = own.sglang_weight_directory or SHARED_MEMORY
        return {f"weights in {SHARED_MEMORY}": size} if directory.is_relative_to(SHARED_MEMORY) else {}

    def _sync(self) -> Bytes:
        """New weights on their way into the engines: the client's or each local engine's copy of the store's."""
        if not self.trainers:
            return {}
        if self.sglang:
            received = (
                self.full + self.full // MASTER * FORWARD[self.config.model.forward_dtype]
            )  # and as they are sent
            return {} if self.node else {"weights received": received, **self._sent(2)}
        copies = self.count("engines") + bool(self.node)  # another node has the store's as well
        return {"weights received": copies * self.full} if self.count("engines") else {}


def check_memory(plan: MemoryPlan, limits: Limits) -> None:
    """ConfigError, one line: the fullest node and phase if it does not fit beside the reserve, and what helps."""
    places: tuple[tuple[Place, str, str, float | None], ...] = (
        ("device", "--gpu-memory-gb", "a GPU", limits.device),
        ("host", "--host-memory-gb", "the host", limits.host),
    )
    for place, flag, what, limit in places:
        node, phase = plan.fullest(place)
        parts, needed = phase.parts(place), phase.total(place)
        if limit is None or needed <= limit * (1 - RESERVE):
            continue
        room, largest = limit * (1 - RESERVE), max(parts, key=lambda part: parts[part])
        raise ConfigError(
            f"{flag} {limit / GB:.4g}: {what} of node {node.node} needs {_gb(needed)} GB in the phase {phase.name}, "
            f"{_gb(needed - room)} GB more than the {_gb(room)} GB left beside a reserve of {RESERVE:.0%} for "
            f"activations, batches and libraries (most of it: {largest}, {_gb(parts[largest])} GB); "
            f"{_remedy(place, phase.name, largest)}"
        )


def _remedy(place: Place, phase: str, largest: str) -> str:
    if place == "device":
        if phase == "generate":
            return "use GPUs with more memory: an engine has one (an engine over several is not available)"
        return "use more ranks (--actor-num-nodes, --actor-num-gpus-per-node), or GPUs with more memory"
    if largest == "host copy of engines":
        return "use fewer engines (--rollout-num-engines), or hosts with more memory"
    if largest == "loading":
        return "let fewer ranks of a node load at a time (--load-ranks-at-once), or use hosts with more memory"
    return "use more nodes (--actor-num-nodes), or hosts with more memory"


def render_memory(plan: MemoryPlan, limits: Limits) -> str:
    """The table for a reader; nodes that are alike are shown once."""
    sizes = (("GPU", limits.device), ("host", limits.host))
    known = [f"{_gb(size)} GB a {what}" for what, size in sizes if size is not None]
    judged = f"limits {' and '.join(known)}, {RESERVE:.0%} of them kept free" if known else "no limit known"
    lines = [f"Memory in GB ({judged}); activations, batches, media and libraries are not counted"]
    alike: dict[str, list[int]] = {}
    for node in plan.nodes:
        alike.setdefault("\n".join(_node_lines(node)), []).append(node.node)
    for text, numbers in alike.items():
        span = f"node {numbers[0]}" if len(numbers) == 1 else f"nodes {numbers[0]}-{numbers[-1]}"
        lines.append(f"  {span}: {text}")
    return "\n".join(lines)


def _node_lines(node: NodeMemory) -> list[str]:
    lines = [", ".join(f"{name} {first}-{last}" for name, (first, last) in node.runs.items())]
    for phase in node.phases:
        for label, parts in (("GPU", phase.device), ("host", phase.host)):
            if parts:
                details = ", ".join(f"{what} {_gb(size)}" for what, size in parts.items())
                lines.append(f"    {phase.name:<16} {label:<4} {_gb(sum(parts.values())):>6} = {details}")
    return lines


def memory_tree(plan: MemoryPlan) -> list[dict[str, object]]:
    """The plan as plain values in GB, for YAML."""
    return [
        {
            "node": node.node,
            "runs": {name: f"{first}-{last}" for name, (first, last) in node.runs.items()},
            "gb-of-its-fullest-gpu": {phase.name: _tree(phase.device) for phase in node.phases if phase.device},
            "gb-of-its-host": {phase.name: _tree(phase.host) for phase in node.phases},
        }
        for node in plan.nodes
    ]


def _tree(parts: Bytes) -> dict[str, float]:
    return {"total": round(sum(parts.values()) / GB, 3)} | {what: round(n / GB, 3) for what, n in parts.items()}


def _gb(size: float) -> str:
    return f"{size / GB:.3g}" if size < 100 * GB else f"{size / GB:.0f}"
