"""Servers of a tiny MiniMax H3, one for each way of serving it; pytest runs the tests of one after the other's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from miles_dmd2.engines.sglang.engine import SGLangEngine, SGLangSettings
from miles_dmd2.engines.sglang.server import ManagedServer, SGLangLaunch
from miles_dmd2.models.minimax_h3 import MiniMaxH3Adapter
from tests import tiny_h3
from tests.sglang import tiny_h3_engine
from tests.sglang.h3.bench import SAME, SERVED, SHORT, SIDE, Ask, Served, body, push
from tests.sglang.raw import Server

START_SECONDS = 240.0


@pytest.fixture(scope="session")
def tiny_python(sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_h3_engine.python_with_tiny_vaes(sglang_python, tmp_path_factory.mktemp("engine") / "of h3")


@pytest.fixture(scope="session")
def native(tiny_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_h3_engine.build(tmp_path_factory.mktemp("h3"), tiny_python)


@pytest.fixture(scope="session", params=SERVED, ids=str)
def served(request: pytest.FixtureRequest) -> Served:
    return request.param


@pytest.fixture(scope="session")
def checkpoint(served: Served, native: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one in diffusers' layout is released as a student of 4 steps is: SGLang then takes no other number itself."""
    if served.layout == "native":
        return native
    root = tiny_h3.tiny_h3(tmp_path_factory.mktemp("h3"), layout=served.layout)
    for vae in ("video_vae", "audio_vae"):
        (root / vae).symlink_to(native / vae, target_is_directory=True)
    index = json.loads((root / "model_index.json").read_text())
    index["_minimax_h3"]["dmd_denoising_steps"] = [1000, 750, 500, 250]
    (root / "model_index.json").write_text(json.dumps(index))
    return root


@pytest.fixture(scope="session")
def running(
    served: Served, checkpoint: Path, tiny_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ManagedServer]:
    serving = MiniMaxH3Adapter(checkpoint, SIDE, SIDE, SHORT).serving
    launch = SGLangLaunch(
        python=tiny_python,
        model=checkpoint,
        model_id=serving.model_id,
        arguments=(*serving.launch_arguments(served.dtype), *tiny_h3_engine.projection(checkpoint)),
        log=tmp_path_factory.mktemp("logs") / f"{served}.log",
        start_timeout=START_SECONDS,
        threads=1,
    )
    with ManagedServer(launch) as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def checkpoint_weights(running: ManagedServer, checkpoint: Path, served: Served) -> None:
    """Received through an update: other modules leave others on this server."""
    adapter = MiniMaxH3Adapter(checkpoint, SIDE, SIDE, SHORT)
    engine = SGLangEngine(adapter, [running], SGLangSettings(forward_dtype=served.dtype))
    push(engine, adapter, served)
    engine.close()


@pytest.fixture
def raw(running: ManagedServer) -> Server:
    return Server(running.url)


@pytest.fixture(scope="session")
def adapter(checkpoint: Path) -> MiniMaxH3Adapter:
    return MiniMaxH3Adapter(checkpoint, SIDE, SIDE, SHORT)


@pytest.fixture(scope="session")
def student(adapter: MiniMaxH3Adapter, served: Served) -> nn.Module:
    return adapter.load_transformer(served.torch_dtype).requires_grad_(False)


@pytest.fixture
def close(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    def compare(found: Tensor, expected: Tensor) -> None:
        record_property("difference", (found - expected).abs().max().item())
        torch.testing.assert_close(found, expected, rtol=0, atol=SAME)

    return compare


@pytest.fixture
def ask(raw: Server, adapter: MiniMaxH3Adapter) -> Ask:
    """A rollout without decoding; `stop` or the whole."""

    def request(stop: int | None, **fields: object) -> dict[str, Any]:
        return raw.exchange(body(adapter, stop, **fields))

    return request
