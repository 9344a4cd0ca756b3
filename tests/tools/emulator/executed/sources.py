"""The portable grouped GEMM by source at a small size, executed on the emulator: see `executed.problems`."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np
import torch
from gates.engine import DEVICES

from error_rule import Maths, check
from executed.problems import BASE, EPOCH, KEY, LINE, OP, Built, Operands, answer, bits
from tilestream.core.error_record import EXPIRED, FIELDS, RECORDS
from tilestream.core.sources import counts_word, rows_word
from tilestream.kernels.portable.grouped_sources import grouped_gemm_by_source
from tilestream.launch.gate import NO_GATE, NO_PUBLISH, PublishArguments
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.grouped_arguments import Bias
from tilestream.launch.portable.sources import SourcesArguments
from tilestream.plan.grouped import plan_groups
from tilestream.plan.plan import Plan
from tilestream.plan.problem import GroupedProblem
from tilestream_tools.emulator import Machine

#: Rows of each group of each source; of a source's place; the extents of a matrix of B.
COUNTS = ((70, 0, 20), (5, 30, 0), (0, 0, 0))
_ROWS, _K, _N = 96, 136, 72
_SOURCES, _GROUPS = len(COUNTS), len(COUNTS[0])
#: What the output holds at first.
_UNTOUCHED = 7.0


@dataclass
class BySource:
    """A product for each group of each source.

    Attributes
    ----------
    arrives
        Whether counts and rows arrive, in an order that is no source's; else each source's result is signalled.
    lost
        ``(source, group)`` whose rows never come; group -1: the source's counts.
    captured
        Whether the launch owns its words, and restores them.
    """

    arch: str
    arrives: bool = False
    lost: tuple[int, int] | None = None
    captured: bool = False
    dies: int = 1
    built: Built | None = field(default=None, init=False)

    @functools.cached_property
    def plan(self) -> Plan:
        problem = GroupedProblem(
            _SOURCES * _ROWS, _N, _K, 1, "bfloat16", "bfloat16", groups=_GROUPS, plain=True, arrives=self.arrives,
            sources=_SOURCES, likely=_ROWS, pivot=1,
        )  # fmt: skip
        return plan_groups.__wrapped__(problem, 4, "auto", (64, 64), device=DEVICES[self.arch], backend="portable")

    @functools.cached_property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(29)
        a, b = (torch.randn(shape, generator=generator) for shape in ((_SOURCES * _ROWS, _K), (_GROUPS, _N, _K)))
        return a.bfloat16(), b.bfloat16()

    def run(self, **how: object) -> Machine:
        """Execute it, and check what comes out.

        Raises
        ------
        AssertionError, Fault
        """
        plan, (a, b), o = self.plan, self.operands, Operands()
        layout = Layout((0, _K, 1), (_N * _K, 1, _K), (0, _N, 1))
        arguments = SourcesArguments(plan, layout, Bias(), publishes=not self.arrives)
        base = 0 if self.captured else BASE
        left = torch.arange((plan.schedule.queues + 2) * LINE + _SOURCES * (_GROUPS + 1)) * 37 % (base + 1)
        counters, like = o.of(left, "the counters"), torch.full((_SOURCES * _ROWS, _N), _UNTOUCHED).bfloat16()
        counts = torch.tensor(COUNTS, dtype=torch.int32)
        x = o.of(torch.full_like(a, float("nan")) if self.arrives else a, "A")
        known = o.of(torch.full_like(counts, -1) if self.arrives else counts, "the counts", 4)
        out = o.of(like, "the output")
        gate, publish, host = NO_GATE, NO_PUBLISH, None
        if self.arrives:
            gate = NO_GATE._replace(
                row_signals=o.zeros(torch.int32, _SOURCES * (_GROUPS + 1), "signals"),
                row_quarantine=o.zeros(torch.int32, 1, "the quarantine"),
                records=o.zeros(torch.int64, FIELDS * RECORDS, "records"),
                claims=o.zeros(torch.int64, 2 * LINE, "claims"), row_epoch=0 if self.captured else EPOCH, row_key=KEY,
                allowed=400_000 if self.lost else 10**12, op=OP,
            )  # fmt: skip
            host = functools.partial(self._bring, list(self._coming()), [0], x, known, gate)
        else:
            signals, done = (o.zeros(torch.int32, _SOURCES, name) for name in ("the result's signals", "its counts"))
            publish = PublishArguments(signals, done, EPOCH)
        given = (
            x, o.of(b, "B"), known, out, None, None, None, None, None, None, counters, None, None, base,
            int(self.captured), 1.0, 1.0,
        )  # fmt: skip
        filled = arguments.fill(given, gate=gate, publish=publish)
        if self.built is None:
            self.built = Built(grouped_gemm_by_source, arguments.options, self.arch)
        machine = self.built.launch(filled, o.memory, plan.schedule.workers, dies=self.dies, host=host, **how)
        self._check(answer(out, like).view(like.shape))
        if self.lost:
            record = gate.records.numpy(FIELDS).tolist()
            word = counts_word(self.lost[0], _GROUPS) if self.lost[1] < 0 else rows_word(*self.lost, _GROUPS)
            assert (record[0], record[1], record[5]) == (1, EXPIRED, word), f"the record: {record}"
        elif self.arrives:
            assert not gate.claims.numpy()[0], "a record of a launch that lost nothing"
        else:
            assert signals.numpy().tolist() == [EPOCH] * _SOURCES, "a source's result is not signalled"
        if self.captured:
            assert not counters.numpy().any(), "the words are not restored"
            assert not self.arrives or not gate.row_signals.numpy().any(), "the signals are not restored"
        return machine

    def _coming(self) -> list[tuple[int, int]]:
        """What comes, in order: rows of some groups before their source's counts."""
        order = [(1, 0), (0, -1), (2, -1), (1, -1), (0, 2), (2, 1), (0, 1), (1, 2), (0, 0), (2, 0), (1, 1), (2, 2)]
        return [one for one in order if one != self.lost]

    def _bring(self, coming: list, sent: list[int], x: object, known: object, gate: object, machine: Machine) -> None:
        while coming and machine.executed >= 1500 * (sent[0] + 1):
            source, group = coming.pop(0)
            sent[0] += 1
            if group < 0:
                known.write(np.array(COUNTS[source], np.int32), 4 * _GROUPS * source)
                word = counts_word(source, _GROUPS)
            else:
                first = source * _ROWS + sum(COUNTS[source][:group])
                rows = bits(self.operands[0])[first : first + COUNTS[source][group]]
                if rows.size:
                    x.write(rows, first * rows.shape[1] * rows.itemsize)
                word = rows_word(source, group, _GROUPS)
            gate.row_signals.write(np.array([1 if self.captured else EPOCH], np.int32), 4 * word)

    def _check(self, found: torch.Tensor) -> None:
        a, b = self.operands
        for source, counts in enumerate(COUNTS):
            place = found[source * _ROWS : (source + 1) * _ROWS]
            if self.lost == (source, -1):
                assert place.isnan().all(), "the place of a source without counts is not NaN"
                continue
            begin = 0
            for group, count in enumerate(counts):
                rows = place[begin : begin + count]
                if self.lost == (source, group):
                    assert rows.isnan().all(), "rows that never came are not NaN"
                elif not (self.lost and rows.isnan().any()):
                    check(rows, Maths(a[source * _ROWS + begin :][:count], b[group].t()))
                begin += count
            assert (place[begin:] == _UNTOUCHED).all(), "rows behind a source's last one are written"


#: The row's name, the architecture of the sample, what there is.
CASES: tuple[tuple[str, str, dict], ...] = (
    ("published", "gfx942", {"dies": 2}),
    ("rows and counts out of order", "gfx950", {"arrives": True, "dies": 2}),
    ("rows are lost", "", {"arrives": True, "lost": (1, 1)}),
    ("counts are lost", "", {"arrives": True, "lost": (0, -1), "dies": 2}),
    ("captured", "", {"captured": True}),
    ("captured, gated", "", {"captured": True, "arrives": True}),
)
