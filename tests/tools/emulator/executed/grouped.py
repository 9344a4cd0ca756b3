"""The portable grouped GEMM at small sizes, executed on the emulator: see `executed.problems`."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

import torch
from gates.engine import DEVICES

from error_rule import check, nans
from executed.problems import BASE, EPOCH, KEY, LINE, OP, Arriving, Built, Operands, Producer, answer
from grouped_cases import expected, offsets_of
from tilestream.core.error_record import FIELDS, RECORDS
from tilestream.core.operands import Epilogue, GroupedOperands
from tilestream.kernels.portable.grouped import grouped_gemm
from tilestream.launch.gate import NO_GATE, GateArguments
from tilestream.launch.portable.grouped import GroupedLaunch
from tilestream.ops.grouped_library import launch_of, problem_of
from tilestream.plan.grouped import plan_groups
from tilestream.plan.plan import Plan
from tilestream_tools.emulator import Machine


@dataclass
class Grouped:
    """A product for each group, of 72 columns.

    Attributes
    ----------
    sizes
        Rows, or K, of each group; ``extent`` of all: what is left is of no group.
    along, k
        What groups divide, and K where it is the rows.
    scales
        ``"none"``; ``"row"``, with a bias a group and ``activation``, and float32 comes out; ``"block"``, of 8 bits.
    ends
        Offsets, in place of those of ``sizes``: ones that are none.
    arriving
        How the groups' matrices of B arrive; chunks are groups.
    captured
        Whether the launch owns its words, and restores them.
    """

    arch: str
    sizes: tuple[int, ...]
    extent: int
    along: str = "rows"
    k: int = 136
    dtype: torch.dtype = torch.bfloat16
    layout: str = "t"
    scales: str = "none"
    activation: str = "none"
    schedule: str = "dynamic"
    workers: int = 4
    dies: int = 1
    ends: tuple[int, ...] = ()
    arriving: Arriving | None = None
    captured: bool = False
    built: Built | None = field(default=None, init=False)

    @functools.cached_property
    def x(self) -> GroupedOperands:
        generator = torch.Generator().manual_seed(23)

        def rand(*shape: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        groups, columns = len(self.sizes), 144 if self.activation == "swiglu" else 72
        if self.along == "k":
            a, b = rand(self.extent, 80).t(), rand(self.extent, columns)
        else:
            a, b = rand(self.extent, self.k), rand(groups, columns, self.k).mT
            b = b if self.layout == "t" else b.contiguous()
        narrow = self.dtype.itemsize == 1
        epilogue = Epilogue(activation=self.activation)
        if self.scales == "row":
            of_a = (self.extent, 1) if self.along == "rows" else (groups, 80, 1)
            scales = (torch.exp2(rand(*shape, dtype=torch.float32)) for shape in (of_a, (groups, 1, columns)))
            bias = rand(groups, 1, columns, dtype=torch.bfloat16 if narrow else self.dtype)
            epilogue = Epilogue(1.0, bias, None, 1.0, self.activation, *scales)
        elif self.scales == "block":
            shapes = (self.extent, -(-self.k // 128)), (groups, -(-self.k // 128), -(-columns // 128))
            of_a, of_b = (torch.exp2(rand(*shape, dtype=torch.float32).round()) for shape in shapes)
            epilogue = epilogue._replace(scale_a=of_a, scale_b=of_b)
        shape = (self.extent, 72) if self.along == "rows" else (groups, a.shape[0], columns)
        full = self.scales == "row"
        out = nans(*shape, dtype=torch.float32 if full else torch.bfloat16 if narrow else self.dtype)
        ends = torch.tensor(self.ends, dtype=torch.int32) if self.ends else offsets_of(self.sizes)
        return GroupedOperands(a, b, out, epilogue, ends)

    @functools.cached_property
    def plan(self) -> Plan:
        problem = replace(problem_of(self.x), arrives=self.arriving is not None)
        tile = (32, 64) if self.dtype == torch.float32 and not problem.aligned else (64, 64)
        return plan_groups.__wrapped__(
            problem, self.workers, self.schedule, tile, device=DEVICES[self.arch], backend="portable"
        )

    def run(self, **how: object) -> Machine:
        """Execute it, and check what comes out.

        Raises
        ------
        AssertionError, Fault
        """
        plan, x, o, arrives = self.plan, self.x, Operands(), self.arriving
        launch = launch_of(plan, x)
        assert isinstance(launch, GroupedLaunch)
        arguments, e = launch._made[False], x.epilogue
        takes_tickets = plan.schedule.kind != "static" or arrives is not None
        base = 0 if self.captured else BASE
        left = torch.arange((plan.schedule.queues + 2) * LINE) * 37 % (base + 1)
        counters = o.of(left, "the counters") if takes_tickets else None

        def stored(tensor: torch.Tensor) -> torch.Tensor:
            """As it lies in memory: transposed, if it is a transposed view."""
            return tensor if tensor.is_contiguous() else tensor.mT

        b = stored(x.b)
        to = o.of(b if arrives is None else torch.full_like(b, float("nan")), "B")
        out = o.of(x.out, "the output")
        operands = (
            o.of(stored(x.a), "A"), to, o.of(x.offsets, "the offsets", 4), out, o.of(e.bias, "the bias"), None,
            o.of(e.scale_a, "A's scales", 4), o.of(e.scale_b, "B's scales", 4), None, None, counters, None, None, base,
            int(self.captured), 1.0, 1.0,
        )  # fmt: skip
        gate = NO_GATE if arrives is None else self._gate(o, arrives)
        if self.built is None:
            self.built = Built(grouped_gemm, arguments.options, self.arch)
        host = None if arrives is None else Producer(arrives, [(to, b)], gate)
        filled = arguments.fill(operands, gate=gate)
        machine = self.built.launch(filled, o.memory, plan.schedule.workers, dies=self.dies, host=host, **how)
        self._check(answer(out, x.out).view(x.out.shape), host)
        if self.captured:
            assert not counters.numpy().any(), "the words are not restored"
        return machine

    def _check(self, found: torch.Tensor, host: Producer | None) -> None:
        if self.ends:
            assert found.isnan().all(), "offsets that are none gave numbers"
            return
        lost = () if self.arriving is None else self.arriving.lost
        for group, (rows, maths) in enumerate(expected(self.x._replace(out=found))):
            if group in lost:
                assert rows.isnan().all(), f"group {group}, whose matrix never came, is not NaN"
            elif not (lost and rows.isnan().any()):
                check(rows, maths)
        if self.along == "rows":
            assert not found[sum(self.sizes) :].any(), "rows of no group are not zero"
        if host is not None and lost:
            host.check_record(operand=1)

    def _gate(self, o: Operands, arrives: Arriving) -> GateArguments:
        return NO_GATE._replace(
            column_signals=o.zeros(torch.int32, arrives.chunks.count, "signals"),
            column_quarantine=o.zeros(torch.int32, 1, "the quarantine"),
            records=o.zeros(torch.int64, FIELDS * RECORDS, "records"), claims=o.zeros(torch.int64, 2 * LINE, "claims"),
            column_epoch=EPOCH, column_key=KEY, allowed=arrives.allowed, op=OP,
        )  # fmt: skip
