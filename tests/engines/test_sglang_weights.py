"""Weights on their way to SGLang servers: what is sent, what proves it, what happens when it is not proven."""

import base64
import io
import os
import pickle
import pickletools
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing import reductions

from miles_dmd2.engines.base import EngineError
from miles_dmd2.engines.sglang import weights as sent_weights
from miles_dmd2.engines.sglang.engine import SGLangEngine, SGLangSettings
from miles_dmd2.engines.sglang.weights import (
    Push,
    WeightStore,
    bodies,
    check_report,
    digests_of,
    in_memory,
)
from miles_dmd2.engines.sglang.wire import WireError
from miles_dmd2.models.qwen_image import QwenImageAdapter
from miles_dmd2.types import Probe, WeightUpdate, WeightVersion
from tests.engines.contract import Harness, all_equal, spoil
from tests.engines.fake_sglang import AllowList, FakeSGLang, digest_of, running
from tests.tiny_qwen import PROMPTS, SIZE


@pytest.fixture(scope="module")
def adapter(tiny_qwen: Path) -> QwenImageAdapter:
    return QwenImageAdapter(tiny_qwen, SIZE, SIZE)


@pytest.fixture
def fake(adapter: QwenImageAdapter) -> Iterator[FakeSGLang]:
    with running(FakeSGLang(adapter)) as (server,):
        yield server


def harness_of(fake: FakeSGLang, adapter: QwenImageAdapter, **settings: object) -> Harness:
    engine = SGLangEngine(adapter, [fake], SGLangSettings(**settings))  # type: ignore[arg-type]
    return Harness(engine, adapter, adapter.load_transformer().requires_grad_(False), PROMPTS, exact=False)


@pytest.fixture
def own(fake: FakeSGLang, adapter: QwenImageAdapter, tmp_path: Path) -> Iterator[Harness]:
    harness = harness_of(fake, adapter, weight_directory=tmp_path)
    yield harness
    harness.engine.close()


def tensors_of(fake: FakeSGLang) -> list[list[tuple[str, Tensor]]]:
    payloads = [base64.b64decode(body["serialized_named_tensors"][0]) for body in fake.updates]
    return [AllowList(io.BytesIO(payload)).load() for payload in payloads]


# -- what is sent --------------------------------------------------------------------------------------------


def test_a_file_holds_the_weights_as_they_are_and_goes_with_the_next(
    own: Harness, fake: FakeSGLang, tmp_path: Path
) -> None:
    update, tensors = own.weights(1)
    own.engine.load_weights(update, tensors)
    (root,) = tmp_path.iterdir()
    (first,) = (path for path in root.iterdir() if path.is_dir())
    assert first.name.startswith("raw-1-")
    assert fake.updates == [{"model_path": str(first), "target_modules": ["transformer"]}]
    assert [path.relative_to(first) for path in first.rglob("*.safetensors")] == [
        Path("transformer/diffusion_pytorch_model.safetensors")
    ]
    held = load_file(first / "transformer/diffusion_pytorch_model.safetensors")
    assert held.keys() == tensors.keys()
    assert all(torch.equal(held[name], value) for name, value in tensors.items())
    own.load(2, "ema")
    (second,) = (path for path in root.iterdir() if path.is_dir())
    assert second.name.startswith("ema-2-")
    with pytest.raises(EngineError, match="refused"):
        own.engine.load_weights(*spoil(own.weights(3), "wrong probe", own.unseen()))
    assert [path for path in root.iterdir() if path.is_dir()] == [second]
    own.engine.close()
    assert list(tmp_path.iterdir()) == []


def test_tensors_go_by_value_a_bucket_at_a_time(
    fake: FakeSGLang, adapter: QwenImageAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sent_weights, "BUCKET_BYTES", 200_000)
    harness = harness_of(fake, adapter, weight_sync="tensor")
    update, tensors = harness.weights(1)
    whole = torch.cat([value.reshape(-1) for value in tensors.values()])
    views = dict(zip(tensors, whole.split([value.numel() for value in tensors.values()]), strict=True))
    harness.engine.load_weights(update, {name: views[name].view(value.shape) for name, value in tensors.items()})
    buckets = tensors_of(fake)
    assert fake.calls.count("begin") == 1
    assert len(buckets) > 3
    assert [name for bucket in buckets for name, _ in bucket] == list(tensors)
    for bucket, body in zip(buckets, fake.updates, strict=True):
        assert body.keys() == {"serialized_named_tensors", "target_modules"}
        size = sum(value.nbytes for _, value in bucket)
        assert size <= 200_000 or len(bucket) == 1
        assert len(body["serialized_named_tensors"][0]) < 1.4 * size + 20_000  # not the storage behind the views
    harness.engine.close()


def test_to_a_bf16_engine_half_the_bytes_are_sent(fake: FakeSGLang, adapter: QwenImageAdapter) -> None:
    fake.dtype = "torch.bfloat16"
    harness = harness_of(fake, adapter, weight_sync="tensor", forward_dtype="bf16")
    update, tensors = harness.weights(1)
    harness.engine.load_weights(update, tensors)
    ((bucket,),) = ([tensors_of(fake)[0]],)
    assert {value.dtype for _, value in bucket} == {torch.bfloat16}
    assert all(torch.equal(value, tensors[name].to(torch.bfloat16)) for name, value in bucket)
    assert harness.engine.weight_checksum == update.checksum  # of what was exported
    harness.engine.close()
    fake.dtype = "mixed"  # some of its parameters keep more
    harness = harness_of(fake, adapter, weight_sync="tensor", forward_dtype="bf16")
    harness.load(1)
    assert {value.dtype for _, value in tensors_of(fake)[-1]} == {torch.float32}
    harness.engine.close()


def test_digests_are_those_of_the_format() -> None:
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3).t(),
        "b": torch.tensor(1.5, dtype=torch.bfloat16),
        "c": torch.zeros(0, 4),
    }
    assert digests_of(tensors) == {name: digest_of(value) for name, value in tensors.items()}


def test_the_server_holds_what_was_sent(own: Harness, fake: FakeSGLang) -> None:
    own.load(1)
    held = fake.transformer.state_dict()
    assert all(torch.equal(held[name], value) for name, value in own.student(1).state_dict().items())


# -- proof ---------------------------------------------------------------------------------------------------


def test_a_parameter_that_no_probe_sees_is_proven_by_its_digest(own: Harness, fake: FakeSGLang) -> None:
    own.load(1)
    before = own.engine.generate(own.requests(2))
    name = own.unseen()

    def half(held: dict[str, Tensor]) -> None:
        held[name].mul_(0.5)
        fake.update_fault = None

    fake.update_fault = half
    with pytest.raises(EngineError, match=f"raw@2 refused: 1 parameters of the engine hold something else: {name}"):
        own.load(2)
    assert own.engine.weight_version == WeightVersion(1)
    assert all_equal(own.engine.generate(own.requests(2)), before)


def test_the_digest_is_asked_for_as_often_as_said_and_the_probe_always(
    fake: FakeSGLang, adapter: QwenImageAdapter
) -> None:
    harness = harness_of(fake, adapter, verify_every=3)
    asked = []
    for step in range(1, 6):
        harness.load(step)
        asked.append(fake.calls.count("weights"))
    assert asked == [1, 1, 1, 2, 2]
    fake.update_fault = lambda held: held["proj_out.weight"].mul_(1.01)
    with pytest.raises(EngineError, match="raw@6 refused: the probe's velocity differs"):
        harness.load(6)
    harness.engine.close()


def update_of(tensors: dict[str, Tensor]) -> Push:
    probe = Probe(torch.zeros(1, 2), torch.ones(1), {}, torch.zeros(1, 2))
    return in_memory(WeightUpdate(WeightVersion(3), "", probe, None), tensors)


def report(push: Push, **changes: object) -> dict[str, object]:
    return {"digest": push.digest, "tensors": dict(push.digests), "missing": [], "wrong": []} | changes


def test_what_did_not_arrive_is_listed_by_name() -> None:
    push = update_of({f"layer.{i}": torch.full((2,), float(i)) for i in range(12)})
    check_report(push, report(push))
    eight = "layer.0, layer.1, layer.10, layer.11, layer.2, layer.3, layer.4, layer.5 and 4 more"
    some = {name: digest for name, digest in push.digests.items() if name not in ("layer.4", "layer.7")}
    cases = {
        "2 parameters of the engine were sent nothing: to_qkv.weight, x": {"missing": ["to_qkv.weight", "x"]},
        "1 parameters of the engine hold something else: y": {"wrong": ["y"]},
        "2 were dropped on the way: layer.4, layer.7": {"tensors": some},
        "1 arrived that were not sent: z": {"tensors": {**push.digests, "z": "0"}},
        "1 arrived changed: layer.3": {"tensors": {**push.digests, "layer.3": "0"}},
        f"12 were dropped on the way: {eight}": {"tensors": {}},
        "its digest is None": {"digest": None},
        "its digest is 00": {"digest": "00"},
    }
    for message, changes in cases.items():
        with pytest.raises(EngineError, match=f"raw@3 refused: {message}"):
            check_report(push, report(push, **changes))
    for unreadable in (None, [], {}, {"tensors": []}):
        with pytest.raises(WireError, match="cannot be read"):
            check_report(push, unreadable)


# -- when it fails -------------------------------------------------------------------------------------------


def test_the_weights_before_are_sent_again_with_proof(own: Harness, fake: FakeSGLang) -> None:
    own.load(1)
    with pytest.raises(EngineError, match="raw@2 refused"):
        own.engine.load_weights(*spoil(own.weights(2), "wrong probe", own.unseen()))
    paths = [body["model_path"] for body in fake.updates]
    assert len(paths) == 3
    assert paths[2] == paths[0] != paths[1]
    assert fake.calls.count("weights") == 3


def test_when_they_cannot_be_put_back_nothing_is_served_until_the_next_success(own: Harness, fake: FakeSGLang) -> None:
    own.load(1)
    fake.update_fault = lambda held: held["proj_out.weight"].mul_(0.5)
    with pytest.raises(EngineError, match="raw@2 refused"):
        own.load(2)
    assert (own.engine.weight_version, own.engine.weight_checksum) == (None, None)
    with pytest.raises(EngineError, match=r"raw@2 was refused, and the weights before it cannot be put back: .*raw@1"):
        own.engine.generate(own.requests(0))
    with pytest.raises(EngineError, match="raw@3 refused"):
        own.load(3)
    with pytest.raises(EngineError, match="no weights"):
        own.engine.generate(own.requests(0))
    fake.update_fault = None
    own.load(4)
    assert own.engine.generate(own.requests(0))[0].weight_version == WeightVersion(4)


def test_the_first_weights_refused_leave_none(own: Harness) -> None:
    with pytest.raises(EngineError, match="raw@1 refused"):
        own.engine.load_weights(*spoil(own.weights(1), "wrong probe", own.unseen()))
    assert own.engine.weight_version is None
    with pytest.raises(EngineError, match="no weights yet"):
        own.engine.generate(own.requests(0))
    own.load(1)


def test_the_checkpoints_weights_are_not_served_after_a_refused_push(
    fake: FakeSGLang, adapter: QwenImageAdapter
) -> None:
    engine = SGLangEngine(adapter, [fake], checkpoint_version=WeightVersion(0))
    harness = Harness(engine, adapter, adapter.load_transformer(), PROMPTS, exact=False)
    engine.generate(harness.requests(0))
    with pytest.raises(EngineError, match="raw@1 refused"):
        engine.load_weights(*spoil(harness.weights(1), "wrong probe", harness.unseen()))
    assert engine.weight_version is None
    with pytest.raises(EngineError, match="raw@1 was refused, and nothing was pushed before it"):
        engine.generate(harness.requests(0))
    harness.load(1)
    engine.generate(harness.requests(0))
    engine.close()


def test_interrupted_in_the_middle_nothing_is_served_until_the_next_success(own: Harness, fake: FakeSGLang) -> None:
    own.load(1)
    fake.update_fault = lambda held: os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        own.load(2)
    fake.update_fault = None
    assert own.engine.weight_version is None
    with pytest.raises(EngineError, match="loading raw@2 was interrupted"):
        own.engine.generate(own.requests(0))
    own.load(3)
    assert own.engine.generate(own.requests(0))[0].weight_version == WeightVersion(3)


def test_one_server_of_two_refusing_keeps_both_on_the_old_weights(adapter: QwenImageAdapter) -> None:
    with running(FakeSGLang(adapter), FakeSGLang(adapter)) as fakes:
        engine = SGLangEngine(adapter, fakes)
        harness = Harness(engine, adapter, adapter.load_transformer().requires_grad_(False), PROMPTS, exact=False)
        harness.load(1)
        before = engine.generate(harness.requests(2, 0, 1, 3))
        old = fakes[0].digest()

        def spoilt(held: dict[str, Tensor]) -> None:
            held["proj_out.weight"].mul_(0.5)
            fakes[1].update_fault = None

        fakes[1].update_fault = spoilt
        with pytest.raises(EngineError, match=f"raw@2 refused: .*{fakes[1].url}"):
            harness.load(2)
        assert [fake.digest() for fake in fakes] == [old, old]
        assert all_equal(engine.generate(harness.requests(2, 0, 1, 3)), before)
        engine.close()


def test_a_server_that_dies_of_new_weights_gets_them_when_it_is_back(adapter: QwenImageAdapter) -> None:
    fake = FakeSGLang(adapter, managed=True)
    with running(fake):
        engine = SGLangEngine(adapter, [fake])
        harness = Harness(engine, adapter, adapter.load_transformer().requires_grad_(False), PROMPTS, exact=False)
        harness.load(1)
        fake.die()
        harness.load(2)
        assert fake.starts == 2
        assert engine.generate(harness.requests(0))[0].weight_version == WeightVersion(2)
        assert engine.faults["restarts"] == 1
        engine.close()


# -- where files are -----------------------------------------------------------------------------------------


def test_without_a_directory_given_memory_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    memory, disk = tmp_path / "shm", tmp_path / "disk"
    for place in (memory, disk):
        place.mkdir()
    free = {memory: 200, disk: 1000}
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(sent_weights, "SHARED_MEMORY", memory)
    monkeypatch.setattr(sent_weights.tempfile, "gettempdir", lambda: str(disk))
    monkeypatch.setattr(sent_weights.shutil, "disk_usage", lambda path: usage(1000, 0, free[Path(path)]))
    for update_bytes, place in ((100, memory), (101, disk), (500, disk)):
        store = WeightStore(None, update_bytes)
        assert store.root.parent == place
        store.close()
    with pytest.raises(EngineError, match=r"--sglang-weight-directory: two copies .* need 0\.00 GiB, .*more room"):
        WeightStore(None, 501)
    free[memory] = free[disk] = 10 * 2**30
    with pytest.raises(EngineError, match=f"need 12.00 GiB, {memory} has 10.00, {disk} has 10.00"):
        WeightStore(None, 6 * 2**30)
    memory.rmdir()
    assert WeightStore(None, 5).root.parent == disk


def test_what_a_killed_process_left_is_removed_and_what_is_in_use_is_not(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from miles_dmd2.engines.sglang.weights import WeightStore\n"
        "store = WeightStore(Path(sys.argv[1]), 1)\n"
        "(store.root / 'raw-1-aa').mkdir()\n"
        "os._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[2], timeout=120, check=False)
    (left,) = tmp_path.iterdir()
    assert (left / "raw-1-aa").is_dir()
    first = WeightStore(tmp_path, 1)
    assert not left.exists()
    second = WeightStore(tmp_path, 1)
    assert sorted(tmp_path.iterdir()) == sorted([first.root, second.root])
    first.close()
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = WeightStore(tmp_path, 1)

    def full(tensors: dict[str, Tensor], path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sent_weights, "save_file", full)
    with pytest.raises(EngineError, match=r"raw@3 refused: cannot write them .*No space left"):
        store.write("raw@3", {"a": torch.zeros(1)})
    assert not list(store.root.iterdir())
    store.close()


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=r"--sglang-weight-directory .*/file: cannot be used"):
        WeightStore(tmp_path / "file", 1)


# -- GPU memory ----------------------------------------------------------------------------------------------


def test_a_handle_names_its_gpu_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that needs no GPU: which argument is replaced, and that only names on SGLang's list are pickled."""
    handle = (torch.Tensor, torch.Size([2]), (1,), 0, torch.storage.TypedStorage, torch.float32, 3, b"handle")
    rest = (8, 0, False, b"counter", 0, b"event", True)
    monkeypatch.setattr(reductions, "reduce_tensor", lambda t: (reductions.rebuild_cuda_tensor, (*handle, *rest)))
    monkeypatch.setattr(sent_weights, "_uuid", lambda device: "gpu-uuid")
    content = base64.b64decode(sent_weights._by_handle([("a", torch.zeros(2))]))
    found: list[object] = []

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            if name == "rebuild_cuda_tensor":
                return lambda *arguments: found.extend(arguments)
            return super().find_class(module, name)

    Reader(io.BytesIO(content)).load()
    assert found == [*handle[:6], "gpu-uuid", b"handle", *rest]
    strings = [argument for _, argument, _ in pickletools.genops(content) if isinstance(argument, str)]
    modules = {text for text in strings if text.partition(".")[0] in ("torch", "miles_dmd2", "tests", "builtins")}
    assert modules <= {"torch", "torch.multiprocessing.reductions", "torch.storage"}


READER = """
import base64, io, pickle, sys, torch
from torch.multiprocessing import reductions

def rebuild(*arguments):
    devices = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    return reductions.rebuild_cuda_tensor(*arguments[:6], devices.index(arguments[6]), *arguments[7:])

class Reader(pickle.Unpickler):
    def find_class(self, module, name):
        return rebuild if name == "rebuild_cuda_tensor" else super().find_class(module, name)

named = Reader(io.BytesIO(base64.b64decode(sys.stdin.read()))).load()
print({name: float(value.double().sum()) for name, value in named})
"""


@pytest.mark.gpu
def test_another_process_reads_the_bucket_in_gpu_memory() -> None:
    tensors = {
        "a": torch.arange(7.0, device="cuda"),
        "b": torch.full((3, 5), 2.0, device="cuda", dtype=torch.bfloat16),
        "c": torch.tensor(4.0, device="cuda"),
    }
    push = update_of(tensors)
    for body in bodies(push, "cuda"):
        assert body["payload_gpu_uuids"] == [str(torch.cuda.get_device_properties(0).uuid)]
        (payload,) = body["serialized_named_tensors"]  # type: ignore[misc]
        done = subprocess.run(
            [sys.executable, "-c", READER], input=payload, capture_output=True, text=True, timeout=120, check=True
        )
        assert done.stdout.strip() == str({"a": 21.0, "b": 30.0, "c": 4.0})
    (body,) = bodies(push)  # servers elsewhere get it by value
    assert "payload_gpu_uuids" not in body


def test_only_a_server_on_the_client_s_gpu_is_sent_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's part is replaced: the bucket stays where it is, and its "handle" is the names in it."""
    monkeypatch.setattr(sent_weights, "_uuid", lambda device: f"uuid of {device}")
    monkeypatch.setattr(sent_weights, "_on_one_storage", lambda named, device: named)
    monkeypatch.setattr(sent_weights, "_by_handle", lambda named: ",".join(name for name, _ in named))
    monkeypatch.setattr(sent_weights, "BUCKET_BYTES", 30)
    push = update_of({"a": torch.zeros(7), "b": torch.ones(3), "c": torch.ones(4)})
    assert [(body["serialized_named_tensors"], body["payload_gpu_uuids"]) for body in bodies(push, "cuda")] == [
        (["a"], ["uuid of cuda"]),
        (["b,c"], ["uuid of cuda"]),
    ]
    assert not any("payload_gpu_uuids" in body for body in bodies(push))
