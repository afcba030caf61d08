"""One real server for the whole suite: it takes a minute to start and 3 GB."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from miles_dmd2.engines.sglang.environment import check_version
from miles_dmd2.engines.sglang.process import members_of
from miles_dmd2.engines.sglang.server import ManagedServer, SGLangLaunch
from tests.sglang.sockets import is_open, listening
from tests.tiny_qwen import build

VARIABLE = "MILES_DMD2_SGLANG_PYTHON"
FP32 = ("--dit-precision", "fp32", "--vae-precision", "fp32", "--text-encoder-precisions", "fp32")
START_SECONDS = 240.0  # 20 s on a machine that has nothing else to do


def pytest_configure() -> None:
    if VARIABLE not in os.environ:
        raise pytest.UsageError(
            "tests/sglang needs a real SGLang server: say `make test-sglang`, which makes its environment and names "
            f"its Python in {VARIABLE}"
        )


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    python = Path(os.environ[VARIABLE])
    check_version(python, allow_untested=False)
    return python


@pytest.fixture(scope="session")
def qwen_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("a pipeline") / "qwen")


@pytest.fixture(scope="session")
def server(
    sglang_python: Path, qwen_pipeline: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ManagedServer]:
    """Serves `qwen_pipeline` in fp32. A test that changes its weights or restarts it has to put that right again."""
    launch = SGLangLaunch(
        python=sglang_python,
        model=qwen_pipeline,
        model_id="Qwen-Image",
        arguments=FP32,
        log=tmp_path_factory.mktemp("logs") / "server.log",
        start_timeout=START_SECONDS,
        threads=1,
    )
    with ManagedServer(launch) as running:
        yield running
        pid, ports = (
            running.pid or 0,
            {port for member in members_of(running.pid or 0) for _, port in listening(member)},
        )
    assert members_of(pid) == []  # the clean end of a healthy server
    assert not [port for port in ports if is_open(port)]
