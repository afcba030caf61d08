from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from miles_dmd2.training import Ranks, init_ranks
from miles_dmd2.training.distributed import backend_string
from tests.training.pool import RankPool


def collectives(ranks: Ranks) -> tuple[object, ...]:
    mine = ranks.rank + 1.0
    return (
        ranks.sum([mine, 0.5]),
        ranks.max([mine, -mine]),
        ranks.all_true(True),
        ranks.all_true(ranks.rank == 0),
        ranks.gather({"rank": ranks.rank}),
        ranks.sum([]),
    )


def test_collectives(ranks: Ranks, two_ranks: RankPool) -> None:
    assert collectives(ranks) == ([1.0, 0.5], [1.0, -1.0], True, True, [{"rank": 0}], [])
    expected = ([3.0, 1.0], [2.0, -1.0], True, False, [{"rank": 0}, {"rank": 1}], [])
    assert two_ranks.run(collectives) == [expected, expected]


def test_gloo_is_always_there_and_nccl_on_gpus_alone(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch is a CUDA build, whose NCCL does not start on a host without a GPU."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert [backend_string(device) for device in ("cpu", "cuda")] == ["gloo", "cpu:gloo,cuda:nccl"]
    assert dist.get_backend() == "gloo"  # of this process's group, whatever torch it has


def test_joining_again_gives_the_same_group_and_another_rank_is_refused(ranks: Ranks) -> None:
    again = init_ranks()
    assert (again.rank, again.world_size, again.device) == (0, 1, torch.device("cpu"))
    with pytest.raises(ValueError, match="rank 0 of 1 already, cannot become rank 1 of 2"):
        init_ranks(1, 2)
    with pytest.raises(ValueError, match="got rank 2 of 2"):
        init_ranks(2, 2)
