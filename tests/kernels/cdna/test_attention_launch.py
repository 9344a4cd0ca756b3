"""Launching CDNA's attention: who gets it, and what it is launched with."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language")

from tilestream.arrival.flat import Awaited
from tilestream.core.gpu_specs import named
from tilestream.core.operands import AttentionOperands
from tilestream.kernels.cdna.attention import attend
from tilestream.kernels.cdna.attention_softmax import narrowed
from tilestream.launch.cdna.attention_arguments import CdnaAttentionArguments
from tilestream.launch.cdna.attention_launch import CdnaAttentionLaunch
from tilestream.launch.portable.attention_launch import AttentionLaunch
from tilestream.ops.attention_gpu import launch_of, layout_of
from tilestream.plan.attention_planner import plan_attention
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.runtime.device_workspace import Words

NAMES = attend.arg_names
PROBLEM = AttentionProblem(2, 4, 2, 300, 500, 128, causal=True, return_lse=True)


def plan(device="mi355x", backend: str | None = "cdna", **change):
    return plan_attention(replace(PROBLEM, **change), device=named(device), backend=backend)


def operands(columns=128):
    q, k, v = (
        torch.zeros(2, rows, heads, columns, dtype=torch.bfloat16) for rows, heads in ((300, 4), (500, 2), (500, 2))
    )
    return AttentionOperands(q, k, v, torch.zeros_like(q), 0.25, torch.zeros(2, 4, 300))


class Recorder:
    """Stands for the kernel: compiled at the first launch, launched directly from then on."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        def launch(*filled, **options):
            self.launches.append((grid, filled, options))
            return SimpleNamespace(
                run=lambda x, y, z, stream, function, metadata, *rest: self.launches.append(((x, y, z), rest[3:], {})),
                function=0, packed_metadata=(),
            )  # fmt: skip

        return launch


def test_a_plan_of_the_backend_is_launched_by_it():
    layout = layout_of(operands())
    assert type(launch_of(plan(), layout)) is CdnaAttentionLaunch
    assert type(launch_of(plan(dtype="float32", backend=None), layout)) is AttentionLaunch


def test_what_it_is_launched_with(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(CdnaAttentionLaunch, "kernel", recorder)
    x, made = operands(), plan()
    launch = launch_of(made, layout_of(x))
    words = Words(torch.zeros(64, dtype=torch.int64), None, None, 7, 0)
    for _ in range(2):
        launch.issue(0, x, words)
    (grid, filled, options), (again, direct, _) = recorder.launches
    assert grid == again == (made.workers, 1, 1)
    assert options == {"num_warps": made.warps, "waves_per_eu": max(1, made.warps // 4)}
    given = dict(zip(NAMES, filled, strict=True))
    assert (given["q"], given["lse"], given["counters"]) == (x.q, x.lse, words.counters)
    assert given["sinks"] is given["block_table"] is given["starts"] is None
    numbers = [given[name] for name in ("base", "seqlen_q", "seqlen_k", "head_tiles", "q_heads_per_kv")]
    assert numbers == [7, 300, 500, 4, 2]
    assert [given[f"stride_k{axis}"] for axis in "brh"] == [500 * 256, 256, 128]
    assert [given[f"lse_{axis}"] for axis in ("batch", "row", "head")] == [4 * 300, 1, 300]
    assert given["scale"] == pytest.approx(0.25 * 1.4426950408889634)
    config = given["C"]
    assert (config.DIRECT, config.RIGHT, config.LEFT, config.VECTOR_OUT) == (True, True, False, 4)
    # From the second launch on: addresses, and nothing else changed.
    assert direct[:4] == tuple(tensor.data_ptr() for tensor in (x.q, x.k, x.v, x.out))
    assert [one for one in direct if isinstance(one, torch.Tensor)] == []
    assert len(direct) == len(filled)


def test_keys_that_arrive_are_another_kernels():
    launch = launch_of(plan(), layout_of(operands()))
    with pytest.raises(ValueError, match="keys arrive, and the CDNA kernel has no gate"):
        launch(operands(), Awaited(None))


def test_what_copies_do_not_reach_goes_through_registers():
    near = layout_of(operands())
    made = plan()
    assert CdnaAttentionArguments(made, near).direct
    far = CdnaAttentionArguments(made, near._replace(k=(2**40, 2**25, 128)))
    assert (far.direct, far.config().KEYS_64BIT, far.config().Q_64BIT) == (False, True, False)
    assert not CdnaAttentionArguments(made, near._replace(q=(2**40, 2**24, 128))).direct
    out = CdnaAttentionArguments(made, near._replace(out=(2**40, 2**24, 128)))
    assert (out.direct, out.config().OUT_64BIT) == (True, True)


def test_an_output_of_odd_strides_or_address_is_stored_an_element_at_a_time():
    layout = layout_of(operands())
    assert CdnaAttentionArguments(plan(), layout).config().VECTOR_OUT == 4
    assert CdnaAttentionArguments(plan(), layout, aligned=False).config().VECTOR_OUT == 1
    assert CdnaAttentionArguments(plan(), layout._replace(out=(300 * 514, 514, 128))).config().VECTOR_OUT == 2


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
