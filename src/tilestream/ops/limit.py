"""`tilestream.worker_limit` and `tilestream.invariant`: blocks that bind the launches of their calls."""

from __future__ import annotations

from types import TracebackType

import torch

from tilestream.plan import limit as limits


class _Traced:
    """The limits of the blocks inside the function that is being compiled, the innermost last.

    torch.compile does not follow a ContextVar.
    """

    def __init__(self) -> None:  # no class attribute: the first assignment would compile a function anew
        self.limits: tuple[int, ...] = (0,)


_traced = _Traced()  # not the class: torch 2.10's compiler sets no attribute of a class


class worker_limit:  # noqa: N801 -- read as `with worker_limit(96):`
    """Launches of this block have at most ``count`` workers, also where ``workers=`` asks for more.

    The block binds the calls of this thread and of coroutines that it awaits. Blocks nest; the smallest count holds,
    TILESTREAM_WORKERS included. On a GPU a worker occupies one SM, so the other SMs stay free, for NCCL or for another
    stream. The plan takes the limit into account and may choose another tile than for the whole device.

    A block inside a function that torch.compile compiles is compiled in. Around a compiled function, the limit is read
    at each call. The function's backward pass on a GPU runs in a thread of torch, which sees only blocks inside the
    function. A call that torch.compile leaves out of its graphs (a graph break) does not see a block inside the
    function: put the block around the function, or compile with ``fullgraph=True``.

    Parameters
    ----------
    count
        The largest number of workers.

    Raises
    ------
    ValueError
        If ``count`` is not a positive whole number.

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
    """Each row of the results of this block has the same bits alone and in any batch.

    The order in which the products of a row are added depends only on K, the dtypes and the epilogue; for attention, on
    the number of keys and the head dim. So row ``i`` has the same bits for every number of rows, place among them,
    schedule, number of workers, chunking, order of arrival, neighbour and layout of A, captured or not. A query's row
    of attention has the same bits for every packing, paging and chunking of a prefill. A call that cannot be computed
    so raises an error that says what to do.

    ``with invariant():`` binds the calls of this thread and of coroutines that it awaits. ``invariant(True)`` binds the
    process from then on, and ``invariant(False)`` ends that; as blocks both restore the previous state.
    TILESTREAM_INVARIANT=1 binds the process from the start. For torch.compile and graph breaks, see `worker_limit`.

    The bits are those of one device and one version of tilestream, torch and Triton. Others may add in another order.

    Parameters
    ----------
    enabled
        True or False: for all threads of the process. None: for this block.

    Raises
    ------
    TypeError
        If ``enabled`` is neither True nor False nor None.

    Examples
    --------
    >>> a, b = torch.randn(100, 64), torch.randn(64, 32)
    >>> with invariant():
    ...     torch.equal(tilestream.matmul(a, b)[7:8], tilestream.matmul(a[7:8], b))
    True
    """

    def __init__(self, enabled: bool | None = None) -> None:
        if enabled is not None and not isinstance(enabled, bool):
            raise TypeError(
                f"invariant({enabled!r}): it must be True or False for the process, or left out for a block"
            )
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
    """The limit as an op's argument (see `tilestream.plan.limit.limit`); 0: no limit.

    While torch.compile traces, it is the limit of the blocks traced so far. The op reads that of the others when it
    runs.
    """
    return _traced.limits[-1] if torch.compiler.is_compiling() else limits.limit()
