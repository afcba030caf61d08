"""Model directories."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from miles_dmd2.models.loading import quiet
from tests.bad_input.bench import Bench, Case, Table, edit_json
from tests.tiny_sd3 import build as build_sd3

FLAG = "--hf-checkpoint"


def damaged(damage: Callable[[Path], object], name: str, value: str, remedy: str) -> Case:
    return Case(lambda bench: bench.broken(damage), name, value, remedy)


def weights(root: Path) -> Path:
    (file,) = (root / "transformer").glob("*.safetensors")
    return file


def cut(root: Path, size: int) -> None:
    weights(root).write_bytes(weights(root).read_bytes()[:size])


def header(root: Path, content: object, data: bytes = b"") -> None:
    text = json.dumps(content).encode()
    weights(root).write_bytes(len(text).to_bytes(8, "little") + text + data)


def tensor(begin: int, end: int, size: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": [size], "data_offsets": [begin, end]}


def index(root: Path, shards: object) -> None:
    (root / "transformer" / "model.safetensors.index.json").write_text(json.dumps(shards))


def pickled(root: Path) -> None:
    weights(root).rename(root / "transformer" / "diffusion_pytorch_model.bin")


def long_grid(bench: Bench) -> list[str]:
    """Of a family whose pipeline takes no sigmas; the others take any."""
    grid = ["--diffusion-num-steps", "1000", "--diffusion-flow-shift", "100"]
    with quiet():
        return [FLAG, str(build_sd3(bench.path / "sd3")), *grid]


MODELS: Table = {
    "nowhere": Case(lambda _: [FLAG, "/nowhere/at/all"], FLAG, "/nowhere/at/all", "give the directory"),
    "a file": Case(lambda bench: [FLAG, str(bench.file("model.bin", ""))], FLAG, "is a file", "give the directory"),
    "no index": damaged(lambda p: (p / "model_index.json").unlink(), FLAG, "model_index.json", "give the directory"),
    "index no JSON": damaged(lambda p: (p / "model_index.json").write_text("{"), FLAG, "not readable JSON", "again"),
    "index a list": damaged(lambda p: (p / "model_index.json").write_text("[1]"), FLAG, "must be a JSON", "again"),
    "other family": damaged(
        lambda p: edit_json(p / "model_index.json", _class_name="FluxPipeline"),
        FLAG,
        "FluxPipeline",
        "this version trains",
    ),
    "part not named": damaged(lambda p: edit_json(p / "model_index.json", vae="remove"), FLAG, "no vae", "complete"),
    "part not there": damaged(lambda p: shutil.rmtree(p / "transformer"), FLAG, "has no transformer/", "complete"),
    "part empty": damaged(
        lambda p: [file.unlink() for file in (p / "tokenizer").iterdir()], FLAG, "tokenizer/ is empty", "complete"
    ),
    "no weights": damaged(lambda p: weights(p).unlink(), FLAG, "no .safetensors weights", "saved as safetensors"),
    "only a pickle": damaged(pickled, FLAG, "diffusion_pytorch_model.bin, a pickle", "saved as safetensors"),
    "cut short": damaged(lambda p: cut(p, 20), FLAG, "cut short (20 bytes)", "again"),
    "size": damaged(lambda p: cut(p, -1), FLAG, "its header says", "download or export it again"),
    "LFS": damaged(lambda p: weights(p).write_text("version https://git-lfs"), FLAG, "Git LFS pointer", "git lfs pull"),
    "header": damaged(lambda p: header(p, {"a": {}}), FLAG, "malformed safetensors header", "again"),
    "nothing in it": damaged(lambda p: header(p, {}), FLAG, "holds no tensors", "again"),
    "overlap": damaged(
        lambda p: header(p, {"a": tensor(0, 8, 2), "b": tensor(4, 12, 2)}, bytes(12)), FLAG, "overlap", "again"
    ),
    "shape": damaged(
        lambda p: header(p, {"a": tensor(0, 8, 3)}, bytes(8)), FLAG, "a 8 bytes, its shape takes 12", "again"
    ),
    "no map": damaged(lambda p: index(p, {}), FLAG, "no weight_map", "download it again"),
    "no shard": damaged(lambda p: index(p, {"weight_map": {"a": "b.safetensors"}}), FLAG, "b.safetensors", "download"),
    "shard elsewhere": damaged(
        lambda p: index(p, {"weight_map": {"a": "../vae/b.safetensors"}}),
        FLAG,
        "../vae/b.safetensors",
        "a source you trust",
    ),
    "variant": damaged(
        lambda p: edit_json(p / "transformer" / "config.json", guidance_embeds=True),
        FLAG,
        "guidance_embeds = true",
        "use a plain Qwen-Image",
    ),
    "channels": damaged(
        lambda p: edit_json(p / "transformer" / "config.json", in_channels="many"),
        FLAG,
        "in_channels",
        "positive integer",
    ),
    "channels differ": damaged(
        lambda p: edit_json(p / "transformer" / "config.json", in_channels=60), FLAG, "in_channels 60", "must be 4 x"
    ),
    "grid that no scheduler has": Case(long_grid, "--diffusion-num-steps 1000", "shift 100", "lower one of them"),
}
