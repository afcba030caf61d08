"""Weights on their way to SGLang servers: what is sent, how, and what proves that it arrived.

Proof needs the plugin. Its digest says that every parameter of the engine came from this update and still has its
content; the probe says that they compute what the exporter's network computes. A stock server offers neither: names,
shapes and values are checked here before anything is sent, and its "success" is taken for one.
"""

from __future__ import annotations

import base64
import io
import os
import pickle
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing import reductions

from miles_dmd2.config.sglang import SHARED_MEMORY
from miles_dmd2.engines.base import EngineError
from miles_dmd2.engines.sglang.wire import WireError
from miles_dmd2.engines.sglang_plugin.protocol import tensor_digest, weights_digest
from miles_dmd2.private_directory import abandoned, private_directory
from miles_dmd2.types import WeightUpdate

MODULE = "transformer"
BUCKET_BYTES = 512 * 2**20  # of weights in one request
_PREFIX = "md2-weights-"
_ALIGNMENT = 256  # bytes, of each tensor in a bucket on a GPU: what the allocator itself gives
_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Push:
    """One set of weights, ready to be sent to any server, any number of times.

    update: without its payload. digests: name as sent -> digest; digest: of the set. The weights are in `directory`
    ("disk") or `tensors` (on the CPU). predicted: see `ServingFormat.predicted`; None: not to be compared.
    """

    update: WeightUpdate
    digests: Mapping[str, str]
    digest: str
    directory: Path | None = None
    tensors: Mapping[str, Tensor] | None = None
    predicted: tuple[str, int] | None = None


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> the digest of its content, as the plugin computes it. Hashing leaves the interpreter's lock."""
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        return dict(zip(tensors, threads.map(_digest, tensors.values()), strict=True))


def in_memory(update: WeightUpdate, tensors: Mapping[str, Tensor]) -> Push:
    """For "tensor": a copy of everything in host memory, so that a server can get it again."""
    copies = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}
    digests = digests_of(copies)
    return Push(replace(update, payload=None), digests, weights_digest(digests), tensors=copies)


def on_disk(update: WeightUpdate, tensors: Mapping[str, Tensor], store: WeightStore) -> Push:
    """For "disk": written to a new directory of the store."""
    host = {name: value.detach().to("cpu").contiguous() for name, value in tensors.items()}
    digests = digests_of(host)
    directory = store.write(str(update.version), host)
    return Push(replace(update, payload=None), digests, weights_digest(digests), directory=directory)


def bodies(push: Push, shared_device: str | None = None) -> Iterator[dict[str, object]]:
    """Requests of `POST /update_weights_from_tensor`, a bucket each, by value.

    shared_device: the CUDA device that this process and the server share. Then a bucket is copied to it, flat, and the
    request names its memory (CUDA IPC): take the next one after the last reply, until then the server may read there.
    """
    assert push.tensors is not None
    for names in _buckets(push.tensors):
        named = {name: push.tensors[name] for name in names}
        body: dict[str, object] = {"target_modules": [MODULE]}
        if shared_device is None:
            body["serialized_named_tensors"] = [_by_value(list(named.items()))]
        else:
            device = torch.device(shared_device)
            bucket = _on_one_storage(named, device)
            body["serialized_named_tensors"] = [_by_handle(list(bucket.items()))]
            body["payload_gpu_uuids"] = [_uuid(device)]
        yield body


def check_report(push: Push, report: object) -> None:
    """The answer of `GET /miles_dmd2/weights` against what was sent. EngineError: what differs, by name."""
    if not isinstance(report, dict) or not isinstance(report.get("tensors"), dict):
        raise WireError(f"the report of the weights cannot be read: {type(report).__name__}")
    arrived = report["tensors"]
    found = {
        "parameters of the engine were sent nothing": report.get("missing") or [],
        "parameters of the engine hold something else": report.get("wrong") or [],
        "were dropped on the way": sorted(push.digests.keys() - arrived.keys()),
        "arrived that were not sent": sorted(arrived.keys() - push.digests.keys()),
        "arrived changed": sorted(n for n, digest in push.digests.items() if arrived.get(n, digest) != digest),
    }
    problems = [f"{len(names)} {what}: {_some(names)}" for what, names in found.items() if names]
    if report.get("digest") != push.digest and not problems:
        problems = [f"its digest is {report.get('digest')}, sent was {push.digest}"]
    if problems:
        raise EngineError(f"weights {push.update.version} refused: {'; '.join(problems)}")


def check_checksum(push: Push, answer: Mapping[str, object]) -> None:
    """The answer of `POST /get_weights_checksum` against the prediction. EngineError: right names, wrong layout."""
    assert push.predicted is not None
    if answer.get(MODULE) != push.predicted[0]:
        raise EngineError(
            f"weights {push.update.version} refused: the engine's checksum is {answer.get(MODULE)}, predicted was "
            f"{push.predicted[0]}: names and shapes fit, but the engine holds them in another order"
        )


def check_parameters(predicted: int, counted: int | None) -> None:
    """EngineError: the engine has another number of values than the trainer, so its checksum cannot be compared."""
    if counted != predicted:
        raise EngineError(
            f"the engine's transformer has {counted} values, the checkpoint's {predicted}: it is another one, or split "
            "over devices, where SGLang's checksum is of one part; start the server on one device"
        )


class WeightStore:
    """Directories of weights that servers read, one per update, in one directory that nobody else writes to.

    It is removed by `close`, or by the next store in the same place if this process is killed: whoever still lives
    holds a lock on it.
    """

    def __init__(self, directory: Path | None, update_bytes: int) -> None:
        """directory: None for the default. update_bytes: of one update. EngineError: no room for two of them."""
        place = directory
        try:
            place = _place(directory, 2 * update_bytes)
            for left in abandoned(_PREFIX, place):
                shutil.rmtree(left, ignore_errors=True)
            self._held = ExitStack()
            self._root = self._held.enter_context(private_directory(_PREFIX, place))
        except OSError as error:
            raise EngineError(f"--sglang-weight-directory {place}: cannot be used: {error}") from error

    @property
    def root(self) -> Path:
        return self._root

    def write(self, version: str, tensors: Mapping[str, Tensor]) -> Path:
        """The directory, complete from the moment it has its name. EngineError: not enough room, nothing is left."""
        directory = self._root / f"{version.replace('@', '-')}-{secrets.token_hex(4)}"
        partial = self._root / f"{directory.name}.partial"
        try:
            (partial / MODULE).mkdir(parents=True)
            save_file(dict(tensors), partial / MODULE / "diffusion_pytorch_model.safetensors")
            partial.rename(directory)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, Exception):
                raise EngineError(
                    f"weights {version} refused: cannot write them to {self._root}: {error}; give another "
                    "--sglang-weight-directory"
                ) from error
            raise
        return directory

    def remove(self, directory: Path) -> None:
        shutil.rmtree(directory)

    def close(self) -> None:
        self._held.close()


def _place(directory: Path | None, needed: int) -> Path:
    candidates = [directory] if directory is not None else [SHARED_MEMORY, Path(tempfile.gettempdir())]
    free: dict[Path, int] = {}
    for candidate in candidates:
        if directory is not None:
            candidate.mkdir(parents=True, exist_ok=True)
        if candidate.is_dir() and os.access(candidate, os.W_OK):
            free[candidate] = shutil.disk_usage(candidate).free
            if free[candidate] >= needed:
                return candidate
    rooms = ", ".join(f"{place} has {room / 2**30:.2f}" for place, room in free.items()) or "none can be written to"
    raise EngineError(
        f"--sglang-weight-directory: two copies of the weights need {needed / 2**30:.2f} GiB, {rooms}: "
        "give a directory with more room"
    )


def _digest(tensor: Tensor) -> str:
    flat = tensor.reshape(-1).clone()  # numpy() forbids resizing its storage for good, and the caller may want to
    return tensor_digest(str(tensor.dtype), list(tensor.shape), flat.view(torch.uint8).numpy().data)


def _buckets(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names in their order, so many at a time that they have at most BUCKET_BYTES, or one that has more."""
    names: list[str] = []
    size = 0
    for name, value in tensors.items():
        if names and size + value.nbytes > BUCKET_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += value.nbytes
    if names:
        yield names


def _by_value(named: Sequence[tuple[str, Tensor]]) -> str:
    """Pickle carries a tensor's whole storage, so each gets one of its size. The server reads it with an allow-list."""
    return base64.b64encode(pickle.dumps([(name, tensor.detach().clone()) for name, tensor in named])).decode()


def _on_one_storage(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copies on a GPU, all in one storage: one IPC handle for the whole bucket."""
    offsets: dict[str, int] = {}
    end = 0
    for name, value in tensors.items():
        offsets[name] = end
        end += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
    flat = torch.empty(end, dtype=torch.uint8, device=device)
    views: dict[str, Tensor] = {}
    for name, value in tensors.items():
        place = flat[offsets[name] : offsets[name] + value.nbytes]
        views[name] = place.view(value.dtype).view(value.shape).copy_(value)
    torch.cuda.synchronize(device)
    return views


class _HandlePickler(pickle.Pickler):
    """CUDA tensors as IPC handles that name their GPU by its UUID: the server may number the GPUs in another way."""

    def reducer_override(self, obj: object) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(obj)
        # The seventh argument of rebuild_cuda_tensor is the device; SGLang's own senders replace it in the same way.
        return rebuild, (*arguments[:6], _uuid(obj.device), *arguments[7:])


def _by_handle(named: list[tuple[str, Tensor]]) -> str:
    buffer = io.BytesIO()
    _HandlePickler(buffer).dump(named)
    return base64.b64encode(buffer.getvalue()).decode()


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMES_SHOWN]) + (
        f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    )
