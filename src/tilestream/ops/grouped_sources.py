"""The registered ops of grouped matmuls by source: rows in places of sources, with counts that only come with them.

``tilestream::grouped_gemm_by_source`` and its ``out`` form are canonical: A is ``[sources * capacity, K]``, B ``[G, K,
N]``, counts int32 ``[sources, G]``, the result ``[sources * capacity, N]``; see `tilestream.core.sources`. They have no
derivative.

On the CPU the calling thread is the only worker, and a group of a source is one tile. It performs the operations of
`tilestream.core.sources.take`, the kernels' schedule.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from tilestream.arrival.flat import Awaited, FlatArrival, check_deadline
from tilestream.arrival.signals import Outcome, Signals
from tilestream.arrival.stream import open_streams
from tilestream.core import sources
from tilestream.core.device import DeviceProperties
from tilestream.core.errors import ArrivalTimeout, source_name
from tilestream.core.operands import HALVES, Epilogue, GemmOperands, GroupedOperands
from tilestream.core.sources import Place, SourcePlaces, SourceTile
from tilestream.launch.cache import launch_cache, signature
from tilestream.launch.gate import NO_PUBLISH, PublishArguments
from tilestream.ops import gpu, streamed
from tilestream.ops.checks import check_pair, check_written
from tilestream.ops.grouped_library import dequantized, halves, make, of_group, product
from tilestream.ops.library import register, result_dtype
from tilestream.ops.operands import refuse_shared
from tilestream.plan import limit as limits
from tilestream.plan.grouped import check_source_schedule, refuse_invariance
from tilestream.runtime import collector
from tilestream.runtime.channel import check_device

_OP = "grouped_mm"
#: Bias ``[G, 1, N]``; scales as of ``grouped_gemm``. arrival: of the rows, as `FlatArrival.ints`, and the caller's own
#: words; empty: all is there. publish: of the sources' results; empty: none is signalled.
_SCHEMA = (
    "(Tensor a, Tensor b, Tensor counts, Tensor? bias, str activation, ScalarType? out_dtype, str schedule, "
    "int workers, int pivot, SymInt[] arrival, Tensor? signals, float deadline, SymInt[] publish, "
    "Tensor? publish_signals{more}, Tensor? scale_a=None, Tensor? scale_b=None, bool fast_accum=True, "
    "int worker_limit=0) -> "
)
_NUM_COMMON, _DEFAULTS = 14, (None, None, True, 0)
#: The tensors of an op, by name.
_OPERANDS = "a", "b", "counts", "bias", "out", "scale_a", "scale_b"


def _fake(*args: Any) -> torch.Tensor:
    a, b, counts, _, activation, out_dtype = args[:6]
    if a.dim() != 2 or b.dim() != 3 or counts.dim() != 2:
        raise ValueError(
            f"grouped_gemm_by_source: a has {a.dim()}, b {b.dim()} counts {counts.dim()} dimensions; they have 2, 3, 2"
        )
    check_pair("grouped_gemm_by_source", a, b)
    torch._check(a.shape[1] == b.shape[1], lambda: f"grouped_gemm_by_source: a {list(a.shape)}, b {list(b.shape)}: K")
    torch._check(counts.shape[1] == b.shape[0], lambda: f"grouped_gemm_by_source: counts {list(counts.shape)}: groups")
    torch._check(
        a.shape[0] % counts.shape[0] == 0,
        lambda: f"grouped_gemm_by_source: {a.shape[0]} rows, {counts.shape[0]} places",
    )
    if activation in HALVES and b.shape[2] % 2:
        raise ValueError(f"{_OP}: activation={activation!r}: b has {b.shape[2]} columns; each half has as many")
    shape = (a.shape[0], b.shape[2] // (2 if activation in HALVES else 1))
    made: torch.Tensor = a.new_empty(shape, dtype=result_dtype(a, out_dtype))
    return made


def _fake_out(*args: Any) -> None:
    wanted, out = _fake(*args), args[_NUM_COMMON]
    if out.shape != wanted.shape or out.dtype != wanted.dtype:
        raise ValueError(f"out: {list(out.shape)} {out.dtype}; the result is {list(wanted.shape)} {wanted.dtype}")


def _real(*args: Any) -> torch.Tensor:
    out = _fake(*args)
    _run(out, args[:_NUM_COMMON], args[_NUM_COMMON:])
    return out


def _real_out(*args: Any) -> None:
    _fake_out(*args)
    out, optional = args[_NUM_COMMON], args[_NUM_COMMON + 1 :]
    check_written("grouped_gemm_by_source", out)
    names = ("a", "b", "counts", "bias", "scale_a", "scale_b")
    refuse_shared(out, **dict(zip(names, (*args[:4], *optional[:2], None, None), strict=False)))
    _run(out, args[:_NUM_COMMON], optional)
    torch._C._increment_version((out,))  # autograd knows nothing of what a kernel writes


def _canonical(out: torch.Tensor, args: tuple[Any, ...], optional: tuple[Any, ...]) -> tuple[GroupedOperands, gpu.How]:
    """The operands and options of a launch, from the ops' arguments."""
    a, b, counts, bias, activation, _, schedule, workers = args[:8]
    rest: Any = (*optional, *_DEFAULTS[len(optional) :])
    scale_a, scale_b, fast_accum, worker_limit = rest
    check_source_schedule(_OP, schedule)
    bias, scale_a, scale_b = (None if t is None else t.detach() for t in (bias, scale_a, scale_b))
    epilogue = Epilogue(1.0, bias, None, 1.0, activation, scale_a, scale_b)
    how = gpu.How(schedule, workers, fast_accum, limits.tighter(worker_limit, limits.limit()))
    refuse_invariance(_OP, how.limit)
    return GroupedOperands(a.detach(), b.detach(), out.detach(), epilogue, counts), how


def compile_ahead(args: tuple[Any, ...], out: torch.Tensor, device: DeviceProperties) -> None:
    """Compile what `by_source_op`, called with ``args``, would launch on ``device`` for ``out``: nothing published."""
    (x, how), (pivot, arrival, signals) = _canonical(out, args[:_NUM_COMMON], args[_NUM_COMMON:]), args[8:11]
    rows = FlatArrival.from_ints(arrival, signals)
    make(x, how, device, rows is not None, pivot)(x, gpu.awaited_ahead(rows))


def _run(out: torch.Tensor, args: tuple[Any, ...], optional: tuple[Any, ...]) -> None:
    (x, how), (pivot, arrival, signals, deadline, publish, published) = _canonical(out, args, optional), args[8:]
    rows, publishes = FlatArrival.from_ints(arrival, signals), FlatArrival.from_ints(publish, published)
    if open_streams:
        operands = (*args[:4], out, *optional)
        streamed.refuse_unfilled(_OP, _OPERANDS, operands, () if rows is None else ("a", "counts"))
    awaited = Awaited.of(rows, None, check_deadline(deadline), _OP, out.device)
    words = None if publishes is None else publishes.signals(_OP, out.device)
    if out.is_cuda:
        _on_gpu(x, how, pivot, awaited, words)
    else:
        _Caller(x, how, pivot, awaited, words).run()


# CPU ------------------------------------------------------------------------------------------------------------------


class _Caller:
    """The calling thread as the one worker of a call on the CPU.

    Parameters
    ----------
    x
        The operands, with counts in the place of offsets.
    awaited
        The signals of the rows; None: all of them are there.
    publishes
        The signals of the sources' results; None for none.
    """

    def __init__(
        self, x: GroupedOperands, how: gpu.How, pivot: int, awaited: Awaited | None, publishes: Signals | None
    ) -> None:  # fmt: skip
        count, groups = x.offsets.shape
        capacity = x.a.shape[0] // count
        self._x, self._how, self._publishes = x, how, publishes
        self._places = SourcePlaces(count, groups, capacity, max(capacity, 1), 1, pivot, awaited is not None)
        self._settled: dict[int, int] = {}
        self._taken: Counter[int] = Counter()
        self._missing: dict[int, None] = {}  # words that were not there when they were looked at, in that order
        self._error: BaseException | None = None
        self._deadline, self._op, self._end = 0.0, _OP, 0.0
        if awaited is not None:
            incoming = awaited.operands[0]
            assert incoming is not None
            (self._signals, self._epoch), self._deadline, self._op = incoming, awaited.deadline, awaited.op
            self._end = time.perf_counter() + awaited.deadline

    def run(self) -> None:
        """Compute the products of all sources.

        Raises
        ------
        ValueError
            If counts are negative, or exceed a source's place; where rows arrive, behind all other sources' products.
        ArrivalTimeout, BaseException
            If something did not come in time, or as a producer reported.
        """
        epoch, left = 0, Counter[int]()
        if not self._places.arrives:
            counts = [self._count(source) for source in range(self._places.sources)]
            if self._error is not None:
                raise self._error
            left.update({source: sum(size > 0 for size in rows) for source, rows in enumerate(counts)})
        if self._publishes is not None:
            epoch = self._publishes.begin_publishing()
        place, tile = Place(), None
        try:
            with torch.inference_mode():  # so that a result that is an inference tensor can be written
                self._publish([source for source in range(self._places.sources) if not left[source]], epoch)
                while True:
                    tile, place = self._next(place)
                    if tile is None:
                        break
                    self._compute(tile, place.over)
                    left[tile.source] -= 1
                    if not left[tile.source]:
                        self._publish([tile.source], epoch)
            if self._places.arrives:
                self._see_all()
        except BaseException as error:
            if tile is not None:
                self._taken[self._places.queue(tile.source, tile.group)] = 0
            self._void_rest()
            if self._publishes is not None:
                self._publishes.fail(error, epoch=epoch)
            raise
        if (failure := self._error) is not None:
            self._error = None
            try:
                raise failure
            finally:
                del failure  # its traceback refers to this frame: the cycle would keep the operands alive

    def _next(self, place: Place) -> tuple[SourceTile | None, Place]:
        turn, answer = sources.take(self._places, 0, place), None
        while True:
            try:
                answer = self._perform(turn.send(answer))
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    def _perform(self, operation: Any) -> Any:
        if isinstance(operation, sources.Look):
            return self._has_arrived(sources.counts_word(operation.source, self._places.groups))
        if isinstance(operation, sources.Arrived):
            return self._has_arrived(sources.rows_word(operation.source, operation.group, self._places.groups))
        if isinstance(operation, sources.Settle):
            return self._settled.setdefault(operation.source, operation.state)
        if isinstance(operation, sources.Count):
            return self._count(operation.source)
        if isinstance(operation, sources.Taken):
            return self._taken[operation.queue]
        if isinstance(operation, sources.Draw):
            self._taken[operation.queue] += 1
            return self._taken[operation.queue] - 1
        assert isinstance(operation, sources.Nap)
        return self._nap()

    def _has_arrived(self, word: int) -> int:
        there = self._signals.arrived(word, self._epoch)
        if not there:
            self._missing[word] = None
        return there

    def _count(self, source: int) -> tuple[int, ...]:
        counts = tuple(self._x.offsets[source].tolist())
        if not self._places.is_valid(counts) and self._error is None:
            self._error = ValueError(
                f"{_OP}: counts[{source}]={list(counts)}; they are not negative, and come to {self._places.capacity} "
                "rows at most"
            )
        return counts

    def _nap(self) -> int:
        begin = time.perf_counter()
        missing = list(self._missing)
        self._missing.clear()
        outcome, _ = self._signals.wait_any([(word,) for word in missing], self._epoch, self._end, lambda: False)
        if outcome is Outcome.ARRIVED:
            return 0
        self._give_up(outcome, missing[0], begin)
        return 1

    def _give_up(self, outcome: Outcome, word: int, begin: float) -> None:
        """Keep the error of a wait that has not ended well."""
        if self._error is not None:
            return
        if outcome is Outcome.FAILED:
            self._error = self._signals.failure(self._epoch)
            return
        groups = self._places.groups
        named = word // (groups + 1), word % (groups + 1) - 1
        waited = time.perf_counter() - begin
        self._error = ArrivalTimeout(
            self._op, 0, word, source_name(*named), waited, self._deadline, source=named
        )  # fmt: skip

    def _compute(self, tile: SourceTile, over: bool) -> None:
        """The product of a group's rows; NaN for a source that is lost or whose counts are not valid, or too late."""
        x, counts, group = self._x, tile.counts, tile.group
        begin = tile.source * self._places.capacity
        if counts is None or not self._places.is_valid(counts):
            x.out[begin : begin + self._places.capacity].fill_(float("nan"))
            return
        begin += sum(counts[:group])
        run = slice(begin, begin + counts[group])
        if over:
            x.out[run].fill_(float("nan"))
            return
        one = _rows_of(x, group, run)
        (halves if one.epilogue.activation in HALVES else product)(one, self._how)

    def _publish(self, those: Sequence[int], epoch: int) -> None:
        if self._publishes is not None:
            for source in those:
                self._publishes.set(source, epoch)

    def _see_all(self) -> None:
        """Zero a caller's own words when all have been seen, those of groups without rows too."""
        if not self._signals.self_reset or self._error is not None:
            return
        begin, words = time.perf_counter(), range(self._signals.count)
        outcome, _ = self._signals.wait_any([tuple(words)], self._epoch, self._end, lambda: False)
        if outcome is Outcome.ARRIVED:
            self._signals.clear()
        else:
            missing = (word for word in words if not self._signals.arrived(word, self._epoch))
            self._give_up(outcome, next(missing, 0), begin)

    def _void_rest(self) -> None:
        """Store NaN where an interrupt or an error left nothing."""
        taken, self._taken = self._taken, Counter()
        with torch.inference_mode():
            for source in range(self._places.sources):
                counts = None
                if self._settled.get(source) == sources.COUNTED:
                    counts = tuple(self._x.offsets[source].tolist())
                for group, size in enumerate(self._places.tiles(counts)):
                    if size and not taken[self._places.queue(source, group)]:
                        self._compute(SourceTile(source, group, 0, counts), True)


def _rows_of(x: GroupedOperands, group: int, run: slice) -> GemmOperands:
    """The operands of some rows of a group."""
    a, b, out, e, counts = x
    if x.scales == "block":
        assert e.scale_a is not None
        assert e.scale_b is not None
        only = slice(group, group + 1)
        mine = e._replace(scale_a=e.scale_a[run], scale_b=e.scale_b[only])
        part = dequantized(GroupedOperands(a[run], b[only], out[run], mine, counts))
        bias = of_group(e.bias, group, run)
        return GemmOperands(part.a, part.b[0], part.out, Epilogue(1.0, bias, None, 1.0, e.activation))
    vectors = [of_group(v, group, run) for v in (e.bias, e.scale_a, e.scale_b)]
    return GemmOperands(a[run], b[group], out[run], Epilogue(1.0, vectors[0], None, 1.0, e.activation, *vectors[1:]))


# GPU ------------------------------------------------------------------------------------------------------------------


def _on_gpu(x: GroupedOperands, how: gpu.How, pivot: int, awaited: Awaited | None, publishes: Any) -> None:
    """Issue the launch on the current stream. ``publishes``: `DeviceSignals` of the sources' results; None for none."""
    device = x.a.device
    check_device(device.index)
    if not x.a.shape[0] and awaited is None and publishes is None:
        return
    if awaited is not None and awaited.rows.by_matmul:  # that matmul may have allocated the rows on its own stream
        x.a.record_stream(torch.cuda.current_stream(device))
    if publishes is None:
        gpu.issue(find(x, how, pivot, awaited is not None), x, awaited, _OP)
        return
    with torch.cuda.device(device):
        x = x._replace(epilogue=x.epilogue._replace(publish=NO_PUBLISH))
        launch = find(x, how, pivot)
        captured = torch.cuda.is_current_stream_capturing()
        words = PublishArguments(*publishes.publish())
        try:
            gpu.issue(launch, x._replace(epilogue=x.epilogue._replace(publish=words)), None, _OP)
            publishes.published(pivot)
        except BaseException as error:
            if not captured:  # a failed capture has neither a graph nor readers
                publishes.fail(error)  # readers that wait for the other sources raise it
            raise


def find(x: GroupedOperands, how: gpu.How, pivot: int = 0, arrives: bool = False) -> Any:
    """The launch for such operands: an earlier one's, or a new one; ``arrives``: the sources' rows."""
    e = x.epilogue
    tensors = (x.a, x.b, x.out, e.bias, e.scale_a, e.scale_b, x.offsets)
    key = signature("sources", tensors, (*how[:-1], e.activation, pivot, arrives, e.publish is not None), how.limit)
    launch = launch_cache.get(key)
    if launch is None:
        generation = launch_cache.generation
        with collector.paused():  # the first one imports the kernels
            launch = launch_cache.insert(key, make(x, how, arrives=arrives, pivot=pivot), generation)
    return launch


register("grouped_gemm_by_source", _SCHEMA.format(more="") + "Tensor", _real, _fake, alone=True)
register("grouped_gemm_by_source_out", _SCHEMA.format(more=", Tensor(a!) out") + "()", _real_out, _fake_out, alone=True)
by_source_op = torch.ops.tilestream.grouped_gemm_by_source.default
by_source_out_op = torch.ops.tilestream.grouped_gemm_by_source_out.default
