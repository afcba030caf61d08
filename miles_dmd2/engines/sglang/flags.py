"""Which flags the SGLang of an environment knows: its server ignores any other without a word."""

from __future__ import annotations

import difflib
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from miles_dmd2.engines.sglang.environment import engine_environment

_FOLDERS = ("multimodal_gen/runtime/server_args", "multimodal_gen/configs/pipeline_configs")
_FLAG = re.compile(r'f?"--(?:\{prefix_with_dot\})?([a-z][a-z0-9_-]*\.?)"')  # as they stand in argparse's calls
_ASK_SECONDS = 60.0
_WHERE = "import importlib.util; print(importlib.util.find_spec('sglang').submodule_search_locations[0])"


def check_flags(python: Path, words: Sequence[str]) -> None:
    """ValueError for the first `--NAME` among `words` that the server in the environment of `python` does not know.

    SGLang is there: see `check_version`. Read off its source, because importing it takes 10 s.
    """
    names = [word.removeprefix("--") for word in words if word.startswith("--")]
    known = known_flags(python) if names else frozenset()
    for name in names:
        if (f"{name.partition('.')[0]}." if "." in name else name) not in known:
            close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]
            raise ValueError(
                f"--sglang-{name}: neither a flag of ours nor of SGLang's server in {python}; the nearest of the "
                f"server's is --sglang-{close}"
            )


def known_flags(python: Path) -> frozenset[str]:
    """Names without dashes; one that ends in a point takes a component behind it. ValueError: they cannot be found."""
    done = subprocess.run(
        [python.absolute(), "-c", _WHERE],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_ASK_SECONDS,
        env=engine_environment(python),
        check=False,
    )
    root = Path(done.stdout.strip() or "/nowhere")
    files = [file for folder in _FOLDERS for file in sorted((root / folder).glob("*.py"))]
    names = {name.replace("_", "-") for file in files for name in _FLAG.findall(file.read_text())}
    if "model-path" not in names or "host" not in names:
        raise ValueError(
            f"--sglang-python {python}: cannot find the flags of SGLang's server below {root}, so that --sglang-NAME "
            "flags cannot be checked; leave them out"
        )
    return frozenset(names)
