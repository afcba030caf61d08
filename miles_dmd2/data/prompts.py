"""Prompt files, and which prompts a rollout takes: a function of (seed, rollout_id), so resuming needs no cursor."""

from __future__ import annotations

import functools
import json
import unicodedata
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from miles_dmd2.config.errors import ConfigError, show
from miles_dmd2.config.yaml_input import read_text

_WHAT = "a file with one prompt per line, or .jsonl with a prompt key on each line"
_NOT_PROMPTS = frozenset({".csv", ".tsv", ".parquet", ".yaml", ".yml", ".xml", ".gz", ".zip", ".zst"})
_BLANKS = frozenset("\t\n\v\f\r\x85")
_LONGEST = 20_000  # characters; text encoders keep some hundred words


@dataclass(frozen=True, slots=True)
class PromptFile:
    """The prompts of a file, in its order. `blank_lines`: lines without one, which are left out."""

    prompts: tuple[str, ...]
    blank_lines: int


def load_prompts(path: Path, flag: str = "--prompt-data") -> list[str]:
    """The prompts of a file. ConfigError, one line with flag, file, line and remedy: see `read_prompt_file`."""
    return list(read_prompt_file(path, flag).prompts)


def read_prompt_file(path: Path, flag: str = "--prompt-data") -> PromptFile:
    """Text (one prompt per line, ends trimmed) or, by its suffix, jsonl. UTF-8 with or without a mark, any line ends.

    ConfigError: unreadable, not UTF-8, no prompt in it, a jsonl line that holds none, JSON in a file not named .jsonl.
    """
    path = Path(path)
    text = read_text(path, flag, _WHAT)
    suffix = path.suffix.lower()
    if suffix == ".json":
        raise ConfigError(f"{flag} {path}: JSON that is not by lines; give {_WHAT}")
    if suffix in _NOT_PROMPTS:
        raise ConfigError(f"{flag} {path}: {suffix} files are not read; give {_WHAT}")
    lines = [line.strip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    if lines[-1] == "":
        lines.pop()  # the end of the last line, not a line
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        where = f"{flag} {path}:{number}"
        if suffix != ".jsonl":
            _refuse_misnamed(line, where)
        prompt = _from_json(line, where) if suffix == ".jsonl" else line
        _check_text(prompt, where)
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{flag} {path}: holds no prompts; give {_WHAT}")
    return PromptFile(tuple(prompts), len(lines) - len(prompts))


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
    if not prompt.isascii() and any("\ud800" <= char <= "\udfff" for char in prompt):
        raise ConfigError(f"{where}: prompt {show(prompt)}: holds half of a surrogate pair; fix or remove that line")
    return prompt.strip()


class _DoubledError(Exception):
    """A key that a JSON object has twice, of which Python would keep the last."""


def _record(pairs: list[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    if len(record) != len(pairs):
        names = [name for name, _ in pairs]
        raise _DoubledError(next(name for name in names if names.count(name) > 1))
    return record


def _check_text(prompt: str, where: str) -> None:
    """Text that a tokenizer can be given: no control characters (of a binary file, say), and not a whole book."""
    control = next((char for char in prompt if unicodedata.category(char) == "Cc" and char not in _BLANKS), None)
    if control is not None:
        raise ConfigError(f"{where}: holds the control character U+{ord(control):04X}; remove it, or give {_WHAT}")
    if len(prompt) > _LONGEST:
        raise ConfigError(f"{where}: a prompt of {len(prompt)} characters, at most {_LONGEST} are read; give {_WHAT}")


def _refuse_misnamed(line: str, where: str) -> None:
    """A text prompt may begin with a brace; one that parses as a record with a prompt is a jsonl file misnamed."""
    if line.startswith("{") and line.endswith("}"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return
        if isinstance(record, dict) and "prompt" in record:
            raise ConfigError(f"{where}: a JSON record in a text file; name the file .jsonl")
