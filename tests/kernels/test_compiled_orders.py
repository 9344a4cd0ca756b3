"""Memory orders and instructions of what kernels share, as GPUs that need not be here execute them.

Triton's interpreter runs one program after the other, in one thread: it shows no barrier, no order and no scope.
"""

from __future__ import annotations

import re

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from tilestream.core.copy_items import CopyArguments  # noqa: E402
from tilestream.core.structs import Gate, Incoming, Publishing, Sources, Watch, Words, Work  # noqa: E402
from tilestream.kernels.device.copy_items import copy_items  # noqa: E402
from tilestream.kernels.device.epilogue import activate  # noqa: E402
from tilestream.kernels.device.gate import ARRIVED, end_launch, poll_signal  # noqa: E402
from tilestream.kernels.device.jit import INTERPRETED  # noqa: E402
from tilestream.kernels.device.schedule import count_in, count_out  # noqa: E402
from tilestream.kernels.device.sources import publish_empty, settle  # noqa: E402
from tilestream.kernels.portable.experts import count_landed  # noqa: E402
from tilestream.launch import compiling  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")


@triton.jit
def counted_in(partials, count, parts):
    """Store a part, count it, and read all parts if it was the last."""
    i = tl.arange(0, 256)
    tl.store(partials + i, i)
    if count_in(count, parts):
        tl.store(partials + 256 + i, tl.load(partials + i))


@triton.jit
def counted_out(counters, last, queues, workers):
    zero, base = 0, tl.cast(0, tl.int64)
    work = Work(zero, zero, zero, zero, zero, zero, zero, queues, None, zero, zero, zero, zero)
    is_last = count_out(work, Words(counters, base, zero, None, zero, None, None), base, workers)
    tl.store(last, is_last.to(tl.int32))


@triton.jit
def landed(partials, count, parts):
    """`counted_in` of what a peer stores."""
    i = tl.arange(0, 256)
    tl.store(partials + i, i)
    if count_landed(count, parts, 7):
        tl.store(partials + 256 + i, tl.load(partials + i))


@triton.jit
def settled(words, as_what, source):
    tl.store(as_what, settle(source, 1, Sources(None, 5, 3, 7, 0, None, words), tl.cast(55, tl.int64)))


@triton.jit
def empty(counts, signals, sources):
    of_all = Sources(counts, sources, 3, 7, 0, None, None)
    publish_empty(of_all, Publishing(signals, None, 9, 1, 1), tl.program_id(0), tl.num_programs(0), tl.arange(0, 4))


@triton.jit
def polled(signals, rows, chunk, epoch):
    """Read a row if its chunk has arrived."""
    if poll_signal(Incoming(signals, None, None, epoch, 0, 5, 1, 0, 7), chunk) == ARRIVED:
        tl.store(rows + 1, tl.load(rows))


@triton.jit
def expired(records, claims, counters, epoch):
    zero = tl.cast(0, tl.int64)
    gate, words = Gate(None, None, None, 0, 0, records, claims, 3, zero), Words(counters, zero, 0, None, 0, None, None)
    watch = Watch(0, 1, 0, counters, claims, zero)
    end_launch(2, 0, 1, 4, epoch, (0, 0, 0, 0), zero, gate, words, watch)


@triton.jit
def copied(source, target, signals, words, table, workers):
    copies = CopyArguments(source, target, table, words, 2)
    copy_items(copies, Incoming(signals, None, None, 9, 0, 5, 1, 0, 7), workers, tl.arange(0, 256), 256, 1)


@triton.jit
def activated(x):
    i = tl.arange(0, 256)
    tl.store(x + i, activate(tl.load(x + i), "silu"))


def instructions(arch: str, function: object, *arguments: object) -> list[str]:
    """What a kernel of four warps executes, in order: atomics, barriers, waits, accesses to memory, divisions."""
    given = [torch.empty(1024, dtype=one, device="meta") if isinstance(one, torch.dtype) else one for one in arguments]
    with compiling.ahead(arch):
        asm = compiling.compiled(function, given, {"num_warps": 4}).asm
    text = asm["ptx" if arch.startswith("sm") else "amdgcn"]
    lines = (re.sub(r"^@!?%p\d+\s+", "", line.strip()) for line in text.splitlines())
    words = r"bar\.sync|atom\.|(st|ld)\.global|global_|buffer_|s_barrier|s_waitcnt vmcnt\(0\)|rcp|div\.|v_rcp|v_div"
    return [line for line in lines if re.match(words, line)]


def places(found: list[str], *beginnings: str) -> list[int]:
    """Where instructions that begin so follow each other, each behind the one before."""
    at, at_each = -1, []
    for beginning in beginnings:
        at = next(i for i, line in enumerate(found) if i > at and re.match(beginning, line))
        at_each.append(at)
    return at_each


def test_a_part_is_counted_between_barriers_by_a_release_and_acquire():
    """All threads store before the count, and the last part's threads load behind it: none before all know."""
    found = instructions("sm_90", counted_in, torch.int32, torch.int32, 3)
    places(
        found, "st.global", "bar.sync", "atom.global.gpu.acq_rel.add", "bar.sync", "bar.sync", "st.global", "ld.global"
    )
    found = instructions("gfx942", counted_in, torch.int32, torch.int32, 3)
    _, count, *_ = places(
        found, "s_barrier", "global_atomic_add", "buffer_inv sc1", "s_barrier", "s_barrier", "(buffer|global)_load"
    )
    before = found[: found.index("s_barrier")]
    assert before[-1] == "s_waitcnt vmcnt(0)", "each wave's stores are in the cache before the barrier"
    assert "buffer_wbl2 sc1" in found[:count]


def test_what_peers_store_is_counted_between_barriers_by_a_release_and_acquire_of_the_system():
    found = instructions("sm_90", landed, torch.int32, torch.int32, 3)
    count = "atom.global.sys.acq_rel.add"
    places(found, "st.global", "bar.sync", count, "bar.sync", "bar.sync", "st.global", "ld.global")


def test_a_source_is_settled_by_releases_and_acquires():
    """A worker that finds it settled reads what those that settled it have seen."""
    found = [line.split()[0] for line in instructions("sm_90", settled, torch.int64, torch.int32, 3) if "atom" in line]
    assert found == ["atom.global.gpu.acq_rel.max.s64", "atom.global.acq_rel.gpu.cas.b64"]


def test_a_source_without_rows_is_signalled_by_a_release_of_the_system():
    found = [line.split()[0] for line in instructions("sm_90", empty, torch.int32, torch.int32, 3) if "atom" in line]
    assert found == ["atom.global.sys.release.exch.b32"]


def test_a_signal_is_read_by_an_acquire_of_the_system():
    found = instructions("sm_90", polled, torch.int32, torch.float32, 3, 5)
    places(found, r"ld\.global\.sys\.acquire\.b32|atom\.global\.sys\.acquire", r"ld\.global\.b32", "st.global")
    found = instructions("gfx942", polled, torch.int32, torch.float32, 3, 5)
    places(found, "global_(atomic_add|load).* sc0 sc1", r"s_waitcnt vmcnt\(0\)", "buffer_inv sc0 sc1")


def test_a_records_number_is_released_behind_its_words():
    found = instructions("sm_90", expired, torch.int64, torch.int64, torch.int64, 5)
    words = sum(line.startswith("st.global") for line in found)
    assert words == 13
    places(found, *["st.global"] * words, "bar.sync", "atom.global.sys.release.exch.b64")


def test_a_copied_chunk_is_signalled_by_a_release_of_the_system():
    given = torch.float32, torch.float32, torch.int32, torch.int32, torch.int32, 3
    places(instructions("sm_90", copied, *given), "atom.global.gpu.acq_rel.add.u32", "atom.global.sys.release.exch.b32")


def test_a_worker_that_leaves_counts_by_a_release_and_acquire():
    found = instructions("sm_90", counted_out, torch.int64, torch.int32, 5, 7)
    assert [line.split()[0] for line in found if line.startswith("atom")] == ["atom.global.gpu.acq_rel.add.u64"]
    found = instructions("gfx942", counted_out, torch.int64, torch.int32, 5, 7)
    places(found, "buffer_wbl2 sc1", "global_atomic_add_x2", "buffer_inv sc1")


def test_a_sigmoid_takes_one_instruction_for_its_reciprocal_on_nvidia():
    found = instructions("sm_90", activated, torch.float32)
    assert any(line.startswith("rcp.approx.ftz.f32") for line in found)
    assert not any(line.startswith("div") for line in found)
    assert any(line.startswith("v_rcp_f32") for line in instructions("gfx942", activated, torch.float32))
