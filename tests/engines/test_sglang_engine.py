"""The SGLang engine over fake servers: the contract, scheduling, deadlines, retries, restarts, stock servers."""

import dataclasses
import logging
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from miles_dmd2.algo import sigma_grid
from miles_dmd2.engines.base import EngineError
from miles_dmd2.engines.sglang.engine import SGLangEngine, SGLangSettings
from miles_dmd2.models.qwen_image import QwenImageAdapter
from miles_dmd2.types import RolloutSample, WeightVersion
from tests.engines.contract import GRID, EngineContract, Harness, all_equal, real_latents
from tests.engines.fake_sglang import FakeSGLang, Fault, running
from tests.tiny_qwen import PROMPTS, SIZE


@pytest.fixture(scope="module")
def adapter(tiny_qwen: Path) -> QwenImageAdapter:
    return QwenImageAdapter(tiny_qwen, SIZE, SIZE)


def harness_of(adapter: QwenImageAdapter, engine: SGLangEngine, *fakes: FakeSGLang) -> Harness:
    reference = adapter.load_transformer().requires_grad_(False)
    return Harness(engine, adapter, reference, PROMPTS, exact=False, decodes=lambda: sum(f.decoded for f in fakes))


@pytest.fixture(scope="module", params=["disk", "tensor"])
def contract(adapter: QwenImageAdapter, request: pytest.FixtureRequest) -> Iterator[Harness]:
    torch.set_num_threads(1)
    with running(FakeSGLang(adapter), FakeSGLang(adapter)) as fakes:
        settings = SGLangSettings(weight_sync=request.param)
        engine = SGLangEngine(adapter, fakes, settings, real_latents=real_latents(adapter))
        yield harness_of(adapter, engine, *fakes)
        engine.close()


class TestSGLangOverFake(EngineContract):
    @pytest.fixture
    def harness(self, contract: Harness) -> Harness:
        return contract


# -- one engine for a test -----------------------------------------------------------------------------------

Start = Callable[..., Harness]


@pytest.fixture
def start(adapter: QwenImageAdapter) -> Iterator[Start]:
    """start(fakes, load=step, **settings): an engine over these servers, with weights; all are stopped afterwards."""
    servers: list[FakeSGLang] = []
    engines: list[SGLangEngine] = []

    def begin(*fakes: FakeSGLang, load: int | None = 1, version: WeightVersion | None = None, **settings: object):
        for fake in fakes:
            servers.append(fake)
            fake.start()
        engine = SGLangEngine(adapter, fakes, SGLangSettings(**settings), checkpoint_version=version)
        engines.append(engine)
        harness = harness_of(adapter, engine, *fakes)
        if load is not None:
            harness.load(load)
        return harness

    yield begin
    for engine in engines:
        engine.close()
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def undisturbed(adapter: QwenImageAdapter) -> list[RolloutSample]:
    """Samples 10..21 of student 1, by one server that nothing happens to."""
    with running(FakeSGLang(adapter)) as fakes:
        engine = SGLangEngine(adapter, fakes)
        harness = harness_of(adapter, engine)
        harness.load(1)
        samples = engine.generate(harness.requests(*STOPS))
        engine.close()
    return samples


STOPS = (3, 0, 2, 1, 3, 0, 1, 2, 0, 3, 1, 2)


def wrong_seed(reply: dict) -> None:
    reply["seed"] += 1


def ctrl_c(reply: object = None) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def flip(body: bytes) -> bytes:
    """One bit in the middle, which is inside a latent's numbers or a name."""
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]


# -- who gets what -------------------------------------------------------------------------------------------


def test_one_server_gets_the_requests_in_their_order(adapter: QwenImageAdapter, start: Start) -> None:
    fake = FakeSGLang(adapter)
    harness = start(fake, max_in_flight=1)
    harness.engine.generate(harness.requests(*STOPS))
    assert [body["seed"] for body in fake.requests] == [510 + i for i in range(12)]
    assert fake.most_in_flight == 1


@pytest.mark.parametrize("bound", [2, 3])
def test_no_server_has_more_requests_than_the_bound(adapter: QwenImageAdapter, start: Start, bound: int) -> None:
    fakes = FakeSGLang(adapter), FakeSGLang(adapter)
    for fake in fakes:
        fake.always = Fault(pause=0.1)
    harness = start(*fakes, max_in_flight=bound)
    harness.engine.generate(harness.requests(*STOPS))
    assert [fake.most_in_flight for fake in fakes] == [bound, bound]


def test_the_least_loaded_server_comes_first(
    adapter: QwenImageAdapter, start: Start, undisturbed: list[RolloutSample]
) -> None:
    """The slow one holds its two while the other does the rest."""
    slow, fast = FakeSGLang(adapter), FakeSGLang(adapter)
    ten_done = threading.Event()
    slow.always = Fault(edit=lambda reply: ten_done.wait(60))
    fast.always = Fault(edit=lambda reply: len(fast.requests) == 10 and ten_done.set())
    harness = start(slow, fast)
    assert all_equal(harness.engine.generate(harness.requests(*STOPS)), undisturbed)
    assert [body["seed"] for body in slow.requests] == [510, 512]  # in turns at first
    assert len(fast.requests) == 10


def test_training_skips_the_decode_and_eval_always_decodes(adapter: QwenImageAdapter, start: Start) -> None:
    fake = FakeSGLang(adapter)
    harness = start(fake)
    training = harness.engine.generate(harness.requests(0, 1, 2))
    assert fake.decoded == 0
    assert {body["rollout_return_generated_output"] for body in fake.requests} == {False}
    pictures = harness.engine.generate(harness.requests(3, 3, 3, decode=True))
    assert fake.decoded == 3
    assert {body["rollout_return_generated_output"] for body in fake.requests[3:]} == {True}
    assert [sample.media is None for sample in [*training, *pictures]] == [True] * 3 + [False] * 3


def test_a_server_without_the_plugin_is_not_asked_for_what_it_cannot_do(
    adapter: QwenImageAdapter, start: Start
) -> None:
    fake = FakeSGLang(adapter, plugin=False)
    harness = start(fake)
    harness.engine._real_latents = real_latents(adapter)
    first, second = harness.requests(0, 1)
    for fields in ({"sample_type": "sde"}, {"real_latent": 0}):
        with pytest.raises(EngineError, match=f"sample {second.sample_id}: .* from noise by Euler steps only"):
            harness.engine.generate([first, dataclasses.replace(second, **fields)])
    assert fake.requests == []


def test_a_prompt_is_asked_for_its_conditioning_once(adapter: QwenImageAdapter, start: Start) -> None:
    fake = FakeSGLang(adapter)
    harness = start(fake, prompt_cache_size=2, max_in_flight=1)
    asked = lambda: [b["prompt"] for b in fake.requests if b["rollout_return_denoising_env"]]  # noqa: E731
    first, second, third = PROMPTS
    harness.prompts = (first, second)
    harness.engine.generate(harness.requests(0, 0, 0, 0))
    assert asked() == [first, second]
    harness.engine.generate(harness.requests(0))  # uses the first again: the second is now the oldest
    harness.engine.conditioning([first])
    harness.prompts = (third,)
    harness.engine.generate(harness.requests(0))
    harness.prompts = PROMPTS
    assert len(harness.engine.generate(harness.requests(0, 0, 0))) == 3  # more prompts than the cache holds
    assert asked() == [first, second, third, second]
    assert {tuple(b.get("rollout_conditioning", ())) for b in fake.requests} == {(), ("encoder_hidden_states",)}


def test_each_sample_owns_its_bytes(adapter: QwenImageAdapter, start: Start) -> None:
    harness = start(FakeSGLang(adapter))
    for sample in harness.engine.generate(harness.requests(1, 1, decode=True)):
        for value in (sample.x_k, sample.x0, sample.media, *sample.cond.values()):
            assert value.untyped_storage().nbytes() == value.nbytes


# -- faults of one attempt -----------------------------------------------------------------------------------

DEADLINE = 3.0  # seconds, for tests of deadlines: longer than a busy machine stalls

FAULTS = {
    "500": Fault(status=500),
    "redirect": Fault(status=302),
    "503 on a healthy server": Fault(status=503),
    "connection dropped": Fault(action="drop"),
    "reply cut short": Fault(action="truncate"),
    "a bit flipped": Fault(body=flip),
    "another request's reply": Fault(edit=wrong_seed),
    "a byte more, and its digest": Fault(body=lambda body: body + b"\0", sealed=True),
    "doubled": Fault(body=lambda body: b"\x92" + body[1:] * 2, sealed=True),
    "late": Fault(pause=DEADLINE + 0.2),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("servers", [1, 2])
def test_a_failed_attempt_is_made_again_with_the_same_seed(
    adapter: QwenImageAdapter, start: Start, undisturbed: list[RolloutSample], name: str, servers: int
) -> None:
    """On the other server, if there is one."""
    fakes = [FakeSGLang(adapter) for _ in range(servers)]
    harness = start(*fakes, max_in_flight=1, request_timeout=DEADLINE if name == "late" else 60.0)
    fakes[0].script.append(FAULTS[name])
    assert all_equal(harness.engine.generate(harness.requests(*STOPS)), undisturbed)
    assert harness.engine.faults == {"faults": 1, "retries": 1, "restarts": 0, "dropped": 0}
    failed, again = (
        [body for fake in which for body in fake.requests if body["seed"] == 510] for which in (fakes[:1], fakes[-1:])
    )
    assert len(again) == (2 if servers == 1 else 1)
    assert servers == 2 or fakes[0].requests[1]["seed"] == 510  # before those that wait
    first, second = failed[0], again[-1]
    assert first.pop("rollout_client_id") != second.pop("rollout_client_id")
    assert first == second


def test_what_a_server_refuses_is_not_tried_again(adapter: QwenImageAdapter, start: Start) -> None:
    fakes = FakeSGLang(adapter), FakeSGLang(adapter)
    fakes[0].always = fakes[1].always = Fault(status=422)
    harness = start(*fakes)
    with pytest.raises(EngineError, match=r"sample 10: http://127\S+ refused .*answered 422: scripted"):
        harness.engine.generate(harness.requests(1))
    assert sum(len(fake.requests) for fake in fakes) == 1


def test_after_the_last_attempt_every_reason_is_told(adapter: QwenImageAdapter, start: Start) -> None:
    fakes = FakeSGLang(adapter), FakeSGLang(adapter)
    harness = start(*fakes, max_in_flight=1)
    urls = [fake.url for fake in fakes]
    fakes[0].script += [Fault(edit=wrong_seed), Fault(status=500)]
    fakes[1].script += [Fault(body=flip)]
    with pytest.raises(EngineError, match="sample 10 failed 3 times") as caught:
        harness.engine.generate(harness.requests(1))
    message = str(caught.value)
    assert f"1. {urls[0]}: seed is 511, expected 510" in message
    assert f"2. {urls[1]}: the reply's" in message
    assert "3. http" in message
    assert "500: scripted" in message
    assert harness.engine.faults == {"faults": 3, "retries": 2, "restarts": 0, "dropped": 0}


def test_faults_all_over_lose_and_double_nothing(
    adapter: QwenImageAdapter, start: Start, undisturbed: list[RolloutSample]
) -> None:
    chance = random.Random(0)
    fakes = FakeSGLang(adapter), FakeSGLang(adapter), FakeSGLang(adapter)
    quick = [fault for name, fault in FAULTS.items() if name != "late"]
    for fake in fakes:
        fake.script += [chance.choice(quick) if chance.random() < 0.4 else Fault() for _ in range(40)]
    harness = start(*fakes, attempts=20)
    for _ in range(3):
        assert all_equal(harness.engine.generate(harness.requests(*STOPS)), undisturbed)
    assert harness.engine.forward_count == 3 * sum(stop + 1 for stop in STOPS)
    faults = harness.engine.faults
    assert faults["faults"] == faults["retries"] == sum(len(fake.requests) for fake in fakes) - 36 >= 10


# -- dead servers --------------------------------------------------------------------------------------------

DEATHS = {
    "killed": Fault(action="die"),
    "its worker died": Fault(action="sicken"),
    "stuck": Fault(action="hang"),
}


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("sync", ["disk", "tensor"])
def test_a_dead_server_is_started_again_gets_the_weights_and_goes_on(
    adapter: QwenImageAdapter, start: Start, undisturbed: list[RolloutSample], death: str, sync: str
) -> None:
    fake = FakeSGLang(adapter, managed=True)
    harness = start(fake, weight_sync=sync, request_timeout=DEADLINE if death == "stuck" else 60.0)
    before = fake.url
    fake.script += [Fault(), Fault(), DEATHS[death]]
    assert all_equal(harness.engine.generate(harness.requests(*STOPS)), undisturbed)
    assert fake.starts == 2
    assert fake.url != before
    assert fake.calls.count("capabilities") == 2  # one handshake for each start
    assert fake.calls.count("weights") == 2
    assert harness.engine.faults["restarts"] == 1
    assert all_equal(harness.engine.generate(harness.requests(*STOPS)), undisturbed)
    harness.load(2)
    assert harness.engine.weight_version == WeightVersion(2)


def test_the_others_go_on_while_one_is_started_again(
    adapter: QwenImageAdapter, start: Start, undisturbed: list[RolloutSample]
) -> None:
    dead, other = FakeSGLang(adapter, managed=True), FakeSGLang(adapter, managed=True)
    harness = start(dead, other)
    dead.script.append(Fault(action="die"))
    other_is_done = threading.Event()
    dead.on_restart = lambda: other_is_done.wait(60)
    other.always = Fault(edit=lambda reply: len(other.requests) == 12 and other_is_done.set())
    assert all_equal(harness.engine.generate(harness.requests(*STOPS)), undisturbed)
    assert len(other.requests) == 12
    assert dead.starts == 2
    assert len(harness.engine.generate(harness.requests(*STOPS))) == 12
    assert dead.requests[-1]["seed"] >= 510  # it takes requests again


def test_a_server_that_cannot_be_started_again_is_dropped(
    adapter: QwenImageAdapter, start: Start, undisturbed: list[RolloutSample]
) -> None:
    dead, other = FakeSGLang(adapter, managed=True), FakeSGLang(adapter)
    harness = start(dead, other, max_restarts=2)
    dead.script.append(Fault(action="die"))
    dead.restart_error = "no such file: python"
    assert all_equal(harness.engine.generate(harness.requests(*STOPS)), undisturbed)
    assert harness.engine.faults["restarts"] == 2
    assert harness.engine.faults["dropped"] == 1
    harness.load(2)
    harness.engine.sleep()
    harness.engine.wake()
    assert harness.engine.generate(harness.requests(0))[0].weight_version == WeightVersion(2)


def test_a_server_of_others_is_dropped_with_a_warning(
    adapter: QwenImageAdapter, start: Start, undisturbed: list[RolloutSample], caplog: pytest.LogCaptureFixture
) -> None:
    dead, other = FakeSGLang(adapter), FakeSGLang(adapter)
    harness = start(dead, other)
    dead.script.append(Fault(action="die"))
    with caplog.at_level(logging.WARNING):
        assert all_equal(harness.engine.generate(harness.requests(*STOPS)), undisturbed)
    assert any("is dropped after 0 restarts" in record.getMessage() for record in caplog.records)
    assert harness.engine.faults["dropped"] == 1


def test_when_all_are_dead_the_error_says_why_of_each(adapter: QwenImageAdapter, start: Start) -> None:
    fakes = FakeSGLang(adapter, managed=True), FakeSGLang(adapter)
    harness = start(*fakes, attempts=10)
    urls = [fake.url for fake in fakes]
    fakes[0].restart_error = "no such file: python"
    for fake in fakes:
        fake.always = Fault(action="die")
    with pytest.raises(EngineError, match="all 2 rollout engines are dead") as caught:
        harness.engine.generate(harness.requests(*STOPS))
    message = str(caught.value)
    assert f"{urls[0]}: cannot be started again: no such file: python" in message
    assert f"{urls[1]}: " in message
    assert message.count("its log ends with:\nlast words") == 2
    for call in (lambda: harness.engine.generate(harness.requests(0)), lambda: harness.load(2)):
        with pytest.raises(EngineError, match="all 2 rollout engines are dead"):
            call()


def test_a_server_that_dies_asleep_is_started_again_when_it_is_woken(
    adapter: QwenImageAdapter, start: Start, undisturbed: list[RolloutSample]
) -> None:
    fake = FakeSGLang(adapter, managed=True)
    harness = start(fake)
    harness.engine.sleep()
    fake.die()
    assert fake.starts == 1
    harness.engine.wake()
    assert fake.starts == 2
    assert all_equal(harness.engine.generate(harness.requests(*STOPS)), undisturbed)
    fake.die()
    harness.engine.sleep()  # the device is wanted by others: nothing is started now
    assert fake.starts == 2
    harness.engine.wake()
    assert fake.starts == 3
    assert all_equal(harness.engine.generate(harness.requests(*STOPS)), undisturbed)


def test_a_server_that_does_not_confirm_its_sleep_does_not_keep_the_device(
    adapter: QwenImageAdapter, start: Start, undisturbed: list[RolloutSample]
) -> None:
    fake = FakeSGLang(adapter, managed=True)
    harness = start(fake, request_timeout=DEADLINE)
    fake.deaf_to_sleep = True
    harness.engine.sleep()
    assert (fake.stops, fake.starts) == (1, 1)
    fake.deaf_to_sleep = False
    harness.engine.wake()
    assert fake.starts == 2
    assert all_equal(harness.engine.generate(harness.requests(*STOPS)), undisturbed)


def test_somebody_elses_server_that_does_not_confirm_its_sleep_is_an_error(
    adapter: QwenImageAdapter, start: Start
) -> None:
    fake = FakeSGLang(adapter)
    harness = start(fake, request_timeout=DEADLINE)
    fake.deaf_to_sleep = True
    with pytest.raises(EngineError, match="does not confirm that it has gone to sleep, and may hold the device"):
        harness.engine.sleep()


def test_one_stall_that_two_requests_meet_is_one(adapter: QwenImageAdapter, start: Start) -> None:
    fake = FakeSGLang(adapter, managed=True)
    harness = start(fake, request_timeout=DEADLINE, max_in_flight=2)
    fake.script.extend([Fault(pause=DEADLINE + 1)])
    harness.engine.generate(harness.requests(0, 0))
    assert fake.starts == 1


def test_a_server_with_other_weights_is_noticed_and_gets_ours(
    adapter: QwenImageAdapter, start: Start, undisturbed: list[RolloutSample]
) -> None:
    """As when whoever runs it started it again at the same address."""
    fake, other = FakeSGLang(adapter), FakeSGLang(adapter)
    harness = start(fake, other)
    fake.transformer.load_state_dict(fake.checkpoint.state_dict())
    fake.weights.received.clear()
    assert all_equal(harness.engine.generate(harness.requests(*STOPS)), undisturbed)
    assert harness.engine.faults["dropped"] == 0
    assert fake.calls.count("disk") == 2
    assert fake.digest() == other.digest() is not None


def test_ctrl_c_stops_at_once_and_the_engine_goes_on(
    adapter: QwenImageAdapter, start: Start, undisturbed: list[RolloutSample]
) -> None:
    fakes = FakeSGLang(adapter), FakeSGLang(adapter)
    harness = start(*fakes)
    fakes[1].script += [Fault(), Fault(edit=ctrl_c)]
    with pytest.raises(KeyboardInterrupt):
        harness.engine.generate(harness.requests(*STOPS))
    assert sum(len(fake.requests) for fake in fakes) < 12
    assert all_equal(harness.engine.generate(harness.requests(*STOPS)), undisturbed)
    assert harness.engine.faults["faults"] == 0


def test_ctrl_c_during_a_restart_does_not_start_a_second(
    adapter: QwenImageAdapter, start: Start, undisturbed: list[RolloutSample]
) -> None:
    fake = FakeSGLang(adapter, managed=True)
    harness = start(fake)
    fake.script.append(Fault(action="die"))
    go_on = threading.Event()
    fake.on_restart = lambda: (ctrl_c(), go_on.wait(60))
    with pytest.raises(KeyboardInterrupt):
        harness.engine.generate(harness.requests(*STOPS))
    fake.on_restart = lambda: None
    threading.Timer(0.2, go_on.set).start()
    assert all_equal(harness.engine.generate(harness.requests(*STOPS)), undisturbed)
    assert fake.starts == 2
    assert harness.engine.faults["restarts"] == 1


# -- handshake -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"worker_hooks": {"x.decode": False}}, r"1 hooks of the plugin did not apply: x.decode \(worker\)"),
        ({"version": "0.5.99"}, "SGLang '0.5.99', tested are >=0.5.23"),
        ({"dtype": "torch.bfloat16"}, "the run computes in fp32"),
        ({"answer": {"protocol": 7}}, "speaks protocol 7"),
        ({"answer": {"launch_id": "another"}, "managed": True}, "another server answers"),
        ({"plugin": False, "managed": True}, "without the miles_dmd2 plugin"),
        ({"plugin": False, "version": "0.5.99"}, "SGLang '0.5.99', tested are >=0.5.23"),
    ],
)
def test_a_server_that_must_not_be_used_is_refused_at_the_start(
    adapter: QwenImageAdapter, change: dict[str, object], message: str
) -> None:
    fakes = FakeSGLang(adapter), FakeSGLang(adapter)
    for name, value in change.items():
        setattr(fakes[1], name, value)
    with running(*fakes), pytest.raises(EngineError, match=f"(?s){fakes[1].url} cannot be used: .*{message}"):
        SGLangEngine(adapter, fakes)


def test_a_server_that_is_not_there_is_refused_at_the_start(adapter: QwenImageAdapter) -> None:
    fake = FakeSGLang(adapter)
    with running(fake):
        fake.die()
        with pytest.raises(EngineError, match=r"(?s)cannot be used: .*Connect.*last words"):
            SGLangEngine(adapter, [fake])


def test_a_server_that_sleeps_is_woken_at_the_start(adapter: QwenImageAdapter, start: Start) -> None:
    fake = FakeSGLang(adapter)
    with running(fake):
        fake.asleep = True
        engine = SGLangEngine(adapter, [fake])
        assert not fake.asleep
        engine.close()


@pytest.mark.parametrize(
    "options",
    [{"attempts": 0}, {"max_in_flight": 0}, {"verify_every": 0}, {"request_timeout": 0.0}, {"max_restarts": -1}],
)
def test_bad_options(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        SGLangSettings(**options)  # type: ignore[arg-type]


def test_no_servers_no_engine(adapter: QwenImageAdapter) -> None:
    with pytest.raises(ValueError, match="at least one server"):
        SGLangEngine(adapter, [])


# -- life ----------------------------------------------------------------------------------------------------


def test_without_weights_it_does_not_generate_but_encodes(adapter: QwenImageAdapter, start: Start) -> None:
    harness = start(FakeSGLang(adapter), load=None)
    assert (harness.engine.weight_version, harness.engine.weight_checksum) == (None, None)
    with pytest.raises(EngineError, match="no weights yet"):
        harness.engine.generate(harness.requests(0))
    assert len(harness.engine.conditioning(["", *PROMPTS])) == 4


def test_a_checkpoint_can_be_served_under_a_name(adapter: QwenImageAdapter, start: Start) -> None:
    harness = start(FakeSGLang(adapter), load=None, version=WeightVersion(0))
    served = harness.engine.generate(harness.requests(3, 1))
    assert served[0].weight_version == WeightVersion(0)
    harness.load(0)
    assert all_equal(harness.engine.generate(harness.requests(3, 1)), served)


def test_a_closed_engine_does_nothing(adapter: QwenImageAdapter, start: Start) -> None:
    fake = FakeSGLang(adapter)
    harness = start(fake)
    engine = harness.engine
    engine.close()
    engine.close()
    calls = (engine.wake, engine.sleep, lambda: engine.generate([]), lambda: engine.conditioning([]))
    for call in (*calls, lambda: harness.load(0)):
        with pytest.raises(EngineError, match="closed"):
            call()
    assert fake.weights.sound  # the server serves on: it belongs to someone else


def test_it_can_be_closed_asleep(adapter: QwenImageAdapter, start: Start) -> None:
    harness = start(FakeSGLang(adapter))
    harness.engine.sleep()
    harness.engine.close()
    with pytest.raises(EngineError, match="closed"):
        harness.engine.wake()


# -- servers without the plugin ------------------------------------------------------------------------------


def test_a_stock_servers_rollouts_are_cut_to_the_same_samples(
    adapter: QwenImageAdapter, start: Start, undisturbed: list[RolloutSample], caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeSGLang(adapter, plugin=False)
    harness = start(fake)
    with caplog.at_level(logging.WARNING):
        assert all_equal(harness.engine.generate(harness.requests(*STOPS)), undisturbed)
        harness.engine.generate(harness.requests(*STOPS))
    told = [record.getMessage() for record in caplog.records if "without the miles_dmd2 plugin" in record.getMessage()]
    assert len(told) == 1
    assert "4 forwards instead of its stop step + 1, a VAE decode, and" in told[0]
    assert harness.engine.forward_count == fake.forwards == 2 * 12 * 4
    assert fake.decoded == 24


def test_a_stock_server_makes_eval_pictures(adapter: QwenImageAdapter, start: Start) -> None:
    harness, stock = start(FakeSGLang(adapter)), start(FakeSGLang(adapter, plugin=False))
    requests = harness.requests(3, 3, decode=True)
    assert all_equal(harness.engine.generate(requests), stock.engine.generate(requests))
    with pytest.raises(EngineError, match=r"sample 10: .* decodes the last step's picture only, not that of step 1"):
        stock.engine.generate(harness.requests(1, decode=True))


def test_what_a_stock_server_cannot_do_is_said(adapter: QwenImageAdapter, start: Start) -> None:
    harness = start(FakeSGLang(adapter, plugin=False))
    (request,) = harness.requests(0)
    with pytest.raises(EngineError, match="own grid"):
        harness.engine.generate([dataclasses.replace(request, sigmas=tuple(sigma_grid(4, 1.0).tolist()))])
    with pytest.raises(EngineError, match=r"starts at sigma 1, not at 0\.5"):
        harness.engine.generate([dataclasses.replace(request, sigmas=(0.5, 0.0))])
    with pytest.raises(EngineError, match=r"does not sleep .*needs the miles_dmd2 plugin"):
        harness.engine.sleep()
    assert harness.engine.generate(harness.requests(2))[0].sigmas.tolist() == list(GRID)


def test_the_plugin_can_be_required(adapter: QwenImageAdapter) -> None:
    with running(FakeSGLang(adapter, plugin=False)) as fakes, pytest.raises(EngineError, match="this run requires"):
        SGLangEngine(adapter, fakes, SGLangSettings(require_plugin=True))


def test_a_family_whose_replies_are_not_complete_needs_the_plugin(
    adapter: QwenImageAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(adapter.serving), "complete_reply", False)
    with running(FakeSGLang(adapter, plugin=False)) as fakes, pytest.raises(EngineError, match="not complete without"):
        SGLangEngine(adapter, fakes)


def test_stock_and_plugin_servers_work_side_by_side(
    adapter: QwenImageAdapter, start: Start, undisturbed: Sequence[RolloutSample]
) -> None:
    stock, other = FakeSGLang(adapter, plugin=False), FakeSGLang(adapter)
    harness = start(stock, other)
    assert all_equal(harness.engine.generate(harness.requests(*STOPS)), undisturbed)
    assert stock.requests
    assert other.requests
