"""A run that goes on reads what the interrupted one read: every option that names a file, by what is in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import train_diffusion
from miles_dmd2.checkpointing import IntervalCheckpoints
from miles_dmd2.cli.contents import contents, function_digest, prompts_digest
from miles_dmd2.config import Config, ConfigError, checks, parse
from miles_dmd2.config.options import BY_CONTENT
from miles_dmd2.data.latents import LatentFile, write_latents
from miles_dmd2.models.checkpoint import component_digest, pipeline_digest
from tests.saved_groups import FileGroup
from tests.tiny_qwen import build

TRAINERS = "- {{name: critic, role: critic, args: {{hf_checkpoint: {}}}}}\n- {{name: actor, role: actor}}\n"
# Options that name a place to write to, or a program whose version is told beside those of packages.
NOT_READ = {"run_dir", "save", "load", "save_eval_media_dir", "sglang_weight_directory", "sglang_python"}
NO_LOAD = {"reference_transformer"}  # of renders, which continue nothing


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that a run can read, in a directory of its own."""
    directory = tmp_path_factory.mktemp("files") / "sound"
    build(directory / "pipeline")
    shutil.copytree(directory / "pipeline", directory / "teacher")
    edit_weights(directory / "teacher")
    (directory / "prompts.txt").write_text("one\ntwo\n")
    (directory / "eval.txt").write_text("three\n")
    (directory / "own.py").write_text("def score(samples): return [0.0]\ndef figures(samples): return {}\n")
    (directory / "measures.py").write_text("def figures(samples): return {}\n")
    (directory / "trainers.yaml").write_text(TRAINERS.format("teacher"))
    shape = (2, 4, 64)  # of the tiny pipeline at 32 x 32
    latents = LatentFile(torch.zeros(shape), ("one", "two"), component_digest(directory / "pipeline", "vae"))
    write_latents(directory / "latents.safetensors", latents)
    return directory


@pytest.fixture
def files(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to change, which is also the working directory."""
    copy = Path(shutil.copytree(sound, tmp_path / "files"))
    monkeypatch.chdir(copy)
    return copy


def command(files: Path, *more: object) -> list[str]:
    flags = {
        "hf-checkpoint": files / "pipeline",
        "trainer-config": files / "trainers.yaml",
        "diffusion-height": 32,
        "diffusion-width": 32,
        "prompt-data": files / "prompts.txt",
        "dmd2-student-input": "forward_noise",
        "dmd2-latents": files / "latents.safetensors",
        "custom-rm-path": f"{files / 'own.py'}:score",
        "eval-prompt-data": files / "eval.txt",
        "eval-metrics-path": f"{files / 'measures.py'}:figures",
        "rollout-batch-size": 2,
        "n-samples-per-prompt": 4,
        "num-steps-per-rollout": 2,
        "num-rollout": 3,
    }
    run_dir = [] if "--run-dir" in more else ["--run-dir", "run"]
    return [str(word) for name, value in flags.items() for word in (f"--{name}", value)] + [*run_dir, *map(str, more)]


def save(words: list[str], completed: int = 1) -> Path:
    """The checkpoint that a run of this command would write."""
    parsed = parse(words)
    options, facts = train_diffusion.options(parsed.config), train_diffusion.run_facts(parsed.config, parsed.trainers)
    groups = [FileGroup("critic", "critic"), FileGroup("actor", "actor")]
    IntervalCheckpoints(parsed.config.save_dir, 1, 3, options, facts)(completed, groups)
    return parsed.config.save_dir / f"step_{completed:06d}"


def edit_weights(pipeline: Path, at: int = -1) -> None:
    """One value of one tensor, here its last."""
    (file,) = (pipeline / "transformer").glob("*.safetensors")
    tensors = load_file(file)
    tensors["img_in.weight"].view(-1)[at] += 1
    save_file(tensors, file, metadata={"format": "pt"})


def other_latents(files: Path) -> None:
    (files / "latents.safetensors").unlink()
    vae = component_digest(files / "pipeline", "vae")
    write_latents(files / "latents.safetensors", LatentFile(torch.ones(2, 4, 64), ("one", "two"), vae))


def appended(name: str, text: str) -> Callable[[Path], None]:
    def change(files: Path) -> None:
        with (files / name).open("a") as file:
            file.write(text)

    return change


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "hf_checkpoint": (lambda files: edit_weights(files / "pipeline"), "pipeline is not what"),
    "trainer_config": (lambda files: edit_weights(files / "teacher", 0), "names a model directory that is not what"),
    "prompt_data": (lambda files: (files / "prompts.txt").write_text("two\none\n"), "holds other prompts than what"),
    "eval_prompt_data": (appended("eval.txt", "four\n"), "eval.txt holds other prompts than what"),
    "dmd2_latents": (other_latents, "latents.safetensors is not what"),
    "custom_rm_path": (appended("own.py", "WEIGHT = 2\n"), "own.py:score is not what"),
    "eval_metrics_path": (appended("measures.py", "SCALE = 2\n"), "measures.py:figures is not what"),
}


def test_every_option_that_names_a_file_is_one_of_these() -> None:
    """A new one is either compared by content, or says here why not."""
    named = {
        name
        for section in Config.model_fields.values()
        for name, field in section.annotation.model_fields.items()
        if "Path" in str(field.annotation) or name.endswith("_path")
    }
    assert named == BY_CONTENT | NOT_READ | NO_LOAD
    assert set(CHANGES) == BY_CONTENT | {"trainer_config"}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_in_its_place_is_refused_unless_it_is_named(
    name: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["--load", str(save(command(files))), "--dry-run"]
    assert train_diffusion.main(command(files, *load)) == 0, capsys.readouterr().err
    change, words = CHANGES[name]
    change(files)
    flag = name.replace("_", "-")
    assert train_diffusion.main(command(files, *load)) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert f"--{flag}" in line
    assert f"{words} the checkpoint's run read" in line
    assert line.endswith(f"use the values of the run it continues, or say --allow-config-change {flag}\n")
    assert train_diffusion.main(command(files, *load, "--allow-config-change", flag)) == 0, capsys.readouterr().err


def test_all_of_it_may_lie_elsewhere(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All but a trainer's own model directory, which the trainer list names."""
    checkpoint = save(command(files))
    moved = Path(shutil.copytree(files, tmp_path / "moved"))
    assert train_diffusion.main(command(moved, "--load", checkpoint, "--dry-run")) == 0, capsys.readouterr().err


@pytest.mark.parametrize("now", [True, False])
def test_evals_that_only_one_of_the_two_has_are_told(
    now: bool, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command(files)
    at = words.index("--eval-prompt-data")
    without = words[:at] + words[at + 4 :]
    first, second = (without, words) if now else (words, without)
    checkpoint = save(first)
    assert train_diffusion.main([*second, "--load", str(checkpoint), "--dry-run"]) == 2
    said = "was not given to the checkpoint's run" if now else "was given to the checkpoint's run and is not here"
    line = capsys.readouterr().err
    assert line.count(said) == 2
    assert line.endswith("--allow-config-change eval-prompt-data eval-metrics-path\n")


def header(tensors: object) -> bytes:
    """A safetensors file without tensors."""
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize("where", ["weights' first value", "and last", "config", "tokenizer", "another file"])
def test_digest_of_a_pipeline(where: str, files: Path) -> None:
    pipeline = files / "pipeline"
    before = pipeline_digest(pipeline)
    (pipeline / "README.md").write_text("of no part")
    (pipeline / ".cache").mkdir()
    (pipeline / ".cache" / "download.json").write_text("{}")
    (pipeline / "of_no_part").mkdir()
    (pipeline / "of_no_part" / "unfetched.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    (pipeline / "vae" / "weights.bin").write_text("never loaded")
    assert pipeline_digest(pipeline) == before
    if where in ("weights' first value", "and last"):
        edit_weights(pipeline, 0 if "first" in where else -1)
    elif where == "another file":
        (pipeline / "tokenizer" / "more.txt").write_text("")
    else:
        file = pipeline / ("vae/config.json" if where == "config" else "tokenizer/tokenizer_config.json")
        file.write_text(json.dumps({**json.loads(file.read_text()), "x": 1}))
    assert pipeline_digest(pipeline) != before


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "no readable safetensors header"),
        (b"version https://git-lfs.github.com/spec/v1\n", "no readable safetensors header"),
        (header({"a": {"dtype": "F32", "shape": [1]}}), "describes a tensor in a malformed way"),
        (
            header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}}),
            "describes a tensor in a malformed way",
        ),
    ],
)
def test_a_file_of_no_weights_is_told_by_its_name(content: bytes, told: str, files: Path) -> None:
    (files / "pipeline" / "vae" / "more.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^--hf-checkpoint: .*more\.safetensors (has )?{told}"):
        pipeline_digest(files / "pipeline")


def test_prompts_are_known_by_what_they_are(files: Path) -> None:
    """Whatever file and format they come from; which of them have no reward counts where there is a reward."""

    def digest(text: str, *, name: str = "p.txt", rewarded: bool = False) -> str:
        (files / name).write_text(text)
        return prompts_digest(files / name, "--prompt-data", rewarded=rewarded)

    assert len({digest(text) for text in ("a\nb", "b\na", "a, b", "a", "a\nb\nb")}) == 5
    records = '{"prompt": "a"}\n{"prompt": "b", "metadata": {"rm_type": "none"}}\n'
    assert digest(records, name="p.jsonl") == digest("\n a\n\nb\n")
    assert digest(records, name="p.jsonl", rewarded=True) != digest("a\nb", rewarded=True)


def test_a_function_of_a_module_is_known_by_its_source() -> None:
    one = function_digest("recipes.digits.metrics:evaluate", "--eval-metrics-path")
    assert one == function_digest(f"{Path('recipes/digits/metrics.py').resolve()}:evaluate", "--eval-metrics-path")
    assert one != function_digest("recipes.digits.metrics:other", "--eval-metrics-path")
    with pytest.raises(ConfigError, match=r"there is no module no_such\.module; give module:function"):
        function_digest("no_such.module:evaluate", "--eval-metrics-path")


def test_contents_are_of_what_is_given(files: Path) -> None:
    parsed = parse(command(files))
    assert set(contents(parsed.config, parsed.trainers)) == set(CHANGES)


def samples(directory: Path) -> Path:
    (directory / "eval_000000").mkdir(parents=True)
    (directory / "eval_000000" / "index.jsonl").touch()
    return directory


@pytest.mark.parametrize(
    ("made_in", "now_in", "run_dir", "fits"),
    [
        ("media", "media", "run", True),  # the very run, where it wrote them
        ("run/media", "run/media", "run", True),
        (None, "run/media", "run", True),  # a run directory that was moved, with all that is in it
        (None, "media", "run", False),  # of somebody else
        ("mine", "media", "run", False),
        ("media", "media", "fork", False),  # a second run from the same checkpoint would write over the first's
    ],
)
def test_eval_samples_of_another_run_are_not_written_over(
    made_in: str | None, now_in: str, run_dir: str, fits: bool, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [] if made_in is None else ["--save-eval-media-dir", files / made_in]
    checkpoint = save(command(files, *before))
    samples(files / now_in)
    words = command(files, "--save-eval-media-dir", files / now_in, "--load", checkpoint, "--run-dir", run_dir)
    code = train_diffusion.main([*words, "--dry-run"])
    err = capsys.readouterr().err
    assert code == (0 if fits else 2), err
    if not fits:
        assert err.startswith(f"error: --save-eval-media-dir {files / now_in}: holds the samples of another run (eval_")
        assert err.count("\n") == 1


def test_a_directory_without_samples_is_anybodys(files: Path) -> None:
    checks.refuse_samples(files)
