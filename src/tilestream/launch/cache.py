"""Launches of earlier calls, found by a signature: all that the checks, the plan and the compiled kernel depend on.

One cache serves matmul and attention: a registered op looks the `tilestream.launch.launch.Launch` of its canonical
operands up. Equal calls are found before that, by the native call path: see `tilestream.launch.native`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from tilestream.core.forks import free_in_child
from tilestream.plan import limit as limits
from tilestream.runtime.properties import allows_tf32, context_units

#: Entries; with one more the cache starts anew.
_MOST = 2 * 4096

T = TypeVar("T")


class LaunchCache(dict[object, object]):
    """What earlier calls decided, by signature. It holds plans and compiled kernels, and no tensor of a caller.

    Attributes
    ----------
    followers
        Called when it is cleared: what else was decided then is to be forgotten, too.
    generation
        How often it has been cleared. What was decided in an earlier generation is not kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.followers: list[Callable[[], None]] = []
        self.generation = 0
        self._lock = free_in_child(threading.RLock())

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self.generation += 1
            super().clear()
            for forget in self.followers:
                forget()

    @contextlib.contextmanager
    def unless_cleared_since(self, generation: int) -> Iterator[bool]:
        """Whether what was decided in a generation may be kept: in this block nothing is cleared."""
        with self._lock:
            yield generation == self.generation

    def insert(self, key: object, found: T, generation: int) -> T:
        """Keep ``found`` if it was decided in the present generation, and return it."""
        with self.unless_cleared_since(generation) as may_keep:
            if may_keep:
                if len(self) >= _MOST:
                    self.clear()
                self[key] = found
        return found

    def of(self, op: str) -> list[Any]:
        """The entries of an op: see `signature`."""
        return [found for key, found in self.items() if isinstance(key, tuple) and key[0] == op]


launch_cache = LaunchCache()


def signature(
    op: str, tensors: Sequence[torch.Tensor | None], settings: object, limit: int | None = None
) -> tuple[object, ...]:
    """What decides a launch: each tensor's layout and alignment, the settings, and the state of the process.

    Parameters
    ----------
    op
        The op, and of which kind the entry is.
    tensors
        Operands, the one that tf32 may round first, which is given; None for one that is not.
    settings
        All else that the caller says.
    limit
        The workers' limit; None: the present one. See `tilestream.plan.limit`.
    """
    first = tensors[0]
    assert first is not None
    device = first.device
    return (
        op, settings, limits.limit() if limit is None else limit,
        context_units(device.index) if device.type == "cuda" else 0,
        first.dtype == torch.float32 and allows_tf32(),
        *[None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0) for x in tensors],
    )  # fmt: skip
