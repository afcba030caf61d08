"""Prompts are cleaned and counted, split by content alone, written whole, and read only as they were written."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_dmd2.config import ConfigError
from miles_dmd2.data.pinned import FILES, MANIFEST, verify_split
from miles_dmd2.data.prompts import load_prompts, read_prompt_file
from miles_dmd2.data.splits import Cleaned, Prepared, clean, prepare, split, write

PROMPTS = [f"prompt {i}" for i in range(40)]
COMPOSED, DECOMPOSED = "caf\u00e9", "cafe\u0301"
FAMILY = "a \U0001f468\u200d\U0001f469\u200d\U0001f467"  # an emoji of three with joiners


def prepared(directory: Path, content: str, *, seed: int = 0, num_test: int = 5, num_eval: int = 3) -> Prepared:
    path = directory / "source.txt"
    path.write_text(content, encoding="utf-8", newline="")
    source = read_prompt_file(path, leave_out_unfit=True)
    return prepare(source, {"file": path.name}, num_test=num_test, num_eval=num_eval, seed=seed)


def test_unicode_and_doubles() -> None:
    """Two spellings of one word are one prompt; what cannot be seen is none; joiners stay."""
    found = clean([COMPOSED, "one", DECOMPOSED, FAMILY, "one", "\u200b", "\u200b \ufeff"])
    assert found == Cleaned((COMPOSED, "one", FAMILY), not_nfc=1, duplicates=2, unseen=2, invisible=1)


@given(st.lists(st.text(min_size=1).filter(str.strip), max_size=12))
def test_cleaned_prompts_are_unique_and_normal(prompts: list[str]) -> None:
    found = clean(prompts)
    assert len(set(found.prompts)) == len(found.prompts)
    assert all(unicodedata.is_normalized("NFC", prompt) for prompt in found.prompts)
    assert len(found.prompts) + found.duplicates + found.unseen == len(prompts)
    assert clean(found.prompts).prompts == found.prompts


def test_the_split_is_by_a_keyed_hash() -> None:
    """The law of the documentation, by hand, and one result written down: neither may ever change."""
    parts = split(PROMPTS, 5, 3, 7)
    key = b"miles_dmd2/1|7|split"
    ordered = sorted(PROMPTS, key=lambda p: hashlib.blake2b(p.encode(), digest_size=16, key=key).hexdigest())
    assert (*parts["eval_media"], *parts["test"], *parts["train"]) == tuple(ordered)
    assert {name: len(part) for name, part in parts.items()} == {"train": 32, "test": 5, "eval_media": 3}
    assert parts["eval_media"] == PINNED
    assert split(PROMPTS, 5, 3, 8) != parts


PINNED = ("prompt 34", "prompt 22", "prompt 27")


@given(st.permutations(PROMPTS), st.sets(st.sampled_from(PROMPTS), max_size=4))
def test_the_order_of_the_source_does_not_matter_and_few_prompts_move(order: list[str], gone: set[str]) -> None:
    whole = split(PROMPTS, 5, 3, 0)
    assert split(order, 5, 3, 0) == whole
    less = split([prompt for prompt in order if prompt not in gone], 5, 3, 0)
    for name in ("test", "eval_media"):
        assert len(set(less[name]) - set(whole[name])) <= len(gone)


def test_too_few() -> None:
    with pytest.raises(ConfigError, match="--num-test 38: 40 prompts are too few for it, --num-eval 2 and one"):
        split(PROMPTS, 38, 2, 0)


def test_line_ends_order_doubles_and_spelling_of_the_source_change_no_output(tmp_path: Path) -> None:
    text = [*PROMPTS, COMPOSED]
    plain = prepared(tmp_path, "\n".join(text))
    odd = "\ufeff" + "\r\n".join([*reversed(text), "", DECOMPOSED, "prompt 3 ", "  ", "tw\0o"]) + "\r\n"
    other = prepared(tmp_path, odd)
    assert other.contents == plain.contents
    assert other.manifest["counts"] == {
        "lines": 46,
        "prompts": 44,
        "byte_order_mark": 1,
        "carriage_returns": 46,
        "blank_lines": 2,
        "unfit": 1,
        "not_nfc": 1,
        "invisible": 0,
        "duplicates": 2,
        "kept": 41,
    }
    assert other.manifest["source"] == {"file": "source.txt", "sha256": hashlib.sha256(odd.encode()).hexdigest()}


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=30))
def test_what_is_written_is_what_is_read(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    """Whatever characters a jsonl source holds, line ends and marks in prompts included."""
    directory = tmp_path_factory.mktemp("any")
    path = directory / "source.jsonl"
    records = [{"prompt": f"{text} {i}"} for i, text in enumerate(["one", "two", "three", *texts])]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    source = read_prompt_file(path, leave_out_unfit=True)
    write(directory / "out", prepare(source, {"file": path.name}, num_test=1, num_eval=1, seed=0))
    read = [load_prompts(directory / "out" / file) for file in FILES.values()]
    assert sorted(prompt for part in read for prompt in part) == sorted(clean(source.prompts).prompts)


def test_the_hashes_are_those_of_the_files(tmp_path: Path) -> None:
    made = prepared(tmp_path, "\n".join(PROMPTS))
    write(tmp_path / "out", made)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted([*FILES.values(), MANIFEST])
    for name, file in FILES.items():
        assert made.hashes[name] == hashlib.sha256((tmp_path / "out" / file).read_bytes()).hexdigest()
    assert json.loads((tmp_path / "out" / MANIFEST).read_text()) == made.manifest
    assert verify_split(tmp_path / "out", {"test": made.hashes["test"].upper()}) == made.hashes


def test_the_files_are_pinned(tmp_path: Path) -> None:
    """On every machine and Python these bytes: a recipe names their hashes."""
    made = prepared(tmp_path, "\n".join([*PROMPTS, COMPOSED]))
    assert made.hashes == {
        "train": "26c26058d16014849f3165d3232959afdf676284f8c72ea389b516cfac87eb39",
        "test": "c0ea0ca58e552c7cb0ddc3424d148b46efbad8a2df90cad30d188e46bce60cdf",
        "eval_media": "5fb33ab3f9a061b0dabaf68e03c8cff24d4da6b6d2c917d180025066ba88c022",
    }


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda path: (path / MANIFEST).unlink(), "has no prompts.manifest.json; prepare them again"),
    "a file is gone": (lambda path: (path / "test.jsonl").unlink(), "test.jsonl: no such file; prepare them again"),
    "a file changed": (lambda path: (path / "test.jsonl").open("a").write(" \n"), "test.jsonl: has SHA-256 "),
    "no JSON": (lambda path: (path / MANIFEST).write_text("{"), "is no manifest of the format miles_dmd2 prompts 1"),
    "other JSON": (lambda path: (path / MANIFEST).write_text('{"files": []}'), "is no manifest of the format"),
    "other format": (
        lambda path: (path / MANIFEST).write_text('{"format": "x 2", "files": {}}'),
        "is no manifest of the format",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_split_that_is_not_as_it_was_written(tmp_path: Path, case: str) -> None:
    write(tmp_path / "out", prepared(tmp_path, "\n".join(PROMPTS)))
    change, told = CHANGES[case]
    change(tmp_path / "out")
    with pytest.raises(ConfigError, match=told) as caught:
        verify_split(tmp_path / "out")
    assert str(tmp_path / "out") in str(caught.value)


def test_another_hash_than_expected(tmp_path: Path) -> None:
    write(tmp_path / "out", prepared(tmp_path, "\n".join(PROMPTS)))
    with pytest.raises(
        ConfigError, match=rf"--expect-sha256 eval_media={'0' * 64}: eval_media.jsonl of .* has SHA-256"
    ):
        verify_split(tmp_path / "out", {"eval_media": "0" * 64})
    with pytest.raises(ConfigError, match="must be of train, test, eval_media"):
        verify_split(tmp_path / "out", {"eval": "0" * 64})


def test_a_changed_file_is_not_read_and_the_others_are(tmp_path: Path) -> None:
    """Both hashes are told. Without the manifest the file is one like any other."""
    write(tmp_path / "out", prepared(tmp_path, "\n".join(PROMPTS)))
    path = tmp_path / "out" / "train.jsonl"
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    with path.open("a") as file:
        file.write('{"prompt": "one more"}\n')
    now = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(ConfigError, match="it changed since; restore it, or prepare them again") as caught:
        load_prompts(path)
    for part in (f"--prompt-data {path}: ", now, before):
        assert part in str(caught.value)
    assert len(load_prompts(tmp_path / "out" / "test.jsonl")) == 5
    (tmp_path / "out" / MANIFEST).unlink()
    assert load_prompts(path)[-1] == "one more"


def test_only_files_of_this_script_are_written_over(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first, second = (prepared(tmp_path, "\n".join(PROMPTS), seed=seed) for seed in (0, 1))
    out.mkdir()
    (out / "test.jsonl").write_text("mine\n")
    with pytest.raises(ConfigError, match=r"test.jsonl there was not made by this script; give another directory"):
        write(out, first, replace=True)
    assert [path.name for path in out.iterdir()] == ["test.jsonl"]
    (out / "test.jsonl").unlink()
    write(out, first)
    write(out, first)  # the same again is no change
    with pytest.raises(ConfigError, match=r"holds another train\.jsonl; give another directory, or --replace"):
        write(out, second)
    assert verify_split(out) == first.hashes
    write(out, second, replace=True)
    assert verify_split(out) == second.hashes
    (out / "train.jsonl").write_text("edited\n")
    with pytest.raises(ConfigError, match=r"train\.jsonl changed since it was written; move it away"):
        write(out, first, replace=True)
    assert (out / "train.jsonl").read_text() == "edited\n"


def test_a_write_that_fails_leaves_no_half_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same command, when there is room again, completes what is there."""
    made = prepared(tmp_path, "\n".join(PROMPTS))
    out = tmp_path / "out"
    with monkeypatch.context() as full:
        synced: list[int] = []

        def sync(descriptor: int) -> None:
            synced.append(descriptor)
            if len(synced) == 2:
                raise OSError(28, "No space left on device")

        full.setattr("os.fsync", sync)
        with pytest.raises(OSError, match="No space left"):
            write(out, made)
    assert [path.name for path in out.iterdir()] == ["train.jsonl"]
    write(out, made)
    assert verify_split(out) == made.hashes
