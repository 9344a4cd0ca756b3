"""`tilestream.worker_limit` and `tilestream.invariant`: what the calls of a block ask of their launches."""

from __future__ import annotations

from types import TracebackType

import torch

from tilestream.plan import limit as limits


class _Traced:
    """The limits of the blocks inside the function that is being compiled: the compiler follows no ContextVar.

    The innermost block's comes last.
    """

    def __init__(self) -> None:  # not of the class: a function would be compiled anew where they are first set
        self.limits: tuple[int, ...] = (0,)


_traced = _Traced()  # not the class: torch 2.10's compiler sets no attribute of a class


class worker_limit:  # noqa: N801 -- read as `with worker_limit(96):`
    """Launches of this block have ``count`` workers at most, whatever they ask for.

    For the calls of this thread, and of what it awaits. Blocks nest: the tightest counts, and so does
    TILESTREAM_WORKERS. ``workers=`` of a call cannot exceed it. On a GPU a worker has an SM to itself, so the other SMs
    stay free: for NCCL, for another stream. A plan knows of it, and may take another tile than for the whole device.

    Inside a function that torch.compile compiles it is compiled in; around one, the compiled function asks for it each
    time it runs. Its backward pass on a GPU runs in a thread of torch's own, which knows of blocks inside the function
    only. A call that the compiler leaves out of its graphs (a graph break) does not know of a block inside it: put the
    block around the function, or compile with ``fullgraph=True``.

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
        self._bound = limits.checked(count)

    def __enter__(self) -> None:
        if torch.compiler.is_compiling():
            _traced.limits = (*_traced.limits, limits.tighter(_traced.limits[-1], self._bound))
        else:
            around = limits._blocks.get()
            limits._blocks.set((*around, limits.tighter(around[-1] if around else 0, self._bound)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if torch.compiler.is_compiling():
            _traced.limits = _traced.limits[:-1]
        else:
            limits._blocks.set(limits._blocks.get()[:-1])


class within_limit(worker_limit):  # noqa: N801 -- a block, as `worker_limit` is
    """A block with the limit of another context: see `tilestream.plan.limit`."""

    def __init__(self, bound: int) -> None:
        super().__init__(1)
        self._bound = bound


class invariant(within_limit):  # noqa: N801 -- read as `with invariant():`
    """Each row of the results of this block has bits of its own: the same alone and in any batch.

    The products of a row are added in an order that depends on K, the dtypes and the epilogue alone, and the keys of a
    query in one that depends on their number and on the head's columns. So row ``i`` has the same bits for every number
    of rows and place among them, for every schedule, number of workers, chunk and order of arrival, neighbour and
    layout of A, captured or not; a query's row likewise for every packing, page and chunk of a prefill. What cannot be
    computed so raises an error that says what to do.

    ``with invariant():`` holds for the calls of this thread, and of what it awaits. ``invariant(True)`` holds for the
    process from there on, ``invariant(False)`` ends that; as blocks they restore what was there. TILESTREAM_INVARIANT=1
    is the former from the start. Inside a function that torch.compile compiles, ``with invariant():`` is compiled in;
    but for calls behind a graph break, as of `worker_limit`.

    Bits are of one device and one version of tilestream, torch and Triton: another may add in another order.

    Parameters
    ----------
    enabled
        Whether all threads promise it; None: this block only.

    Raises
    ------
    TypeError
        If ``enabled`` is neither True, False nor None.

    Examples
    --------
    >>> a, b = torch.randn(100, 64), torch.randn(64, 32)
    >>> with invariant():
    ...     torch.equal(tilestream.matmul(a, b)[7:8], tilestream.matmul(a[7:8], b))
    True
    """

    def __init__(self, enabled: bool | None = None) -> None:
        if enabled is not None and not isinstance(enabled, bool):
            raise TypeError(f"invariant({enabled!r}): it is True or False for the process, or left away for a block")
        super().__init__(limits.INVARIANT)
        self._of_process = None if enabled is None else limits.set_of_process(enabled)

    def __enter__(self) -> None:
        if self._of_process is None:
            super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._of_process is None:
            super().__exit__(kind, error, trace)
        else:
            limits.set_of_process(self._of_process)


def limit() -> int:
    """The limit as an op's argument: see `tilestream.plan.limit.limit`. 0 where there is none.

    While a compiler traces, that of the blocks it has seen; the op itself asks for the others when it runs.
    """
    return _traced.limits[-1] if torch.compiler.is_compiling() else limits.limit()
