"""Two rank processes that live for the whole session and run functions sent to them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp

from miles_dmd2.training import Ranks, init_ranks, join_rendezvous, leave_ranks, open_rendezvous

TIMEOUT_S = 120.0


class RankPool:
    """`run(function, *args)` calls `function(ranks, *args)` on every rank and returns the results in rank order."""

    def __init__(self, world_size: int = 2) -> None:
        context = mp.get_context("spawn")
        pipes = [context.Pipe() for _ in range(world_size)]
        self._ends = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(theirs, rank, world_size), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        port = self._receive(self._ends[0])
        for end in self._ends[1:]:
            end.send(port)
        for end in self._ends:
            assert self._receive(end) == "joined"

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """AssertionError with the rank's traceback if one raises."""
        for end in self._ends:
            end.send((function, args))
        return [self._receive(end) for end in self._ends]

    def close(self) -> None:
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()

    @staticmethod
    def _receive(end: Connection) -> Any:
        assert end.poll(TIMEOUT_S), "a rank did not answer"
        result, error = end.recv()
        assert error is None, error
        return result


def _serve(end: Connection, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    if rank == 0:
        store = open_rendezvous("127.0.0.1", world_size)
        end.send((store.port, None))
    else:
        store = join_rendezvous("127.0.0.1", end.recv(), world_size)
    ranks: Ranks = init_ranks(rank, world_size, store=store, timeout_s=TIMEOUT_S)
    end.send(("joined", None))
    while (task := end.recv()) is not None:
        function, args = task
        try:
            end.send((function(ranks, *args), None))
        except BaseException:
            end.send((None, f"rank {rank}:\n{traceback.format_exc()}"))
    leave_ranks()
