"""Files, directories and devices: broken one way at a time, each told in one line before anything starts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from config_commands import run

from miles_dmd2.config import ConfigError
from miles_dmd2.config.checks import (
    check_checkpoint,
    check_devices,
    check_eval_media,
    check_packages,
    check_run_dir,
    find_checkpoint,
    safetensors_fault,
)

KNOWN = dict.fromkeys(
    ("QwenImagePipeline", "WanPipeline"), ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    text = str(caught.value)
    assert text.splitlines() == [text]
    return text


def edit_index(root: Path, **changes: object) -> None:
    file = root / "model_index.json"
    index = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in index.items() if value != "remove"}))


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def shard(root: Path) -> None:
    weights = root / "transformer" / "model.safetensors"
    weights.rename(weights.with_name("model-00001-of-00002.safetensors"))
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (root / "transformer" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def test_a_complete_pipeline_passes(pipeline: Path) -> None:
    check_checkpoint(pipeline, KNOWN)


def test_a_sharded_pipeline_passes(pipeline: Path) -> None:
    shard(pipeline)
    shards = pipeline / "transformer"
    shutil.copy(shards / "model-00001-of-00002.safetensors", shards / "model-00002-of-00002.safetensors")
    check_checkpoint(pipeline, KNOWN)


WEIGHTS = "transformer/model.safetensors"
BROKEN: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "gone": (shutil.rmtree, ("no such directory", "model_index.json")),
    "no index": (lambda p: (p / "model_index.json").unlink(), ("has no model_index.json",)),
    "index is no JSON": (
        lambda p: (p / "model_index.json").write_text("{"),
        ("model_index.json is not readable JSON",),
    ),
    "index is a list": (lambda p: (p / "model_index.json").write_text("[1]"), ("must be a JSON object",)),
    "index is binary": (lambda p: (p / "model_index.json").write_bytes(b"\xff\xff"), ("not readable JSON",)),
    "unknown class": (lambda p: edit_index(p, _class_name="FluxPipeline"), ("FluxPipeline", "QwenImagePipeline, Wan")),
    "no class": (lambda p: edit_index(p, _class_name="remove"), ("_class_name null", "QwenImagePipeline")),
    "class is a list": (lambda p: edit_index(p, _class_name=["Qwen"]), ("_class_name", "QwenImagePipeline")),
    "no vae named": (lambda p: edit_index(p, vae="remove"), ("names no vae", "complete pipeline")),
    "part named, not there": (lambda p: edit_index(p, extra=["a", "B"]), ("has no extra/", "complete pipeline")),
    "no scheduler dir": (lambda p: shutil.rmtree(p / "scheduler"), ("has no scheduler/",)),
    "no scheduler config": (
        lambda p: (p / "scheduler/scheduler_config.json").unlink(),
        ("has no scheduler/scheduler_config.json",),
    ),
    "empty tokenizer": (lambda p: (p / "tokenizer/tokenizer.json").unlink(), ("tokenizer/ is empty",)),
    "no config": (lambda p: (p / "vae/config.json").unlink(), ("has no vae/config.json",)),
    "no weights": (lambda p: (p / "text_encoder/model.safetensors").unlink(), ("text_encoder/ has no .safetensors",)),
    "empty weights": (lambda p: cut(p / WEIGHTS, 0), (WEIGHTS, "cut short", "again")),
    "weights cut in the header": (lambda p: cut(p / WEIGHTS, 20), (WEIGHTS, "cut short", "again")),
    "weights cut in a tensor": (lambda p: cut(p / WEIGHTS, -1), (WEIGHTS, "bytes and its header says", "again")),
    "weights with a tail": (
        lambda p: (p / WEIGHTS).write_bytes((p / WEIGHTS).read_bytes() + b"x"),
        (WEIGHTS, "bytes and its header says"),
    ),
    "weights are a pointer": (
        lambda p: (p / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"),
        (WEIGHTS, "Git LFS pointer"),
    ),
    "weights are not safetensors": (lambda p: (p / WEIGHTS).write_bytes(b"PK" * 400), (WEIGHTS, "not safetensors")),
    "header is no object": (lambda p: (p / WEIGHTS).write_bytes(_header(b"[1]")), (WEIGHTS, "malformed")),
    "header without offsets": (lambda p: (p / WEIGHTS).write_bytes(_header(b'{"a": {}}')), (WEIGHTS, "malformed")),
    "no tensors": (lambda p: (p / WEIGHTS).write_bytes(_header(b"{}")), (WEIGHTS, "holds no tensors")),
    "shard missing": (shard, ("transformer/", "model-00002-of-00002.safetensors", "again")),
    "no weight map": (
        lambda p: (p / "transformer/model.safetensors.index.json").write_text("{}"),
        ("has no weight_map", "again"),
    ),
}


def _header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize("case", BROKEN)
def test_broken_pipelines(pipeline: Path, case: str) -> None:
    damage, parts = BROKEN[case]
    damage(pipeline)
    text = refusal(lambda: check_checkpoint(pipeline, KNOWN))
    for part in (f"--hf-checkpoint {pipeline}", *parts):
        assert part in text, text


def test_a_file_is_no_pipeline_and_the_flag_may_be_another(pipeline: Path) -> None:
    file = pipeline / "model_index.json"
    text = refusal(lambda: check_checkpoint(file, KNOWN, "trainer critic: hf-checkpoint"))
    assert text.startswith(f"trainer critic: hf-checkpoint {file}: is a file")


def test_unreadable_weights_are_told(tmp_path: Path) -> None:
    assert "cannot be read" in (safetensors_fault(tmp_path / "gone.safetensors") or "")


def checkpoint(root: Path, step: int, *, complete: bool = True) -> Path:
    directory = root / f"step_{step:06d}"
    directory.mkdir(parents=True)
    if complete:
        (directory / "manifest.json").write_text("{}")
    return directory


def test_the_newest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    for step in (5, 1000000, 999999):
        newest = checkpoint(tmp_path / "checkpoints", step)
    checkpoint(tmp_path / "checkpoints", 1000001, complete=False)
    newest = tmp_path / "checkpoints" / "step_1000000"
    assert find_checkpoint(tmp_path) == find_checkpoint(tmp_path / "checkpoints") == find_checkpoint(newest) == newest


def test_loads_that_find_nothing(tmp_path: Path) -> None:
    assert f"--load {tmp_path}/no: no such directory" in refusal(lambda: find_checkpoint(tmp_path / "no"))
    assert "holds no complete checkpoint step_*/manifest.json;" in refusal(lambda: find_checkpoint(tmp_path))
    checkpoint(tmp_path, 5, complete=False)
    assert "(step_000005: without a manifest" in refusal(lambda: find_checkpoint(tmp_path))
    (tmp_path / "file").write_text("")
    assert "is a file" in refusal(lambda: find_checkpoint(tmp_path / "file"))


def check_dirs(*flags: str) -> None:
    check_run_dir(run(*flags).config)


def test_a_new_an_empty_and_a_strangers_directory_are_fine(tmp_path: Path) -> None:
    check_dirs("--run-dir", str(tmp_path / "a" / "b"))
    check_dirs("--run-dir", str(tmp_path))
    (tmp_path / "notes.txt").write_text("")
    check_dirs("--run-dir", str(tmp_path))


@pytest.mark.parametrize("trace", ["run.json", "manifest.json", "checkpoints/step_000005"])
def test_a_run_directory_that_holds_another_run_is_refused(tmp_path: Path, trace: str) -> None:
    (tmp_path / "checkpoints" / "step_000005").mkdir(parents=True) if "step" in trace else (tmp_path / trace).touch()
    text = refusal(lambda: check_dirs("--run-dir", str(tmp_path)))
    assert text.startswith(
        f"--run-dir {tmp_path}: holds another run ({trace}); give a new directory, or --load {tmp_path}"
    )


def test_load_allows_its_own_run_only(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    for root in (mine, other):
        checkpoint(root / "checkpoints", 5)
        (root / "run.json").touch()
    for load in (mine, mine / "checkpoints", mine / "checkpoints" / "step_000005"):
        check_dirs("--run-dir", str(mine), "--load", str(load))
    check_dirs("--run-dir", str(tmp_path / "new"), "--load", str(other))
    text = refusal(lambda: check_dirs("--run-dir", str(mine), "--load", str(other)))
    assert "holds another run (run.json)" in text
    assert f"instead of {other}" in text
    text = refusal(lambda: check_dirs("--run-dir", str(tmp_path / "new"), "--load", str(tmp_path / "none")))
    assert "no such directory" in text


def test_a_save_directory_of_its_own_is_guarded_too(tmp_path: Path) -> None:
    mine, save = tmp_path / "mine", tmp_path / "save"
    mine.mkdir()
    (mine / "run.json").touch()
    checkpoint(save, 5)
    text = refusal(lambda: check_dirs("--run-dir", str(tmp_path / "new"), "--save", str(save)))
    assert text.startswith(f"--save {save}: holds checkpoints of another run (step_000005)")
    check_dirs("--run-dir", str(mine), "--save", str(save), "--load", str(save))


def test_directories_that_cannot_be_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert f"--run-dir {file}: is a file" in refusal(lambda: check_dirs("--run-dir", str(file)))
    text = refusal(lambda: check_dirs("--run-dir", str(file / "a" / "b")))
    assert f"cannot be made, {file} is a file" in text
    assert "--save" in refusal(lambda: check_dirs("--run-dir", str(tmp_path / "a"), "--save", str(file)))


def test_eval_media_of_another_run_are_not_written_over(tmp_path: Path) -> None:
    flags = ("--eval-prompt-data", "e", "--save-eval-media-dir", str(tmp_path / "media"))
    check_eval_media(run(*flags).config)
    check_eval_media(run().config)
    (tmp_path / "media").write_text("")
    assert "media: is a file" in refusal(lambda: check_eval_media(run(*flags).config))
    (tmp_path / "media").unlink()
    (tmp_path / "media" / "eval_000025").mkdir(parents=True)
    check_eval_media(run(*flags).config)  # as long as there is nothing in it
    (tmp_path / "media" / "eval_000025" / "index.jsonl").write_text("")
    assert "another run (eval_000025)" in refusal(lambda: check_eval_media(run(*flags).config))
    check_eval_media(run(*flags, "--load", "runs/a").config)  # evals of a run that is continued come again


def test_a_directory_that_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "is not writable" in refusal(lambda: check_dirs("--run-dir", str(tmp_path / "a")))


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--actor-num-gpus-per-node 5", ("--actor-num-gpus-per-node 5", "4 CPU cores", "use 4 or fewer")),
        ("--num-gpus-per-node 5", ("--num-gpus-per-node 5", "4 CPU cores", "use 4 or fewer")),
        ("--device cuda --actor-num-gpus-per-node 4", ("--actor-num-gpus-per-node 4", "2 CUDA devices", "use 2")),
        ("--actor-num-nodes 2", ("--actor-num-nodes 2", "one node", "--ray-address")),
    ],
)
def test_more_ranks_than_devices(flags: str, parts: tuple[str, ...]) -> None:
    config = run(*flags.split(), "--rollout-batch-size", "100").config
    text = refusal(lambda: check_devices(config, cpu_count=4, cuda_count=2))
    for part in parts:
        assert part in text, text


def test_enough_devices() -> None:
    check_devices(run("--actor-num-gpus-per-node", "4").config, cpu_count=4, cuda_count=0)
    check_devices(run("--actor-num-gpus-per-node", "2", "--device", "cuda").config, cpu_count=1, cuda_count=2)


def test_cuda_without_a_device() -> None:
    config = run("--device", "cuda").config
    assert "--device cuda: no CUDA device" in refusal(lambda: check_devices(config, cpu_count=4, cuda_count=0))


def test_packages_and_metric_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_packages(run().config)
    metrics = ("--eval-prompt-data", "e.txt", "--eval-metrics-path")
    text = refusal(lambda: check_packages(run(*metrics, f"{tmp_path}/m.py:figures").config))
    assert f"no such file {tmp_path}/m.py" in text
    (tmp_path / "m.py").touch()
    check_packages(run(*metrics, f"{tmp_path}/m.py:figures").config)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "--use-wandb: the package wandb" in refusal(lambda: check_packages(run("--use-wandb").config))
