"""The shipped teacher is what its manifest says, and its judge measures what it should."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from recipes.digits import build_teacher, classifier, data, metrics, report, run
from recipes.digits.report import PIPELINE, Column, Judge

MANIFEST = json.loads((PIPELINE / "manifest.json").read_text())


def test_every_shipped_file_has_the_hash_of_the_manifest_and_all_fit_in_three_megabytes() -> None:
    assert build_teacher.hash_files(PIPELINE) == MANIFEST["files"]
    assert build_teacher.hash_file(classifier.WEIGHTS) == MANIFEST["classifier"]
    size = sum(entry["size"] for entry in MANIFEST["files"].values()) + classifier.WEIGHTS.stat().st_size
    assert size <= 3_000_000


def test_nothing_shipped_is_a_pickle() -> None:
    weights = [name for name in MANIFEST["files"] if not name.endswith((".json", ".jinja", ".txt"))]
    assert weights
    assert all(name.endswith(".safetensors") for name in weights)


def test_the_tokenizer_makes_the_template_as_long_as_the_pipeline_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_teacher.build_tokenizer()
    assert build_teacher.check_template(tokenizer) == MANIFEST["prompt_tokens"] == 8
    monkeypatch.setattr(data, "PROMPTS", (*data.PROMPTS, "digit zero"))
    with pytest.raises(ValueError, match="must have one token length"):
        build_teacher.check_template(tokenizer)


def test_a_tokenizer_that_merges_the_template_is_refused() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # newlines vanish, punctuation sticks to words
    with pytest.raises(ValueError, match="but QwenImagePipeline drops 34"):
        build_teacher.check_template(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>"))


def test_the_judge_reads_the_digits_and_their_reconstructions() -> None:
    digits = data.load(300)
    model = classifier.load()
    assert classifier.label_accuracy(model, data.enlarge(digits.grey), digits.labels) > 0.98
    assert classifier.label_accuracy(model, report.reconstruct(digits), digits.labels) > 0.98
    wrong = (digits.labels + 1) % 10
    assert classifier.label_accuracy(model, data.enlarge(digits.grey), wrong) < 0.02


def with_moments(mean: torch.Tensor, deviation: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """A sample whose empirical mean and (diagonal) covariance are exactly these."""
    x = torch.randn(count, len(mean), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = x - x.mean(0)
    factor = torch.linalg.cholesky(torch.cov(x.T))
    return torch.linalg.solve_triangular(factor, x.T, upper=False).T * deviation + mean


def test_frechet_distance_is_the_closed_form_of_gaussians() -> None:
    """Diagonal covariances: sum of (mean difference)^2 + (deviation difference)^2."""
    mean_a, mean_b = torch.tensor([0.0, 1.0, -2.0]).double(), torch.tensor([0.5, 1.0, 0.0]).double()
    dev_a, dev_b = torch.tensor([1.0, 2.0, 0.5]).double(), torch.tensor([1.5, 0.5, 0.5]).double()
    a, b = with_moments(mean_a, dev_a, 50, 1), with_moments(mean_b, dev_b, 70, 2)
    expected = (0.25 + 4.0) + (0.25 + 2.25)
    assert classifier.frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)
    assert classifier.frechet_distance(a, a) == pytest.approx(0.0, abs=1e-9)


def column(fd: float) -> Column:
    return Column("a column", fd, 0.1, fd, 1.0, [])


def test_gap_closed_is_measured_from_the_better_of_both_grids() -> None:
    columns = {
        "teacher_50": column(1.0),
        "teacher": column(5.0),
        "student_start": column(3.0),
        "student_ema": column(1.5),
    }
    assert report.gap_closed(columns, "student_ema") == 0.75
    assert math.isclose(report.gap_closed(columns, "teacher_50"), 1.0)


def test_flags_that_a_user_gives_replace_the_recipe_s_own() -> None:
    flags = run.flags(4, Path("here"), smoke=True, given=["--num-rollout=9", "--prompt-data", "mine.txt"])
    assert "--num-rollout" not in flags
    assert "--prompt-data" not in flags
    assert flags[flags.index("--run-dir") + 1] == "here"
    assert flags[flags.index("--config") + 1].endswith("4_steps.yaml")


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_every_recipe_resolves_to_the_loop_that_the_docs_describe(steps: int) -> None:
    from miles_dmd2.config import build_plan, parse

    parsed = parse(run.flags(steps, Path("here"), smoke=False, given=[]))
    plan = build_plan(parsed.config, parsed.trainers)
    assert plan.student_steps == steps
    assert plan.windows == 5
    assert [group.updates_per_rollout for group in plan.groups] == [5, 1]
    assert plan.window_size == 64
    assert plan.stop_law == "per_sample"
    assert parsed.config.keeps_ema
    assert plan.forwards_per_update.engine == pytest.approx(320 * (steps + 1) / 2)


def test_metrics_name_a_sample_without_media() -> None:
    from miles_dmd2.types import RolloutSample, WeightVersion

    zero = torch.zeros(1)
    sample = RolloutSample(3, "the digit two", 1, 0, zero, zero, zero, {}, WeightVersion(0))
    with pytest.raises(ValueError, match=r"samples \[3\] have no decoded media"):
        metrics.evaluate([sample])


def test_the_floor_is_what_a_perfect_sampler_scores() -> None:
    """On a law that we can draw from: the floor of one sample predicts the distance of two fresh ones."""
    count, width = 600, 16
    draw = torch.Generator().manual_seed(0)

    def fresh() -> torch.Tensor:
        return torch.randn(count, width, generator=draw, dtype=torch.float64)

    labels = torch.arange(count) % 10
    expected = sum(classifier.frechet_distance(fresh(), fresh()) for _ in range(20)) / 20
    found = classifier.frechet_floor(fresh(), labels)
    assert found.value == pytest.approx(expected, rel=0.15)


def test_the_judge_is_no_distance_away_from_itself() -> None:
    judge = Judge(data.load(200))
    assert classifier.frechet_distance(judge.features, judge.features) == pytest.approx(0.0, abs=1e-6)
    assert judge.floor().value > 0.05


def test_digits_as_real_latents_look_like_the_digits(tmp_path: Path) -> None:
    """Encoded and decoded again they are the pictures up to the VAE's error, each with its own prompt."""
    from miles_dmd2.data.latents import read_latents
    from miles_dmd2.models.registry import build_adapter
    from recipes.digits import latents

    path = tmp_path / "latents.safetensors"
    latents.build(path, count=12)
    content = read_latents(path)
    digits = data.load(12)
    assert content.prompts == tuple(data.prompt_of(int(label)) for label in digits.labels)
    adapter = build_adapter(latents.PIPELINE, data.IMAGE_SIZE, data.IMAGE_SIZE)
    pictures = adapter.decode(adapter.load_components(), content.latents)[:, 0].permute(0, 3, 1, 2) * 2 - 1
    error = (pictures - data.enlarge(digits.grey)).abs().mean((1, 2, 3))
    others = (pictures - data.enlarge(digits.grey).roll(1, 0)).abs().mean((1, 2, 3))
    assert error.max() < 0.15
    assert (error < 0.5 * others).all()
