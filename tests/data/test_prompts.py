"""Prompt files read whole or refused with their line; each epoch a permutation, whoever asks in whatever order."""

import hashlib
import unicodedata
from collections import Counter
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_dmd2.config import ConfigError
from miles_dmd2.data.prompts import load_prompts, prompts_for_rollout, read_prompt_file

READ: dict[str, tuple[str, bytes, list[str], int]] = {
    "plain": ("p.txt", b"one\ntwo\n", ["one", "two"], 0),
    "no last line end": ("p.txt", b"one\ntwo", ["one", "two"], 0),
    "Windows": ("p.txt", b"one\r\ntwo\r\n", ["one", "two"], 0),
    "old Mac": ("p.txt", b"one\rtwo\r", ["one", "two"], 0),
    "mark": ("p.txt", b"\xef\xbb\xbfone\ntwo\n", ["one", "two"], 0),
    "blank lines": ("p.txt", b"\none\n  \n\t\ntwo\n\n", ["one", "two"], 4),
    "trimmed": ("p.txt", b"  the digit  one \n", ["the digit  one"], 0),
    "line separators are text": ("p.txt", "a\u2028b\x0bc\nd".encode(), ["a\u2028b\x0bc", "d"], 0),
    "doubles are kept": ("p.txt", b"one\none\n", ["one", "one"], 0),
    "a brace is text": ("p.txt", b"{art deco}, a vase\n{}\n", ["{art deco}, a vase", "{}"], 0),
    "any suffix": ("prompts", b"one\n", ["one"], 0),
    "jsonl": ("p.jsonl", b'{"prompt": "one", "id": 3}\n\n{"prompt": " t\\u00fcr "}\r\n', ["one", "t\u00fcr"], 1),
    "jsonl with a line end": ("P.JSONL", b'{"prompt": "one\\ntwo"}', ["one\ntwo"], 0),
}


@pytest.mark.parametrize("case", READ)
def test_read(tmp_path: Path, case: str) -> None:
    name, content, prompts, blank = READ[case]
    (tmp_path / name).write_bytes(content)
    file = read_prompt_file(tmp_path / name)
    assert (file.prompts, file.blank_lines, file.lines) == (tuple(prompts), blank, len(prompts) + blank)
    assert file.sha256 == hashlib.sha256(content).hexdigest()
    assert load_prompts(tmp_path / name) == prompts


def test_what_was_met_is_counted(tmp_path: Path) -> None:
    """Two lines end in CR LF and one in CR; three prompts are not for a tokenizer, and refused unless left out."""
    book = b"x" * 20_001
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\nt\x00o\rthree\n\x7f\n" + book)
    file = read_prompt_file(tmp_path / "p.txt", leave_out_unfit=True)
    assert file.prompts == ("one", "three")
    assert (file.lines, file.blank_lines, file.unfit, file.carriage_returns) == (6, 1, 3, 3)
    assert file.byte_order_mark
    assert "p.txt:3: holds the control character U+0000" in refusal(tmp_path / "p.txt")


def test_control_characters_are_those_of_unicode(tmp_path: Path) -> None:
    """All of category Cc but the blanks, and no other, for every character that UTF-8 can hold."""
    fit = [c for c in map(chr, range(0x110000)) if not "\ud800" <= c <= "\udfff" and unicodedata.category(c) != "Cc"]
    (tmp_path / "p.txt").write_text("".join(f"a{char}b\n" for char in (*fit, *"\t\v\f\x85")), encoding="utf-8")
    assert read_prompt_file(tmp_path / "p.txt").unfit == 0
    unfit = [c for c in map(chr, range(256)) if unicodedata.category(c) == "Cc" and c not in "\t\n\v\f\r\x85"]
    assert len(unfit) == 65 - 6
    (tmp_path / "p.txt").write_text("".join(f"a{char}b\n" for char in ("", *unfit)), encoding="utf-8")
    assert read_prompt_file(tmp_path / "p.txt", leave_out_unfit=True).unfit == len(unfit)


REFUSED: dict[str, tuple[str, bytes, tuple[str, ...]]] = {
    "empty": ("p.txt", b"", ("holds no prompts", "one prompt per line")),
    "blank": ("p.txt", b"\n \r\n\n", ("holds no prompts",)),
    "only a mark": ("p.txt", b"\xef\xbb\xbf", ("holds no prompts",)),
    "empty jsonl": ("p.jsonl", b"\n", ("holds no prompts",)),
    "latin-1": ("p.txt", b"one\nt\xfcr\n", (":2", "not UTF-8", "0xfc", "save the file as UTF-8")),
    "utf-16": ("p.txt", "one".encode("utf-16"), (":1", "not UTF-8")),
    "json": ("p.json", b'["one"]', ("JSON that is not by lines", ".jsonl")),
    "misnamed": ("p.txt", b'{"prompt": "one"}\n', (":1", "a JSON record in a text file", "name the file .jsonl")),
    "not json": ("p.jsonl", b'{"prompt": "one"}\n\none\n', (":3", "not JSON", "fix that line")),
    "cut": ("p.jsonl", b'{"prompt": "on', (":1", "not JSON")),
    "deep": ("p.jsonl", b"[" * 100_000, (":1", "not JSON")),
    "not a record": ("p.jsonl", b'"one"\n', (":1", 'no key "prompt"', "one")),
    "other keys": ("p.jsonl", b'{"text": "a", "id": 3}\n', (":1", 'no key "prompt"', "keys text, id")),
    "not text": ("p.jsonl", b'{"prompt": 3}\n', (":1", "prompt 3", "must be text")),
    "blank prompt": ("p.jsonl", b'{"prompt": " "}\n', (":1", "prompt ' '", "not blank")),
    "half a character": ("p.jsonl", b'{"prompt": "\\ud83d"}\n', (":1", "surrogate", "fix or remove")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    name, content, parts = REFUSED[case]
    (tmp_path / name).write_bytes(content)
    text = refusal(tmp_path / name)
    for part in (f"--eval-prompt-data {tmp_path / name}", *parts):
        assert part in text, text


def test_no_file_and_a_directory(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "none.txt")
    assert "is a directory" in refusal(tmp_path)


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_prompts(path, "--eval-prompt-data")
    text = str(caught.value)
    assert text.splitlines() == [text]
    return text


@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 2**63 - 1))
def test_every_epoch_is_a_permutation(num_prompts: int, batch: int, seed: int) -> None:
    rollouts = -(-num_prompts * 3 // batch)
    stream = [i for r in range(rollouts) for i in prompts_for_rollout(num_prompts, batch, r, seed)]
    assert len(stream) == rollouts * batch
    for start in range(0, len(stream) - num_prompts + 1, num_prompts):
        assert sorted(stream[start : start + num_prompts]) == list(range(num_prompts))
    assert len(set(stream[len(stream) // num_prompts * num_prompts :])) == len(stream) % num_prompts


def test_a_rollout_over_the_end_of_an_epoch_reads_on() -> None:
    """3 prompts, 2 per rollout: p0 p1 | p2 q0 | q1 q2, as rollouts of 6 read them in one go."""
    whole = prompts_for_rollout(3, 6, 0, 5)
    assert [prompts_for_rollout(3, 2, r, 5) for r in range(3)] == [whole[0:2], whole[2:4], whole[4:6]]
    assert prompts_for_rollout(3, 7, 0, 5)[:6] == whole, "more than two epochs in one rollout"


def test_the_order_of_calls_does_not_matter() -> None:
    ahead = {r: prompts_for_rollout(50, 7, r, 1) for r in range(40)}
    back = {r: prompts_for_rollout(50, 7, r, 1) for r in reversed(range(40))}
    assert ahead == back


def test_seeds_and_epochs_differ() -> None:
    first = prompts_for_rollout(50, 50, 0, 1)
    assert first != prompts_for_rollout(50, 50, 1, 1)
    assert first != prompts_for_rollout(50, 50, 0, 2)
    assert first != sorted(first)


def test_the_first_prompt_is_uniform() -> None:
    counts = Counter(prompts_for_rollout(4, 1, 0, seed)[0] for seed in range(4000))
    assert all(abs(counts[i] - 1000) < 5 * (4000 * 0.25 * 0.75) ** 0.5 for i in range(4))


def test_the_order_is_pinned() -> None:
    """A resumed run needs it on another machine and another Python, so it may never change."""
    assert prompts_for_rollout(10, 10, 0, 0) == sorted(range(10), key=lambda i: _digest(f"miles_dmd2/1|0|order|0|{i}"))
    assert prompts_for_rollout(10, 10, 0, 0) == PINNED


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()


PINNED = [4, 3, 5, 7, 1, 9, 0, 2, 8, 6]


@pytest.mark.parametrize("arguments", [(0, 1, 0, 0), (1, 0, 0, 0), (1, 1, -1, 0)])
def test_nonsense_is_refused(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="want num_prompts >= 1"):
        prompts_for_rollout(*arguments)
