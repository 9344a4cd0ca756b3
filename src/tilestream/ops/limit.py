"""`tilestream.worker_limit`: leave the rest of the device to other work."""

from __future__ import annotations

from contextvars import Token
from types import TracebackType

import torch

from tilestream.plan import limit as limits


class _Traced:
    """The limit of the blocks inside the function that is being compiled: the compiler follows no ContextVar."""

    limit = 0


_traced = _Traced()  # not the class: torch 2.10's compiler sets no attribute of a class


class worker_limit:  # noqa: N801 -- read as `with worker_limit(96):`
    """Launches of this block have ``count`` workers at most, whatever they ask for.

    For the calls of this thread, and of what it awaits. Blocks nest: the tightest counts, and so does
    TILESTREAM_WORKERS. ``workers=`` of a call cannot exceed it. On a GPU a worker has an SM to itself, so the other SMs
    stay free: for NCCL, for another stream. A plan knows of it, and may take another tile than for the whole device.

    Inside a function that torch.compile compiles it is compiled in; around one, the compiled function asks for it each
    time it runs. Its backward pass on a GPU runs in a thread of torch's own, which knows of blocks inside the function
    only.

    Parameters
    ----------
    count
        Workers.

    Raises
    ------
    ValueError
        If ``count`` is no positive whole number.

    Examples
    --------
    >>> with worker_limit(1):
    ...     torch.equal(tilestream.matmul(torch.ones(4, 4), torch.ones(4, 4)), torch.full((4, 4), 4.0))
    True
    """

    def __init__(self, count: int) -> None:
        self._count = limits.checked(count)
        self._before = 0
        self._tokens: list[Token[int]] = []  # one object may stand in several blocks

    def __enter__(self) -> None:
        if torch.compiler.is_compiling():
            self._before = _traced.limit
            _traced.limit = limits.tighter(_traced.limit, self._count)
        else:
            self._tokens.append(limits._blocks.set(limits.tighter(limits._blocks.get(), self._count)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if torch.compiler.is_compiling():
            _traced.limit = self._before
        else:
            limits._blocks.reset(self._tokens.pop())


def limit() -> int:
    """The limit as an op's argument: see `tilestream.plan.limit.limit`. 0 where there is none.

    While a compiler traces, that of the blocks it has seen; the op itself asks for the others when it runs.
    """
    return _traced.limit if torch.compiler.is_compiling() else limits.limit()
