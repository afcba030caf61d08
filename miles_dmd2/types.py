"""Records that cross a process, and the protocols the driver is written against.

Layer 0: importing this module loads neither torch nor ray. Tensors appear in annotations only.
A record carries what was *used* (seed, grid, weights version), never something to recompute it from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

WeightKind = Literal["raw", "ema"]
Role = Literal["critic", "actor"]
SampleType = Literal["ode", "sde"]
VideoDtype = Literal["uint8", "fp32"]

# One sample's conditioning as its model family defines it: tensors without a batch axis, by name.
Conditioning = Mapping[str, "Tensor"]


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """Which student produced a sample: after how many student updates, and raw or averaged weights."""

    step: int
    kind: WeightKind = "raw"

    def __str__(self) -> str:
        return f"{self.kind}@{self.step}"


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One sample to generate. `sigmas` are the N+1 fp32 grid values (terminal 0 included) as Python floats.

    sample_type: how it hops from step to step, by Euler or by noising x0 afresh. real_latent: instead of hopping, noise
    this row of the run's real latents to the stop step's sigma. decode, video_dtype: whether the answer has media, and
    of which dtype. scored: the run's reward function is asked about the sample.
    """

    sample_id: int
    prompt: str
    seed: int
    sigmas: tuple[float, ...]
    stop_step: int
    decode: bool = False
    sample_type: SampleType = "ode"
    real_latent: int | None = None
    scored: bool = False
    video_dtype: VideoDtype = "uint8"


@dataclass(frozen=True, slots=True)
class RolloutSample:
    """One student sample, stopped at step k of its grid.

    x_k: input of step k, fp32 `[*latent]`; x0: the student's clean prediction x_k - sigma_k * v, fp32 `[*latent]`.
    media: decoded uint8 or fp32 in [0, 1] `[frames, height, width, 3]`, only when the request asked for it.
    audio: decoded fp32 `[channels, samples]` in [-1, 1], with media of families that have sound, and its rate in Hz.
    """

    sample_id: int
    prompt: str
    seed: int
    stop_step: int
    sigmas: Tensor
    x_k: Tensor
    x0: Tensor
    cond: Conditioning
    weight_version: WeightVersion
    media: Tensor | None = None
    audio: Tensor | None = None
    audio_sample_rate: int | None = None
    reward: float = 0.0


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """What the critic group says about one sample: clean predictions of teacher and critic at one noised copy.

    x0_real, x0_fake: fp32 `[*latent]`; score_sigma: the noise level both saw.
    """

    x0_real: Tensor
    x0_fake: Tensor
    score_sigma: float


ScoreBatch = Mapping[int, ScoreRow]  # keyed by sample_id


@dataclass(frozen=True, slots=True)
class Probe:
    """A fixed input and the exporter's answer to it: whoever loads the weights must give the same velocity.

    x `[1, *latent]`, sigma `[1]`, cond of one sample, velocity `[1, *latent]`, all fp32.
    """

    x: Tensor
    sigma: Tensor
    cond: Conditioning
    velocity: Tensor


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Student weights on their way to an engine, with all that is needed to prove that they arrived.

    `payload` is a reference to (or in process: is) the dictionary name -> full fp32 tensor, in the family's names.
    """

    version: WeightVersion
    checksum: str
    probe: Probe
    payload: Any


@dataclass(frozen=True, slots=True)
class Chunk:
    """Samples that an engine returned together: their ids, and a reference to the `list[RolloutSample]`."""

    sample_ids: tuple[int, ...]
    payload: Any


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """One rollout, cut into the critic's windows in sample-id order. The actor reads the last window only.

    student_step: whether the student takes a step on it, so whether its last window is scored.
    """

    rollout_id: int
    weight_version: WeightVersion
    windows: tuple[tuple[Chunk, ...], ...]
    student_step: bool = True

    @property
    def sample_ids(self) -> tuple[int, ...]:
        return tuple(i for window in self.windows for chunk in window for i in chunk.sample_ids)


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a group hands back: reduced metrics, and per-rank references to its `ScoreBatch` (empty if it has none)."""

    metrics: Mapping[str, float]
    external: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupState:
    """A group's part of a checkpoint: path below the checkpoint directory -> SHA-256, and the group's counters."""

    files: Mapping[str, str]
    counters: Mapping[str, int] = field(default_factory=dict)


class Engines(Protocol):
    """The rollout engines as the driver sees them. Every method returns only when its effect is complete."""

    def wake(self) -> None: ...

    def sleep(self) -> None: ...

    def load_weights(self, update: WeightUpdate) -> None:
        """Load and verify (checksum and probe); raises if the engines do not serve exactly these weights."""

    def conditioning(self, prompts: Sequence[str]) -> list[Conditioning]:
        """What samples of these prompts carry as `cond`, in the order of the prompts; "" is a prompt here."""

    def generate(self, windows: Sequence[Sequence[RolloutRequest]]) -> tuple[tuple[Chunk, ...], ...]:
        """All windows' samples, each window in the order of its requests and in one or more chunks.

        One call for a whole rollout, so that engines batch over windows. Raises if a sample is lost or doubled.
        """

    def evaluate(self, requests: Sequence[RolloutRequest], rollout_id: int, kind: WeightKind) -> Mapping[str, float]:
        """Generate with decoded media, keep pictures in the run directory, return the eval metric's figures."""

    def settle(self) -> None:
        """Return when the files of all evals so far are on the disk. One that cannot be written ends no run."""

    def metrics(self) -> Mapping[str, float]:
        """Counts since the last call: `samples`, student `forwards` per sample, and of engines that can fail by
        themselves `faults` (failed attempts), `retries`, `restarts` and engines `dropped` for good (evals' too)."""

    def dispose(self) -> None: ...


class TrainerGroup(Protocol):
    """One role's ranks as the driver sees them."""

    @property
    def name(self) -> str: ...

    @property
    def role(self) -> Role: ...

    def wake(self) -> None: ...

    def sleep(self) -> None: ...

    def train(self, batch: RolloutBatch, external: Mapping[str, tuple[Any, ...]]) -> TrainResult:
        """Train on one rollout. `external` maps each earlier group's name to what it handed over."""

    def export_weights(self) -> Mapping[WeightKind, WeightUpdate]:
        """Raw (and, when kept, averaged) student weights. Awake actor group only."""

    def save(self, directory: Path) -> GroupState:
        """Write this group's state below `directory`, whether awake or asleep."""

    def dispose(self) -> None: ...
