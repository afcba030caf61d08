"""Plain trainers that run in one process, with or without other ranks: critic and actor over a shared core."""

from miles_dmd2.training.actor import ActorTrainer, DriftError
from miles_dmd2.training.batching import rank_slice, wanted_ids
from miles_dmd2.training.critic import CriticTrainer
from miles_dmd2.training.distributed import Ranks, init_ranks, join_rendezvous, leave_ranks, open_rendezvous
from miles_dmd2.training.optimizer import OptimizerSettings
from miles_dmd2.training.trainer import Trainer, TrainerSettings

__all__ = [
    "ActorTrainer",
    "CriticTrainer",
    "DriftError",
    "OptimizerSettings",
    "Ranks",
    "Trainer",
    "TrainerSettings",
    "init_ranks",
    "join_rendezvous",
    "leave_ranks",
    "open_rendezvous",
    "rank_slice",
    "wanted_ids",
]
