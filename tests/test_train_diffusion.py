"""Bad input through the real entry point: exit code 2 and one line, before Ray or a model is touched."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import train_diffusion
from miles_dmd2.config import parse
from tests.tiny_qwen import build

Arguments = dict[str, object]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("tiny") / "pipeline")


@pytest.fixture
def arguments(pipeline: Path, tmp_path: Path) -> Arguments:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the digit one\nthe digit two\n")
    return {
        "hf-checkpoint": pipeline,
        "diffusion-height": 32,
        "diffusion-width": 32,
        "prompt-data": prompts,
        "rollout-batch-size": 2,
        "n-samples-per-prompt": 8,
        "num-steps-per-rollout": 2,
        "num-rollout": 3,
        "run-dir": tmp_path / "run",
    }


def start(arguments: Arguments, *more: str) -> int:
    return train_diffusion.main([*(f"--{name}={value}" for name, value in arguments.items()), *more])


def copied(pipeline: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pipeline, tmp_path / "broken"))


def without_transformer(arguments: Arguments, tmp_path: Path) -> Arguments:
    broken = copied(Path(str(arguments["hf-checkpoint"])), tmp_path)
    shutil.rmtree(broken / "transformer")
    return {**arguments, "hf-checkpoint": broken}


def cut_weights(arguments: Arguments, tmp_path: Path) -> Arguments:
    broken = copied(Path(str(arguments["hf-checkpoint"])), tmp_path)
    (file,) = (broken / "transformer").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    return {**arguments, "hf-checkpoint": broken}


def another_family(arguments: Arguments, tmp_path: Path) -> Arguments:
    broken = copied(Path(str(arguments["hf-checkpoint"])), tmp_path)
    index = json.loads((broken / "model_index.json").read_text())
    (broken / "model_index.json").write_text(json.dumps({**index, "_class_name": "PixArtAlphaPipeline"}))
    return {**arguments, "hf-checkpoint": broken}


def empty_prompts(arguments: Arguments, tmp_path: Path) -> Arguments:
    (tmp_path / "empty.txt").write_text("\n \n")
    return {**arguments, "prompt-data": tmp_path / "empty.txt"}


def taken_run_dir(arguments: Arguments, tmp_path: Path) -> Arguments:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "run.json").write_text("{}")
    return {**arguments, "run-dir": tmp_path / "taken"}


def changed(**changes: object) -> Callable[[Arguments, Path], Arguments]:
    return lambda arguments, tmp_path: {
        **arguments,
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }


CASES = {
    "no such checkpoint": (changed(hf_checkpoint="/nowhere/at/all"), ["--hf-checkpoint /nowhere/at/all", "directory"]),
    "a part missing": (without_transformer, ["--hf-checkpoint", "transformer/", "give a complete pipeline"]),
    "weights cut short": (cut_weights, ["--hf-checkpoint", "safetensors", "again"]),
    "another family": (another_family, ["PixArtAlphaPipeline", "QwenImagePipeline"]),
    "empty prompts": (empty_prompts, ["--prompt-data", "empty.txt"]),
    "no such prompts": (changed(prompt_data="/nowhere.txt"), ["--prompt-data /nowhere.txt"]),
    "batch": (changed(global_batch_size=17), ["--global-batch-size 17", "16"]),
    "windows": (changed(num_steps_per_rollout=3), ["3", "16", "2 or 4"]),
    "micro-batch": (changed(micro_batch_size=3), ["3", "8"]),
    "sigma range": (changed(dmd2_score_sigma_range=0.5), ["--dmd2-score-sigma-range"]),
    "zero steps": (changed(diffusion_num_steps=0), ["--diffusion-num-steps 0"]),
    "ranks": (changed(actor_num_gpus_per_node=8), ["--actor-num-gpus-per-node 8", "2 CPU cores"]),
    "taken directory": (taken_run_dir, ["--run-dir", "holds another run", "--load"]),
    "no checkpoint": (changed(load="/nowhere"), ["--load /nowhere", "no such directory"]),
    "canvas": (changed(diffusion_height=33), ["--diffusion-height 33", "32"]),
    "frames": (changed(diffusion_num_frames=5), ["--diffusion-num-frames 5", "single pictures"]),
    "sglang without a Python": (changed(rollout_engine="sglang"), ["--sglang-python is required"]),
    "sglang's Python": (
        changed(rollout_engine="sglang", sglang_python="/nowhere/python"),
        ["--sglang-python /nowhere/python", "no such file"],
    ),
    "a Python without sglang": (
        changed(rollout_engine="sglang", sglang_python=sys.executable),
        [f"--sglang-python {sys.executable}", "has no SGLang"],
    ),
    "weight directory": (
        changed(rollout_engine="sglang", sglang_python=sys.executable, sglang_weight_directory="/proc/version/x"),
        ["--sglang-weight-directory /proc/version/x", "is a file"],
    ),
    "sglang's flags beside local": (changed(sglang_log_level="info"), ["--sglang-log-level", "--rollout-engine"]),
    "sigmas": (changed(diffusion_sigmas="1,2"), ["--diffusion-sigmas 1,2", "decrease"]),
    "a GPU that is too small": (changed(gpu_memory_gb=1e-4), ["--gpu-memory-gb 0.0001", "GB more than"]),
    "a host that is too small": (changed(host_memory_gb=1e-4), ["--host-memory-gb 0.0001", "of node 0", "actor"]),
}


@pytest.mark.parametrize("name", CASES)
def test_one_line_names_the_value_and_the_remedy(
    name: str, arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_diffusion, "run", lambda *_: pytest.fail("the run started"))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    change, words = CASES[name]
    assert start(change(arguments, tmp_path)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    for word in words:
        assert word in captured.err
    assert not (tmp_path / "run").exists()


def test_flags_for_the_server_are_checked_in_its_own_environment(
    arguments: Arguments, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr("miles_dmd2.engines.sglang.environment.check_version", lambda *given: asked.append(given))
    monkeypatch.setattr("miles_dmd2.engines.sglang.flags.known_flags", lambda python: frozenset({"log-level"}))
    flags = ("--rollout-engine", "sglang", "--sglang-python", "engine/python", "--sglang-allow-untested-version")
    assert start(arguments, "--dry-run", *flags, "--sglang-log-level", "info") == 0
    assert asked == [(Path("engine/python"), True)]
    assert "--log-level" in capsys.readouterr().out
    assert start(arguments, "--dry-run", *flags, "--sglang-log-levels", "info") == 2
    assert "error: --sglang-log-levels: neither" in capsys.readouterr().err


def test_a_family_that_sglang_cannot_serve_is_told(
    arguments: Arguments, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from miles_dmd2.models.base import ModelAdapter
    from miles_dmd2.models.qwen_image import QwenImageAdapter

    monkeypatch.setattr(QwenImageAdapter, "serving", ModelAdapter.serving)
    url = ("--rollout-engine", "sglang", "--rollout-engine-url", "http://127.0.0.1:1")
    assert start(arguments, "--dry-run", *url) == 2
    assert "error: --rollout-engine sglang: qwen_image cannot be served" in capsys.readouterr().err


def test_sigma_range_outside_zero_and_one(arguments: Arguments, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(arguments, "--dmd2-score-sigma-range", "0.2", "1.5") == 2
    assert "--dmd2-score-sigma-range 0.2 1.5" in capsys.readouterr().err


def test_dry_run_prints_what_config_reads_back_and_starts_nothing(
    arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_diffusion, "run", lambda *_: pytest.fail("the run started"))
    assert start(arguments, "--dry-run") == 0
    printed = capsys.readouterr().out
    (tmp_path / "again.yaml").write_text(printed)
    assert train_diffusion.main(["--config", str(tmp_path / "again.yaml"), "--dry-run"]) == 0
    assert capsys.readouterr().out == printed
    assert not (tmp_path / "run").exists()


def test_a_dry_run_shows_each_node_and_refuses_what_does_not_fit(
    arguments: Arguments, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_diffusion, "run", lambda *_: pytest.fail("the run started"))
    nodes = ("--ray-address", "auto", "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "4", "--device", "cuda")
    assert start(arguments, "--dry-run", *nodes) == 0
    printed = capsys.readouterr()
    first, second = yaml.safe_load(printed.out)["plan"]["nodes"]
    assert first["runs"] == {"engines": "0-0", "critic": "0-3", "actor": "0-3"}
    assert second["runs"] == {"critic": "4-7", "actor": "4-7"}
    assert "# Memory in GB (no limit known)" in printed.out  # the cluster's machines may be others than this one
    assert start(arguments, "--dry-run", *nodes, "--host-memory-gb", "0.001") == 2
    refused = capsys.readouterr()
    assert "#   node 0: engines 0-0, critic 0-3, actor 0-3" in refused.out
    assert refused.err.startswith("error: --host-memory-gb 0.001: the host of node 0 needs ")
    assert refused.err.count("\n") == 1


def test_limits_are_this_machine_s_unless_declared(arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    def limits(*more: str) -> tuple[float | None, float | None]:
        found = train_diffusion._limits(
            parse([*(f"--{name}={value}" for name, value in arguments.items()), *more]).config
        )
        return found.device, found.host

    monkeypatch.setattr(train_diffusion, "host_bytes", lambda: 7)
    assert limits() == (None, 7.0)
    assert limits("--ray-address", "auto") == (None, None)
    assert limits("--gpu-memory-gb", "141", "--host-memory-gb", "2000") == (141e9, 2000e9)
    assert limits("--ray-address", "auto", "--device", "cuda", "--host-memory-gb", "1") == (None, 1e9)
