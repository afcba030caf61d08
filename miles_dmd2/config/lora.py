"""LoRA (arXiv 2106.09685) as options have it, and which layers it is over, by the names and shapes of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def lora_layers(shapes: Mapping[str, Sequence[int]], lora: Lora) -> dict[str, tuple[int, int]]:
    """Layer -> (out, in) of the layers that the adapter is over: of the blocks' linear ones those whose name is, or
    ends in, one of the targets. `shapes`: of the network's weights. ValueError: a target that no layer has, or a rank
    that none of the layers has.
    """
    linear = {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2 and block_of(name) not in ("", name.removesuffix(".weight"))
    }  # a layer that has a number itself, as `cap_embedder.1`, is no block
    chosen = linear if lora.target_modules == (ALL_LINEAR,) else {}
    for target in () if chosen else lora.target_modules:
        found = {name: shape for name, shape in linear.items() if name == target or name.endswith(f".{target}")}
        if not found:
            known = sorted({name.removeprefix(f"{block_of(name)}.") for name in linear})
            more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
            raise ValueError(
                f"--lora-target-modules {target}: no linear layer of the network's blocks has this name; they have "
                f"{', '.join(known[:_SHOWN])}{more}; {ALL_LINEAR} takes all"
            )
        chosen |= found
    largest = max(min(shape) for shape in chosen.values())
    if lora.rank > largest:
        raise ValueError(
            f"--lora-rank {lora.rank}: none of the layers has a rank above {largest}; use {largest} or less, or 0 to "
            "train all parameters"
        )
    return {name: chosen[name] for name in linear if name in chosen}


def lora_shapes(shapes: Mapping[str, Sequence[int]], lora: Lora) -> dict[str, tuple[int, int]]:
    """Names and shapes of the adapter's parameters. ValueError as `lora_layers`."""
    return {
        f"{layer}.lora_{factor}.weight": shape
        for layer, (rows, columns) in lora_layers(shapes, lora).items()
        for factor, shape in (("A", (lora.rank, columns)), ("B", (rows, lora.rank)))
    }
