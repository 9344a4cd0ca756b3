"""Launching CDNA's kernels: which plans get them, and what they are launched with."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language")

from tilestream.arrival.flat import Awaited
from tilestream.core.gpu_specs import named
from tilestream.core.operands import AttentionOperands, Epilogue, GemmOperands
from tilestream.kernels.cdna.attention import attend
from tilestream.kernels.cdna.attention_softmax import narrowed
from tilestream.kernels.cdna.gemm import gemm
from tilestream.launch.cdna.arguments import Arguments
from tilestream.launch.cdna.attention_arguments import CdnaAttentionArguments
from tilestream.launch.cdna.attention_launch import CdnaAttentionLaunch
from tilestream.launch.cdna.launch import GemmLaunch
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.portable.attention_launch import AttentionLaunch
from tilestream.launch.portable.launch import GemmLaunch as PortableLaunch
from tilestream.launch.trace import SpanLog
from tilestream.ops.attention_gpu import launch_of, layout_of
from tilestream.ops.gpu import How, _make
from tilestream.plan import plan
from tilestream.plan.attention_planner import plan_attention
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.runtime.device_workspace import Words


class Recorder:
    """Stands for a kernel: compiled for the first launch, launched directly."""

    def __init__(self):
        self.launches, self.options = [], None

    def warmup(self, *filled, grid, **options):
        assert self.options is None, "it is compiled once"
        self.options = options
        return SimpleNamespace(
            run=lambda x, y, z, stream, function, metadata, *rest: self.launches.append(((x, y, z), rest[3:])),
            function=0, packed_metadata=(),
        )  # fmt: skip


@pytest.fixture
def recorder(monkeypatch):
    made = Recorder()
    monkeypatch.setattr(GemmLaunch, "kernel", made)
    monkeypatch.setattr(CdnaAttentionLaunch, "kernel", made)
    return made


def words(size=64):
    return Words(torch.zeros(size, dtype=torch.int64), None, None, 7, 0)


def check_relaunch(first, second, *tensors):
    """From the second launch on: addresses, and nothing else changed."""
    (grid, filled), (again, direct) = first, second
    assert grid == again
    assert direct[: len(tensors)] == tuple(tensor.data_ptr() for tensor in tensors)
    assert not any(isinstance(one, torch.Tensor) for one in direct)
    assert len(direct) == len(filled)


# GEMM -----------------------------------------------------------------------------------------------------------------


def made(m=256, n=256, k=512, **more):
    return plan(m, n, k, dtype="bfloat16", device=named("mi300x"), layout="nt", backend="cdna", **more)


def gemm_operands(m=256, n=256, k=512, **epilogue):
    a, b, out = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((m, k), (n, k), (m, n)))
    return GemmOperands(a, b.t(), out, Epilogue(**epilogue))


def test_a_plan_of_the_backend_is_launched_by_it():
    assert type(_make(gemm_operands(), How(), made())) is GemmLaunch
    portable = plan(256, 256, 512, dtype="bfloat16", device=named("mi300x"), layout="nt")
    assert type(_make(gemm_operands(), How(), portable)) is PortableLaunch
    layout = layout_of(attention_operands())
    assert type(launch_of(attention_plan(), layout)) is CdnaAttentionLaunch
    assert type(launch_of(attention_plan(dtype="float32", backend=None), layout)) is AttentionLaunch


def test_operands_that_are_no_vectors_are_refused_before_the_launch():
    wide = torch.zeros(256, 520, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"a of strides \(520, 1\): .* no multiple of 16; take backend='portable'"):
        _make(gemm_operands()._replace(a=wide[:, :512]), How(), made())


def test_what_gemm_is_launched_with(recorder):
    x = gemm_operands(bias=torch.zeros(256, dtype=torch.bfloat16))
    chosen, own = made(schedule="dynamic", tile=(128, 128)), words()
    launch = _make(x, How(), chosen)
    for _ in range(2):
        launch.issue(0, x, own, None, None)
    (grid, filled), options = recorder.launches[0], recorder.options
    assert grid == (chosen.workers, 1, 1)
    assert options == {"num_warps": 4, "waves_per_eu": 2}
    given = dict(zip(gemm.arg_names, filled, strict=True))
    config = given["C"]
    given |= dataclasses.asdict(config)
    assert given["x"] is x.a
    assert given["y"] is x.b
    assert given["counters"] is own.counters
    assert (given["base"], given["stride_x"], given["stride_y"], given["rows"], given["k"]) == (7, 512, 512, 256, 512)
    assert (config.X.K_MAJOR, config.Y.K_MAJOR, given["DIRECT"], given["STAGES"]) == (True, True, False, 2)
    assert (given["BIAS"], given["VECTOR_C"], given["ROW_CHUNKS"], given["EVEN_K"]) == ("columns", 4, "none", True)
    check_relaunch(*recorder.launches, x.a, x.b, x.out)


def test_a_portable_launch_that_is_traced_has_a_program_a_worker(recorder, monkeypatch):
    monkeypatch.setattr(PortableLaunch, "kernel", recorder)
    x, chosen = gemm_operands(), plan(256, 256, 512, dtype="bfloat16", device=named("mi300x"), layout="nt")
    _make(x, How(), chosen).issue(0, x, words(), None, SpanLog(chosen, torch.device("cpu")))
    assert [grid for grid, _ in recorder.launches] == [(chosen.workers, 1, 1)]


def test_an_output_at_an_odd_address_is_stored_an_element_at_a_time(recorder):
    x = gemm_operands()._replace(out=torch.zeros(256 * 256 + 1, dtype=torch.bfloat16)[1:].view(256, 256))
    _make(x, How(), made()).issue(0, x, words(), None, None)
    assert dict(zip(gemm.arg_names, recorder.launches[0][1], strict=True))["C"].VECTOR_C == 1


def test_what_lies_too_far_apart_goes_through_registers():
    chosen = made(variant="direct", tile=(128, 128))
    near = Arguments(chosen, Layout((0, 512, 1), (0, 1, 512), (0, 256, 1)))
    assert near.direct
    assert near.tile.stages == 3
    far = Arguments(chosen, Layout((0, 2**24, 1), (0, 1, 512), (0, 2**24, 1)))
    assert (far.direct, far.x.far, far.y.far) == (False, True, False)
    assert far.config.OFFSETS_64BIT
    # gfx942 cannot read across: an operand that is not K-major is transposed on the way, through registers.
    across = Arguments(chosen, Layout((0, 1, 256), (0, 1, 512), (0, 256, 1)))
    assert (across.direct, across.x.turned) == (False, True)


# Attention ------------------------------------------------------------------------------------------------------------

PROBLEM = AttentionProblem(2, 4, 2, 300, 500, 128, causal=True, return_lse=True)


def attention_plan(device="mi355x", backend: str | None = "cdna", **change):
    return plan_attention(replace(PROBLEM, **change), device=named(device), backend=backend)


def attention_operands(columns=128):
    q, k, v = (
        torch.zeros(2, rows, heads, columns, dtype=torch.bfloat16) for rows, heads in ((300, 4), (500, 2), (500, 2))
    )
    return AttentionOperands(q, k, v, torch.zeros_like(q), 0.25, torch.zeros(2, 4, 300))


def test_what_attention_is_launched_with(recorder):
    x, chosen, own = attention_operands(), attention_plan(), words()
    launch = launch_of(chosen, layout_of(x))
    for _ in range(2):
        launch.issue(0, x, own)
    (grid, filled), options = recorder.launches[0], recorder.options
    assert grid == (chosen.workers, 1, 1)
    assert options == {"num_warps": chosen.warps, "waves_per_eu": max(1, chosen.warps // 4)}
    given = dict(zip(attend.arg_names, filled, strict=True))
    assert (given["q"], given["lse"], given["counters"]) == (x.q, x.lse, own.counters)
    assert given["sinks"] is given["block_table"] is given["starts"] is None
    numbers = [given[name] for name in ("base", "seqlen_q", "seqlen_k", "head_tiles", "q_heads_per_kv")]
    assert numbers == [7, 300, 500, 4, 2]
    assert [given[f"stride_k{axis}"] for axis in "brh"] == [500 * 256, 256, 128]
    assert [given[f"lse_{axis}"] for axis in ("batch", "row", "head")] == [4 * 300, 1, 300]
    assert given["scale"] == pytest.approx(0.25 * 1.4426950408889634)
    config = given["C"]
    assert (config.DIRECT, config.RIGHT, config.LEFT, config.VECTOR_OUT) == (True, True, False, 4)
    check_relaunch(*recorder.launches, x.q, x.k, x.v, x.out)


def test_keys_that_arrive_are_another_kernels():
    launch = launch_of(attention_plan(), layout_of(attention_operands()))
    with pytest.raises(ValueError, match="keys arrive, and the CDNA kernel has no gate"):
        launch(attention_operands(), Awaited(None))


def test_what_copies_of_attention_do_not_reach_goes_through_registers():
    near = layout_of(attention_operands())
    chosen = attention_plan()
    assert CdnaAttentionArguments(chosen, near).direct
    far = CdnaAttentionArguments(chosen, near._replace(k=(2**40, 2**25, 128)))
    assert (far.direct, far.config().KEYS_64BIT, far.config().Q_64BIT) == (False, True, False)
    assert not CdnaAttentionArguments(chosen, near._replace(q=(2**40, 2**24, 128))).direct
    out = CdnaAttentionArguments(chosen, near._replace(out=(2**40, 2**24, 128)))
    assert (out.direct, out.config().OUT_64BIT) == (True, True)


def test_an_output_of_odd_strides_or_address_is_stored_an_element_at_a_time():
    layout = layout_of(attention_operands())
    assert CdnaAttentionArguments(attention_plan(), layout).config().VECTOR_OUT == 4
    assert CdnaAttentionArguments(attention_plan(), layout, aligned=False).config().VECTOR_OUT == 1
    assert CdnaAttentionArguments(attention_plan(), layout._replace(out=(300 * 514, 514, 128))).config().VECTOR_OUT == 2


class Bits:
    """float32 in a register, of which `narrowed` looks at the bits."""

    def __init__(self, x):
        self.x = x

    def to(self, dtype, bitcast=False):
        return Bits(self.x.view(dtype) if bitcast else self.x.astype(dtype))

    def __add__(self, other):
        return Bits(self.x + np.int32(other))

    def __rshift__(self, other):
        return Bits(self.x >> np.int32(other))


def test_weights_are_rounded_to_nearest(monkeypatch):
    """What gfx942 has no instruction for, by the kernel's own text; numpy knows no bfloat16, so torch reads it."""
    text = narrowed.fn
    dtypes = SimpleNamespace(int32=np.int32, int16=np.int16, bfloat16=np.int16)
    monkeypatch.setitem(text.__globals__, "gl", dtypes)
    weights = np.concatenate([np.random.default_rng(0).random(10000), [0.0, 1.0, 256.0, 1e-40, 3e38]]).astype(
        np.float32
    )
    found = torch.from_numpy(text(Bits(weights), np.int16, 3).x.copy()).view(torch.bfloat16).double().numpy()
    right = torch.from_numpy(weights).bfloat16().double().numpy()
    # To the nearest, as torch; where two are as near, the one above.
    assert (np.abs(found - weights) <= np.abs(right - weights)).all()
    assert (found >= right).all()
    nan = text(Bits(np.array([np.nan, np.inf], np.float32)), np.int16, 3).x.copy()
    nan, inf = torch.from_numpy(nan).view(torch.bfloat16).double().tolist()
    assert np.isnan(nan)
    assert inf == np.inf
