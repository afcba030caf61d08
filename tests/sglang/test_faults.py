"""Nothing wrong gets through: a real server behind a proxy that spoils replies, and a server that is killed.

Every test compares with samples that nothing happened to, bit for bit.
"""

import json
import os
import random
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_dmd2.engines.base import EngineError
from miles_dmd2.engines.sglang.engine import SGLangEngine, SGLangSettings
from miles_dmd2.engines.sglang.server import ManagedServer
from miles_dmd2.models.qwen_image import QwenImageAdapter
from miles_dmd2.types import RolloutSample, WeightVersion
from tests.engines.contract import Harness, all_equal
from tests.sglang.proxy import Proxy, Spoil
from tests.tiny_qwen import PROMPTS, SIZE

pytestmark = pytest.mark.sglang

STOPS = (3, 0, 2, 1, 3, 0, 1, 2, 0, 3, 1, 2)


@pytest.fixture(scope="module")
def adapter(qwen_pipeline: Path) -> QwenImageAdapter:
    return QwenImageAdapter(qwen_pipeline, SIZE, SIZE)


def harness_of(adapter: QwenImageAdapter, engine: SGLangEngine) -> Harness:
    return Harness(engine, adapter, adapter.load_transformer().requires_grad_(False), PROMPTS, exact=False)


@pytest.fixture(scope="module")
def undisturbed(server: ManagedServer, adapter: QwenImageAdapter) -> list[RolloutSample]:
    """Samples of student 1, straight from the server."""
    engine = SGLangEngine(adapter, [server])
    harness = harness_of(adapter, engine)
    harness.load(1)
    samples = engine.generate(harness.requests(*STOPS))
    engine.close()
    return samples


@pytest.fixture
def proxy(server: ManagedServer) -> Iterator[Proxy]:
    with Proxy(server) as running:
        yield running


@pytest.fixture
def harness(proxy: Proxy, adapter: QwenImageAdapter) -> Iterator[Harness]:
    engine = SGLangEngine(adapter, [proxy], SGLangSettings(attempts=100, request_timeout=60.0))
    harness = harness_of(adapter, engine)
    harness.load(1)
    yield harness
    engine.close()


@pytest.mark.parametrize("how", ["truncate", "drop", "lose", "double", "stale"])
def test_spoilt_replies_are_asked_for_again(
    harness: Harness, proxy: Proxy, undisturbed: list[RolloutSample], how: str
) -> None:
    proxy.script += [None, Spoil(how)] * 6
    before = proxy.rollouts
    assert all_equal(harness.engine.generate(harness.requests(*STOPS)), undisturbed)
    assert proxy.spoilt[how] == 6
    faults = harness.engine.faults
    assert (faults["restarts"], faults["dropped"]) == (0, 0)
    assert faults["faults"] == faults["retries"] == proxy.rollouts - before - 12
    assert (how == "double") == (faults["faults"] == 0)  # read once; the connection with the other is not used again


def test_no_bit_can_be_wrong(harness: Harness, proxy: Proxy, undisturbed: list[RolloutSample]) -> None:
    """From the status line to the last number: every attempt is spoilt somewhere else."""
    places = [(i + 0.5) / 48 for i in range(48)]
    random.Random(0).shuffle(places)
    for start in range(0, 48, 12):
        proxy.script += [spoil for at in places[start : start + 12] for spoil in (Spoil("flip", at), None)]
        assert all_equal(harness.engine.generate(harness.requests(*STOPS)), undisturbed)
        proxy.script.clear()
    assert proxy.spoilt["flip"] >= 40


def test_a_late_reply_is_not_waited_for(
    proxy: Proxy, adapter: QwenImageAdapter, undisturbed: list[RolloutSample]
) -> None:
    engine = SGLangEngine(adapter, [proxy], SGLangSettings(request_timeout=8.0))
    harness = harness_of(adapter, engine)
    harness.load(1)
    proxy.script += [None, None, Spoil("delay", seconds=30.0)]
    start = time.monotonic()
    assert all_equal(engine.generate(harness.requests(*STOPS)), undisturbed)
    assert 8 < time.monotonic() - start < 30
    assert engine.faults == {"faults": 1, "retries": 1, "restarts": 0, "dropped": 0}
    engine.close()


def test_all_of_it_at_once(harness: Harness, proxy: Proxy, undisturbed: list[RolloutSample]) -> None:
    chance = random.Random(1)
    kinds = ("truncate", "drop", "lose", "double", "stale", "flip")
    for _ in range(3):
        proxy.script.clear()
        proxy.script += [Spoil(chance.choice(kinds), chance.random()) if chance.random() < 0.5 else None for _ in STOPS]
        proxy.script += [None, *(Spoil(kind) for kind in kinds)]
        assert all_equal(harness.engine.generate(harness.requests(*STOPS)), undisturbed)
    assert all(proxy.spoilt[kind] >= 3 for kind in kinds)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def worker_of(server: ManagedServer) -> int:
    with urllib.request.urlopen(f"{server.url}/miles_dmd2/capabilities", timeout=30) as answer:
        return int(json.load(answer)["worker"]["pid"])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["server", "worker"])
def test_a_killed_server_is_started_again_gets_the_weights_and_goes_on(
    server: ManagedServer, adapter: QwenImageAdapter, undisturbed: list[RolloutSample], victim: str
) -> None:
    engine = SGLangEngine(adapter, [server], SGLangSettings(attempts=5))
    harness = harness_of(adapter, engine)
    harness.load(1)
    pid = worker_of(server) if victim == "worker" else server.pid
    assert pid is not None
    before = server.launch_id
    threading.Timer(0.1, kill, [pid]).start()
    samples: list[RolloutSample] = []
    while server.launch_id == before:  # it may be done before it is killed
        samples = engine.generate(harness.requests(*STOPS))
        assert all_equal(samples, undisturbed)
    assert engine.faults["restarts"] == 1
    assert samples[0].weight_version == WeightVersion(1)
    harness.load(2)
    assert engine.generate(harness.requests(0))[0].weight_version == WeightVersion(2)
    engine.close()


def test_when_all_are_dead_the_error_says_why(harness: Harness, proxy: Proxy) -> None:
    proxy.dead = True
    with pytest.raises(EngineError, match="all 1 rollout engines are dead") as caught:
        harness.engine.generate(harness.requests(*STOPS))
    assert f"{proxy.url}: cannot be started again: the proxy is dead" in str(caught.value)
    assert "its log ends with" in str(caught.value)
