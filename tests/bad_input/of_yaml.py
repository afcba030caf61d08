"""--config files."""

import os

from tests.bad_input.bench import Bench, Case, Table


def text(content: str | bytes, name: str, value: str, remedy: str) -> Case:
    return Case(lambda bench: ["--config", str(bench.file("run.yaml", content))], name, value, remedy)


def pipe(bench: Bench) -> list[str]:
    os.mkfifo(bench.path / "pipe")
    return ["--config", str(bench.path / "pipe")]


def unreadable(bench: Bench) -> list[str]:
    link = bench.path / "loop.yaml"
    link.symlink_to(link)
    return ["--config", str(link)]


YAML: Table = {
    "no file": Case(lambda _: ["--config", "nowhere.yaml"], "--config", "nowhere.yaml", "give a YAML mapping"),
    "a directory": Case(lambda bench: ["--config", str(bench.path)], "--config", "is a directory", "give a YAML"),
    "a pipe": Case(pipe, "--config", "is a pipe", "give a YAML mapping"),
    "unreadable": Case(unreadable, "--config", "cannot be read", "give a YAML mapping"),
    "not UTF-8": text(b"lr: 1\nrun-dir: \xff\n", ":2", "0xff", "save the file as UTF-8"),
    "control character": text("lr: 1\nrun-dir: a\x07\n", ":2", "a control character", "remove it"),
    "syntax": text("lr: 1\n  seed: 2\n", ":2", "not YAML", "fix that line"),
    "unclosed": text("lr: [1\n", "--config", "but got", "fix that line"),
    "two documents": text("lr: 1\n---\nlr: 2\n", ":2", "but found another document", "fix that line"),
    "an object": text("lr: !!python/object:os.system {}\n", ":1", "python/object:os.system", "fix that line"),
    "no such anchor": text("lr: *a\n", ":1", "undefined alias", "fix that line"),
    "a list as a key": text("[a]: 3\n", ":1", "unhashable key", "fix that line"),
    "no such day": text("lr: 2001-99-99\n", "--config", "ValueError", "fix the file"),
    "too deep": text("[" * 5000, "--config", "RecursionError", "fix the file"),
    "empty": text("# nothing\n", "--config", "is empty", "give a YAML mapping"),
    "a list": text("- lr\n", "--config", "got ", "a YAML mapping of options"),
    "a key twice": text("num-rollout: 1\nnum_rollout: 2\n", ":2", "already on line 1", "keep one of them"),
    "unknown key": text("lr: 1\nnum-rolout: 3\n", ":2", "num-rolout", "the nearest is num-rollout"),
    "a flag's": text("dry-run: true\n", ":1", "dry-run", "remove it from the file"),
    "yes for a number": text("lr: true\n", "--lr", "true", "a number > 0"),
    "a number for yes": text("use-wandb: 1\n", "--use-wandb", "1", "true or false"),
    "a word for a count": text("seed: many\n", "--seed", "many", "a whole number >= 0"),
}
