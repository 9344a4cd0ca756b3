"""What the fast kernels refuse: each says why, raises that where it is forced, and leaves it to the portable kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from made_up import A100, BF16, H100, reason, refused

from tilestream.core.chunks import Chunks
from tilestream.core.gpu_specs import named
from tilestream.plan import Problem, plan_attention, plan_problem
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.policy import cdna_attention, cdna_tiles, hopper, hopper_attention
from tilestream.plan.problem import FNUZ, OCP, Incoming

MI300X, MI355X = named("mi300x"), named("mi355x")
LARGE, ROWS = 2**31 - 512, 2**29


class Kernel(NamedTuple):
    """A fast kernel: its backend and policy, a problem and devices that it takes, and what plans such problems."""

    backend: str
    policy: Any
    problem: Problem | AttentionProblem
    archs: tuple[str, ...]
    plan: Callable[..., Any]
    how: dict[str, Any]


GEMM, ATTENTION = Problem(4096, 4096, 4096, **BF16), AttentionProblem(4, 16, 16, 4096, 4096, 128)
KINDS, KIND = {"kinds": ("dynamic",)}, {"kind": "dynamic"}
KERNELS = {
    "hopper": Kernel("hopper", hopper, GEMM, ("sm_90",), plan_problem, KINDS),
    "cdna": Kernel("cdna", cdna_tiles, GEMM, ("gfx942", "gfx950"), plan_problem, KINDS),
    "hopper attention": Kernel("hopper", hopper_attention, ATTENTION, ("sm_90",), plan_attention, KIND),
    "cdna attention": Kernel("cdna", cdna_attention, ATTENTION, ("gfx942", "gfx950"), plan_attention, KIND),
}
EMPTY, COUNTS, CDNA = (
    "there is nothing to load",
    "it counts rows, columns and K in 31 bits",
    "it is for gfx942 and gfx950",
)
SCALE = "a scale that is not positive: it takes the largest product for the largest score"
REFUSED = [
    ("hopper", {}, A100, "it is for sm_90, this is sm_80"),
    ("hopper", {}, MI300X, "it is for sm_90, this is gfx942"),
    ("hopper", {"dtype": "float64", "out_dtype": "float64"}, H100,
     "it multiplies bfloat16, float16, float8_e4m3fn, float8_e5m2, float32, not float64"),
    ("hopper", {"dtype": "float32"}, H100,
     "it multiplies float32 as tf32, which torch.backends.cuda.matmul does not allow (or was not asked)"),
    ("hopper", {"out_dtype": "float64"}, H100, "its outputs are bfloat16, float16, float32, not float64"),
    *(("hopper", {name: 0}, H100, EMPTY) for name in ("m", "n", "k", "batch")),
    *(("hopper", {name: LARGE}, H100, f"{name}={LARGE}; {COUNTS}") for name in ("m", "n", "k")),
    ("hopper", {"no_tma": "b has strides"}, H100, "b has strides"),
    ("hopper", {"publishes": Incoming(Chunks((0, 5, 4096)))}, H100,
     "it publishes chunks of one size, and these are ragged"),
    ("hopper", {"publishes": Incoming(Chunks.uniform(40960, 4096)), "batch": 10}, H100,
     "it publishes the rows of one output, and there are 10"),
    ("hopper", {"publishes": Incoming(Chunks.uniform(2**24, 2**23)), "m": 2**24, "n": 2**16}, H100,
     f"rows of a chunk that is published, by column tiles: {2 * 2**12 * 2**23 + 2**24}; it counts them in 31 bits"),
    ("cdna", {}, H100, f"{CDNA}, of which the constants are known; this is sm_90"),
    ("cdna", {"dtype": "float32"}, MI300X,
     f"it multiplies bfloat16, float16, {FNUZ[0]}, {FNUZ[1]} on gfx942, not float32"),
    ("cdna", {"dtype": OCP[0]}, MI300X,
     f"{OCP[0]}: the matrix units of gfx942 take {FNUZ[0]} and {FNUZ[1]}, to which the same bits are other numbers, "
     "and this kernel does not convert"),
    ("cdna", {"dtype": FNUZ[1]}, MI355X,
     f"{FNUZ[1]}: the matrix units of gfx950 take {OCP[0]} and {OCP[1]}, to which the same bits are other numbers, "
     "and this kernel does not convert"),
    ("cdna", {"aligned": False}, MI355X, "a stride, an extent or an address is no multiple of 16"),
    ("cdna", {"m": 0}, MI355X, EMPTY),
    ("cdna", {"n": 2**31 - 512}, MI355X, f"n={LARGE}; {COUNTS}"),
    ("cdna", {"k": 112}, MI300X, "k=112; it has no whole K step of each tile"),
    ("hopper attention", {}, MI300X, "it is for sm_90, this is gfx942"),
    ("hopper attention", {"dtype": "float32"}, H100, "it multiplies bfloat16, float16, float8_e4m3fn, not float32"),
    ("hopper attention", {"scaled": True}, H100, "q, k or v has scales, which it applies to 8 bits"),
    ("hopper attention", {"dtype": OCP[0], "head_dim": 192}, H100,
     "192 columns; in 8 bits it takes 128, which leave room for warps that convert values"),
    ("hopper attention", {"dtype": OCP[0], "keys": Incoming(Chunks.uniform(4 * 4096, 512))}, H100,
     "keys arrive, and warps that convert values of 8 bits leave no registers for a gate"),
    ("hopper attention", {"head_dim": 256, "head_dim_v": 256, "keys": Incoming(Chunks.uniform(4 * 4096, 512))}, H100,
     "keys arrive, and sums of 256 columns leave no registers for a gate"),
    ("hopper attention", {"positive": False}, H100, SCALE),
    ("hopper attention", {"seqlen_q": 0}, H100, EMPTY),
    ("hopper attention", {"page_size": 4, "pages": 9}, H100, "pages of 4 keys; a copy brings 8 at least"),
    ("hopper attention", {"aligned": False}, H100, "a stride or an address is no multiple of 16 bytes, TMA's rule"),
    ("hopper attention", {"no_tma": "out begins 2 bytes"}, H100, "out begins 2 bytes"),
    ("hopper attention", {"batch": 2**13, "seqlen_q": 2**14}, H100,
     f"{2**27} rows of 16 heads; it counts log-sum-exps in 31 bits"),
    ("hopper attention", {"seqlen_k": ROWS}, H100, f"seqlen_k={ROWS}; it counts rows in 31 bits"),
    ("cdna attention", {}, H100, f"{CDNA}, of which the constants are known; this is sm_90"),
    ("cdna attention", {}, replace(MI300X, arch="gfx90a"), f"{CDNA}, of which the constants are known; this is gfx90a"),
    ("cdna attention", {}, replace(MI300X, l2=0), f"{CDNA}, of which the constants are known; this is gfx942"),
    *(("cdna attention", change, device, why) for device in (MI300X, MI355X) for change, why in (
        ({"dtype": "float32"}, "it multiplies bfloat16, float16, not float32"),
        ({"dtype": OCP[0]}, f"it multiplies bfloat16, float16, not {OCP[0]}"),
        ({"scaled": True}, "q, k or v has scales, which it does not apply"),
        ({"keys": Incoming(Chunks.uniform(4 * 4096, 512))}, "keys arrive, and it has no gate yet"),
        ({"positive": False}, SCALE),
        ({"seqlen_q": 0}, EMPTY),
        ({"aligned": False}, "a stride or an address is no multiple of 16 bytes, a lane's vector"),
        ({"seqlen_k": ROWS}, f"seqlen_k={ROWS}; it counts rows in 31 bits"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "device", "why"), REFUSED)
def test_what_it_does_not_do_goes_to_the_portable_kernel_with_the_reason(name, change, device, why):
    kernel = KERNELS[name]
    problem = replace(kernel.problem, **change)
    assert kernel.policy.refusal(problem, device) == why
    with refused(NotImplementedError, why):
        next(iter(kernel.policy.candidates(problem, device, 132, **kernel.how)))
    if device.arch in kernel.archs or kernel.plan is plan_attention:
        with pytest.raises(NotImplementedError) as raised:
            kernel.plan(problem, device=device, backend=kernel.backend)
        assert str(raised.value).startswith(f"backend={kernel.backend!r}: {why}; leave ")
    if "publishes" in change:
        with pytest.raises(NotImplementedError, match="publishes: the portable kernel signals no chunk") as raised:
            kernel.plan(problem, device=device)
        assert f"({why}): launch them one by one" in str(raised.value)
    elif device.arch in kernel.archs and not {"float64", LARGE, ROWS} & set(change.values()):
        made = kernel.plan(problem, device=device)
        assert (made.backend, reason(made, kernel.backend)) == ("portable", why)


@pytest.mark.parametrize(
    ("name", "change", "device"),
    [
        *(("hopper", {"m": 8, "n": 8, "k": 8, extent: LARGE - 1}, H100) for extent in ("m", "n", "k")),
        ("cdna", {"dtype": OCP[0]}, MI355X),
        ("cdna", {"dtype": FNUZ[0], "b_dtype": FNUZ[1]}, MI300X),
        ("cdna", {"k": 128}, MI300X),
        ("hopper attention", {"dtype": OCP[0], "scaled": True}, H100),
        ("hopper attention", {"page_size": 8, "pages": 9}, H100),
        ("cdna attention", {"page_size": 1, "pages": 9}, MI300X),
    ],
)
def test_what_is_just_within_it_takes(name, change, device):
    kernel = KERNELS[name]
    problem = replace(kernel.problem, **change)
    assert kernel.policy.refusal(problem, device) == ""
    for one in kernel.policy.candidates(problem, device, 132, **kernel.how):
        assert one.schedule.grid.tiles < 2**31
    made = kernel.plan(problem, device=device, backend=kernel.backend)
    assert made.backend == kernel.backend


@pytest.mark.parametrize(
    ("name", "device", "variants"),
    [("hopper attention", H100, "ordered, unordered"), ("cdna attention", MI355X, "direct, staged")],
)
def test_attention_refuses_a_variant_that_there_is_not(name, device, variants):
    policy = KERNELS[name].policy
    with refused(ValueError, f"variant='foo'; it must be one of {variants}, or None for the model's choice"):
        next(policy.candidates(ATTENTION, device, 132, kind="dynamic", variant="foo"))
    for variant in variants.split(", "):
        found = policy.candidates(ATTENTION, device, 132, kind="dynamic", variant=variant)
        assert {one.variant for one in found} == {variant}
