"""The guard around weight updates, and what the worker can prove about the weights that it serves.

SGLang answers success to unknown names, missing names and NaN, and a wrong shape in the middle leaves a mixture. Here
an update is first loaded, parameter by parameter, into scratch memory by SGLang's own loaders (so that fused and split
parameters are covered without knowing them); only if all of it fits does the real load run. The digests of the scratch
copies are what the parameters must hold from then on.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from miles_dmd2.engines.sglang_plugin import protocol

SHOWN = 8  # names in a message
THREADS = min(
    8, os.cpu_count() or 1
)  # hashing releases the interpreter lock: gigabytes a second instead of half of one


@dataclass
class Record:
    """What arrived since the update began.

    received: name as sent -> digest. expected: engine parameter -> digest of what it must hold. pending: parameters of
    which parts are missing so far, NaN where they are. sound: no update failed in between.
    """

    received: dict[str, str] = field(default_factory=dict)
    expected: dict[str, str] = field(default_factory=dict)
    pending: dict[str, nn.Parameter] = field(default_factory=dict)
    parameters: int = 0
    sound: bool = False
    partial: bool = False


_record = Record()


def begin() -> None:
    """Forget what was received: an update in several requests starts."""
    _record.received.clear()
    _record.expected.clear()
    _record.pending.clear()
    _record.sound = True


def served() -> str | None:
    """Digest of the complete set of weights that was received last; None while it is unknown or incomplete."""
    complete = _record.sound and not _record.pending and 0 < _record.parameters == len(_record.expected)
    return protocol.weights_digest(_record.received) if complete else None


def state(module: nn.Module) -> dict[str, Any]:
    """The answer to `GET /miles_dmd2/weights`: compares every parameter's content with what was sent, now."""
    held = dict(_materialized(module))
    missing = sorted(held.keys() - _record.expected.keys())
    names = sorted(held.keys() & _record.expected.keys())
    with ThreadPoolExecutor(THREADS) as pool:
        digests = dict(zip(names, pool.map(lambda name: _digest(held[name]), names), strict=True))
    wrong = [name for name, digest in _record.expected.items() if digests.get(name) != digest]
    return {
        "digest": None if missing or wrong else served(),
        "tensors": dict(_record.received),
        "missing": missing,
        "wrong": sorted(wrong),
    }


def in_parts(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `WeightsUpdater.update_weights_from_tensor`: one update may come in several requests."""
    _record.partial = True
    if kwargs.get("weight_update_mode") is not None:  # LoRA: merged into the layers without the guard's knowledge
        _record.sound = False
    try:
        return original(self, *args, **kwargs)
    finally:
        _record.partial = False


def changed_by_lora(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND what sets, merges or unmerges an adapter: the weights are no longer those that were received."""
    _record.sound = False
    return original(self, *args, **kwargs)


def guard(original: Callable[..., Any], module: nn.Module, weights_iter: Iterable[tuple[str, Tensor]]) -> None:
    """AROUND `_load_weights_into_module`: ValueError, with nothing changed, for an update that does not fit.

    Other modules than the diffusion transformer pass: text encoders and VAEs are frozen here.
    """
    from sglang.multimodal_gen.runtime.models.dits.base import BaseDiT

    if not isinstance(module, BaseDiT):
        original(module, weights_iter)
        return
    entries = list(weights_iter)
    try:
        if not _record.partial:
            begin()
        _rehearse(module, entries)
        original(module, iter(entries))
    except BaseException:
        _record.sound = False
        raise


def _rehearse(module: nn.Module, entries: list[tuple[str, Tensor]]) -> None:
    """Load into scratch; record what must be held. Raises before anything is recorded if names or values are wrong."""
    parameters = dict(module.named_parameters())
    _record.parameters = len(parameters)
    groups = _by_parameter(module, entries, parameters)

    def load(name: str) -> nn.Parameter | str:
        """The digest of what the parameter will hold; the scratch copy itself while parts are missing."""
        scratch = _loaded(parameters[name], _record.pending.get(name), name, groups[name])
        return scratch if bool(torch.isnan(scratch).any()) else _digest(scratch)

    with ThreadPoolExecutor(THREADS) as pool:
        loaded = dict(zip(groups, pool.map(load, groups), strict=True))
        sent = list(pool.map(lambda entry: _sent_digest(entry[1]), entries))
    finished = {name: digest for name, digest in loaded.items() if isinstance(digest, str)}
    pending = {name: scratch for name, scratch in loaded.items() if not isinstance(scratch, str)}
    absent = sorted(parameters.keys() - groups.keys()) + sorted(pending)
    if absent and not _record.partial:
        raise ValueError(f"{len(absent)} parameters are missing or incomplete: {_some(absent)}")
    for name in finished:
        _record.pending.pop(name, None)
    _record.expected.update(finished)
    _record.pending.update(pending)
    _record.received.update(zip((name for name, _ in entries), sent, strict=True))


def _by_parameter(
    module: nn.Module, entries: list[tuple[str, Tensor]], parameters: dict[str, nn.Parameter]
) -> dict[str, list[tuple[str, Tensor, Any]]]:
    """Engine parameter -> its parts, by SGLang's own mapping of names. ValueError: names or values that are wrong."""
    from sglang.multimodal_gen.runtime.post_training.weights_updater import _build_module_weight_name_mapper

    mapper = _build_module_weight_name_mapper(module) or (lambda name: (name, None))
    buffers = {name for name, _ in module.named_buffers()}
    names = [name for name, _ in entries]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    unknown: list[str] = []
    not_finite: list[str] = []
    groups: dict[str, list[tuple[str, Tensor, Any]]] = {}
    for name, tensor in entries:
        target, part = (name, None) if name in parameters else mapper(name)
        if target in parameters:
            groups.setdefault(target, []).append((name, tensor, part))
        elif name not in buffers and target not in buffers:
            unknown.append(name)
        if not bool(torch.isfinite(tensor).all()):
            not_finite.append(name)
    for what, found in (("come twice", twice), ("are unknown", unknown), ("are not finite", not_finite)):
        if found:
            raise ValueError(f"{len(found)} names {what}: {_some(found)}")
    return groups


def _loaded(
    parameter: nn.Parameter, before: nn.Parameter | None, name: str, parts: list[tuple[str, Tensor, Any]]
) -> nn.Parameter:
    """A copy of the parameter, NaN where no part goes, filled by its own loader."""
    from sglang.multimodal_gen.runtime.post_training.weights_updater import load_weights_into_model

    scratch = before
    if scratch is None:
        scratch = nn.Parameter(torch.full_like(parameter.detach(), float("nan"), device="cpu"), requires_grad=False)
        scratch.__class__ = parameter.__class__
        scratch.__dict__.update(parameter.__dict__)  # the loader and the axes that it reads
    shapes = ", ".join(f"{sent} {list(tensor.shape)}" for sent, tensor, _ in parts)
    try:
        with torch.inference_mode():
            load_weights_into_model(((name, tensor.cpu(), part) for _, tensor, part in parts), {name: scratch})
    except (AssertionError, RuntimeError, ValueError, IndexError) as error:
        raise ValueError(f"{shapes} do not fit {name} {list(parameter.shape)}: {error}") from error
    return scratch


def _materialized(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    from sglang.multimodal_gen.runtime.managers.memory_managers.layerwise_offload import iter_materialized_weights

    return iter_materialized_weights(module)


def _content(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _sent_digest(tensor: Tensor) -> str:
    return protocol.tensor_digest(str(tensor.dtype), list(tensor.shape), _content(tensor))


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(_content(tensor)).hexdigest()


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
