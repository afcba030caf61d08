"""Servers that must not be used, by what they say of themselves."""

from __future__ import annotations

import pytest

from miles_dmd2.engines.base import EngineError
from miles_dmd2.engines.sglang.handshake import read_capabilities


def capabilities(**changes: object) -> dict[str, object]:
    worker = {
        "hooks": {"denoise": True, "decode": True},
        "bypassed": [],
        "offloaded": False,
        "pipeline": "QwenImagePipeline",
        "dtype": "torch.float32",
        "sleeping": False,
        "pid": 7,
    }
    worker.update({key.removeprefix("worker_"): value for key, value in changes.items() if key.startswith("worker_")})
    top = {key: value for key, value in changes.items() if not key.startswith("worker_")}
    return {
        "protocol": 1,
        "version": "1.0",
        "sglang": "0.5.23",
        "launch_id": "us",
        "hooks": {"request": True},
        "worker": worker,
    } | top


def read(answer: object, dtype: str = "fp32", launch_id: str | None = "us", untested: bool = False) -> object:
    return read_capabilities(answer, ("QwenImagePipeline",), launch_id, dtype, untested)  # type: ignore[arg-type]


def test_a_good_server_is_taken() -> None:
    found = read(capabilities())
    assert (found.plugin, found.all_bf16, found.sleeping) == (True, False, False)
    assert read(capabilities(worker_sleeping=True)).sleeping
    assert read(capabilities(worker_dtype="torch.bfloat16"), "bf16").all_bf16
    assert not read(capabilities(worker_dtype="mixed"), "bf16").all_bf16
    read(capabilities(launch_id=None), launch_id=None)
    read(capabilities(sglang="0.5.24"), untested=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"protocol": 2}, "speaks protocol 2, this trainer 1"),
        ({"launch_id": "them"}, "another server answers: launch 'them', started was 'us'"),
        ({"launch_id": None}, "another server answers"),
        ({"sglang": "0.5.24"}, "SGLang '0.5.24', tested are >=0.5.23,<0.5.24: .*--sglang-allow-untested-version"),
        ({"hooks": {"request": False}}, r"1 hooks of the plugin did not apply: request \(HTTP process\)"),
        ({"hooks": {}}, r"all \(HTTP process\)"),
        (
            {"worker_hooks": {"denoise": False, "decode": False}},
            r"2 hooks of the plugin did not apply: denoise \(worker\), decode \(worker\)",
        ),
        ({"worker_hooks": {"denoise": "true"}}, "did not apply"),
        ({"worker_bypassed": ["Stage.forward"]}, r"goes around the plugin's hooks, with \['Stage.forward'\]"),
        ({"worker_offloaded": True}, "offloads layers of the transformer"),
        ({"worker_pipeline": "DiffusersPipeline"}, "serves a 'DiffusersPipeline'"),
        ({"worker_dtype": "torch.bfloat16"}, "transformer is 'torch.bfloat16', the run computes in fp32"),
        ({"worker_dtype": "mixed"}, "transformer is 'mixed'"),
        ({"worker": None}, "cannot be read: worker must be a map"),
        ({"hooks": [1]}, "cannot be read: hooks must be a map"),
    ],
)
def test_a_server_that_must_not_be_used_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        read(capabilities(**changes))


@pytest.mark.parametrize("missing", ["protocol", "sglang", "launch_id", "hooks", "worker"])
def test_capabilities_that_lack_something_are_refused(missing: str) -> None:
    answer = capabilities()
    del answer[missing]
    with pytest.raises(EngineError, match=f"cannot be read: .*{missing}"):
        read(answer)
