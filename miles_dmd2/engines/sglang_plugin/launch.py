"""Becomes SGLang's server, and dies with the process that asked for it. Run by the engine's Python:

    python -m miles_dmd2.engines.sglang_plugin.launch PARENT_PID -- ARGUMENTS OF THE SERVER

A parent that is killed cannot stop its server; on Linux the kernel does. The wish survives exec, and SGLang's worker
follows its own parent in the same way. Standard library only: the engine's environment has none of our packages.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

SERVER = "sglang.multimodal_gen.runtime.launch_server"
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main(arguments: list[str]) -> None:
    if len(arguments) < 2 or not arguments[0].isdecimal() or arguments[1] != "--":
        raise SystemExit(f"usage: {__spec__.name} PARENT_PID -- ARGUMENTS, got {arguments[:2]}")
    die_with(int(arguments[0]))
    os.execv(sys.executable, [sys.executable, "-m", SERVER, *arguments[2:]])  # noqa: S606 - no shell is what is wanted


def die_with(parent: int) -> None:
    """Ask for SIGKILL at the parent's death. SystemExit if it is not `parent`, or no longer."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # asked last: a death before prctl is not missed
        raise SystemExit(
            f"started by process {os.getppid()}, not by {parent}: that one is gone, or the Python is a script that "
            "does not exec; name the Python itself"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
