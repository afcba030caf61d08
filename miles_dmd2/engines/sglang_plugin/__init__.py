"""What an unmodified SGLang diffusion server needs to serve DMD2 rollouts, on the hooks that SGLang itself offers.

`register` is the entry point (group `sglang.multimodal_gen.plugins`). It runs in the engine's environment, in the HTTP
process and again in each worker, and imports nothing of this project outside this package: torch, NumPy, pydantic and
what SGLang brings. Written for and tested with SGLang 0.5.23; every hook's target was read there.

SGLang only logs a hook that does not apply, and serves on without it. So `GET /miles_dmd2/capabilities` says for each
hook of both processes whether it is in place, and a client refuses a server where one is not.
"""

from __future__ import annotations

import multiprocessing

from miles_dmd2.engines.sglang_plugin.protocol import PROTOCOL, VERSION

__all__ = ["PROTOCOL", "VERSION", "register"]


def register() -> None:
    """Register this process's hooks; SGLang applies them before it serves.

    The HTTP process gets none of the worker's and the other way round: a hook's target is imported to apply it, and the
    worker's runtime takes half a minute to import.
    """
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry

    if multiprocessing.parent_process() is None:
        from miles_dmd2.engines.sglang_plugin.http import HOOKS
    else:
        from miles_dmd2.engines.sglang_plugin.worker import HOOKS
    for target, (hook, kind) in HOOKS.items():
        HookRegistry.register(target, hook, kind)
