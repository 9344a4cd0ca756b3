"""The ranks among which faults are made: processes of this machine over gloo, or one on each of two GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fault_table.engine import Fault, use_folders

use_folders("distributed")


class Ranks:
    """Processes that form a group for each job; they begin with the first.

    Parameters
    ----------
    device
        ``cpu``: three ranks. ``cuda``: two, each on its GPU; over gloo where there is no GPU, to try the steps.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.world = 3 if device == "cpu" else 2
        self._pool: Any = None

    @property
    def backend(self) -> str:
        return "cpu:gloo,cuda:nccl" if self.device == "cuda" and torch.cuda.is_available() else "gloo"

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """Each rank's answer; dead ranks are started anew."""
        from pool import Pool

        if self._pool is None:
            self._pool = Pool(self.backend)
        bounds = {} if self.device == "cpu" else {"seconds": 60.0, "bound": 120.0}
        return list(self._pool.run(self.world, job, *args, **bounds))

    def renew(self) -> None:
        """After a rank has died. On GPUs all processes are new, as torchrun starts them.

        torch counts a process's rendezvous of symmetric memory: a new process does not meet one that had some.
        """
        if self.device == "cuda":
            self.close()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


@contextlib.contextmanager
def ranks_of(device: str) -> Iterator[Ranks]:
    """Ranks that end with the block."""
    made = Ranks(device)
    try:
        yield made
    finally:
        made.close()


def why_not(row: Fault, device: str) -> str:
    """Why this machine cannot make a fault; empty if it can."""
    if row.part != "ranks" or device != "cuda" or (count := torch.cuda.device_count()) >= 2:
        return ""
    return f"{row.part}: {row.name}: needs two GPUs, here is {count}"
