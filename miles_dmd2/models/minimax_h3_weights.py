"""MiniMax H3's transformer weights between diffusers' names and SGLang's native layout.

The trainer holds diffusers' `MiniMaxH3Transformer3DModel`. The released checkpoint, and a server that was started on
it, have the native layout: other names, q, k and v in one matrix, the SwiGLU halves in the other order, and the rotary
frequencies as a tensor. A file has that one matrix grouped, head by head `[q_h; k_h; v_h]`; in the engine's memory it
is `[Q; K; V]`. Each form loads where another was due without an error, so `engine_checksum` predicts what SGLang's
`get_weights_checksum` answers once the right thing has arrived.

Written from SGLang 0.5.23's `MiniMaxH3DiTArchConfig.param_names_mapping` and its loaders.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from miles_dmd2.models.weights import mismatch

NATIVE_CLASS = "MiniMaxH3DiTModel"
DIFFUSERS_CLASS = "MiniMaxH3Transformer3DModel"
ROPE = "rope.inv_freq"
ROPE_THETA = 10000.0

# Beside the blocks: diffusers -> native.
_NAMES = {
    "proj_in": "video_patch_proj",
    "audio_proj_in": "audio_patch_proj",
    "context_embedder": "condition_proj",
    "time_embedder.linear_1": "time_embedder.proj_in",
    "time_embedder.linear_2": "time_embedder.proj_out",
    "token_refiner.final_norm": "token_refiner.final_norm",
    "norm_out.norm": "final_layer.norm",
    "norm_out.linear": "final_layer.adaln_proj.linear",
    "proj_out": "final_layer.video_out",
    "audio_proj_out": "final_layer.audio_out",
}
_WEIGHT_ONLY = ("token_refiner.final_norm", "norm_out.norm")
# Inside a block, all without a bias but the last.
_IN_BLOCK = {
    "norm1": "norm1",
    "attn.norm_q": "attn.q_norm",
    "attn.norm_k": "attn.k_norm",
    "attn.to_out.0": "attn.out_proj",
    "norm2": "norm2",
    "ff.net.0.proj": "mlp.fc1",
    "ff.net.2": "mlp.fc2",
}
_MODULATION = "adaln_proj.linear"  # of the main blocks, not of the text's
_SPLIT = ("attn.to_q", "attn.to_k", "attn.to_v")
_FUSED = "attn.qkv_proj.weight"
_SWAPPED = "mlp.fc1.weight"

# Kept in fp32 by a bf16 engine; every other parameter is bf16 (SGLang's MINIMAX_H3_FP32_PARAM_NAMES and the buffer).
FP32_NAMES = frozenset(
    f"{_NAMES[name]}.{kind}"
    for name in (
        "proj_in",
        "audio_proj_in",
        "time_embedder.linear_1",
        "time_embedder.linear_2",
        "proj_out",
        "audio_proj_out",
    )
    for kind in ("weight", "bias")
) | {ROPE}


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """What of a transformer's config.json, native or diffusers', its weights' layout depends on."""

    layers: int
    refiner_layers: int
    heads: int
    head_dim: int
    rope_frequencies: int
    rope_theta: float = ROPE_THETA

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> TransformerShape:
        """ValueError: an entry that is missing or no positive number."""

        def number(*names: str) -> int:
            found = next((config[name] for name in names if name in config), None)
            if type(found) is not int or found < 1:
                raise ValueError(f"the transformer's config.json must have a positive {names[0]}, got {found!r}")
            return found

        return cls(
            number("num_layers"),
            number("num_refiner_layers", "token_refiner_num_layers"),
            number("num_attention_heads"),
            number("attention_head_dim"),
            number("rope_freq_dim", "rope_inv_freq_len"),
            float(config.get("rope_theta", ROPE_THETA)),
        )

    def rope(self) -> Tensor:
        """The rotary frequencies, fp32, with the operations of diffusers' module, which has no such parameter."""
        count = 2 * self.rope_frequencies
        return 1.0 / (self.rope_theta ** (torch.arange(0, count, 2, dtype=torch.float32) / count))


def to_native(tensors: Mapping[str, Tensor], config: Mapping[str, Any], *, grouped: bool = True) -> dict[str, Tensor]:
    """diffusers' names -> the native names and layout, `rope.inv_freq` included. ValueError: other names or shapes.

    grouped: q, k and v head by head, as in a native file and for an engine that was started on one. Otherwise
    `[Q; K; V]`: for an engine that was started on a checkpoint in diffusers' layout.
    """
    shape = TransformerShape.of(config)
    names = _names(shape)
    _check_names({name for sources in names.values() for name in sources}, tensors)
    native: dict[str, Tensor] = {}
    for target, sources in names.items():
        if target.endswith(_FUSED):
            native[target] = _fuse([tensors[name] for name in sources], shape, target, grouped)
        elif target.endswith(_SWAPPED):
            native[target] = _swap(tensors[sources[0]], target)
        else:
            native[target] = tensors[sources[0]]
    native[ROPE] = shape.rope()
    return native


def from_native(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """A native file's tensors -> diffusers' names and layout, without the rotary frequencies.

    ValueError: other names or shapes, or frequencies that are not those of the config, which diffusers' module would
    compute with.
    """
    shape = TransformerShape.of(config)
    names = _names(shape)
    _check_names({*names, ROPE}, tensors)
    found, expected = tensors[ROPE].float().cpu(), shape.rope()
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-6, atol=0):
        raise ValueError(f"{ROPE} is not theta^(-i/n) of theta {shape.rope_theta:g} and {len(expected)} frequencies")
    ours: dict[str, Tensor] = {}
    for source, targets in names.items():
        if source.endswith(_FUSED):
            ours.update(zip(targets, _split(tensors[source], shape, source), strict=True))
        elif source.endswith(_SWAPPED):
            ours[targets[0]] = _swap(tensors[source], source)
        else:
            ours[targets[0]] = tensors[source]
    return ours


def native_shapes(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a native file -> those of diffusers' parameters. ValueError: other names or shapes."""
    return {
        name: tuple(value.shape)
        for name, value in from_native(
            {name: _without_memory(name, shape, config) for name, shape in shapes.items()}, config
        ).items()
    }


def _without_memory(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> Tensor:
    return TransformerShape.of(config).rope() if name == ROPE else torch.empty(shape, device="meta")


def engine_tensors(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], dtype: Literal["fp32", "bf16"]
) -> dict[str, Tensor]:
    """diffusers' names -> every parameter of the engine as it lies in its memory, whatever layout it was started on."""
    held = torch.float32 if dtype == "fp32" else torch.bfloat16
    return {
        name: value.detach().to(torch.float32 if name in FP32_NAMES else held)
        for name, value in to_native(tensors, config, grouped=False).items()
    }


def engine_checksum(tensors: Mapping[str, Tensor]) -> str:
    """What `POST /get_weights_checksum` answers for these: SHA-256 over names and raw bytes, by sorted name."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        value = tensors[name].detach().to("cpu", copy=True).contiguous()  # copy: numpy() forbids resizing for good
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _names(shape: TransformerShape) -> dict[str, tuple[str, ...]]:
    """Native parameter -> the one or three of diffusers that it holds, in the module's order."""
    names: dict[str, tuple[str, ...]] = {}
    for ours, native in _NAMES.items():
        for kind in ("weight",) if ours in _WEIGHT_ONLY else ("weight", "bias"):
            names[f"{native}.{kind}"] = (f"{ours}.{kind}",)
    stacks = (
        ("token_refiner.refiner_blocks", "token_refiner.blocks", shape.refiner_layers),
        ("transformer_blocks", "blocks", shape.layers),
    )
    for ours, native, count in stacks:
        for index in range(count):
            here, there = f"{ours}.{index}", f"{native}.{index}"
            for name, other in _IN_BLOCK.items():
                names[f"{there}.{other}.weight"] = (f"{here}.{name}.weight",)
            names[f"{there}.{_FUSED}"] = tuple(f"{here}.{name}.weight" for name in _SPLIT)
            if native == "blocks":
                for kind in ("weight", "bias"):
                    names[f"{there}.{_MODULATION}.{kind}"] = (f"{here}.{_MODULATION}.{kind}",)
    return names


def _check_names(expected: set[str], tensors: Mapping[str, Tensor]) -> None:
    problem = mismatch(dict.fromkeys(expected, ()), dict.fromkeys(tensors, torch.empty(())))
    if problem:
        raise ValueError(f"not the weights of this MiniMax H3 transformer: {problem}")


def _fuse(parts: list[Tensor], shape: TransformerShape, name: str, grouped: bool) -> Tensor:
    rows = shape.heads * shape.head_dim
    if any(part.ndim != 2 or part.shape != parts[0].shape or len(part) != rows for part in parts):
        raise ValueError(f"{name}: q, k and v must be [{rows}, width], got {[list(part.shape) for part in parts]}")
    if not grouped:
        return torch.cat(parts)
    heads = [part.reshape(shape.heads, shape.head_dim, -1) for part in parts]
    return torch.stack(heads, 1).reshape(3 * rows, -1)


def _split(fused: Tensor, shape: TransformerShape, name: str) -> tuple[Tensor, ...]:
    rows = shape.heads * shape.head_dim
    if fused.ndim != 2 or len(fused) != 3 * rows:
        raise ValueError(f"{name} must be [{3 * rows}, width], got {list(fused.shape)}")
    heads = fused.reshape(shape.heads, 3, shape.head_dim, -1)
    return tuple(part.reshape(rows, -1) for part in heads.unbind(1))


def _swap(fc1: Tensor, name: str) -> Tensor:
    """[value; gate] <-> [gate; value]."""
    if fc1.ndim != 2 or len(fc1) % 2:
        raise ValueError(f"{name} must be [2 x width, width], got {list(fc1.shape)}")
    first, second = fc1.chunk(2)
    return torch.cat([second, first])
