"""What a checkpoint of a LoRA adapter says of the network that it is over: without that, its tensors mean nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from miles_dmd2.config.errors import ConfigError
from miles_dmd2.config.lora import Lora


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """`base_sha256`: of the base's configuration and weights, see `models.checkpoint.component_digest`."""

    rank: int
    alpha: int
    target_modules: tuple[str, ...]
    base_sha256: str

    @classmethod
    def of(cls, lora: Lora, base_sha256: str) -> SavedAdapter:
        return cls(lora.rank, lora.alpha, lora.target_modules, base_sha256)

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> SavedAdapter:
        """KeyError, TypeError or ValueError: malformed."""
        names = tuple(str(name) for name in content["target_modules"])
        return cls(int(content["rank"]), int(content["alpha"]), names, str(content["base_sha256"]))

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def lora(self) -> Lora:
        return Lora(self.rank, self.alpha, self.target_modules)


def check_adapters(
    where: str, saved: Mapping[str, SavedAdapter | None], now: Mapping[str, SavedAdapter | None]
) -> None:
    """ConfigError: a trainer whose parameters are others than the checkpoint's, or are over another base. No option
    allows that: there is no place for what was saved. Another alpha is one that can be allowed.
    """
    for name in saved.keys() & now.keys():
        before, after = saved[name], now[name]
        if _layout(before) != _layout(after):
            raise ConfigError(
                f"{where}: trainer {name} trained {_words(before)} and now has {_words(after)}: what it saved fits no "
                "other parameters; use the --lora-rank and --lora-target-modules of the run it continues"
            )
        if before is not None and after is not None and before.base_sha256 != after.base_sha256:
            raise ConfigError(
                f"{where}: trainer {name}: --hf-checkpoint has another transformer (SHA-256 {after.base_sha256[:12]}) "
                f"than the one that its adapter was trained on ({before.base_sha256[:12]}); give that one"
            )


def _layout(adapter: SavedAdapter | None) -> tuple[int, frozenset[str]] | None:
    return None if adapter is None else (adapter.rank, frozenset(adapter.target_modules))


def _words(adapter: SavedAdapter | None) -> str:
    return (
        "all parameters" if adapter is None else f"LoRA of rank {adapter.rank} over {' '.join(adapter.target_modules)}"
    )
