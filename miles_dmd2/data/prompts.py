"""Prompt files, and which prompts a rollout takes: a function of (seed, rollout_id), so resuming needs no cursor."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from miles_dmd2.config.errors import ConfigError, show
from miles_dmd2.config.yaml_input import decoded, read_bytes
from miles_dmd2.data.pinned import check_pinned

_WHAT = "a file with one prompt per line, or .jsonl with a prompt key on each line"
_NOT_PROMPTS = frozenset({".csv", ".tsv", ".parquet", ".yaml", ".yml", ".xml", ".gz", ".zip", ".zst"})
_MARK = b"\xef\xbb\xbf"
_CONTROL = re.compile("[\0-\x08\x0e-\x1f\x7f-\x84\x86-\x9f]")  # Unicode's category Cc, less those that are blanks
_SURROGATE = re.compile("[\ud800-\udfff]")
LONGEST = 20_000  # characters; text encoders keep some hundred words


@dataclass(frozen=True, slots=True)
class PromptFile:
    """The prompts of a file, in its order, and what else was met in it.

    blank_lines: lines without a prompt, which are left out. unfit: prompts left out because no tokenizer should be
    given them (see `read_prompt_file`). carriage_returns: lines that end in CR LF or CR. sha256: of the whole file.
    """

    prompts: tuple[str, ...]
    lines: int
    blank_lines: int
    unfit: int
    carriage_returns: int
    byte_order_mark: bool
    sha256: str


def load_prompts(path: Path, flag: str = "--prompt-data") -> list[str]:
    """The prompts of a file. ConfigError, one line with flag, file, line and remedy: see `read_prompt_file`."""
    return list(read_prompt_file(path, flag).prompts)


def read_prompt_file(path: Path, flag: str = "--prompt-data", *, leave_out_unfit: bool = False) -> PromptFile:
    """Text (one prompt per line, ends trimmed) or, by its suffix, jsonl. UTF-8 with or without a mark, any line ends.

    ConfigError: unreadable, not UTF-8, another content than the manifest beside it pins, no prompt in it, a jsonl line
    that holds none, JSON in a file not named .jsonl; and, unless these are to be left out, a prompt with a control
    character, half a surrogate pair, or of more than 20,000 characters.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    content = read_bytes(path, flag, _WHAT)
    if suffix == ".json":
        raise ConfigError(f"{flag} {path}: JSON that is not by lines; give {_WHAT}")
    if suffix in _NOT_PROMPTS:
        raise ConfigError(f"{flag} {path}: {suffix} files are not read; give {_WHAT}")
    text = decoded(content, path, flag)
    sha256 = hashlib.sha256(content).hexdigest()
    check_pinned(path, sha256, flag)
    unix = text.replace("\r\n", "\n")
    returns = len(text) - len(unix) + unix.count("\r")
    lines = [line.strip() for line in unix.replace("\r", "\n").split("\n")]
    if lines[-1] == "":
        lines.pop()  # the end of the last line, not a line
    prompts = []
    unfit = 0
    for where, prompt in _prompts(lines, suffix, f"{flag} {path}"):
        fault = _unfit(prompt)
        if fault is None:
            prompts.append(prompt)
        elif leave_out_unfit:
            unfit += 1
        else:
            raise ConfigError(f"{where}: {fault}")
    if not prompts:
        raise ConfigError(f"{flag} {path}: holds no prompts; give {_WHAT}")
    blank = len(lines) - len(prompts) - unfit
    return PromptFile(tuple(prompts), len(lines), blank, unfit, returns, content.startswith(_MARK), sha256)


def prompts_for_rollout(num_prompts: int, rollout_batch_size: int, rollout_id: int, seed: int) -> list[int]:
    """Indices of the prompts of one rollout. Rollouts in turn read epoch after epoch; each is a permutation of its own.

    With 3 prompts and 2 per rollout, rollouts 0, 1, 2 read p0 p1 | p2 q0 | q1 q2 of permutations p and q.
    ValueError: no prompts, an empty rollout, a negative rollout_id.
    """
    if num_prompts < 1 or rollout_batch_size < 1 or rollout_id < 0:
        raise ValueError(
            f"want num_prompts >= 1, rollout_batch_size >= 1 and rollout_id >= 0, got {num_prompts}, "
            f"{rollout_batch_size} and {rollout_id}"
        )
    start = rollout_id * rollout_batch_size
    places = (divmod(position, num_prompts) for position in range(start, start + rollout_batch_size))
    return [_epoch_order(num_prompts, epoch, seed)[index] for epoch, index in places]


@functools.lru_cache(maxsize=8)
def _epoch_order(num_prompts: int, epoch: int, seed: int) -> tuple[int, ...]:
    """Indices sorted by a hash of each: the same on every machine and Python, unlike `random.shuffle`.

    The key is that of `algo.key_seed(seed, "order", epoch, index)`.
    """

    def key(index: int) -> tuple[bytes, int]:
        return blake2b(f"miles_dmd2/1|{seed}|order|{epoch}|{index}".encode(), digest_size=8).digest(), index

    return tuple(sorted(range(num_prompts), key=key))


def _prompts(lines: list[str], suffix: str, file: str) -> Iterator[tuple[str, str]]:
    """Where each prompt is, and the prompt; blank lines are passed over."""
    for number, line in enumerate(lines, 1):
        where = f"{file}:{number}"
        if line and suffix == ".jsonl":
            yield where, _from_json(line, where)
        elif line:
            _refuse_misnamed(line, where)
            yield where, line


def _from_json(line: str, where: str) -> str:
    try:
        record = json.loads(line, object_pairs_hook=_record)
    except _DoubledError as error:
        raise ConfigError(f"{where}: the key {show(str(error))} is there twice; keep one of them") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({getattr(error, 'msg', 'too deep')}); fix that line") from None
    if not isinstance(record, dict) or "prompt" not in record:
        held = f"the keys {', '.join(map(str, record))}" if isinstance(record, dict) and record else show(record)
        raise ConfigError(f'{where}: has no key "prompt" but {held}; each line is {{"prompt": "..."}}')
    prompt = record["prompt"]
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError(f"{where}: prompt {show(prompt)}: must be text that is not blank; fix or remove that line")
    return prompt.strip()


class _DoubledError(Exception):
    """A key that a JSON object has twice, of which Python would keep the last."""


def _record(pairs: list[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    if len(record) != len(pairs):
        names = [name for name, _ in pairs]
        raise _DoubledError(next(name for name in names if names.count(name) > 1))
    return record


def _unfit(prompt: str) -> str | None:
    """Why a tokenizer should not be given this: control characters (of a binary file, say), or a whole book."""
    control = _CONTROL.search(prompt)
    if control is not None:
        return f"holds the control character U+{ord(control[0]):04X}; remove it, or give {_WHAT}"
    if not prompt.isascii() and _SURROGATE.search(prompt):
        return f"prompt {show(prompt)}: holds half of a surrogate pair; fix or remove that line"
    if len(prompt) > LONGEST:
        return f"a prompt of {len(prompt)} characters, at most {LONGEST} are read; give {_WHAT}"
    return None


def _refuse_misnamed(line: str, where: str) -> None:
    """A text prompt may begin with a brace; one that parses as a record with a prompt is a jsonl file misnamed."""
    if line.startswith("{") and line.endswith("}"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return
        if isinstance(record, dict) and "prompt" in record:
            raise ConfigError(f"{where}: a JSON record in a text file; name the file .jsonl")
