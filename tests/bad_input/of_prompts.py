"""Prompt files of training and of eval."""

import json

from tests.bad_input.bench import Bench, Case, Table


def lines(name: str, content: str | bytes, said: str, value: str, remedy: str, flag: str = "--prompt-data") -> Case:
    return Case(lambda bench: [flag, str(bench.file(f"data/{name}", content))], said, value, remedy)


def pinned(manifest: object, said: str, value: str, remedy: str) -> Case:
    """A sound file, and a manifest beside it."""

    def make(bench: Bench) -> list[str]:
        bench.file("data/prompts.manifest.json", json.dumps(manifest))
        return ["--prompt-data", str(bench.file("data/train.jsonl", '{"prompt": "one"}\n'))]

    return Case(make, said, value, remedy)


OTHER_HASH = {"format": "miles_dmd2 prompts 1", "files": {"train.jsonl": {"sha256": "ab" * 32}}}

PROMPTS: Table = {
    "none": lines("p.txt", "\n \n", "--prompt-data", "holds no prompts", "give a file"),
    "json": lines("p.json", '["one"]', "--prompt-data", "JSON that is not by lines", "give a file"),
    "a table": lines("p.csv", "prompt\none\n", "--prompt-data", ".csv files are not read", "give a file"),
    "misnamed": lines("p.txt", '{"prompt": "one"}\n', ":1", "a JSON record", "name the file .jsonl"),
    "control": lines("p.txt", "one\ntw\0o\n", ":2", "U+0000", "remove it"),
    "a book": lines("p.txt", "word " * 9000, ":1", "44999 characters", "give a file"),
    "no JSON": lines("p.jsonl", '{"prompt": "one"}\n\none\n', ":3", "not JSON (Expecting value)", "fix that line"),
    "deep": lines("p.jsonl", "[" * 100_000, ":1", "too deep", "fix that line"),
    "no record": lines("p.jsonl", '"one"\n', ":1", "but one", 'each line is {"prompt"'),
    "other keys": lines("p.jsonl", '{"text": "a"}\n', ":1", "keys text", 'each line is {"prompt"'),
    "key twice": lines("p.jsonl", '{"prompt": "a", "prompt": "b"}\n', ":1", "prompt is there twice", "keep one"),
    "no text": lines("p.jsonl", '{"prompt": 3}\n', ":1", "prompt 3", "fix or remove that line"),
    "half": lines("p.jsonl", '{"prompt": "\\ud83d"}\n', ":1", "surrogate pair", "fix or remove that line"),
    "of eval": lines("e.txt", b"\x89PNG", "--eval-prompt-data", "0x89", "save", "--eval-prompt-data"),
    "changed": pinned(OTHER_HASH, "data/train.jsonl", "ab" * 32, "restore it, or prepare them again"),
    "no manifest": pinned([], "prompts.manifest.json", "is no manifest", "remove it and prepare them again"),
}
