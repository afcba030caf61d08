"""Names that both processes of the server, and the client, agree on. Standard library only."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

PROTOCOL = 1  # raised when a client of before could misread a reply
VERSION = "1.0"

KEY = "miles_dmd2"  # our options inside `diffusers_kwargs`, and our part of a reply
DIGEST_HEADER = "X-Miles-Dmd2-Digest"  # blake2b, 16 bytes, of a reply's body
LAUNCH_ID = "MILES_DMD2_LAUNCH_ID"  # environment: whose server this is

# Operations of the worker, sent as the module name of a checksum request: the one call whose answer SGLang passes back
# as it is, whether the worker sleeps or not.
CAPABILITIES = f"{KEY}.capabilities"
WEIGHTS = f"{KEY}.weights"
BEGIN = f"{KEY}.weights.begin"


def body_digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def tensor_digest(dtype: str, shape: list[int], content: bytes | memoryview) -> str:
    """SHA-256 of one tensor: dtype as `str(torch.dtype)`, shape, raw contiguous bytes."""
    digest = hashlib.sha256(f"{dtype}\0{shape}\0".encode())
    digest.update(content)
    return digest.hexdigest()


def weights_digest(tensors: Mapping[str, str]) -> str:
    """SHA-256 of a set of weights, from name -> `tensor_digest`."""
    return hashlib.sha256("".join(f"{name} {tensors[name]}\n" for name in sorted(tensors)).encode()).hexdigest()
