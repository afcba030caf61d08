"""A disk that fills up while a checkpoint is written: one line, and the checkpoint before is whole."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from run_commands import command, environment

from miles_dmd2.checkpointing import read_manifest

pytestmark = pytest.mark.ray
# $1: where the small disk goes, $2: where what is on it at the end is copied, the rest: a command.
ON_A_SMALL_DISK = (
    'disk=$1; copy=$2; shift 2; mount -t tmpfs -o size=14m none "$disk" || exit 3; '
    '"$@"; code=$?; cp -r "$disk" "$copy"; exit $code'
)


def unshared(*words: str) -> list[str]:
    """In a mount namespace of its own, which every user may have on many systems."""
    return ["unshare", "--user", "--map-root-user", "--mount", *words]


def can_mount(tmp_path: Path) -> bool:
    try:
        words = unshared("mount", "-t", "tmpfs", "none", str(tmp_path))
        return subprocess.run(words, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def test_the_run_ends_with_one_line_and_the_last_checkpoint_is_whole(workspace: Path, tmp_path: Path) -> None:
    """A checkpoint of the tiny model is 8 MB: the first fits, the second does not."""
    if not can_mount(tmp_path):
        pytest.skip("this system lets no user mount a small disk (unshare --user --mount)")
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    words = command(workspace, "full disk", save=disk, save_interval=1)
    shell = unshared("sh", "-c", ON_A_SMALL_DISK, "sh", str(disk), str(copy), *words)
    done = subprocess.run(shell, capture_output=True, text=True, timeout=240, env=environment())
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "checkpoint step_000002 was not written: " in line
    assert "No space left on device" in line
    assert "step_000001 is the last complete one" in line
    assert "--load" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in copy.iterdir() if path.name.startswith((".step", "step"))) == ["step_000001"]
    assert read_manifest(copy / "step_000001").rollout == 1
