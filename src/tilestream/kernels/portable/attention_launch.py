"""Launching the portable attention: what a plan and a layout decide is worked out once, a call gives the addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tilestream.kernels.attention import Operands
from tilestream.kernels.launch import Signals, Table, address, with_words
from tilestream.kernels.portable.attention import attention
from tilestream.kernels.portable.attention_arguments import (
    NO_KEY_GATE,
    AttentionArguments,
    AttentionLayout,
    KeyGate,
    list_programs,
)
from tilestream.kernels.portable.attention_list import PLACED, list_sequences
from tilestream.kernels.portable.jit import INTERPRETED
from tilestream.kernels.portable.launch import LONGEST_SECONDS, direct
from tilestream.plan.attention_plan import AttentionPlan
from tilestream.runtime.channel import channel
from tilestream.runtime.device_workspace import Words
from tilestream.runtime.record import op_number


class IncomingKeys(NamedTuple):
    """How the keys and values of a call arrive.

    Attributes
    ----------
    signals
        Of their chunks.
    deadline
        Seconds from the start of each worker.
    op
        For messages.
    """

    signals: Signals
    deadline: float
    op: str = "attention"


class AttentionLaunch:
    """The portable attention for one plan, one layout of the operands and one alignment of their addresses.

    Holds no operand: a call is given all of them.
    """

    def __init__(self, plan: AttentionPlan, layout: AttentionLayout) -> None:
        self.plan = plan
        self._arguments = AttentionArguments(plan, layout)
        self._grid = (plan.schedule.workers, 1, 1)
        keys = plan.problem.keys
        ragged = keys is not None and not keys.chunks.rows_per_chunk
        self._bounds = Table(keys.chunks.bounds if keys is not None and ragged else None)
        self._list_grid = (list_programs(plan, PLACED.value), 1, 1)
        wordless = plan.schedule.kind == "static" and keys is None and not plan.problem.varlen
        self._schedule = None if wordless else plan.schedule
        self._compiled: Callable[[int, tuple[Any, ...]], None] | None = None
        self._compiled_list: Callable[[int, tuple[Any, ...]], None] | None = None

    def __call__(self, operands: Operands, incoming: IncomingKeys | None = None) -> None:
        """Issue the launch on the current stream of the current device, which is the operands'."""

        def issue(stream: int, words: Words) -> None:
            self._issue(stream, operands, words, incoming)

        with_words(operands.q.device, self._schedule, self.plan.block, issue, self._arguments.listed)

    def _issue(self, stream: int, x: Operands, words: Words, incoming: IncomingKeys | None) -> None:
        starts = order = None
        if words.listed is not None:
            starts, order = words.listed
            self._list(stream, (x.cu_seqlens_q, x.cu_seqlens_k, x.seqlens_k, starts, order))
        gate = NO_KEY_GATE if incoming is None else self._gate(x.q.device, incoming)
        operands = (
            x.q, x.k, x.v, x.out, x.lse, x.sinks, x.scale_q, x.scale_k, x.scale_v, x.cu_seqlens_q, x.cu_seqlens_k,
            x.block_table, x.seqlens_k, starts, order, words.counters,
        )  # fmt: skip
        if self._compiled is not None:
            # Addresses and no tensors: the launcher asks the driver about each tensor.
            gate = gate if gate is NO_KEY_GATE else KeyGate(*map(address, gate))
            self._compiled(
                stream, self._arguments.fill(*map(address, operands), words.base, words.reset, x.scale, gate=gate)
            )
            return
        filled = self._arguments.fill(*operands, words.base, words.reset, x.scale, gate=gate)
        kernel = attention[self._grid](*filled, **self._arguments.options)
        self._compiled = None if INTERPRETED else direct(kernel, self._grid)

    def _list(self, stream: int, lists: tuple[torch.Tensor | None, ...]) -> None:
        if self._compiled_list is not None:
            self._compiled_list(stream, self._arguments.fill_list(*map(address, lists)))
            return
        kernel = list_sequences[self._list_grid](*self._arguments.fill_list(*lists))
        self._compiled_list = None if INTERPRETED else direct(kernel, self._list_grid)

    def _gate(self, device: torch.device, incoming: IncomingKeys) -> KeyGate:
        words = incoming.signals.use()
        report = channel(device)
        return KeyGate(
            words.words, words.quarantine, self._bounds.on(device), report.records, report.claims, words.epoch,
            words.key, int(1e9 * min(incoming.deadline, LONGEST_SECONDS)), op_number(incoming.op),
        )  # fmt: skip
