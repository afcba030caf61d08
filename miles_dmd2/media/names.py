"""File names of eval samples: the same in every run, for any prompt, on any file system."""

from __future__ import annotations

import hashlib
import re
import unicodedata

from miles_dmd2.types import WeightKind

_SHOWN = 48  # characters of the prompt
_DIGEST = 16  # hex digits of its hash: what tells prompts apart


def sample_name(prompt: str, seed: int, kind: WeightKind) -> str:
    """`<prompt in small letters, digits and dashes>_<hash of the prompt>_<seed>_<kind>`: at most 100 characters.

    The hash tells prompts apart that look alike in small ASCII letters, or only differ behind the part shown.
    """
    plain = unicodedata.normalize("NFKD", prompt).encode("ascii", "ignore").decode().lower()
    shown = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:_SHOWN].rstrip("-")
    digest = hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST]
    return "_".join(part for part in (shown, digest, str(seed), kind) if part)


def eval_directory(rollout_id: int) -> str:
    return f"eval_{rollout_id:06d}"
