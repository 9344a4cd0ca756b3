"""Kernels of the project at small sizes, compiled for AMD and executed on the emulator, checked by the error rule.

A problem is compiled once and run under many orders. It must run in a process of its own: see
`tilestream_tools.isa.build`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from gates import cdna
from gates.engine import DEVICES, attention_layout
from gates.portable_attention import layout_of

from attention_maths import FEATURES, call_of
from attention_maths import Case as Call
from error_rule import Maths, check, nans
from tilestream.core.chunks import Chunks
from tilestream.core.copy_items import CopyArguments, Pieces, word_dtype
from tilestream.core.error_record import FIELDS, RECORDS
from tilestream.core.gate import arrival_order
from tilestream.core.grid import Grid
from tilestream.core.integers import cdiv
from tilestream.core.schedule import Schedule
from tilestream.kernels.cdna.attention import attend
from tilestream.kernels.cdna.gemm import gemm as cdna_gemm
from tilestream.kernels.device.varlen import PLACED, list_sequences
from tilestream.kernels.portable.attention import attention
from tilestream.kernels.portable.gemm import gemm as portable_gemm
from tilestream.launch.attention_arguments import NO_KEY_GATE, KeyGate
from tilestream.launch.cdna.arguments import Arguments as CdnaArguments
from tilestream.launch.cdna.attention_arguments import CdnaAttentionArguments
from tilestream.launch.gate import NO_GATE, GateArguments, chunk_table, queue_table
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.portable.arguments import Arguments
from tilestream.launch.portable.attention_arguments import AttentionArguments
from tilestream.plan.attention_plan import AttentionCandidate, AttentionPlan, of_candidate, packed_heads, schedule_of
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.candidate import Candidate
from tilestream.plan.plan import Plan
from tilestream.plan.plan import of_candidate as gemm_of_candidate
from tilestream.plan.planner import plan_problem
from tilestream.plan.policy import cdna_attention as attention_policy
from tilestream.plan.policy.cdna_tiles import TILES
from tilestream.plan.policy.portable_attention import candidates
from tilestream.plan.problem import ITEMSIZE, Incoming, Problem, gate_of, result_name
from tilestream.plan.raster import raster_of, split_of
from tilestream_tools.emulator import Machine, Memory, Tensor, decode, launch
from tilestream_tools.isa.build import build

#: Words of 8 bytes from one counter to the next.
LINE = 16
#: What the counters of a launch begin with.
BASE = 1000
#: The epoch and the key of what arrives, and the op of a record.
EPOCH, KEY, OP = 3, 7, 5
#: Of the instructions that this process has executed.
MNEMONICS: set[str] = set()


def bits(x: torch.Tensor) -> np.ndarray:
    """A tensor as an array of its bytes: numpy has no bfloat16, nor 8-bit floating point."""
    if x.dtype in (torch.float32, torch.int32, torch.int64, torch.float16):
        return x.contiguous().numpy()
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.uint8).numpy()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Operands:
    """The tensors of a launch in an emulated memory."""

    def __init__(self) -> None:
        self.memory = Memory()

    def of(self, x: torch.Tensor | None, name: str, align: int = 256) -> Tensor | None:
        return None if x is None else Tensor(self.memory, bits(x), name_of(x.dtype), name, align)

    def zeros(self, dtype: torch.dtype, count: int, name: str) -> Tensor | None:
        return self.of(torch.zeros(count, dtype=dtype), name) if count else None

    def nans(self, *shape: int, name: str) -> Tensor | None:
        return self.of(nans(*shape), name) if all(shape) else None


def answer(tensor: Tensor, like: torch.Tensor) -> torch.Tensor:
    """What a tensor holds after a launch."""
    return torch.from_numpy(tensor.numpy()).view(like.dtype)


@dataclass
class Arriving:
    """How A's rows arrive: in these chunks, in this order, one every so many instructions.

    Attributes
    ----------
    lost
        Chunks that never come.
    failed
        A chunk whose producer reports a failure.
    in_order
        Whether workers take from the queues whose chunks they have seen.
    copies
        Whether the kernel copies the rows itself; pieces a chunk.
    allowed
        Nanoseconds until the deadline.
    """

    bounds: tuple[int, ...]
    order: tuple[int, ...] = ()
    every: int = 3000
    lost: tuple[int, ...] = ()
    failed: int | None = None
    in_order: bool = False
    copies: int = 0
    allowed: int = 10**12

    @property
    def may_end(self) -> bool:
        """Whether the launch ends without a chunk. Where the kernel copies, that depends on who is faster."""
        return bool(self.lost) or self.failed is not None

    @property
    def chunks(self) -> Chunks:
        steps = {b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False)}
        return Chunks.uniform(self.bounds[-1], steps.pop()) if len(steps) == 1 else Chunks(self.bounds)


class Built:
    """A kernel compiled for some arguments: the first launch's, whose alignments all launches have."""

    def __init__(self, kernel: Any, options: dict[str, Any], arch: str) -> None:
        self.kernel, self.options, self.arch = kernel, options, arch
        self.compiled: Any = None

    def launch(self, filled: Sequence[Any], memory: Memory, groups: int, **how: Any) -> Machine:
        if self.compiled is None:
            self.compiled, _ = build(self.kernel, filled, self.options, self.arch)
        machine = launch(self.compiled, self.kernel.arg_names, filled, memory, groups, **how)
        steps = decode(how.get("text") or self.text).steps
        MNEMONICS.update(steps[pc].text.partition(" ")[0] for pc in machine.visited)
        return machine

    @property
    def text(self) -> str:
        return self.compiled.asm["amdgcn"]


@dataclass
class Gemm:
    """A product ``[m, k] @ [k, n]``, of one batch.

    Attributes
    ----------
    backend
        ``portable`` or ``cdna``; of the latter ``tile`` has how operands come, too.
    layout
        ``n``, ``t``: of A row by row or column by column, of B likewise.
    epilogue
        Whether there are alpha, a bias, beta times a residual, and an activation; float32 comes out.
    captured
        Whether the launch owns its words, as one of a captured graph does, and restores them.
    """

    backend: str
    arch: str
    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    schedule: str = "static"
    tile: tuple[int, int] = (64, 64)
    copies: str = ""
    layout: str = "nt"
    workers: int = 3
    queues: int = 1
    dies: int = 1
    epilogue: bool = False
    arriving: Arriving | None = None
    b_dtype: torch.dtype | None = None
    stages: int = 0
    captured: bool = False
    built: Built | None = field(default=None, init=False)

    @functools.cached_property
    def plan(self) -> Plan:
        dtype, size = name_of(self.dtype), self.dtype.itemsize
        out = "float32" if self.epilogue else result_name(dtype, None)
        aligned = not (self.m % 16 or self.n % 16 or self.k % 16)
        problem = Problem(
            self.m, self.n, self.k, 1, dtype, out, aligned=aligned, scales="tensor" if size == 1 else "none",
            b_dtype=name_of(self.b_dtype) if self.b_dtype else "", plain=size != 1 and not self.epilogue,
        )  # fmt: skip
        if self.backend == "portable":
            plan = plan_problem(
                problem, None, self.schedule, self.tile, queues=self.queues if self.queues > 1 else None,
                device=DEVICES[self.arch], backend="portable",
            )  # fmt: skip
            plan = replace(plan, stages=self.stages or plan.stages)
            plan = replace(plan, schedule=replace(plan.schedule, workers=self.workers))
        else:
            plan = self._cdna_plan(problem)
        return plan if self.arriving is None else self._gated(plan, self.arriving)

    def _cdna_plan(self, problem: Problem) -> Plan:
        device = cdna.DEVICES[self.arch]
        tile = next(
            one for one in TILES[self.arch]
            if (one.block_m, one.block_n) == self.tile and self.copies in ("", one.copies)
        )  # fmt: skip
        block = (tile.block_m, tile.block_n, tile.block_k(ITEMSIZE[problem.dtype]))
        grid = Grid.of(problem.m, problem.n, problem.k, *block, batch=1)
        raster = raster_of(problem, grid, block, 8, None)
        split = split_of(raster) if self.queues > 1 else "items"
        schedule = Schedule(self.schedule, grid, raster, self.workers, self.queues, split)
        found = Candidate(tile.copies, block, schedule, 0.0, tile.warps, tile.stages)
        return gemm_of_candidate(problem, device, "cdna", found, "the emulator's")

    def _gated(self, plan: Plan, arriving: Arriving) -> Plan:
        word = 16 if arriving.copies else 0
        problem = replace(plan.problem, rows=Incoming(arriving.chunks, 0, word))
        schedule = plan.schedule
        if arriving.in_order:
            gate = gate_of(problem, plan.tile)
            assert gate is not None
            ends = arrival_order(schedule, gate)
            schedule = replace(schedule, split="chunks", queues=len(ends), ends=ends)
        return replace(plan, problem=problem, schedule=schedule, copiers=2 if arriving.copies else 0)

    @functools.cached_property
    def maths(self) -> Maths:
        generator = torch.Generator().manual_seed(17)

        def rand(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        a, b = rand(self.m, self.k, dtype=self.dtype), rand(self.k, self.n, dtype=self.b_dtype or self.dtype)
        if self.dtype.itemsize == 1:
            one = torch.tensor([0.5]), torch.tensor([0.25])
            return Maths(a, b, scale_a=one[0], scale_b=one[1])
        if not self.epilogue:
            return Maths(a, b)
        bias, residual = rand(self.n, dtype=self.dtype), rand(self.m, self.n, dtype=self.dtype)
        return Maths(a, b, bias, residual, 1.5, 0.5, "gelu", torch.float32)

    @property
    def strides(self) -> Layout:
        m, n, k = self.m, self.n, self.k
        a = (m * k, k, 1) if self.layout[0] == "n" else (m * k, 1, m)
        b = (k * n, n, 1) if self.layout[1] == "n" else (k * n, 1, k)
        made = Layout(a, b, (0, n, 1))
        return made._replace(bias=1, residual=(0, n, 1), scaled=True, activation="gelu") if self.epilogue else made

    def run(self, **how: Any) -> Machine:
        """Execute it, and check what comes out.

        Raises
        ------
        AssertionError, Fault
        """
        plan, maths, s, o = self.plan, self.maths, self.plan.schedule, Operands()
        a = maths.a if self.layout[0] == "n" else maths.a.t().contiguous()
        b = maths.b if self.layout[1] == "n" else maths.b.t().contiguous()
        like = maths.by_torch()
        arrives = self.arriving
        x = o.of(a if arrives is None else torch.full_like(a, math.nan), "A")
        out = o.of(nans(self.m, self.n, dtype=like.dtype), "the output")
        assert self.schedule != "stream_k" or s.slots, "no tile is split: take another number of workers"
        takes_tickets = s.kind != "static" or plan.gate is not None
        # What earlier launches left in the counters is at most the number that this launch counts from.
        base = 0 if self.captured else BASE
        left = torch.arange((s.queues + 2) * LINE) * 37 % (base + 1)
        counters = o.of(left, "the counters") if takes_tickets else None
        scaled = self.dtype.itemsize == 1
        operands = (
            x, o.of(b, "B"), out, o.of(maths.bias, "the bias"), o.of(maths.residual, "the residual"),
            o.of(maths.scale_a, "A's scale") if scaled else None, o.of(maths.scale_b, "B's scale") if scaled else None,
            o.nans(s.slots, *plan.block[:2], name="partial sums"), o.zeros(torch.int32, s.slots, "counts"), counters,
            None, None, base, int(self.captured), maths.alpha, maths.beta if self.epilogue else 0.0,
        )  # fmt: skip
        arguments = (Arguments if self.backend == "portable" else CdnaArguments)(plan, self.strides)
        gate, more = (NO_GATE, {}) if arrives is None else self._arrival(o, plan, arrives)
        if arrives is not None and arrives.copies:
            more["copies"] = self._copies(o, plan, arrives, a, x)
        filled = arguments.fill(operands, gate=gate, **more)
        if self.built is None:
            kernel = portable_gemm if self.backend == "portable" else cdna_gemm
            self.built = Built(kernel, arguments.options, self.arch)
        host = None if arrives is None else Producer(arrives, [(x, a)], gate)
        machine = self.built.launch(filled, o.memory, self.workers, dies=self.dies, host=host, **how)
        found = answer(out, like)
        if host is None or not (arrives.may_end or host.record[0]):
            check(found, maths)
            if arrives is not None:
                assert not gate.claims.numpy()[0], "a record of a launch that lost nothing"
        else:
            self._check_loss(found, maths, arrives, host)
        if arrives is not None and arrives.copies:
            assert not more["copies"].words.numpy().any(), "the copies' words are not restored"
        if self.captured:
            assert not counters.numpy().any(), "the words are not restored"
        if s.slots:
            assert not operands[8].numpy().any(), "counts are not restored"
        return machine

    def _arrival(self, o: Operands, plan: Plan, arrives: Arriving) -> tuple[GateArguments, dict[str, Any]]:
        def table_of(entries: list[int] | None, name: str) -> Tensor | None:
            return None if entries is None else o.of(torch.tensor(entries, dtype=torch.int32), name)

        gate = GateArguments(
            o.zeros(torch.int32, arrives.chunks.count, "signals"), o.zeros(torch.int32, 1, "the quarantine"),
            table_of(chunk_table(plan, 0), "the table of chunks"),
            records=o.zeros(torch.int64, FIELDS * RECORDS, "records"), claims=o.zeros(torch.int64, 2 * LINE, "claims"),
            queue_table=table_of(queue_table(plan), "the table of queues"),
            row_epoch=EPOCH, row_key=KEY, allowed=arrives.allowed, op=OP,
        )  # fmt: skip
        return gate, {}

    def _copies(self, o: Operands, plan: Plan, arrives: Arriving, a: torch.Tensor, x: Any) -> CopyArguments:
        incoming = plan.problem.rows
        word, rows = word_dtype(incoming.copied), a.view(torch.int32)
        source, target = o.of(rows, "what is copied"), _view(x, word)
        source.dtype = target.dtype
        pieces = Pieces(arrives.chunks, 0, self.k * self.dtype.itemsize // incoming.copied, arrives.copies)
        table = o.of(torch.tensor(pieces.table(), dtype=torch.int32), "the table of pieces")
        words = o.zeros(torch.int32, 2 + arrives.chunks.count, "the copies' counts")
        return CopyArguments(source, target, table, words, plan.copiers)

    def _check_loss(self, found: torch.Tensor, maths: Maths, arrives: Arriving, host: Producer) -> None:
        """What was lost is NaN, as far as tiles of it; what came is right or NaN; the record names a chunk of it."""
        gone = {*arrives.lost, arrives.failed} - {None}
        bounds = arrives.bounds
        for chunk in gone:
            assert found[bounds[chunk] : bounds[chunk + 1]].isnan().all(), f"rows of chunk {chunk} are not NaN"
        rows = ~found.isnan().any(1)
        if rows.any():
            check(found[rows], replace(maths, a=maths.a[rows]))
        host.check_record()


def _view(tensor: Tensor, dtype: str) -> Tensor:
    """The same memory as elements of another dtype."""
    made = object.__new__(Tensor)
    made.__dict__.update(tensor.__dict__)
    made.dtype = type(tensor.dtype)(dtype)
    return made


class Producer:
    """The host while a kernel runs: writes chunks and signals, unless the kernel does, and reads the record.

    Parameters
    ----------
    operands
        What arrives: where it is in the kernel's memory, and what it is. Rows are those of `Arriving`.
    gate
        Where signals and records are: a `GateArguments` or a `KeyGate`.

    Attributes
    ----------
    record
        What the record has at the moment when its number is first seen; it has to be complete then.
    """

    def __init__(self, arrives: Arriving, operands: Sequence[tuple[Tensor, torch.Tensor]], gate: Any) -> None:
        order = arrives.order or tuple(range(arrives.chunks.count))
        self._left = [] if arrives.copies else [chunk for chunk in order if chunk not in arrives.lost]
        self._arrives, self._sent, self._records = arrives, 0, gate.records
        of_rows = gate.signals if isinstance(gate, KeyGate) else gate.row_signals
        self._signals = gate.column_signals if of_rows is None else of_rows
        self._operands = [(to, bits(x).view(np.uint8).reshape(arrives.bounds[-1], -1)) for to, x in operands]
        self.record, self._elapsed = [0] * FIELDS, 0

    def __call__(self, machine: Machine) -> None:
        if not self.record[0] and self._records.numpy(1)[0]:
            self.record, self._elapsed = self._records.numpy(FIELDS).tolist(), machine.executed * machine.nanoseconds
        while self._left and machine.executed >= self._arrives.every * (self._sent + 1):
            chunk = self._left.pop(0)
            begin, end = self._arrives.bounds[chunk : chunk + 2]
            epoch = -EPOCH if chunk == self._arrives.failed else EPOCH
            for to, rows in self._operands if epoch > 0 else ():
                to.write(rows[begin:end], begin * rows.shape[1])
            self._signals.write(np.array([epoch], np.int32), 4 * chunk)
            self._sent += 1

    def check_record(self, operand: int = 0) -> None:
        """Assert that the record names a chunk of this operand that was lost, and all else that it should."""
        arrives = self._arrives
        gone = set(range(arrives.chunks.count)) if arrives.copies else {*arrives.lost, arrives.failed} - {None}
        number, state, op, _, named, chunk, key, epoch = self.record[:8]
        assert (number, op, named, key, epoch) == (1, OP, operand, KEY, EPOCH), f"the record: {self.record}"
        assert state == (3 if self._arrives.failed is None else 4), f"the record's state is {state}"
        assert chunk in gone, f"the record names chunk {chunk}"
        assert 0 <= self.record[12] <= self._elapsed, f"waited for {self.record[12]} ns of {self._elapsed}"


@dataclass
class Attention:
    """A call of attention: see `attention_maths.Case`.

    Attributes
    ----------
    pick
        Which of the candidates; of CDNA's, tiles that do the problem.
    arriving
        How the rows of keys and values of all sequences arrive.
    captured
        Whether the launch owns its words, and restores them.
    """

    backend: str
    arch: str
    call: Call
    pick: int = 0
    kind: str = "dynamic"
    workers: int = 3
    dies: int = 1
    arriving: Arriving | None = None
    captured: bool = False
    built: Built | None = field(default=None, init=False)
    lister: Built | None = field(default=None, init=False)

    @functools.cached_property
    def numbers(self) -> Any:
        return call_of(self.call)

    @functools.cached_property
    def problem(self) -> AttentionProblem:
        call, features, tensors = self.call, dict(FEATURES[self.call.features]), self.numbers.tensors
        causal = features.get("causal", False)
        packed_keys = call.how == "packed"
        rows = max(call.keys) if packed_keys else tensors["k"].shape[1]
        if call.how.endswith("paged"):
            rows = tensors["block_table"].shape[1] * call.page
        return AttentionProblem(
            len(call.keys), *call.heads, max(call.queries), rows, *call.dims, dtype=name_of(call.dtype),
            causal=bool(causal), alignment="top_left" if causal == "top_left" else "bottom_right",
            window=features.get("window", (None, None)), softcap=features.get("softcap", 0.0),
            sinks=bool(features.get("sinks")), varlen=call.packed,
            tokens_q=tensors["q"].shape[0] if call.packed else 0, tokens_k=sum(call.keys) if packed_keys else 0,
            page_size=call.page if call.how.endswith("paged") else 0,
            pages=tensors["k"].shape[0] if call.how.endswith("paged") else 0, lengths="seqlens_k" in tensors,
            return_lse=True, scaled=call.dtype.itemsize == 1, positive=features.get("scale", 1.0) > 0,
            keys=None if self.arriving is None else Incoming(self.arriving.chunks),
        )  # fmt: skip

    @functools.cached_property
    def plan(self) -> AttentionPlan:
        p = self.problem
        if self.backend == "portable":
            device = DEVICES[self.arch]
            found = list(candidates(p, device, device.workers, kind=self.kind))[self.pick]
        else:
            found = self._cdna_candidate(p)
            device = cdna.DEVICES[self.arch]
        plan = of_candidate(p, device, self.backend, found, "the emulator's", ())
        return replace(plan, schedule=replace(plan.schedule, workers=self.workers))

    def _cdna_candidate(self, p: AttentionProblem) -> AttentionCandidate:
        device, policy = cdna.DEVICES[self.arch], attention_policy
        keys, values = (policy.parts_of(columns, self.arch) for columns in self.call.dims)
        tile = [
            one for one in policy.TILES[self.arch]
            if one.columns >= max(self.call.dims) and one.busy in (None, policy.is_busy(p, one))
            and not policy.why_not(one, keys, values, self.arch, device.shared)
            and not (one.copies == "direct" and policy.gathers(p, one))
        ][self.pick]  # fmt: skip
        pack = packed_heads(p, tile.rows)
        schedule = schedule_of(p, tile.rows // pack, pack, 1, self.kind, device.workers, device.xcds)
        block = (tile.rows, tile.block)
        return AttentionCandidate(tile.copies, block, schedule, 0.0, pack, tile.warps, tile.stages)

    def run(self, **how: Any) -> Machine:
        """Execute it, and check what comes out."""
        plan, p, o, tensors = self.plan, self.problem, Operands(), self.numbers.tensors
        out_dtype = getattr(torch, p.out_dtype)
        shape = (*tensors["q"].shape[:-1], self.call.dims[1])
        out = nans(*shape, dtype=out_dtype)
        lse = nans(*(shape[:-1] if p.varlen else (shape[0], shape[2], shape[1])))
        at = {name: o.of(x, name) for name, x in tensors.items() if name != "block_table"}
        arrives = self.arriving
        if arrives is not None:
            at |= {name: o.of(torch.full_like(tensors[name], math.nan), name) for name in "kv"}
        at["block_table"] = o.of(tensors.get("block_table"), "block_table")
        to, logs = o.of(out, "the output"), o.of(lse, "the log-sum-exp", 4)
        sinks = o.of(self.numbers.options.get("sinks"), "sinks", 4)
        table = tensors["block_table"].shape[1] if p.page_size else 0
        layout = layout_of(p) if self.backend == "portable" else attention_layout(p, table)
        layout = layout._replace(table=table)
        made = (AttentionArguments if self.backend == "portable" else CdnaAttentionArguments)(plan, layout)
        listed = self._list(o, plan, at, how) if p.varlen else (None, None)
        counters = o.zeros(torch.int64, (plan.schedule.queues + 2) * LINE, "the counters")
        takes_tickets = plan.schedule.kind != "static" or arrives is not None
        scale = self.numbers.options.get("scale") or 1 / math.sqrt(self.call.dims[0])
        given = (
            at["q"], at["k"], at["v"], to, logs, sinks, *(at.get(f"scale_{x}") for x in "qkv"), at.get("cu_seqlens_q"),
            at.get("cu_seqlens_k"), at.get("seqlens_k"), at["block_table"], *listed,
            counters if takes_tickets else None, None, 0, int(self.captured), *made.scales(scale),
        )  # fmt: skip
        kernel = attention if self.backend == "portable" else attend
        gate = NO_KEY_GATE if arrives is None else self._arrival(o, arrives)
        host = None if arrives is None else Producer(arrives, [(at[name], tensors[name]) for name in "kv"], gate)
        filled = made.pack(kernel)(given, *((gate,) if self.backend == "portable" else ()))
        if self.built is None:
            self.built = Built(kernel, made.options, self.arch)
        machine = self.built.launch(filled, o.memory, self.workers, dies=self.dies, host=host, **how)
        if self.captured:
            assert not counters.numpy().any(), "the words are not restored"
        if host is not None and arrives.may_end:
            assert len(self.call.keys) == 1, "of one sequence every row sees what is lost"
            assert answer(to, out).isnan().all(), "rows whose keys are lost are not NaN"
            host.check_record()
        else:
            self.numbers.check(answer(to, out), answer(logs, lse))
        return machine

    def _arrival(self, o: Operands, arrives: Arriving) -> KeyGate:
        bounds = None if arrives.chunks.rows_per_chunk else torch.tensor(arrives.bounds, dtype=torch.int32)
        return KeyGate(
            o.zeros(torch.int32, arrives.chunks.count, "signals"), o.zeros(torch.int32, 1, "the quarantine"),
            o.of(bounds, "the chunks' bounds"), o.zeros(torch.int64, FIELDS * RECORDS, "records"),
            o.zeros(torch.int64, 2 * LINE, "claims"), EPOCH, KEY, arrives.allowed, OP,
        )  # fmt: skip

    def _list(self, o: Operands, plan: AttentionPlan, at: dict[str, Any], how: dict[str, Any]) -> tuple[Any, Any]:
        """The launch before a packed call."""
        p = self.problem
        starts, order = (o.zeros(torch.int32, p.batch + 2, name) for name in ("starts", "order"))
        packs = max(1, p.heads_q // plan.pack) * plan.shares
        numbers = (p.batch + 1, p.tokens_q, p.tokens_k, p.seqlen_k, packs, plan.positions)
        filled = (at["cu_seqlens_q"], at.get("cu_seqlens_k"), at.get("seqlens_k"), starts, order, *numbers)
        if self.lister is None:
            self.lister = Built(list_sequences, {}, self.arch)
        rest = {name: value for name, value in how.items() if name not in ("text", "host")}
        self.lister.launch(filled, o.memory, cdiv(p.batch + 1, PLACED.value), **rest)
        return starts, order


#: Anything that can be run.
Runs = Gemm | Attention
