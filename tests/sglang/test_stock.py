"""A server without our plugin: started by hand, on a pipeline whose scheduler has the student's grid.

On a CPU SGLang's public wheel lacks two normalisations; a plugin of these tests brings those alone, so that all that
a client meets is SGLang's own.
"""

from __future__ import annotations

import logging
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from miles_dmd2.engines.base import EngineError
from miles_dmd2.engines.local import LocalEngine
from miles_dmd2.engines.sglang.engine import SGLangEngine, SGLangSettings
from miles_dmd2.engines.sglang.environment import engine_environment
from miles_dmd2.engines.sglang.process import free_ports
from miles_dmd2.engines.sglang.server import ExternalServer
from miles_dmd2.models.export import StudentSampling
from miles_dmd2.models.qwen_image import QwenImageAdapter
from miles_dmd2.types import WeightVersion
from tests.engines.contract import GRID, Harness
from tests.sglang.conftest import FP32, START_SECONDS
from tests.tiny_qwen import PROMPTS, SIZE

pytestmark = pytest.mark.sglang

KERNELS = Path(__file__).parents[2] / "miles_dmd2" / "engines" / "sglang_plugin" / "kernels.py"
NAME = "cpu_norms"
SAME = 2e-5  # as in test_contract.py
PLUGIN = """
import kernels

LAYERS = "sglang.multimodal_gen.runtime.layers.layernorm."


def register():
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    for name, hook in (
        ("_NormScaleShift", kernels.norm_scale_shift),
        ("_ScaleResidualNormScaleShift", kernels.scale_residual_norm_scale_shift),
    ):
        HookRegistry.register(f"{LAYERS}{name}.forward_cpu", hook, HookType.AROUND)
"""


@pytest.fixture(scope="module")
def pipeline(qwen_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights, with a scheduler of the grid's static shift: SGLang samples on no other."""
    adapter = QwenImageAdapter(qwen_pipeline, SIZE, SIZE)
    directory = tmp_path_factory.mktemp("stock") / "pipeline"
    adapter.export_pipeline(adapter.load_transformer().state_dict(), StudentSampling(GRID, 3.0), directory)
    return directory


@pytest.fixture(scope="module")
def url(sglang_python: Path, pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    plugin = tmp_path_factory.mktemp("plugin")
    info = plugin / f"{NAME}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.multimodal_gen.plugins]\n{NAME} = {NAME}:register\n")
    (plugin / f"{NAME}.py").write_text(PLUGIN)
    (plugin / "kernels.py").symlink_to(KERNELS)
    ports = free_ports()
    words = ["-m", "sglang.multimodal_gen.runtime.launch_server", "--model-path", str(pipeline)]
    words += ["--model-id", "Qwen-Image", "--host", "127.0.0.1", "--sleep-on-idle", "--strict-ports"]
    words += ["--port", str(ports.http), "--scheduler-port", str(ports.scheduler), "--master-port", str(ports.master)]
    variables = {
        **engine_environment(sglang_python),
        "PYTHONPATH": str(plugin),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    log = tmp_path_factory.mktemp("logs") / "stock.log"
    with log.open("w") as stream:
        server = subprocess.Popen([sglang_python, *words, *FP32], stdout=stream, stderr=stream, env=variables)
        try:
            address = f"http://127.0.0.1:{ports.http}"
            wait_until_healthy(address, server, log)
            yield address
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def wait_until_healthy(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert server.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.5)


@pytest.fixture(scope="module")
def adapter(pipeline: Path) -> QwenImageAdapter:
    return QwenImageAdapter(pipeline, SIZE, SIZE)


@pytest.fixture(scope="module")
def stock(url: str, adapter: QwenImageAdapter) -> Iterator[Harness]:
    engine = SGLangEngine(adapter, [ExternalServer(url)])
    reference = adapter.load_transformer().requires_grad_(False)
    yield Harness(engine, adapter, reference, PROMPTS, same=SAME, exact=False)
    engine.close()


def test_it_is_one_without_the_plugin(url: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{url}/miles_dmd2/capabilities", timeout=30)


def test_rollouts_are_cut_to_what_the_local_engine_gives(stock: Harness, adapter: QwenImageAdapter) -> None:
    """At every stop step, with the conditioning; each costs all four forwards."""
    stock.load(0)
    local = LocalEngine(adapter, checkpoint_version=WeightVersion(0))
    requests = stock.requests(0, 1, 2, 3)
    before = stock.engine.forward_count
    samples = stock.engine.generate(requests)
    assert stock.engine.forward_count - before == 4 * 4
    for found, expected in zip(samples, local.generate(requests), strict=True):
        torch.testing.assert_close(found.x_k, expected.x_k, rtol=0, atol=SAME)
        torch.testing.assert_close(found.x0, expected.x0, rtol=0, atol=SAME)
        torch.testing.assert_close(found.cond["prompt_embeds"], expected.cond["prompt_embeds"], rtol=0, atol=SAME)
        assert found.media is None


@pytest.mark.parametrize("sync", ["disk", "tensor"])
def test_it_serves_the_weights_that_it_is_sent(url: str, adapter: QwenImageAdapter, stock: Harness, sync: str) -> None:
    engine = SGLangEngine(adapter, [ExternalServer(url)], SGLangSettings(weight_sync=sync))
    try:
        for step in (2, 1):
            update, tensors = stock.weights(step)
            engine.load_weights(update, tensors)
            (sample,) = engine.generate(stock.requests(1))
            velocity = stock.velocity(step, [sample], sample.x_k.unsqueeze(0), GRID[1])
            torch.testing.assert_close(sample.x0, sample.x_k - GRID[1] * velocity[0], rtol=0, atol=SAME)
            assert sample.weight_version == WeightVersion(step)
    finally:
        engine.close()


def test_the_last_step_is_decoded(stock: Harness) -> None:
    stock.load(0)
    (picture,) = stock.engine.generate(stock.requests(3, decode=True))
    assert picture.media is not None
    assert picture.media.shape == (1, SIZE, SIZE, 3)


def test_another_grid_is_refused(stock: Harness) -> None:
    stock.load(0)
    (request,) = stock.requests(0)
    with pytest.raises(EngineError, match=r"samples on its own grid .* install the plugin"):
        stock.engine.generate([replace(request, sigmas=(1.0, 0.5, 0.0))])


def test_a_run_may_refuse_it_and_is_told_once_what_it_costs(
    url: str, adapter: QwenImageAdapter, stock: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = SGLangEngine(adapter, [ExternalServer(url)], checkpoint_version=WeightVersion(0))
        for request in stock.requests(0, 1):
            engine.generate([request])
        engine.close()
    told = [record.getMessage() for record in caplog.records if "without the miles_dmd2 plugin" in record.getMessage()]
    assert len(told) == 1
    assert "4 forwards instead of its stop step + 1" in told[0]
    with pytest.raises(EngineError, match="this run requires"):
        SGLangEngine(adapter, [ExternalServer(url)], SGLangSettings(require_plugin=True))
