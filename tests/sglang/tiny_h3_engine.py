"""A Python for servers of the tiny MiniMax H3, and its whole checkpoint, VAEs included."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from miles_dmd2.engines.sglang.environment import engine_environment
from tests.tiny_h3 import tiny_h3

PLUGIN = Path(__file__).with_name("tiny_vaes.py")
NAME = "tiny_vaes"


def python_with_tiny_vaes(python: Path, directory: Path, checkpoint: Path | None = None) -> Path:
    """A script that becomes `python`, with the plugin that shrinks the VAEs beside ours.

    checkpoint: the directory that `build` is given. Then servers that are started with it have `projection`'s flag,
    which no run may pass on.

    Its directory comes first on a server's PATH, and has the ffmpeg that SGLang wants to see and rollouts never call.
    """
    plugin, bin_directory = directory / "plugin", directory / "bin"
    info = plugin / f"{NAME}-0.dist-info"
    info.mkdir(parents=True)
    bin_directory.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.multimodal_gen.plugins]\n{NAME} = {NAME}:register\n")
    (plugin / PLUGIN.name).symlink_to(PLUGIN)
    path = shlex.quote(str(plugin))
    script = f'PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}"{path} exec {shlex.quote(str(python.absolute()))} "$@"'
    if checkpoint is not None:
        flag = shlex.join(projection(checkpoint / "MiniMax-H3" / "FL2VA"))
        script = f'case "$*" in *sglang_plugin.launch*) set -- "$@" {flag} ;; esac\n{script}'
    for name, line in (("python", script), ("ffmpeg", "exit 1"), ("ffprobe", "exit 1")):
        (bin_directory / name).write_text(f"#!/bin/sh\n{line}\n")
        (bin_directory / name).chmod(0o755)
    return bin_directory / "python"


def build(directory: Path, python: Path, layout: str = "native") -> Path:
    """The checkpoint of `tiny_h3` with both VAEs. python: of `python_with_tiny_vaes`, or the engine's own."""
    root = tiny_h3(directory, layout=layout)
    subprocess.run([python, PLUGIN, root], check=True, env=engine_environment(python), timeout=240)
    return root


def projection(root: Path) -> tuple[str, str]:
    """The server's flag for its small text encoder."""
    return "--component-paths.conditioning_projection", str(root.parent / "conditioning_projection")
