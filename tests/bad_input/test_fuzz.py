"""Whatever a file holds: accepted, or refused in one line. Flags and YAML are in tests/config/test_flags.py, manifests
in tests/checkpointing/test_saving.py."""

from __future__ import annotations

import json
import re
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from miles_dmd2.checkpointing import Retention
from miles_dmd2.config import ConfigError
from miles_dmd2.config.checks import check_checkpoint, parameter_count, safetensors_fault
from miles_dmd2.config.trainers import read_trainer_entries
from miles_dmd2.data.latents import read_latents
from miles_dmd2.data.pinned import FORMAT, MANIFEST, verify_split
from miles_dmd2.data.prompts import load_prompts, read_prompt_file
from miles_dmd2.models.registry import build_adapter
from tests.tiny_qwen import build

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6))
JSON = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=6), v, max_size=3), max_leaves=8
)


def survives(call: Callable[[], object], refusal: type[ValueError] = ConfigError) -> bool:
    """Whether it was accepted."""
    told = ""
    try:
        call()
    except refusal as error:
        told = str(error)
    assert len(told.splitlines()) <= 1, told
    return not told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["critic", "actor", "x"]) | JSON,
        "role": st.sampled_from(["critic", "actor"]) | JSON,
        "args": st.dictionaries(st.sampled_from(["lr", "num-gpus", "lr_schedule", "seed"]) | st.text(), JSON) | JSON,
        "more": JSON,
    },
)


@given(st.lists(ENTRY | JSON, max_size=3))
def test_trainer_lists(folder: Path, entries: list[object]) -> None:
    file = folder / "trainers.yaml"
    file.write_text(yaml.safe_dump(entries), encoding="utf-8", errors="surrogatepass")
    survives(lambda: read_trainer_entries(file))
    survives(lambda: read_trainer_entries(entries))


LINES = st.one_of(st.text(max_size=20), JSON.map(json.dumps), JSON.map(lambda v: json.dumps({"prompt": v})))


@given(st.lists(LINES, max_size=4).map("\n".join) | st.binary(max_size=60), st.sampled_from(["p.txt", "p.jsonl", "p"]))
@example('{"prompt": "a", "prompt": "b"}', "p.jsonl")
@example('{"prompt": ' + "9" * 5000 + "}", "p.jsonl")
@example("\ufeff\ufeff", "p.txt")
def test_prompt_files(folder: Path, content: str | bytes, name: str) -> None:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    if survives(lambda: load_prompts(file)):
        prompts = load_prompts(file)
        assert prompts
        assert all((prompt.strip() and prompt.isascii()) or prompt.encode() for prompt in prompts)


@given(st.lists(st.text(max_size=12) | st.sampled_from(["", " ", "\x00", "{", '{"prompt": "a"}']), max_size=6))
@example(["\ufeff", "a"])
def test_text_files_are_read_line_by_line(folder: Path, lines: list[str]) -> None:
    """Against the law in words: the lines between line ends, trimmed, without those that are blank or unfit."""
    file = folder / "lines.txt"
    kept = [line for line in lines if not any("\ud800" <= char <= "\udfff" for char in line)]
    file.write_bytes("\r\n".join(kept).encode())
    whole = re.split("\r\n|\r|\n", "\r\n".join(kept).removeprefix("\ufeff"))
    wanted = [line.strip() for line in whole if line.strip()]
    records = [line for line in wanted if re.fullmatch(r"\{.*\}", line, re.DOTALL) and '"prompt"' in line]
    unfit = [line for line in wanted if any(unicodedata.category(c) == "Cc" and c not in "\t\v\f\x85" for c in line)]
    try:
        found = read_prompt_file(file, leave_out_unfit=True)
    except ConfigError:
        assert records or len(unfit) == len(wanted)
        return
    assert list(found.prompts) == [line for line in wanted if line not in unfit]
    assert found.unfit == len(unfit)
    assert survives(lambda: load_prompts(file)) == (not unfit)


HASHES = st.dictionaries(st.sampled_from(["train.jsonl", "a"]), st.fixed_dictionaries({"sha256": JSON}) | JSON) | JSON


@given(st.fixed_dictionaries({"format": st.just(FORMAT) | JSON, "files": HASHES}) | JSON, st.binary(max_size=9))
@example({"format": FORMAT, "files": {"train.jsonl": {"sha256": None}}}, b"")
@example({}, b"[" * 100_000)
def test_manifests_of_prompts(folder: Path, content: object, raw: bytes) -> None:
    """Whatever lies beside a prompt file: read, or one line."""
    directory = folder / "pinned"
    directory.mkdir(exist_ok=True)
    (directory / "train.jsonl").write_text('{"prompt": "one"}\n')
    for manifest in (json.dumps(content).encode("utf-8", "surrogatepass"), raw):
        (directory / MANIFEST).write_bytes(manifest)
        survives(lambda: load_prompts(directory / "train.jsonl"))
        survives(lambda: verify_split(directory))


TENSOR = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "U8", "Q4"]) | JSON,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-1, 40), max_size=3) | JSON,
    },
)
HEADERS = st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), TENSOR | JSON, max_size=3) | JSON


@given(HEADERS, st.binary(max_size=40))
@example({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(8))
@example({"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}, b"")
@example({"a": {"dtype": "F32", "shape": [1e400], "data_offsets": [0, 8]}}, bytes(8))
def test_safetensors_headers(folder: Path, header: object, data: bytes) -> None:
    """What is called sound is read by the library too, and the other way round."""
    from safetensors import SafetensorError, safe_open

    text = json.dumps(header).encode()
    (folder / "weights").mkdir(exist_ok=True)
    file = folder / "weights" / "w.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    fault = safetensors_fault(file)
    try:
        with safe_open(file, framework="pt") as opened:
            sound = bool(opened.keys())
    except SafetensorError:
        sound = False
    assert not (fault is None and not sound and b"Q4" not in text), (header, data)
    if sound:
        assert fault is None, fault
        assert parameter_count(file.parent) >= 0


@given(st.binary(max_size=40))
def test_bytes_are_no_weights(folder: Path, content: bytes) -> None:
    file = folder / "w.safetensors"
    file.write_bytes(content)
    fault = safetensors_fault(file)
    assert fault is None or len(fault.splitlines()) == 1


METADATA = st.dictionaries(
    st.sampled_from(["format", "prompts", "vae", "sha256"]),
    JSON.map(json.dumps) | st.sampled_from(["miles_dmd2 latents 1", '["a", "b"]', "[1, 2]"]),
)
TENSORS = st.sampled_from([torch.zeros(2, 3), torch.zeros(2), torch.zeros(()), torch.zeros(2, 1).bfloat16()])


@given(METADATA, TENSORS, st.sampled_from(["latents", "x"]))
@example({"format": "miles_dmd2 latents 1"}, torch.zeros(2, 3), "latents")
@example({"format": "miles_dmd2 latents 1", "prompts": '["a", "b"]'}, torch.zeros(2, 3), "latents")
@example({"format": "miles_dmd2 latents 1", "prompts": '["a", "b"]'}, torch.zeros(2, 1).bfloat16(), "latents")
def test_files_of_latents(folder: Path, metadata: dict[str, str], tensor: torch.Tensor, name: str) -> None:
    save_file({name: tensor}, folder / "latents.safetensors", metadata=metadata)
    assert not survives(lambda: read_latents(folder / "latents.safetensors"))  # no hash fits


@given(st.dictionaries(st.sampled_from(["checkpoint", "figure", "mode", "value"]), JSON) | JSON, st.binary(max_size=9))
@example({"checkpoint": "step_000001", "figure": "f", "mode": "max", "value": 10**400}, b"[" * 100_000)
@example({"checkpoint": "../x\0", "figure": "f", "mode": "max", "value": 1}, b"")
def test_what_names_the_best_checkpoint(folder: Path, content: object, raw: bytes) -> None:
    """Beside checkpoints, of a run that goes on: anything else is no best."""
    for text in (json.dumps(content).encode(), raw):
        (folder / "best.json").write_bytes(text)
        assert Retention(folder, 1, "f").best() is None


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("tiny") / "pipeline")


FILES = ["model_index.json", "transformer/config.json", "vae/config.json", "scheduler/scheduler_config.json"]
KEYS = [
    "_class_name",
    "transformer",
    "in_channels",
    "out_channels",
    "joint_attention_dim",
    "z_dim",
    "temperal_downsample",
]


@settings(max_examples=150)
@given(st.sampled_from(FILES), st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), JSON, max_size=3), JSON)
@example("vae/config.json", {"temperal_downsample": 5}, None)
@example("transformer/config.json", {"in_channels": 10**400}, None)
@example("model_index.json", {"../evil": ["a", "b"]}, None)
def test_pipeline_configs(pipeline: Path, folder: Path, name: str, changes: dict, instead: object) -> None:
    """Keys of a sound file changed, or another value in its place."""
    sound = json.loads((pipeline / name).read_text())
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(pipeline, copy)
    for content in ({**sound, **changes}, instead):
        (copy / name).write_text(json.dumps(content))
        if survives(lambda: check_checkpoint(copy, {"QwenImagePipeline": ("transformer", "vae")})):
            survives(lambda: build_adapter(copy, 32, 32), ValueError)
