"""LoRA (arXiv 2106.09685) as options have it, and which layers it is over, by the names and shapes of the weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

ALL_LINEAR = "all-linear"
_SHOWN = 12  # names in a message


@dataclass(frozen=True, slots=True)
class Lora:
    """A trainer's adapter: W + alpha / rank * B A, with A `[rank, in]` and B `[out, rank]`, beside each layer W."""

    rank: int
    alpha: int
    target_modules: tuple[str, ...] = (ALL_LINEAR,)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def __str__(self) -> str:
        return f"LoRA of rank {self.rank}, alpha {self.alpha}, over {' '.join(self.target_modules)}"


def block_of(name: str) -> str:
    """The block that a weight is in: `transformer_blocks.3` of `transformer_blocks.3.attn.to_q.weight`,
    `token_refiner.blocks.0` of a list inside a module; empty for what is in no numbered list of blocks.
    """
    parts = name.split(".")
    if len(parts) > 2 and parts[1].isdigit():
        return ".".join(parts[:2])
    return ".".join(parts[:3]) if len(parts) > 3 and parts[1].endswith("blocks") and parts[2].isdigit() else ""


def lora_layers(
    shapes: Mapping[str, Sequence[int]], lora: Lora, untrained: Collection[str] = ()
) -> dict[str, tuple[int, int]]:
    """Layer -> (out, in) of the layers that the adapter is over: of the blocks' linear ones those whose name is, or
    ends in, one of the targets. `shapes`: of the network's weights. `untrained`: names of weights that get no adapter,
    because no gradient comes to them. ValueError: a target that no layer has, or none that trains, or a rank that none
    of the layers has.
    """
    linear = {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2 and block_of(name) not in ("", name.removesuffix(".weight"))
    }  # a layer that has a number itself, as `cap_embedder.1`, is no block
    training = {name for name in linear if f"{name}.weight" not in untrained}
    if lora.target_modules == (ALL_LINEAR,):
        named = training
    else:
        named = {name for target in lora.target_modules for name in _layers_of(target, linear, training)}
    chosen = {name: shape for name, shape in linear.items() if name in named & training}
    if not chosen:
        raise ValueError(f"--lora-rank {lora.rank}: no linear layer of the network's blocks is trained; use 0")
    largest = max(min(shape) for shape in chosen.values())
    if lora.rank > largest:
        raise ValueError(
            f"--lora-rank {lora.rank}: none of the layers has a rank above {largest}; use {largest} or less, or 0 to "
            "train all parameters"
        )
    return chosen


def lora_shapes(layers: Mapping[str, tuple[int, int]], rank: int) -> dict[str, tuple[int, int]]:
    """Names and shapes of the parameters of an adapter over layers of these shapes."""
    return {
        f"{layer}.lora_{factor}.weight": shape
        for layer, (rows, columns) in layers.items()
        for factor, shape in (("A", (rank, columns)), ("B", (rows, rank)))
    }


def _layers_of(target: str, linear: Collection[str], training: Collection[str]) -> set[str]:
    """The linear layers that a target names. ValueError: none, or none of those that train."""
    found = {name for name in linear if name == target or name.endswith(f".{target}")}
    if not found:
        known = _shown({name.removeprefix(f"{block_of(name)}.") for name in linear})
        raise ValueError(
            f"--lora-target-modules {target}: no linear layer of the network's blocks has this name; they have "
            f"{known}; {ALL_LINEAR} takes all"
        )
    if found.isdisjoint(training):
        raise ValueError(
            f"--lora-target-modules {target}: no gradient ever comes to {_shown(found)}, so an adapter there would not "
            f"train; name other layers; {ALL_LINEAR} takes all that train"
        )
    return found


def _shown(names: Collection[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(sorted(names)[:_SHOWN])}{more}"
