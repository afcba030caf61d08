"""Functions that an option names."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any


def check_form(value: str | None, example: str) -> str | None:
    """ValueError unless the text is module:function or file.py:function."""
    source, _, function = (value or "").rpartition(":")
    named = source.endswith(".py") or all(part.isidentifier() for part in source.split("."))
    if value is not None and not (named and function.isidentifier()):
        raise ValueError(f"must be module:function or file.py:function, for example {example}")
    return value


def absolute(function: str | None) -> str | None:
    """`file.py:function` with the file's full path: workers run elsewhere."""
    if function is None or not function.rpartition(":")[0].endswith(".py"):
        return function
    file, _, name = function.rpartition(":")
    return f"{Path(file).resolve()}:{name}"


def load_function(path: str) -> Callable[..., Any]:
    """`package.module:function` or `some/file.py:function`. ValueError that names what is missing."""
    location, _, name = path.rpartition(":")
    if not location or not name:
        raise ValueError(f"{path!r} is not of the form module:function or file.py:function")
    if location.endswith(".py"):
        file = Path(location)
        if not file.is_file():
            raise ValueError(f"{path!r}: there is no file {location}")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(location)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{path!r}: {location} has no function {name}")
    return function  # type: ignore[no-any-return]
