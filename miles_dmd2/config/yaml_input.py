"""YAML as a user writes it: one document, no key twice, every fault told with its line."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from miles_dmd2.config.errors import ConfigError, show


@dataclass(frozen=True, slots=True)
class YamlFile:
    """A parsed file. `lines`: where each key of a top-level mapping is, as written."""

    value: Any
    lines: dict[str, int]


def read_text(path: Path, flag: str, what: str) -> str:
    """A file's text (UTF-8, a byte-order mark is dropped). ConfigError names the flag, the path and what is wrong."""
    return decoded(read_bytes(path, flag, what), path, flag)


def decoded(content: bytes, path: Path, flag: str) -> str:
    """What was read from `path` as UTF-8 text without its byte-order mark. ConfigError: it is not UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        found = f"{path}:{line}: not UTF-8 (byte 0x{error.object[error.start]:02x})"
        raise ConfigError(f"{flag} {found}; save the file as UTF-8") from None


def read_bytes(path: Path, flag: str, what: str) -> bytes:
    """A file's content. ConfigError names the flag, the path and what is wrong."""
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise ConfigError(f"{flag} {show(path)}: is a pipe or a device, which cannot be read twice; give {what}")
        return path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{flag} {show(path)}: no such file; give {what}") from None
    except IsADirectoryError:
        raise ConfigError(f"{flag} {show(path)}: is a directory; give {what}") from None
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{flag} {show(path)}: cannot be read ({why}); give {what}") from None


def read_yaml(path: Path, flag: str, what: str) -> YamlFile:
    """Parse one document. ConfigError: unreadable, not YAML, a key twice, nothing in it."""
    text = read_text(path, flag, what)
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(f"{flag} {path}: is empty; give {what}")
        _refuse_doubles(node, f"{flag} {path}")
        value = loader.construct_document(node)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{flag} {path}:{line}: not YAML (a control character); remove it") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{flag} {path}:{line}: not YAML ({error.problem or error.context}); fix that line") from None
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        raise ConfigError(f"{flag} {path}: not YAML ({type(error).__name__}: {error}); fix the file") from None
    return YamlFile(value, _lines(node))


def _lines(node: yaml.Node) -> dict[str, int]:
    if not isinstance(node, yaml.MappingNode):
        return {}
    return {key.value: key.start_mark.line + 1 for key, _ in node.value if isinstance(key, yaml.ScalarNode)}


def _refuse_doubles(root: yaml.Node, where: str) -> None:
    """No mapping has a key twice, written with - or _; YAML itself would silently keep the last."""
    for node in _nodes(root):
        seen: dict[str, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode):
                continue
            name, line = key.value.replace("-", "_"), key.start_mark.line + 1
            if name in seen:
                raise ConfigError(
                    f"{where}:{line}: {show(key.value)} is already on line {seen[name]}; keep one of them"
                )
            seen[name] = line


def _nodes(root: yaml.Node) -> Iterator[yaml.Node]:
    waiting, seen = [root], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, yaml.MappingNode):
            waiting += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value
