"""The command line: one flag per field of the schema, over a YAML file, over the defaults."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from miles_dmd2.config.errors import ConfigError, nearest, show
from miles_dmd2.config.options import OPTIONS, Option, build_config, flag_of
from miles_dmd2.config.schema import Config
from miles_dmd2.config.sglang import check_name, mapping_of, normal_name
from miles_dmd2.config.trainers import TrainerSpec, read_trainer_entries, resolve_trainers
from miles_dmd2.config.yaml_input import read_yaml

_PROGRAM = "train_diffusion.py"
_CONFIG_WHAT = "a YAML mapping of options, for example `num-rollout: 100`"
_LIKE_OURS = 0.8  # a `--sglang-` flag that looks so much like one of ours was meant to be it
_PLAN_KEY = "plan"  # what --dry-run prints beside the options; derived, so not read back


@dataclass(frozen=True, slots=True)
class ParsedRun:
    """What a command line asks for: validated, every derived default filled in, its trainers resolved."""

    config: Config
    dry_run: bool
    trainers: tuple[TrainerSpec, ...]


def parse(argv: Sequence[str]) -> ParsedRun:
    """Flags over --config over defaults. ConfigError: bad input, in one line. SystemExit(0): --help, printed."""
    ours, passed_on = _take_passed_on(argv)
    given = _read_flags(ours)
    dry_run = bool(given.pop("dry_run", False))
    file = given.pop("config", None)
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    if file is not None:
        values, origins = _read_file(Path(file))
    for name, value in given.items():
        values[name] = value
        origins.pop(name, None)
    if passed_on:
        values["sglang_args"] = _merged(values.get("sglang_args"), passed_on)
    if values.get("trainer_config") is not None:
        values["trainer_config"] = read_trainer_entries(values["trainer_config"])
    config = build_config(values, origins).resolved()
    _check_allowed(config)
    return ParsedRun(config, dry_run, resolve_trainers(config))


def _check_allowed(config: Config) -> None:
    """--allow-config-change names options, of a run that continues another one."""
    names = config.run.allow_config_change
    for name in names:
        if name.replace("-", "_") not in OPTIONS:
            close = nearest(name.replace("-", "_"), OPTIONS).replace("_", "-")
            raise ConfigError(f"--allow-config-change {show(name)}: no such option; the nearest is {close}")
    if names and config.run.load is None:
        raise ConfigError(
            f"--allow-config-change {show(names[0])}: nothing is continued without --load; give it, or leave this out"
        )


def help_text() -> str:
    return _parser().format_help()


def _read_file(path: Path) -> tuple[dict[str, object], dict[str, str]]:
    """The options in a YAML file by field name, and where each is written."""
    file = read_yaml(path, "--config", _CONFIG_WHAT)
    if not isinstance(file.value, Mapping):
        raise ConfigError(f"--config {path}: must be {_CONFIG_WHAT}, got {show(file.value)}")
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for key, value in file.value.items():
        line = file.lines.get(str(key))
        where = f"{path}:{line}" if line else str(path)
        if key == _PLAN_KEY and isinstance(value, Mapping):
            continue
        name = str(key).replace("-", "_")
        if name in ("config", "dry_run"):
            raise ConfigError(f"--config {where}: {show(key)} belongs on the command line; remove it from the file")
        if name not in OPTIONS:
            close = nearest(name, OPTIONS).replace("_", "-")
            raise ConfigError(f"--config {where}: no such option {show(str(key))}; the nearest is {close}")
        values[name] = value
        origins[name] = where
    return values, origins


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        match = re.match(r"argument (--[\w-]+)[^:]*: (.*)", message)
        if match and match[1].removeprefix("--").replace("-", "_") in OPTIONS:
            option = OPTIONS[match[1].removeprefix("--").replace("-", "_")]
            takes = "no value" if option.is_switch else option.valid
            raise ConfigError(f"{option.flag}: {match[2]}; it takes {takes} ({option.description})")
        raise ConfigError(f"{message.removeprefix('argument ')}; see --help")


class _Once(argparse.Action):
    """Stores a value, and refuses a second one that differs: which of the two was meant?"""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        _store_once(namespace, self.dest, values, str(option_string))


class _Switch(argparse.BooleanOptionalAction):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        _store_once(namespace, self.dest, not str(option_string).startswith("--no-"), str(option_string))


def _store_once(namespace: argparse.Namespace, name: str, value: Any, flag: str) -> None:
    before = getattr(namespace, name, value)
    if before != value:
        if isinstance(value, bool):
            raise ConfigError(f"{flag_of(name)} and --no-{name.replace('_', '-')} are both given; keep one of them")
        raise ConfigError(f"{flag} is given twice, as {show(before)} and as {show(value)}; keep one of them")
    setattr(namespace, name, value)


def _take_passed_on(argv: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Ours, and SGLang's: each `--sglang-NAME` that is no flag of ours, with what follows up to the next flag."""
    ours: list[str] = []
    taken: dict[str, list[str]] = {}
    (collector,) = (option for option in OPTIONS.values() if option.prefix)
    prefix = str(collector.prefix)
    known = [flag for flag in _flags() if flag.startswith(prefix) and flag != collector.flag]
    into = ours
    for word in argv:
        flag, equals, value = word.partition("=")
        if not flag.startswith(prefix) or flag in known:
            into = ours if word.startswith("-") and not _is_number(word) else into
            into.append(word)
            continue
        close = difflib.get_close_matches(flag, known, n=1, cutoff=_LIKE_OURS)
        if close:
            raise ConfigError(f"{show(flag)}: no such flag; the nearest is {close[0]}")
        name = normal_name(flag.removeprefix(prefix))
        try:
            check_name(name)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if name in taken:
            raise ConfigError(f"{flag} is given twice; keep one of them")
        into = taken[name] = [value] if equals else []
    return ours, taken


def _merged(in_file: object, passed_on: Mapping[str, list[str]]) -> object:
    """`sglang-args` of --config, and over it those of the command line."""
    try:
        flags = {**mapping_of(in_file or {}), **passed_on}
        return {name: words or True for name, words in flags.items()}
    except ValueError:
        return in_file  # is refused where all values are


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=_PROGRAM,
        usage=f"{_PROGRAM} [--config FILE.yaml] [--dry-run] [--OPTION VALUE ...]",
        description="Distill a flow-matching diffusion model into a few-step student by distribution matching (DMD2).",
        epilog="Precedence: defaults < --config < flags. Exit codes: 0 done, 1 the run failed, 2 bad input.",
        allow_abbrev=False,
        add_help=False,
        argument_default=argparse.SUPPRESS,
    )
    general = parser.add_argument_group("General")
    general.add_argument("-h", "--help", action="help", help="print this and exit")
    general.add_argument(
        "--config",
        action=_Once,
        metavar="FILE.yaml",
        help="options in YAML, named as the flags are, with - or _; what --dry-run prints is one",
    )
    general.add_argument(
        "--dry-run", action="store_true", help="check everything, print the resolved options and the plan as YAML, stop"
    )
    groups: dict[str, Any] = {}
    for option in OPTIONS.values():
        if option.section not in groups:
            groups[option.section] = parser.add_argument_group(option.title)
        _add_flag(groups[option.section], option)
    return parser


def _add_flag(group: Any, option: Option) -> None:
    text = option.description
    if option.info.is_required():
        text += " (required)"
    elif option.info.default not in (None, ()):
        text += f" (default: {option.default_in_words})"
    elif "(default" not in text:
        text += " (default: none)"
    text = text.replace("%", "%%")
    if option.prefix:  # for --help alone: `_take_passed_on` reads them
        group.add_argument(option.flag, dest=option.name, nargs="*", metavar="VALUE", help=text)
    elif option.is_list:
        group.add_argument(option.flag, dest=option.name, action=_Once, nargs="+", metavar=option.metavar, help=text)
    elif option.is_switch:
        group.add_argument(option.flag, dest=option.name, action=_Switch, help=text)
    elif option.is_pair:
        group.add_argument(option.flag, dest=option.name, action=_Once, nargs=2, metavar=("LO", "HI"), help=text)
    else:
        metavar = f"{{{','.join(option.choices)}}}" if option.choices else option.metavar
        alone: dict[str, Any] = {} if option.alone is None else {"nargs": "?", "const": option.alone}
        group.add_argument(option.flag, dest=option.name, action=_Once, metavar=metavar, help=text, **alone)


def _read_flags(argv: Sequence[str]) -> dict[str, Any]:
    # argparse would take -1e-5 for a flag; a leading blank says that it is a value, and numbers are parsed without it.
    shielded = [f" {word}" if word.startswith("-") and _is_number(word) else word for word in argv]
    namespace, rest = _parser().parse_known_args(shielded)
    for word in rest:
        if word.startswith("-") and word != "--":
            name = word.partition("=")[0]
            raise ConfigError(f"{show(name)}: no such flag; the nearest is {nearest(name, _flags())}")
    if rest:
        before = _flag_before(rest[0], shielded)
        raise ConfigError(f"{show(rest[0].strip())}: a value without a flag{before}; see --help")
    return {
        name: [_unshielded(part) for part in value] if isinstance(value, list) else _unshielded(value)
        for name, value in vars(namespace).items()
    }


def _unshielded(value: Any) -> Any:
    return value.lstrip() if isinstance(value, str) and _is_number(value) else value


def _flags() -> Iterable[str]:
    switches = [f"--no-{option.name.replace('_', '-')}" for option in OPTIONS.values() if option.is_switch]
    return [option.flag for option in OPTIONS.values()] + switches + ["--config", "--dry-run", "--help"]


def _flag_before(word: str, argv: Sequence[str]) -> str:
    flag = next((w for w in reversed(argv[: argv.index(word)]) if w.startswith("--")), None)
    if flag is None:
        return ""
    option = OPTIONS.get(flag.removeprefix("--").removeprefix("no-").replace("-", "_"))
    return f" ({flag} takes {'no value' if option and option.is_switch else 'one value' if option else 'none'})"


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
