"""What the Hopper attention is launched with: maps, numbers, addresses; and who launches it. No GPU."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tilestream.arrival.device import GateWords
from tilestream.arrival.flat import Awaited
from tilestream.core.chunks import Chunks
from tilestream.core.device import DeviceProperties
from tilestream.core.operands import AttentionOperands
from tilestream.kernels.device.varlen import list_sequences
from tilestream.kernels.hopper.attention import attend
from tilestream.kernels.portable import attention as portable_kernel
from tilestream.launch.attention_arguments import AttentionLayout
from tilestream.launch.hopper import attention_launch as launching
from tilestream.launch.hopper.attention_arguments import HopperAttentionArguments
from tilestream.launch.hopper.attention_launch import HopperAttentionLaunch
from tilestream.launch.hopper.maps import Map
from tilestream.launch.launcher import VARIES, Descriptor
from tilestream.launch.portable import attention_launch as portable
from tilestream.launch.trace import SpanLog
from tilestream.ops import attention_gpu
from tilestream.plan.attention_plan import AttentionPlan, of_candidate
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.policy import hopper_attention as policy
from tilestream.plan.problem import Incoming

H100 = DeviceProperties("an H100", "portable", 132, 5e11, 3.3e12, "a stub", "sm_90", 232448)
NAMES = attend.arg_names
B, H, KV, S, D = 3, 8, 2, 500, 128
ROWS = (S * H * D, H * D, D)
KEYS = (S * KV * D, KV * D, D)
OPERANDS = NAMES[: NAMES.index("sequences")]


def make(kind="dynamic", **more: Any) -> AttentionPlan:
    problem = AttentionProblem(B, H, KV, **({"seqlen_q": S, "seqlen_k": S, "head_dim": D} | more))
    found = [one for one in policy.candidates(problem, H100, 7, kind=kind) if one.shares == 1][-1]
    return of_candidate(problem, H100, "hopper", found, "a test's", ())


def arguments(plan: AttentionPlan | None = None, k=KEYS, v=KEYS, lse=None, table=0, **more: Any):
    """Of a plan, or of the one that ``more`` asks for."""
    return HopperAttentionArguments(plan or make(**more), AttentionLayout(ROWS, k, v, ROWS, lse, table))


def named(found: HopperAttentionArguments) -> dict[str, Any]:
    """Every argument of the kernel by its name; what stands in for operands is their name."""
    return flat(found.pack(attend)((*OPERANDS, "scale", "softcap_scale")))


def flat(filled: Any) -> dict[str, Any]:
    """The kernel's arguments by name, and in place of its configuration the fields of that."""
    found = dict(zip(NAMES, filled, strict=True))
    return found | dataclasses.asdict(found.pop("C"))


def check(found: HopperAttentionArguments | dict[str, Any], **expected) -> None:
    """Arguments and constants, by name."""
    given = named(found) if isinstance(found, HopperAttentionArguments) else found
    assert {name: given[name] for name in expected} == expected


def test_maps_of_a_batch():
    made = arguments()
    assert made.q == made.out == Map((B, S, H, D), (*ROWS, 1), (1, 64, 1, 64))
    assert made.k == made.v == Map((B, S, KV, D), (*KEYS, 1), (1, 128, 1, 64))
    check(
        made, seqlen_q=S, seqlen_k=S, head_tiles=H, q_heads_per_kv=4, CONSUMERS=2, PARTS=2, COLUMNS=128, BLOCK=128,
        num_m=4, num_n=B * H, tiles=4 * B * H, RAGGED_Q=False, RAGGED_K=False, PAGE=0, KIND="dynamic", batch_rows_k=0,
        page_rows_k=0,
    )  # fmt: skip


def test_maps_that_clip_at_any_row():
    plan = make(varlen=True, tokens_q=900, tokens_k=1100)
    rows, keys = (0, *ROWS[1:]), (0, *KEYS[1:])
    made = HopperAttentionArguments(plan, AttentionLayout(rows, keys, keys, rows))
    wrap = 2**31 - 2**16
    for one, (_, row, head), heads, box in ((made.q, ROWS, H, 64), (made.k, KEYS, KV, 128)):
        assert one == Map((wrap, wrap, 2**30, heads, D), (2**34 - row, row, row, head, 1), (1, 1, box, 1, 64))
        # Around 64 bits: to the row that is meant, and so far before the extent's end as there are rows left.
        origin, length, first = 300, 77, 70
        at = (2**30, origin + length, 2**30 - length + first, 1, 0)
        place = sum(x * stride for x, stride in zip(at, one.strides, strict=True)) * 2 % 2**64
        assert place == ((origin + first) * row + head) * 2
        assert one.shape[2] - at[2] == length - first
    numbers = {"sequences": B + 1, "tokens_q": 900, "tokens_k": 1100, "tiles": plan.schedule.full_tiles}
    check(made, **numbers, ORDER="row_major", RAGGED_Q=True, RAGGED_K=True)


@pytest.mark.parametrize(("page", "rows"), [(8, 8), (16, 16), (128, 128), (256, 128)])
def test_maps_of_pages(page, rows):
    lies = (page * KV * D, KV * D, D)
    made = arguments(k=lies, v=(2 * lies[0], *lies[1:]), table=40, page_size=page, pages=99, lengths=True)
    assert made.k.box == made.v.box == (1, 1, rows, 1, 64)
    check(made, PAGE=page, page_rows_k=page, page_rows_v=2 * page, table_stride=40)
    check(made, batch_rows_k=0, batch_rows_v=0, RAGGED_Q=False, RAGGED_K=True)


def test_lengths_of_dense_keys():
    made = arguments(v=(2 * KEYS[0], *KEYS[1:]), lengths=True)
    check(made, batch_rows_k=S, batch_rows_v=2 * S, RAGGED_K=True)


def test_packs_have_their_heads_side_by_side():
    made = arguments(seqlen_q=30)
    assert made.plan.pack == 4
    assert made.q.box == made.out.box == (1, 16, 4, 64)
    check(made, PACK=4, head_tiles=2, q_heads_per_kv=1)


def test_masks_and_caps():
    made = arguments(window=(30, 4), softcap=20.0)
    check(made, left=30, right=4, LEFT=True, RIGHT=True, CAPPED=True)
    assert made.scales(0.5) == (20 * math.log2(math.e), 0.025)
    check(arguments(causal=True), right=0, LEFT=False, RIGHT=True, CAPPED=False)
    assert arguments().scales(0.5) == (0.5 * math.log2(math.e), 0.0)
    check(arguments(causal=True, alignment="top_left"), TOP_LEFT=True)


def test_log_sum_exps_lie_as_the_layout_says():
    check(arguments(lse=(4000, 1, 500), return_lse=True), lse_batch=4000, lse_row=1, lse_head=500)


def test_every_box_is_one_that_tensor_maps_have():
    for dims in ((64, 64), (128, 128), (256, 256), (192, 128), (8, 8), (80, 40)):
        for more in ({}, {"page_size": 8, "pages": 9, "lengths": True}, {"softcap": 2.0}, {"seqlen_q": 2}):
            made = arguments(head_dim=dims[0], head_dim_v=dims[1], **more)
            for one in (made.q, made.k, made.v, made.out):
                assert len(one.box) == len(one.shape) == len(one.strides) <= 5
                assert all(extent <= 256 for extent in one.box)
                assert 2 * one.box[-1] == 128


def test_what_varies_is_not_compiled_in():
    numbers = NAMES[NAMES.index("base") : NAMES.index("C")]
    pointers = {"signals", "quarantine", "bounds", "records", "claims"}
    assert {p.name for p in attend.params if p.do_not_specialize} == set(numbers) - pointers
    # A deadline of seconds leaves 31 bits, whatever the first one was; so does a base in time.
    assert {p.name for p in attend.params if p.annotation_type == "i64"} == {"base", "allowed"}


def test_what_lies_anywhere_does_so_in_both_kernels():
    # What has an alignment of its own: the workspace's counters, a trace's log, records and claims.
    pointers = {*OPERANDS[4:], "signals", "quarantine", "bounds", "records", "claims"} - {"base", "reset"}
    for kernel in (attend, portable_kernel.attention):
        unaligned = {p.name for p in kernel.params if p.do_not_specialize_on_alignment}
        assert pointers - unaligned == {"counters", "log", "records", "claims"}


# Launches -------------------------------------------------------------------------------------------------------------


class Written:
    """Stands in for `Launcher`: what it was made from, and with what it was called."""

    made: list[Written] = []  # noqa: RUF012

    def __init__(self, kernel, grid, arguments) -> None:
        self.grid, self.arguments = grid, flat(arguments)
        self.calls: list[dict[str, Any]] = []
        Written.made.append(self)

    def __call__(self, stream, *varying) -> None:
        varies = [name for name, x in self.arguments.items() if x is VARIES or isinstance(x, Descriptor)]
        self.calls.append(dict(zip(varies, varying, strict=True)))


class Lists:
    """Stands in for `list_sequences`."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.compiled_for: tuple[Any, ...] = ()
        #: Launches of the attention that had been made when this kernel was loaded.
        self.loaded_behind: int | None = None

    #: Of a compiled kernel, which this is as well.
    function = packed_metadata = None

    @property
    def run(self):
        if self.loaded_behind is None:  # as Triton's: asked for it, a kernel is loaded
            self.loaded_behind = sum(len(launcher.calls) for launcher in Written.made)
        return lambda *given: self.launches.append((given[:3], *given[9:]))

    def warmup(self, *filled, grid, **_):
        self.compiled_for = filled
        return self


@pytest.fixture
def written(monkeypatch):
    """Launches are written down; nothing is compiled."""
    monkeypatch.setattr(launching, "Launcher", Written)
    monkeypatch.setattr(attend, "warmup", lambda *filled, grid, **options: (filled, grid, options))
    lists = Lists()
    monkeypatch.setattr(portable, "list_sequences", lists)
    Written.made = []
    return Written.made, lists


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_launch_gives_each_argument_its_address(written, kind):
    made, lists = written
    plan = make(kind, sinks=True, return_lse=True, causal=True)
    x = AttentionOperands(bf16(B, S, H, D), bf16(B, S, KV, D), bf16(B, S, KV, D), bf16(B, S, H, D), 0.1,
                 torch.zeros(B, H, S), torch.zeros(H))  # fmt: skip
    launch = HopperAttentionLaunch(plan, attention_gpu.layout_of(x))
    launch(x)
    launch(x._replace(scale=0.2))
    (launcher,) = made
    first, second = launcher.calls
    expected = {"q_map": x.q, "k_map": x.k, "v_map": x.v, "out_map": x.out, "lse": x.lse, "sinks": x.sinks}
    assert {name: first[name] for name in expected} == {name: t.data_ptr() for name, t in expected.items()}
    assert second["scale"] == pytest.approx(2 * first["scale"])
    assert ("counters" in first) == (kind == "dynamic")
    if kind == "dynamic":
        assert second["base"] - first["base"] == plan.schedule.full_tiles + plan.workers
    assert launcher.grid == (plan.workers, 1, 1)
    assert not lists.launches


def test_a_launch_of_8_bits_gives_the_scales(written):
    made, _ = written
    plan = make(dtype="float8_e4m3fn", scaled=True, causal=True)
    e4m3 = [torch.zeros(B, S, n, D).to(torch.float8_e4m3fn) for n in (H, KV, KV)]
    scales = [torch.ones(1, n).expand(B, n) for n in (H, KV)] + [torch.ones(1, 1).expand(B, KV)]
    given = dict(zip(("scale_q", "scale_k", "scale_v"), scales, strict=True))
    x = AttentionOperands(*e4m3, bf16(B, S, H, D), 0.1, **given)
    launch = HopperAttentionLaunch(plan, attention_gpu.layout_of(x))
    launch(x)
    (launcher,) = made
    (call,) = launcher.calls
    assert [call[f"scale_{name}"] for name in "qkv"] == [scale.data_ptr() for scale in scales]
    given = launcher.arguments
    assert given["SCALES"] == (0, 1, 0, 1, 0, 0)
    assert (given["SCALED"], given["CONVERT_REGISTERS"], given["PARTS"], given["COLUMNS"]) == (True, 32, 1, 128)
    assert given["q_map"].shape == (B, S, H, D)
    arguments = HopperAttentionArguments(plan, attention_gpu.layout_of(x))
    assert (arguments.k.box, arguments.v.box) == ((1, 128, 1, 128), (1, 128, 1, 64))


def test_a_launch_that_is_traced_is_another_kernel_with_a_log(written):
    made, _ = written
    x = AttentionOperands(*(bf16(B, S, n, D) for n in (H, KV, KV, H)), 0.1)
    plan = make()
    launch, log = HopperAttentionLaunch(plan, attention_gpu.layout_of(x)), SpanLog(plan, torch.device("cpu"))
    for probe in (None, log, log, None):
        launch(x, probe=probe)
    plain, traced = made
    assert [launcher.arguments["TRACE"] for launcher in made] == [False, True]
    assert len(plain.calls) == len(traced.calls) == 2
    assert "log" not in plain.calls[0]
    assert traced.calls[1]["log"] == log.words.data_ptr()
    assert log.words.shape[0] == plan.schedule.grid.tiles
    assert {name for name, given in traced.arguments.items() if given != plain.arguments[name]} == {"log", "TRACE"}


def test_a_launch_of_packed_sequences_makes_their_list_first(written):
    made, lists = written
    plan = make(varlen=True, tokens_q=900, page_size=16, pages=99, lengths=True)
    bounds, lengths, table = (torch.zeros(n, dtype=torch.int32) for n in (B + 1, B, 32))
    x = AttentionOperands(bf16(900, H, D), bf16(99, 16, KV, D), bf16(99, 16, KV, D), bf16(900, H, D), 0.1,
                 cu_seqlens_q=bounds, seqlens_k=lengths, block_table=table.view(1, 32).expand(B, 32))  # fmt: skip
    launch = HopperAttentionLaunch(plan, attention_gpu.layout_of(x))
    launch(x)
    launch(x)
    call = made[0].calls[1]
    assert (call["cu_seqlens_q"], call["seqlens_k"], call["block_table"]) == tuple(
        t.data_ptr() for t in (bounds, lengths, x.block_table)
    )
    names = list_sequences.arg_names
    first, second = (dict(zip(names, filled, strict=True)) for _, *filled in lists.launches)
    assert first["starts"] == second["starts"] == call["starts"]
    assert first["order"] == second["order"] == call["order"]
    assert second["seqlens_k"] == lengths.data_ptr()
    names = ("sequences", "tokens_q", "tokens_k", "seqlen_k", "head_tiles", "POSITIONS")
    numbers = {name: second[name] for name in names}
    assert numbers == {
        "sequences": B + 1, "tokens_q": 900, "tokens_k": 0, "seqlen_k": plan.problem.seqlen_k,
        "head_tiles": H // plan.pack, "POSITIONS": plan.positions,
    }  # fmt: skip
    assert dict(zip(list_sequences.arg_names, lists.compiled_for, strict=True))["starts"].numel() >= B + 2


class Arrived:
    """Signals of a chunk each."""

    def use(self) -> GateWords:
        return GateWords(torch.ones(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 7, 3)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_launch_is_told_how_keys_arrive(written, kind, ragged):
    chunks = Chunks((0, 100, B * S)) if ragged else Chunks.uniform(B * S, 200)
    plan = make(kind, keys=Incoming(chunks))
    x = AttentionOperands(*(bf16(B, S, n, D) for n in (H, KV, KV, H)), 0.1)
    launch = HopperAttentionLaunch(plan, attention_gpu.layout_of(x))
    for _ in range(2):
        launch(x, Awaited(Arrived(), None, 2.5, "attention"))
    (launcher,) = written[0]
    call = launcher.calls[1]
    assert (call["epoch"], call["key"], call["allowed"]) == (7, 3, 2_500_000_000)
    assert call["counters"], "the abort word lies behind them"
    assert ("bounds" in call) == ragged
    assert {"signals", "quarantine", "records", "claims", "op"} <= set(call)
    given = named(HopperAttentionArguments(plan, attention_gpu.layout_of(x)))
    assert (given["KEYS"], given["chunks"]) == (("ragged", 2) if ragged else ("uniform", 8))
    assert given["rows_per_chunk"] == (1 if ragged else 200)
    assert not given["CHAINED"], "a launch that waits for others lets none begin beside it"


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_shares_are_joined_by_a_second_launch(written, monkeypatch, kind):
    merges = Lists()
    monkeypatch.setattr(portable, "merge_shares", merges)
    problem = AttentionProblem(B, H, KV, 5, S, D, return_lse=True, sinks=True)
    found = next(policy.candidates(problem, H100, 7, kind=kind, splits=3))
    plan = of_candidate(problem, H100, "hopper", found, "a test's", ())
    x = AttentionOperands(bf16(B, 5, H, D), bf16(B, S, KV, D), bf16(B, S, KV, D), bf16(B, 5, H, D), 0.1,
                 torch.zeros(B, H, 5), torch.zeros(H))  # fmt: skip
    launch = HopperAttentionLaunch(plan, attention_gpu.layout_of(x))
    launch(x)
    assert merges.loaded_behind == 0, "what may wait for the host must not be on the device while code is loaded"
    (launcher,) = written[0]
    (call,) = launcher.calls
    ((_, partials, sums, out, lse, sinks, shares, rows, *_),) = merges.launches
    assert (out, lse, sinks) == tuple(t.data_ptr() for t in (x.out, x.lse, x.sinks))
    assert (shares, rows) == (3, B * 5 * H)
    assert call["out_map"] == partials
    assert call["lse"] == sums == partials + 4 * 3 * B * 5 * H * D
    assert "sinks" not in call, "a sink counts once"
    given = launcher.arguments
    assert (given["SPLIT_KEYS"], given["shares"], given["num_n"]) == (True, 3, B * H // plan.pack * 3)
    assert (given["lse_batch"], given["lse_row"], given["lse_head"]) == (5 * H, H, 1)
    assert given["out_map"].shape == (3 * B, 5, H, D)


def test_the_plan_s_backend_launches():
    x = AttentionOperands(*(bf16(B, S, n, D) for n in (H, KV, KV, H)), 0.1)
    layout = attention_gpu.layout_of(x)
    assert isinstance(attention_gpu.launch_of(make(), layout), HopperAttentionLaunch)
