"""Weights of a tiny MiniMax H3 on their way to real servers that were started on either layout."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from miles_dmd2.engines.base import EngineError
from miles_dmd2.engines.sglang.engine import SGLangEngine, SGLangSettings
from miles_dmd2.engines.sglang.environment import engine_environment
from miles_dmd2.engines.sglang.server import ManagedServer
from miles_dmd2.engines.sglang_plugin import protocol
from miles_dmd2.models import minimax_h3_weights as layout
from miles_dmd2.models.minimax_h3 import MiniMaxH3Adapter
from miles_dmd2.models.minimax_h3_serving import MiniMaxH3Serving
from tests.sglang.h3.bench import (
    GRID,
    SERVED,
    SHORT,
    SIDE,
    UPDATE,
    WRONG,
    Ask,
    Served,
    cond_of,
    latents,
    levels,
    live_checksum,
    push,
    velocity,
    weights_of,
    write,
)
from tests.sglang.raw import Server, content

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("sync", ["disk", "tensor"])
def test_new_weights_are_served_and_their_checksum_is_the_predicted_one(
    raw: Server,
    running: ManagedServer,
    ask: Ask,
    adapter: MiniMaxH3Adapter,
    served: Served,
    close: Callable[..., None],
    sync: Any,
) -> None:
    ask(2)  # whatever the engine keeps of this prompt must not outlive the weights
    settings = SGLangSettings(forward_dtype=served.dtype, weight_sync=sync)
    engine = SGLangEngine(adapter, [running], settings)
    student = push(engine, adapter, served, 0.05)
    predicted = layout.engine_checksum(layout.engine_tensors(weights_of(adapter, 0.05), adapter.config, served.dtype))
    assert live_checksum(raw) == predicted
    arrived = raw.json("/miles_dmd2/weights")["tensors"]  # in bf16 what the engine holds in bf16: half the bytes
    for sent, name, held in (
        ("blocks.0.norm1.weight", "transformer_blocks.0.norm1.weight", served.torch_dtype),
        ("video_patch_proj.bias", "proj_in.bias", torch.float32),
    ):
        value = weights_of(adapter, 0.05)[name].to(held)
        assert arrived[sent] == protocol.tensor_digest(str(held), list(value.shape), content(value))
    reply = ask(2)
    x_k, x0 = latents(reply)
    close(x0, x_k - levels(adapter, GRID[2]) * velocity(adapter, student, cond_of(adapter, reply), x_k, GRID[2]))
    push(engine, adapter, served)
    engine.close()
    assert live_checksum(raw) != predicted


class Careless(MiniMaxH3Serving):
    """Sends the other engine's layout: right names, right shapes."""

    def weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return layout.to_native(tensors, self._config, grouped=not self._native)


def test_the_wrong_layout_loads_and_is_caught_by_the_checksum(
    raw: Server,
    running: ManagedServer,
    ask: Ask,
    adapter: MiniMaxH3Adapter,
    served: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """SGLang answers success; what it serves is another network."""
    engine = SGLangEngine(adapter, [running], SGLangSettings(forward_dtype=served.dtype, probe_tolerance=1e9))
    push(engine, adapter, served)
    before, good = latents(ask(2)), live_checksum(raw)
    wrong = layout.to_native(weights_of(adapter), adapter.config, grouped=served.layout != "native")
    answer = raw.json(UPDATE, write(tmp_path / "wrong", wrong))
    assert answer["success"]
    assert raw.json("/miles_dmd2/weights")["wrong"] == []  # it holds what was sent
    assert live_checksum(raw) != good
    difference = (latents(ask(2))[0] - before[0]).abs().max().item()
    record_property("difference", difference)
    assert difference > WRONG
    careless = Careless(adapter.canvas, 5120, adapter.config, native=served.layout == "native")
    monkeypatch.setattr(MiniMaxH3Adapter, "serving", careless)
    with pytest.raises(EngineError, match=r"the engine's checksum is [0-9a-f]{64}, predicted was"):
        push(engine, adapter, served)
    monkeypatch.undo()
    push(engine, adapter, served)
    engine.close()
    assert live_checksum(raw) == good
    assert torch.equal(latents(ask(2)), before)


def test_diffusers_own_names_are_no_silent_success(
    raw: Server, ask: Ask, adapter: MiniMaxH3Adapter, served: Served, tmp_path: Path
) -> None:
    """A native engine refuses them; one started on that layout takes them, SwiGLU halves the wrong way round."""
    good, before = live_checksum(raw), latents(ask(2))
    tensors = {**weights_of(adapter), layout.ROPE: layout.TransformerShape.of(adapter.config).rope()}
    status, _, _ = raw.call(UPDATE, write(tmp_path / "diffusers", tensors))
    if served.layout == "native":
        assert status == 400
        assert live_checksum(raw) == good
        assert torch.equal(latents(ask(2)), before)
    else:
        assert status == 200
        assert live_checksum(raw) != good
        assert (latents(ask(2))[0] - before[0]).abs().max() > WRONG
        right = layout.to_native(weights_of(adapter), adapter.config, grouped=False)
        assert raw.json(UPDATE, write(tmp_path / "right", right))["success"]
        assert live_checksum(raw) == good


@pytest.mark.parametrize("fault", ["missing", "unknown", "NaN"])
def test_a_wrong_update_is_refused_and_changes_nothing(
    raw: Server, ask: Ask, adapter: MiniMaxH3Adapter, tmp_path: Path, fault: str
) -> None:
    good = adapter.serving.weights(weights_of(adapter))
    assert raw.json(UPDATE, write(tmp_path / "good", good))["success"]
    before = latents(ask(2))
    tensors = adapter.serving.weights(weights_of(adapter, 0.05))
    name = "blocks.1.attn.qkv_proj.weight"
    if fault == "missing":
        del tensors[name]
    elif fault == "unknown":
        tensors["nobody"] = torch.zeros(2)
    else:
        tensors[name].view(-1)[0] = float("nan")
    status, text, _ = raw.call(UPDATE, write(tmp_path / "bad", tensors))
    assert status == 400
    assert {"missing": name, "unknown": "nobody", "NaN": "not finite"}[fault] in text.decode()
    assert torch.equal(latents(ask(2)), before)
    digests = {n: protocol.tensor_digest(str(t.dtype), list(t.shape), content(t)) for n, t in good.items()}
    assert raw.json(UPDATE, write(tmp_path / "again", good))["success"]
    assert raw.json("/miles_dmd2/weights")["digest"] == protocol.weights_digest(digests)


CONVERT = """
import sys
from safetensors.torch import load_file, save_file
from sglang.multimodal_gen.runtime.models.dits.minimax_h3 import _diffusers_h3_checkpoint
converted = _diffusers_h3_checkpoint(load_file(sys.argv[1]).items())
save_file({name: value.contiguous() for name, value in converted}, sys.argv[2])
"""


@pytest.mark.parametrize("served", SERVED[:1], ids=str, indirect=True, scope="session")
def test_our_names_and_layout_are_those_of_sglangs_own_converter(
    native: Path, sglang_python: Path, tmp_path: Path
) -> None:
    adapter = MiniMaxH3Adapter(native, SIDE, SIDE, SHORT)
    ours = weights_of(adapter, 0.05)
    save_file(ours, tmp_path / "in.safetensors")
    command = [sglang_python, "-c", CONVERT, tmp_path / "in.safetensors", tmp_path / "out.safetensors"]
    subprocess.run(command, check=True, env=engine_environment(sglang_python), timeout=240)
    theirs, converted = load_file(tmp_path / "out.safetensors"), layout.to_native(ours, adapter.config, grouped=False)
    assert theirs.keys() == converted.keys() - {layout.ROPE}
    assert all(torch.equal(value, converted[name]) for name, value in theirs.items())
    said = subprocess.run(
        [
            sglang_python,
            "-c",
            "from sglang.multimodal_gen.runtime.models.dits.minimax_h3 import MINIMAX_H3_FP32_PARAM_NAMES as names;"
            "print(*sorted(names))",
        ],
        check=True,
        env=engine_environment(sglang_python),
        timeout=240,
        capture_output=True,
        text=True,
    ).stdout
    assert set(said.split()) == layout.FP32_NAMES - {layout.ROPE}
