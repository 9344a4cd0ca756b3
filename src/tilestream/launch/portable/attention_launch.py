"""Launches the portable attention. A plan and a layout decide most arguments once; a call gives the addresses."""

from __future__ import annotations

from typing import Any

import torch

from tilestream.arrival.flat import Awaited
from tilestream.core.integers import cdiv
from tilestream.core.operands import AttentionOperands, MergeOperands
from tilestream.kernels.device.varlen import PLACED, list_sequences
from tilestream.kernels.portable.attention_merge import merge_pair, merge_shares, merge_shares_of_rows
from tilestream.launch.attention_arguments import NO_KEY_GATE, AttentionLayout, KeyGate
from tilestream.launch.gate import bounds_of
from tilestream.launch.launch import Kernel, Launch, Probe, Table, records_of
from tilestream.launch.portable.attention_arguments import (
    PAIR_WARPS,
    ROWS_WARPS,
    AttentionArguments,
    merge_shape,
    merged_rows,
    padded,
    pair_arguments,
)
from tilestream.launch.trace import SpanLog
from tilestream.plan.attention_plan import AttentionPlan
from tilestream.runtime.device_workspace import Words


class ListLaunch:
    """Makes the list of packed sequences of a plan: see `tilestream.kernels.device.varlen`.

    Attributes
    ----------
    listed
        Elements of each half of the list; 0 if queries are not packed.
    """

    def __init__(self, plan: AttentionPlan) -> None:
        p = plan.problem
        self.listed = p.batch + 2 if p.varlen else 0
        packs = max(1, p.heads_q // plan.pack) * plan.shares
        self._numbers = (p.batch + 1, p.tokens_q, p.tokens_k, p.seqlen_k, packs, plan.positions)
        self._kernel = Kernel(list_sequences, (cdiv(p.batch + 1, PLACED.value), 1, 1))

    def __call__(self, stream: int, x: AttentionOperands, words: Words) -> tuple[torch.Tensor, torch.Tensor] | None:
        """``(starts, order)``, which later launches on ``stream`` can read; None without a list."""
        if words.listed is None:
            return None
        self._kernel(stream, self._filled(x, words))
        return words.listed

    def compile(self, x: AttentionOperands, words: Words) -> None:
        """Have the kernel compiled, for operands as a call gives them."""
        if words.listed is not None:
            self._kernel.compile(self._filled(x, words))

    def _filled(self, x: AttentionOperands, words: Words) -> tuple[Any, ...]:
        lists = x.cu_seqlens_q, x.cu_seqlens_k, x.seqlens_k, *(words.listed or ())
        return (*self._kernel.take(lists), *self._numbers)


class MergeLaunch:
    """Joins the shares of a plan with split keys.

    Attributes
    ----------
    floats
        Elements of scratch: outputs, then log-sum-exps; 0 if keys are not split.
    """

    def __init__(self, plan: AttentionPlan, layout: AttentionLayout) -> None:
        p = plan.problem
        self._rows = p.rows * p.heads_q
        self._sums_at = plan.shares * self._rows * p.head_dim_v
        self.floats = self._sums_at + plan.shares * self._rows if plan.shares > 1 else 0
        lse = layout.lse or (0, 0, 0)
        positions = p.tokens_q if p.varlen else p.seqlen_q
        self._numbers = (plan.shares, self._rows, positions, p.heads_q, *layout.out, *lse)
        columns = padded(p.head_dim_v)
        rows = merged_rows(self._rows, plan.shares, columns)
        together, warps = merge_shape(plan.shares, columns)
        kernel, together, warps = (
            (merge_shares, together, warps) if rows == 1 else (merge_shares_of_rows, rows, ROWS_WARPS)
        )
        self._constants = (p.head_dim_v, columns, together)
        self._kernel = Kernel(kernel, (max(1, cdiv(self._rows, rows)), 1, 1), {"num_warps": warps})

    def scratch(self, partials: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The parts of a launch's partials for the shares' outputs and for their log-sum-exps."""
        return partials, partials[self._sums_at :]

    def compile(self, shares: tuple[torch.Tensor, torch.Tensor], x: AttentionOperands) -> None:
        """Have the kernel compiled, for operands as a call gives them."""
        self._kernel.compile(self._filled(shares, x))

    def load(self, shares: tuple[torch.Tensor, torch.Tensor], x: AttentionOperands) -> None:
        """Load the kernel on the device, for a call's operands.

        Loading code may wait for all work of the device. After a launch that waits for keys which the host must send,
        it would last until that launch's deadline.
        """
        self._kernel.load(self._filled(shares, x))

    def __call__(self, stream: int, shares: tuple[torch.Tensor, torch.Tensor], x: AttentionOperands) -> None:
        """Launch on ``stream``, after the launch that fills ``shares``."""
        self.load(shares, x)
        self._kernel(stream, self._filled(shares, x))

    def _filled(self, shares: tuple[torch.Tensor, torch.Tensor], x: AttentionOperands) -> tuple[Any, ...]:
        return (*self._kernel.take((*shares, x.out, x.lse, x.sinks)), *self._numbers, *self._constants)


class PairLaunch(Launch):
    """Joins two attentions of one layout, with three or four dimensions, not empty, whose last stride is 1."""

    def __init__(self, x: MergeOperands) -> None:
        super().__init__(None, counts=False)
        extents = (1, *x.lse.shape)[-3:]

        def strides(tensor: torch.Tensor) -> tuple[int, ...]:
            """Strides of the rows; 0 for an extent of 1, whose stride is free."""
            pairs = zip(x.lse.shape, tensor.stride(), strict=False)
            return (0, *(0 if extent == 1 else stride for extent, stride in pairs))[-3:]

        outputs, sums = map(strides, (x.o_a, x.o_b, x.out)), map(strides, (x.lse_a, x.lse_b, x.lse))
        grid, self._numbers = pair_arguments(extents, x.out.shape[-1], [*outputs], [*sums])
        self._kernel = Kernel(merge_pair, grid, {"num_warps": PAIR_WARPS})

    def issue(self, stream: int, x: MergeOperands, *_: Any) -> None:
        """See `Launch.issue`."""
        self._kernel(stream, (*self._kernel.take(x), *self._numbers))


class KeyGateLaunch:
    """The arguments of a plan's launches for keys that arrive."""

    def __init__(self, plan: AttentionPlan) -> None:
        keys = plan.problem.keys
        ragged = keys is not None and not keys.chunks.rows_per_chunk
        self._bounds = Table(keys.chunks.bounds if keys is not None and ragged else None)

    def __call__(self, device: torch.device, awaited: Awaited | None) -> KeyGate:
        """The arguments of a launch on the current stream of ``device``."""
        if awaited is None:
            return NO_KEY_GATE
        words = awaited.rows.use()
        return KeyGate(
            words.words, words.quarantine, self._bounds.on(device), *records_of(device), words.epoch, words.key,
            *bounds_of(awaited.deadline, awaited.op),
        )  # fmt: skip


def given_to(
    x: AttentionOperands, listed: tuple[torch.Tensor, torch.Tensor] | None, counters: torch.Tensor | None,
    probe: Probe | SpanLog | None,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """A kernel's arguments, in the order of `tilestream.launch.attention_arguments.GIVEN`, up to ``log``."""
    return (
        x.q, x.k, x.v, x.out, x.lse, x.sinks, x.scale_q, x.scale_k, x.scale_v, x.cu_seqlens_q, x.cu_seqlens_k,
        x.seqlens_k, x.block_table, *(listed or (None, None)), counters, None if probe is None else probe.words,
    )  # fmt: skip


class AttentionLaunch(Launch):
    """The portable attention for one plan, one layout of the operands and one alignment of their addresses."""

    def __init__(self, plan: AttentionPlan, layout: AttentionLayout) -> None:
        # The other backends use the lists and shares of this module, but not its kernel.
        from tilestream.kernels.portable.attention import attention

        made = {traced: AttentionArguments(plan, layout, traced) for traced in (False, True)}
        self._arguments = made[False]
        self._packs = {traced: one.pack(attention) for traced, one in made.items()}
        self._gate, self._list = KeyGateLaunch(plan), ListLaunch(plan)
        counts = plan.schedule.kind != "static" or plan.problem.keys is not None or plan.problem.varlen
        super().__init__(plan, counts, self._list.listed)
        grid = (plan.schedule.workers, 1, 1)
        self._kernels = {traced: Kernel(attention, grid, one.options) for traced, one in made.items()}

    def issue(
        self, stream: int, x: AttentionOperands, words: Words, awaited: Awaited | None, probe: Probe | SpanLog | None
    ) -> None:
        """See `Launch.issue`."""
        kernel, pack = self._kernels[probe is not None], self._packs[probe is not None]
        given = given_to(x, self._list(stream, x, words), words.counters, probe)
        gate = self._gate(x.q.device, awaited)
        gate = gate if gate is NO_KEY_GATE else KeyGate._make(kernel.take(gate))
        numbers = words.base, words.reset, *self._arguments.scales(x.scale)
        kernel(stream, pack((*kernel.take(given), *numbers), gate))
