"""Launching the portable attention: what a plan and a layout decide is worked out once, a call gives the addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilestream.arrival.flat import Awaited
from tilestream.core.error_record import op_number
from tilestream.core.integers import cdiv
from tilestream.core.operands import Operands
from tilestream.core.schedule import Schedule
from tilestream.kernels.device.jit import INTERPRETED
from tilestream.kernels.device.varlen import PLACED, list_sequences
from tilestream.kernels.portable.attention import attention
from tilestream.kernels.portable.attention_merge import merge_shares
from tilestream.launch.attention_arguments import NO_KEY_GATE, AttentionLayout, KeyGate
from tilestream.launch.launch import LONGEST_SECONDS, Table, address, with_words
from tilestream.launch.portable.attention_arguments import AttentionArguments, padded
from tilestream.launch.portable.launch import direct
from tilestream.launch.trace import SpanLog
from tilestream.plan.attention_plan import AttentionPlan
from tilestream.runtime.channel import channel
from tilestream.runtime.device_workspace import Words

#: Shares that a program which joins them reads at a time, and its warps.
TOGETHER, MERGE_WARPS = 16, 4


class ListLaunch:
    """Makes the list of packed sequences that a plan's tiles are found in: see `attention_list`.

    Attributes
    ----------
    listed
        Elements of either half of it; 0 where queries are not packed.
    """

    def __init__(self, plan: AttentionPlan) -> None:
        p = plan.problem
        self.listed = p.batch + 2 if p.varlen else 0
        self._grid = (cdiv(p.batch + 1, PLACED.value), 1, 1)
        packs = max(1, p.heads_q // plan.pack) * plan.shares
        self._numbers = (p.batch + 1, p.tokens_q, p.tokens_k, p.seqlen_k, packs, plan.positions)
        self._compiled: Callable[[int, tuple[Any, ...]], None] | None = None

    def __call__(self, stream: int, x: Operands, words: Words) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """``(starts, order)``, which a launch on ``stream`` will find made; None where there is no list."""
        if words.listed is None:
            return None, None
        lists = (x.cu_seqlens_q, x.cu_seqlens_k, x.seqlens_k, *words.listed)
        if self._compiled is not None:
            self._compiled(stream, (*map(address, lists), *self._numbers))
        else:
            kernel = list_sequences[self._grid](*lists, *self._numbers)
            self._compiled = None if INTERPRETED else direct(kernel, self._grid)
        return words.listed


class MergeLaunch:
    """Adds up what the shares of a plan give.

    Attributes
    ----------
    floats
        Elements of scratch: outputs, then log-sum-exps; 0 where keys are not split.
    """

    def __init__(self, plan: AttentionPlan, layout: AttentionLayout) -> None:
        p = plan.problem
        self._rows = p.rows * p.heads_q
        self._sums_at = plan.shares * self._rows * p.head_dim_v
        self.floats = self._sums_at + plan.shares * self._rows if plan.shares > 1 else 0
        self._grid = (max(1, self._rows), 1, 1)
        lse = layout.lse or (0, 0, 0)
        positions = p.tokens_q if p.varlen else p.seqlen_q
        self._numbers = (plan.shares, self._rows, positions, p.heads_q, *layout.out, *lse)
        self._constants = (p.head_dim_v, padded(p.head_dim_v), TOGETHER)
        self._compiled: Callable[[int, tuple[Any, ...]], None] | None = None

    def scratch(self, partials: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where shares put their outputs and log-sum-exps, of a launch's partials."""
        return partials, partials[self._sums_at :]

    def load(self, shares: tuple[torch.Tensor, torch.Tensor], x: Operands) -> None:
        """Have the kernel on the device, for operands as a call gives them.

        Loading code may wait for all that the device is doing: behind a launch that waits for keys, and those for the
        host, it would last until that launch's deadline.
        """
        if self._compiled is None and not INTERPRETED:
            kernel = merge_shares.warmup(*self._filled(shares, x), grid=self._grid, num_warps=MERGE_WARPS)
            self._compiled = direct(kernel, self._grid)

    def __call__(self, stream: int, shares: tuple[torch.Tensor, torch.Tensor], x: Operands) -> None:
        """Issue it on ``stream``, behind the launch that fills ``shares``."""
        self.load(shares, x)
        filled = self._filled(shares, x)
        if self._compiled is not None:
            self._compiled(stream, tuple(map(address, filled)))
        else:  # in the interpreter
            merge_shares[self._grid](*filled, num_warps=MERGE_WARPS)

    def _filled(self, shares: tuple[torch.Tensor, torch.Tensor], x: Operands) -> tuple[Any, ...]:
        return (*shares, x.out, x.lse, x.sinks, *self._numbers, *self._constants)


class KeyGateLaunch:
    """What the launches of a plan are told of keys that arrive."""

    def __init__(self, plan: AttentionPlan) -> None:
        keys = plan.problem.keys
        ragged = keys is not None and not keys.chunks.rows_per_chunk
        self._bounds = Table(keys.chunks.bounds if keys is not None and ragged else None)

    def __call__(self, device: torch.device, incoming: Awaited | None) -> KeyGate:
        """For a launch on the current stream of ``device``."""
        if incoming is None:
            return NO_KEY_GATE
        words = incoming.rows.use()
        report = channel(device)
        return KeyGate(
            words.words, words.quarantine, self._bounds.on(device), report.records, report.claims, words.epoch,
            words.key, int(1e9 * min(incoming.deadline, LONGEST_SECONDS)), op_number(incoming.op),
        )  # fmt: skip


def given_to(
    x: Operands, listed: tuple[torch.Tensor | None, torch.Tensor | None], counters: torch.Tensor | None,
    log: SpanLog | None,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """What a kernel is given, in the order of `tilestream.launch.attention_arguments.GIVEN`, up to ``log``."""
    return (
        x.q, x.k, x.v, x.out, x.lse, x.sinks, x.scale_q, x.scale_k, x.scale_v, x.cu_seqlens_q, x.cu_seqlens_k,
        x.seqlens_k, x.block_table, *listed, counters, None if log is None else log.words,
    )  # fmt: skip


class TracedLaunch:
    """What the attention launches that may be traced have in common: words, and a call."""

    plan: AttentionPlan
    _schedule: Schedule | None
    _list: ListLaunch
    #: Elements of scratch that a launch asks for.
    _floats = 0

    def __call__(self, operands: Operands, incoming: Awaited | None = None, log: SpanLog | None = None) -> None:
        """Issue the launch on the current stream of the current device, which is the operands'.

        Parameters
        ----------
        incoming
            How keys arrive, if and only if the plan is for such.
        log
            Room for a trace: another kernel is launched then.
        """

        def issue(stream: int, words: Words) -> None:
            self._issue(stream, operands, words, incoming, log)

        with_words(operands.q.device, self._schedule, self.plan.block, issue, self._list.listed, self._floats)

    def _issue(self, stream: int, x: Operands, words: Words, incoming: Awaited | None, log: SpanLog | None) -> None:
        raise NotImplementedError


class AttentionLaunch(TracedLaunch):
    """The portable attention for one plan, one layout of the operands and one alignment of their addresses.

    Holds no operand: a call is given all of them.
    """

    def __init__(self, plan: AttentionPlan, layout: AttentionLayout) -> None:
        self.plan = plan
        self._made = AttentionArguments(plan, layout)
        self._packs = {False: self._made.pack(attention), True: AttentionArguments(plan, layout, True).pack(attention)}
        self._grid = (plan.schedule.workers, 1, 1)
        self._gate = KeyGateLaunch(plan)
        self._list = ListLaunch(plan)
        wordless = plan.schedule.kind == "static" and plan.problem.keys is None and not plan.problem.varlen
        self._schedule = None if wordless else plan.schedule
        self._compiled: dict[bool, Callable[[int, tuple[Any, ...]], None]] = {}

    def _issue(self, stream: int, x: Operands, words: Words, incoming: Awaited | None, log: SpanLog | None) -> None:
        pack = self._packs[log is not None]
        gate = self._gate(x.q.device, incoming)
        given = given_to(x, self._list(stream, x, words), words.counters, log)
        numbers = words.base, words.reset, *self._made.scales(x.scale)
        compiled = self._compiled.get(log is not None)
        if compiled is not None:
            # Addresses and no tensors: the launcher asks the driver about each tensor.
            gate = gate if gate is NO_KEY_GATE else KeyGate(*map(address, gate))
            compiled(stream, pack((*map(address, given), *numbers), gate))
            return
        kernel = attention[self._grid](*pack((*given, *numbers), gate), **self._made.options)
        if not INTERPRETED:
            self._compiled[log is not None] = direct(kernel, self._grid)
