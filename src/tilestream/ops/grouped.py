"""`tilestream.grouped_mm`: a product a group, of groups whose lengths only the device knows."""

from __future__ import annotations

import contextlib

import torch
from torch.compiler import is_compiling

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.by_source import SourceArrival, check_counts
from tilestream.arrival.flat import FlatArrival, check_deadline
from tilestream.arrival.stream import Stream, open_streams
from tilestream.core.arguments import is_one_of
from tilestream.core.dtypes import dtype_name
from tilestream.core.errors import kind_of
from tilestream.core.operands import HALVES, blocks_of
from tilestream.ops import checks, native, streamed
from tilestream.ops.grouped_library import grouped_arriving_op, grouped_arriving_out_op, grouped_op, grouped_out_op
from tilestream.ops.grouped_sources import by_source_op, by_source_out_op
from tilestream.ops.library import result_dtype
from tilestream.ops.limit import limit
from tilestream.ops.operands import Overlap, made_fresh
from tilestream.ops.request import ACTIVATIONS, Request, check_out, multiply
from tilestream.ops.scales import FP8_DTYPES, check_scale_dtype
from tilestream.ops.sharding import is_dtensor
from tilestream.plan.api import check_publish
from tilestream.plan.grouped import check_schedule, check_source_schedule
from tilestream.runtime import shutdown

_OP = "grouped_mm"
_is_autocast_enabled = torch._C._is_any_autocast_enabled
#: What the offsets divide, by the dimensions of a and b: A's rows, B's columns, K; or there are no offsets.
_FORMS = {(2, 3): "rows", (3, 2): "columns", (2, 2): "k", (3, 3): "batches"}

_NO_DERIVATIVE = (
    "rows by source have no derivative: pack the rows and pass offsets=, or detach the operands (torch.no_grad)"
)


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor | Stream,
    offsets: torch.Tensor | None = None,
    *,
    counts: torch.Tensor | None = None,
    arrival: SourceArrival | None = None,
    publish: Arrival | None = None,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    use_fast_accum: bool = True,
    schedule: str = "auto",
    workers: int | None = None,
    deadline: float | None = None,
) -> torch.Tensor:
    """``activation(scale_a * scale_b * (a @ b) + bias)``, group by group, as ``torch.nn.functional.grouped_mm`` has it.

    ``offsets`` end the groups: group g goes from ``offsets[g - 1]`` (the first from 0) to ``offsets[g]``. On a GPU the
    kernel reads them, and no host does: a call does not wait for the device, and a captured call takes those of each
    replay. A group may be empty.

    ==============  ==============  ==================  ================================================================
    a               b               result              group g
    ==============  ==============  ==================  ================================================================
    ``[M, K]``      ``[G, K, N]``   ``[M, N]``          ``result[rows g] = a[rows g] @ b[g]``
    ``[G, M, K]``   ``[K, N]``      ``[M, N]``          ``result[:, columns g] = a[g] @ b[:, columns g]``
    ``[M, K]``      ``[K, N]``      ``[G, M, N]``       ``result[g] = a[:, k of g] @ b[k of g]``
    ``[G, M, K]``   ``[G, K, N]``   ``[G, M, N]``       ``a[g] @ b[g]``, without offsets
    ==============  ==============  ==================  ================================================================

    Rows (columns) behind the last group are not read in an operand, and are 0 in the result, whatever bias and
    activation are. (Torch leaves them undefined.)

    Rows may also lie by source, as several producers bring them: in places of equal numbers of rows, in each from its
    first row on, sorted by group. Then ``counts`` (or an ``arrival``, which has them) replace the offsets, and the
    result has the same places: ``result[p : p + c] = a[p : p + c] @ b[g]`` for ``c = counts[s, g]`` and ``p = s * (M /
    sources) + counts[s, :g].sum()``. Rows behind a source's last one are not written, so a new result has undefined
    values there.

    Parameters
    ----------
    a, b
        As above; dtypes as for `tilestream.matmul`, any strides. 16-bit operands are fastest if rows of ``a`` and
        columns of each matrix of ``b`` are contiguous, as those of tokens and of transposed ``[G, N, K]`` weights. If K
        is divided, they are fastest if columns of ``a`` and rows of ``b`` are contiguous. If rows are divided, ``b``
        may be a stream of `tilestream.stream_experts`: each group's product begins when its matrix is there.
    offsets
        int32 ``[G]`` on the operands' device: non-decreasing, from 0 to the extent that is divided. G is at most 1024
        on a GPU. Other offsets raise on the CPU. On a GPU they make the whole result NaN; no memory outside the
        operands is read or written.
    out
        As for `tilestream.matmul`.
    counts
        int32 ``[sources, G]``, contiguous, on the operands' device: the rows of each group of each source, all of them
        there. Counts that are negative, or come to more than a source's place, raise on the CPU; on a GPU the whole
        place of that source is NaN.
    arrival
        The `tilestream.SourceArrival` by which rows and counts arrive. Each group of a source is computed when both are
        there, whichever comes first. Beside it operands get no gradient, as beside ``counts``.
    publish
        An `Arrival` of the result, ``Arrival.uniform(M / sources, sources)``, beside ``counts``: each source is
        signalled when all its rows are complete. Its pivot is the source that is computed first.
    bias
        ``[G, N]``; where columns are divided ``[N]``.
    activation
        As for `tilestream.matmul`; or ``"swiglu"``, of groups of rows: ``silu(gate) * up`` in float32, where ``gate``
        is the first half of b's columns and ``up`` the second. So ``b`` is ``[G, K, 2 F]``, the transpose of the
        stacked ``[G, 2 F, K]`` weights of gate and up (w1 and w3) that vLLM and SGLang keep, and the result is
        ``[M, F]``. Bias and ``scale_b`` have ``2 F`` columns.
    out_dtype, use_fast_accum, workers
        As for `tilestream.matmul`. Sums are float32.
    scale_a, scale_b
        float32, for operands of any dtype. Default: 1. One element; or one a row of A and one a column of B: ``[M]``,
        or ``[G, M]`` if a has groups, and ``[N]``, or ``[G, N]`` if b has groups. If K is divided: ``[G, M]`` and
        ``[G, N]``.

        Operands of 8 bits whose rows (columns) are divided may also have scales of blocks, as in DeepSeek-V3. The
        divided operand has one a row and 128 of K: ``[M, K / 128]`` (``[K / 128, N]``). The other has one for 128 of K
        and 128 columns (rows): ``[G, K / 128, N / 128]`` (``[G, M / 128, K / 128]``). Quotients are rounded up. Each
        partial product over 128 of K is scaled in float32, and then added.

        Neither scales nor the operands that they scale get a gradient.
    schedule
        ``"static"``, ``"dynamic"`` or ``"auto"``: see `tilestream.grouped_plan`. Rows by source have no static one.
    deadline
        As for `tilestream.matmul`, of a stream or an ``arrival``.

    Returns
    -------
    torch.Tensor
        ``out``, or a new tensor.

    Raises
    ------
    ValueError, TypeError
        For arguments that do not fit, before anything is computed.
    RuntimeError
        If an operand of 8 bits, a scale or what it scales, or any operand of a call with ``out``, ``counts`` or
        ``arrival`` requires a gradient.
    NotImplementedError
        As from `tilestream.matmul`; and under `tilestream.invariant` for rows by source, and on GPUs for scales of
        blocks, and on those other than sm_90.
    ArrivalTimeout
        If a matrix of a stream, or the counts or rows of a source, did not come in time; what was not computed is NaN.
        On a GPU it is raised by the next call on that device, or by `tilestream.check`.

    Examples
    --------
    >>> tokens, experts = torch.ones(5, 3), torch.stack([torch.ones(3, 2), torch.zeros(3, 2)])
    >>> grouped_mm(tokens, experts, torch.tensor([2, 4], dtype=torch.int32))[:, 0]
    tensor([3., 3., 0., 0., 0.])
    """
    if counts is not None or arrival is not None or publish is not None:
        if isinstance(b, Stream):
            raise TypeError(
                f"{_OP}: b is a Stream, and a's rows lie by source; wait for it: stream.wait(), and pass stream.tensor"
            )
        r = Request(
            _OP, a, b, out=out, bias=bias, activation=None if activation in HALVES else activation,
            out_dtype=out_dtype, scale_a=scale_a, scale_b=scale_b, fast_accum=use_fast_accum, schedule=schedule,
            workers=workers,
        )  # fmt: skip
        return _by_source(r, offsets, activation, counts, arrival, publish, deadline)
    experts = None
    if isinstance(b, Stream):
        b, experts = _experts(b, offsets)
    if not is_compiling() and open_streams:
        of_b = None if experts is not None else b
        streamed.refuse(_OP, a=a, b=of_b, offsets=offsets, bias=bias, out=out, scale_a=scale_a, scale_b=scale_b)
    if experts is not None or deadline is not None:
        return _grouped(
            a, b, offsets, out, bias, activation, out_dtype, scale_a, scale_b, use_fast_accum, schedule, workers,
            experts, deadline,
        )  # fmt: skip
    if not is_compiling():
        if _is_autocast_enabled() and isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            a, b = checks.autocast(_OP, False, a, b)
            with checks.below_autocast():
                return grouped_mm(
                    a, b, offsets, out=out, bias=bias, activation=activation, out_dtype=out_dtype, scale_a=scale_a,
                    scale_b=scale_b, use_fast_accum=use_fast_accum, schedule=schedule, workers=workers,
                )  # fmt: skip
        call = (
            a, b, offsets, out, bias, activation, out_dtype, scale_a, scale_b, use_fast_accum, schedule, workers,
        )  # fmt: skip
        made = native.grouped(*call)
        return native.observed_grouped(call, lambda: _grouped(*call)) if made is None else made
    return _grouped(
        a, b, offsets, out, bias, activation, out_dtype, scale_a, scale_b, use_fast_accum, schedule, workers
    )


def _grouped(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor | None, out: torch.Tensor | None, bias: torch.Tensor | None,
    activation: str | None, out_dtype: torch.dtype | None, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None,
    use_fast_accum: bool, schedule: str, workers: int | None, arrival: Arrival | None = None,
    deadline: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """`grouped_mm`, checked, by the registered ops."""
    _check_activation(activation)
    r = Request(
        _OP, a, b, out=out, bias=bias, activation=None if activation in HALVES else activation, out_dtype=out_dtype,
        scale_a=scale_a, scale_b=scale_b, fast_accum=use_fast_accum, schedule=schedule, workers=workers,
        weight_arrival=arrival, deadline=deadline,
    )  # fmt: skip
    form = _check(r, offsets)
    if activation in HALVES:
        _check_halves(form, activation, r)
    if form == "batches":
        residual = None if bias is None else bias.unsqueeze(1)
        scale_a = None if scale_a is None or scale_a.dim() != 2 else scale_a.unsqueeze(2)
        scale_b = None if scale_b is None or scale_b.dim() != 2 else scale_b.unsqueeze(1)
        return multiply(r._replace(
            bias=None, residual=residual, scale_a=r.scale_a if scale_a is None else scale_a,
            scale_b=r.scale_b if scale_b is None else scale_b,
        ))  # fmt: skip
    assert offsets is not None
    x, y = checks.autocast(_OP, arrival is not None, a, b)
    checks.check_pair(_OP, x, y)
    groups = offsets.shape[0]
    rows, columns = a.shape[-2], b.shape[-1]
    shape = (groups, rows, columns) if form == "k" else (rows, columns // 2 if activation in HALVES else columns)
    wanted = (columns,) if form == "columns" else (groups, columns)
    if bias is not None and tuple(bias.shape) != wanted:
        what = "one element a column" if form == "columns" else "one row a group"
        raise ValueError(f"{_OP}: bias has shape {list(bias.shape)}; it has {what}: {list(wanted)}")
    if out is not None:
        check_out(r, out, shape, result_dtype(x, out_dtype))
        if tuple(out.shape) != shape:
            out.resize_(shape)
    if form != "k" and _are_blocks(form, x, y, scale_a, scale_b):
        if arrival is not None:
            raise NotImplementedError(f"{_OP}: b is a Stream, and scales are of blocks; wait for it: stream.wait()")
        per_row, per_column = scale_a, scale_b
    else:
        per_row = _scale("scale_a", scale_a, (groups, rows) if form != "rows" else (rows,), 1)
        per_column = _scale("scale_b", scale_b, (groups, columns) if form != "columns" else (columns,), 0)
    turned = form == "columns"
    if turned:  # the transposes: groups of rows
        x, y, per_row, per_column = y.t(), x.mT, _turned(per_column), _turned(per_row)
    how = (
        None if bias is None else bias.unsqueeze(1), activation or "none", out_dtype, schedule, workers or 0,
    )  # fmt: skip
    optional = (per_row, per_column, use_fast_accum, limit())
    offsets = offsets.contiguous()
    if is_compiling():
        return _call(r, x, y, offsets, turned, how, optional)
    try:
        with shutdown.call():
            return _call(r, x, y, offsets, turned, how, optional)
    except Overlap as error:
        raise Overlap(f"{_OP}: {error.what}", error.read) from None


def _check_activation(activation: str | None) -> None:
    if activation is not None and not is_one_of(activation, (*ACTIVATIONS, *HALVES)):
        known = ", ".join((*ACTIVATIONS, *HALVES))
        raise ValueError(f"{_OP}: activation={activation!r}; it must be None or one of {known}")


def _by_source(
    r: Request, offsets: torch.Tensor | None, activation: str | None, counts: torch.Tensor | None,
    arrival: SourceArrival | None, publish: Arrival | None, deadline: float | None,
) -> torch.Tensor:  # fmt: skip
    """`grouped_mm` of rows by source, checked, by the registered ops."""
    _check_activation(activation)
    counts = _check_sources(r, offsets, counts, arrival, publish, deadline)
    a, b = checks.autocast(_OP, arrival is not None, r.a, r.b)
    checks.check_pair(_OP, a, b)
    rows, columns, groups = a.shape[0], b.shape[2], counts.shape[1]
    form = _check_form(r._replace(a=a, b=b), groups)
    if activation in HALVES:
        _check_halves(form, activation, r)
    if r.bias is not None and tuple(r.bias.shape) != (groups, columns):
        raise ValueError(f"{_OP}: bias has shape {list(r.bias.shape)}; it has one row a group: {[groups, columns]}")
    shape = (rows, columns // 2 if activation in HALVES else columns)
    if r.out is not None:
        check_out(r, r.out, shape, result_dtype(a, r.out_dtype))
        if tuple(r.out.shape) != shape:
            r.out.resize_(shape)
    scales = r.scale_a, r.scale_b
    if not _are_blocks(form, a, b, *scales):
        scales = _scale("scale_a", r.scale_a, (rows,), 1), _scale("scale_b", r.scale_b, (groups, columns), 0)
    pivot = arrival.pivot if arrival is not None else publish.pivot if publish is not None else 0
    how = (
        None if r.bias is None else r.bias.unsqueeze(1), activation or "none", r.out_dtype, r.schedule, r.workers or 0,
        pivot, [] if arrival is None else FlatArrival.of(arrival).ints,
        None if arrival is None or arrival.signals is None else arrival.signals.view(-1),
        check_deadline(deadline), [] if publish is None else FlatArrival.of(publish).ints,
        None if publish is None else publish.signals,
    )  # fmt: skip
    optional = (*scales, r.fast_accum, limit())
    with contextlib.nullcontext() if is_compiling() else shutdown.call():
        if r.out is None:
            made: torch.Tensor = by_source_op(a, b, counts, *how, *optional)
            return made
        try:
            by_source_out_op(a, b, counts, *how, r.out, *optional)
        except Overlap as error:
            raise Overlap(f"{_OP}: {error.what}", error.read) from None
        return r.out


def _check_sources(
    r: Request, offsets: torch.Tensor | None, counts: torch.Tensor | None, arrival: SourceArrival | None,
    publish: Arrival | None, deadline: float | None,
) -> torch.Tensor:  # fmt: skip
    """The counts of rows by source; raise for arguments of which one excludes or needs another."""
    if arrival is not None and not isinstance(arrival, SourceArrival):
        raise TypeError(
            f"{_OP}: arrival is {kind_of(arrival)}; it must be a tilestream.SourceArrival, of rows by source. "
            "Experts that arrive are b: ts.stream_experts"
        )
    for name, other in (("counts", counts), ("offsets", offsets)):
        if other is not None and (arrival is not None or name == "offsets"):
            raise ValueError(
                f"{_OP}: {name} beside {'arrival' if arrival is not None else 'counts'}, which say where groups lie; "
                "leave one of them away"
            )
    if publish is not None:
        checks.check_waiting(_OP, None, None, publish=publish)
        check_publish(_OP, r.schedule, arrival is not None)
    if counts is None and arrival is None:
        raise ValueError(f"{_OP}: publish= without counts=; sources are published, and their counts say what they have")
    if deadline is not None:
        if arrival is None:
            raise ValueError(f"{_OP}: deadline={deadline} without arrival=; nothing is waited for")
        check_deadline(deadline)
    counts = arrival.counts if arrival is not None else counts
    assert counts is not None
    r.check()
    check_source_schedule(_OP, r.schedule)
    for name, tensor in (("a", r.a), ("b", r.b), ("out", r.out), ("counts", counts)):
        if is_dtensor(tensor):
            raise TypeError(f"{_OP}: {name} is a DTensor; sources bring one rank's rows: pass {name}.to_local()")
    sources, _ = check_counts(_OP, counts)
    tensors = {
        "a": r.a, "b": r.b, "counts": counts, "bias": r.bias, "out": r.out, "scale_a": r.scale_a, "scale_b": r.scale_b,
    }  # fmt: skip
    checks.check_dense(
        _OP, "torch.nn.functional.grouped_mm", tensors, 3, _check_dtype, "dense tensors are multiplied: "
        "{name}.to_dense()",
    )  # fmt: skip
    if (r.a.dim(), r.b.dim()) != (2, 3):
        raise ValueError(
            f"{_OP}: a {list(r.a.shape)} and b {list(r.b.shape)}; with rows by source they are [M, K] and [G, K, N]"
        )
    rows = r.a.shape[0]
    if arrival is not None and rows != sources * arrival.capacity:
        raise ValueError(
            f"{_OP}: a has {rows} rows; {sources} sources have places of {arrival.capacity}: "
            f"{sources * arrival.capacity} rows"
        )
    if rows % sources:
        raise ValueError(f"{_OP}: a has {rows} rows, which are no equal places of {sources} sources (counts' rows)")
    if publish is not None and (publish.num_chunks, publish.rows_per_chunk) != (sources, rows // sources):
        raise ValueError(
            f"{_OP}: publish is {publish}; each source is a chunk: Arrival.uniform({rows // sources}, {sources})"
        )
    checks.refuse_tangents(_OP, r.a, r.b, r.bias, r.scale_a, r.scale_b, r.out, why=_NO_DERIVATIVE)
    if r.needs_gradient(r.scale_a, r.scale_b, r.out):
        raise RuntimeError(f"{_OP}: an operand requires a gradient; {_NO_DERIVATIVE}")
    return counts


def _check_form(r: Request, groups: int) -> str:
    """Raise unless A's columns and B's matrices fit; which of `_FORMS` it is."""
    if r.a.shape[1] != r.b.shape[1]:
        raise ValueError(
            f"{_OP}: a {list(r.a.shape)} and b {list(r.b.shape)} differ in K: {r.a.shape[1]} and {r.b.shape[1]}"
        )
    if r.b.shape[0] != groups:
        raise ValueError(f"{_OP}: counts have {groups} groups, b {r.b.shape[0]}")
    return "rows"


def _call(
    r: Request, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, turned: bool, how: tuple[object, ...],
    optional: tuple[object, ...],
) -> torch.Tensor:  # fmt: skip
    """Call the registered op; ``turned``: its result is the transpose of the caller's."""
    if r.weight_arrival is not None:
        late = FlatArrival.of(r.weight_arrival).ints, check_deadline(r.deadline)
        if r.out is not None:
            grouped_arriving_out_op(a, b, offsets, *how, *late, r.out, *optional)
            return r.out
        made: torch.Tensor = grouped_arriving_op(a, b, offsets, *how, False, *late, *optional)
        return made
    if r.out is not None:
        grouped_out_op(a, b, offsets, *how, r.out.t() if turned else r.out, *optional)
        return r.out
    result: torch.Tensor = grouped_op(a, b, offsets, *how, turned, *optional)
    if not turned:
        return result
    with made_fresh():
        return result.t()


def _experts(stream: Stream, offsets: torch.Tensor | None) -> tuple[torch.Tensor, Arrival]:
    """A stream's tensor and its arrival; raise for one whose chunks are no groups' matrices, or not these groups'."""
    if not stream.of_experts:
        raise TypeError(
            f"{_OP}: b is a Stream of {stream.arrival.num_chunks} chunks of rows; one whose chunks are the groups' "
            "matrices is made by ts.stream_experts. Or wait for it: stream.wait()"
        )
    stream.check_brings(_OP, offsets)
    return stream.tensor, stream.arrival


def _turned(scale: torch.Tensor | None) -> torch.Tensor | None:
    return scale if scale is None or scale.numel() == 1 else scale.mT


def _scale(name: str, scale: torch.Tensor | None, shape: tuple[int, ...], missing: int) -> torch.Tensor | None:
    """Scales ``shape`` (``[extent]``, or ``[G, extent]``), with the dimension of 1 along which they are constant.

    ``missing``: how many dimensions from the last that one is.
    """
    if scale is None or scale.numel() == 1:
        return scale
    canonical = (*shape, 1) if missing == 1 else (*shape[:-1], 1, shape[-1])
    if tuple(scale.shape) not in (shape, canonical):
        raise ValueError(
            f"{_OP}: {name} has shape {list(scale.shape)}; it has one element, or {list(shape)}, or {list(canonical)}"
        )
    return scale.reshape(canonical)


def _are_blocks(
    form: str, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None
) -> bool:  # fmt: skip
    """Whether scales are of blocks; raise where one of them is, and they cannot be."""
    (rows, k), columns = a.shape[-2:], b.shape[-1]
    if form == "rows":
        of_groups, per_group = scale_b, (1, columns)
        wanted = (rows, *blocks_of(k)), (b.shape[0], *blocks_of(k, columns))
        theirs = wanted[1]
    else:
        of_groups, per_group = scale_a, (rows, 1)
        wanted = (a.shape[0], *blocks_of(rows, k)), (*blocks_of(k), columns)
        theirs = wanted[0]
    if of_groups is None or of_groups.numel() == 1 or tuple(of_groups.shape) != theirs or theirs[1:] == per_group:
        return False
    for name, scale, shape in (("scale_a", scale_a, wanted[0]), ("scale_b", scale_b, wanted[1])):
        if scale is None or tuple(scale.shape) != shape:
            given = None if scale is None else list(scale.shape)
            raise ValueError(f"{_OP}: {name} of shape {given} beside a scale of blocks; of blocks it has {list(shape)}")
    if a.dtype not in FP8_DTYPES:
        raise TypeError(f"{_OP}: scales of blocks, and a is {a.dtype}; they are of operands of 8 bits")
    return True


def _check_halves(form: str, activation: str | None, r: Request) -> None:
    """Raise where an activation of two halves is of what has none."""
    said = f"{_OP}: activation={activation!r} with a {list(r.a.shape)} and b {list(r.b.shape)}"
    if form != "rows":
        raise ValueError(f"{said}; it is of groups of rows: a [M, K], b [G, K, 2 F] and offsets")
    if r.b.shape[2] % 2:
        raise ValueError(f"{said}; half of b's columns are gates: it has an even number")


def _check(r: Request, offsets: torch.Tensor | None) -> str:
    """Which of `_FORMS` a call has; raise for what does not fit whatever its scales and output are."""
    r.check()
    a, b = r.a, r.b
    for name, tensor in (("a", a), ("b", b), ("out", r.out)):
        if is_dtensor(tensor):
            raise TypeError(f"{_OP}: {name} is a DTensor; groups are rows of one rank's tensor: pass {name}.to_local()")
    tensors = {"a": a, "b": b, "bias": r.bias, "out": r.out, "scale_a": r.scale_a, "scale_b": r.scale_b}
    if offsets is not None:
        tensors["offsets"] = offsets
    checks.check_dense(
        _OP, "torch.nn.functional.grouped_mm", tensors, 2, _check_dtype, "dense tensors are multiplied: "
        "{name}.to_dense()",
    )  # fmt: skip
    form = _FORMS.get((a.dim(), b.dim()))
    if r.weight_arrival is not None and form != "rows":
        raise ValueError(f"{_OP}: b is a Stream, and a has shape {list(a.shape)}; groups of rows arrive: [M, K]")
    if form is None:
        raise ValueError(f"{_OP}: a has {a.dim()} and b {b.dim()} dimensions; each has 2 or 3")
    checks.refuse_tangents(_OP, r.scale_a, r.scale_b, *(() if r.out is None else (a, b, r.bias, r.out)))
    if torch.is_grad_enabled():
        checks.refuse_gradients(_OP, a=a, b=b, scale_a=r.scale_a, scale_b=r.scale_b)
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"{_OP}: a {list(a.shape)} and b {list(b.shape)} differ in K: {a.shape[-1]} and {b.shape[-2]}")
    if form == "batches":
        if offsets is not None:
            raise ValueError(f"{_OP}: offsets with a and b of 3 dimensions, whose groups are all of one size: None")
        if a.shape[0] != b.shape[0]:
            raise ValueError(f"{_OP}: a has {a.shape[0]} groups, b has {b.shape[0]}")
        if r.bias is not None and tuple(r.bias.shape) != (b.shape[0], b.shape[2]):
            raise ValueError(
                f"{_OP}: bias has shape {list(r.bias.shape)}; it has one row a group: {[b.shape[0], b.shape[2]]}"
            )
        return form
    check_schedule(_OP, r.schedule)
    if offsets is None:
        raise ValueError(f"{_OP}: offsets=None with a {list(a.shape)} and b {list(b.shape)}; they say where groups end")
    if offsets.dim() != 1:
        raise ValueError(f"{_OP}: offsets has shape {list(offsets.shape)}; it has one element a group")
    groups = {"rows": b, "columns": a}.get(form)
    if groups is not None and groups.shape[0] != offsets.shape[0]:
        raise ValueError(
            f"{_OP}: offsets has {offsets.shape[0]} elements, {'b' if groups is b else 'a'} {groups.shape[0]} groups"
        )
    return form


def _check_dtype(op: str, name: str, tensor: torch.Tensor) -> None:
    if name in ("offsets", "counts"):
        if tensor.dtype != torch.int32:
            raise TypeError(f"{op}: {name} is {tensor.dtype}; it must be torch.int32: {name}.int()")
    elif name in ("scale_a", "scale_b"):
        check_scale_dtype(op, name, tensor)
    else:
        try:
            dtype_name(tensor.dtype)
        except TypeError as error:
            raise TypeError(f"{op}: {name}: {error}") from None
        if tensor.dtype in FP8_DTYPES and name not in ("a", "b"):
            raise TypeError(f"{op}: {name} is {tensor.dtype}; of 8 bits are operands only: {name}.to(torch.bfloat16)")
