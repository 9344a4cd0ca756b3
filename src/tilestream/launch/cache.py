"""A cache of launches. The key is a signature: all that the checks, the plan and the compiled kernel depend on.

Matmul and attention share one cache: a registered op looks up the `tilestream.launch.launch.Launch` of its canonical
operands. The native call path finds equal calls before that: see `tilestream.launch.native`.
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

#: The largest number of entries. One more empties the cache.
_MOST = 2 * 4096

T = TypeVar("T")


class LaunchCache(dict[object, object]):
    """Launches by signature. It holds plans and compiled kernels, but no tensor of a caller.

    Attributes
    ----------
    followers
        Functions that are called when the cache is cleared: they clear what depends on it.
    generation
        The number of clears. An entry that was made in an earlier generation is not inserted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.followers: list[Callable[[], None]] = []
        self.generation = 0
        self._lock = free_in_child(threading.RLock())

    def clear(self) -> None:
        """Empty the cache."""
        with self._lock:
            self.generation += 1
            super().clear()
            for forget in self.followers:
                forget()

    @contextlib.contextmanager
    def unless_cleared_since(self, generation: int) -> Iterator[bool]:
        """A block in which the cache is not cleared; its value says whether the generation is still the given one."""
        with self._lock:
            yield generation == self.generation

    def insert(self, key: object, found: T, generation: int) -> T:
        """Insert ``found`` if it was made in the present generation. Returns it."""
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
    """The key of a launch: each tensor's layout and alignment, the settings, and the process's state.

    Parameters
    ----------
    op
        The op, and the kind of entry.
    tensors
        The operands; None for one that is not given. The first one is given, and decides whether tf32 matters.
    settings
        All other arguments of the call.
    limit
        The limit of workers; None: the present one. See `tilestream.plan.limit`.
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
