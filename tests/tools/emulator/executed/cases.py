"""What is executed: a table of problems by name. `executed.engine` runs them.

``quick`` ones are a sample: each kind of kernel and of hand-over once on one architecture or the other.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from executed.experts import CASES as EXPERTS
from executed.grouped import Grouped
from executed.problems import Arriving, Attention, Call, Gemm
from executed.small import CASES as SMALL
from executed.small import Small
from executed.sources import CASES as BY_SOURCE
from executed.sources import BySource

ARCHS = ("gfx942", "gfx950")
_UNIFORM = (0, 64, 128, 192)
_BF16, _F16, _F32 = torch.bfloat16, torch.float16, torch.float32
_FP8 = {
    "gfx942": (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), "gfx950": (torch.float8_e4m3fn, torch.float8_e5m2),
}  # fmt: skip
_OTHER_FP8 = {"gfx942": _FP8["gfx950"], "gfx950": _FP8["gfx942"]}


class Case(NamedTuple):
    """A problem. ``kernel``: the row of the table that it counts for."""

    kernel: str
    name: str
    arch: str
    make: Callable[[], Any]
    quick: bool


#: The portable GEMM: kernel's row, name, architecture of the sample, what there is beside the extents.
_PORTABLE: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("static", "bfloat16", "gfx942", {}),
    ("static", "float16, A by columns", "", {"dtype": _F16, "layout": "tn"}),
    ("static", "float32", "gfx950", {"dtype": _F32, "k": 96}),
    ("static", "tails", "", {"m": 97, "n": 75, "k": 83}),
    ("static", "tails of 8 elements", "", {"m": 136, "n": 72, "k": 136, "layout": "nn"}),
    ("queues", "stealing over two dies", "gfx950", {"schedule": "dynamic", "queues": 2, "dies": 2, "workers": 4}),
    ("queues", "epilogue", "gfx942", {"schedule": "dynamic", "epilogue": True, "k": 136, "dies": 2}),
    ("stream-K", "two dies", "gfx942", {"schedule": "stream_k", "k": 256, "workers": 4, "dies": 2}),
    ("stream-K", "epilogue", "gfx950", {"schedule": "stream_k", "k": 136, "workers": 4, "epilogue": True}),
    ("gated", "chunks out of order", "gfx950", {
        "schedule": "dynamic", "arriving": Arriving(_UNIFORM, (2, 0, 1)), "dies": 2}),
    ("gated", "a chunk is lost", "gfx942", {
        "schedule": "dynamic", "arriving": Arriving(_UNIFORM, (2, 0, 1), lost=(1,), allowed=300_000), "dies": 2}),
    ("gated", "a producer fails", "", {"schedule": "dynamic", "arriving": Arriving(_UNIFORM, (2, 0, 1), failed=1)}),
    ("gated", "ragged, arrival order", "gfx942", {
        "schedule": "dynamic", "arriving": Arriving((0, 5, 5, 130, 192), (3, 1, 0, 2), in_order=True), "dies": 2}),
    ("gated", "stream-K", "gfx950", {
        "schedule": "stream_k", "workers": 4, "dies": 2, "arriving": Arriving(_UNIFORM, (1, 2, 0))}),
    ("gated", "static", "", {"arriving": Arriving(_UNIFORM, (2, 1, 0)), "dies": 2}),
    ("captured", "queues", "gfx950", {"schedule": "dynamic", "queues": 2, "captured": True, "dies": 2}),
    ("captured", "stream-K", "", {"schedule": "stream_k", "workers": 4, "captured": True}),
    ("captured", "gated", "", {
        "schedule": "dynamic", "captured": True, "dies": 2, "arriving": Arriving(_UNIFORM, (2, 0, 1))}),
    ("captured", "a chunk is lost", "", {
        "schedule": "dynamic", "captured": True,
        "arriving": Arriving(_UNIFORM, (2, 0, 1), lost=(1,), allowed=300_000)}),
    ("copied", "arrival order, two dies", "gfx942", {
        "schedule": "dynamic", "k": 512, "dies": 2, "arriving": Arriving(_UNIFORM, in_order=True, copies=2)}),
    ("copied", "the deadline passes", "", {
        "schedule": "dynamic", "k": 512, "dies": 2,
        "arriving": Arriving(_UNIFORM, in_order=True, copies=2, allowed=1)}),
    ("copied", "one piece a chunk", "", {
        "schedule": "dynamic", "k": 512, "workers": 4, "dies": 2,
        "arriving": Arriving(_UNIFORM, in_order=True, copies=1)}),
)  # fmt: skip
#: Each schedule, and a gate, of the portable GEMM and of CDNA's: for dtypes other than bfloat16.
_SCHEDULES: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "portable": (
        ("queues", {"schedule": "dynamic", "queues": 2, "dies": 2, "workers": 4}),
        ("stream-K", {"schedule": "stream_k", "k": 256, "workers": 4, "dies": 2}),
        ("gated", {"schedule": "dynamic", "dies": 2, "arriving": Arriving(_UNIFORM, (2, 0, 1))}),
    ),
    "cdna": (
        ("queues", {"schedule": "dynamic", "queues": 2, "workers": 2, "dies": 2}),
        ("stream-K", {"schedule": "stream_k", "dies": 2}),
        ("gated", {"schedule": "dynamic", "dies": 2, "arriving": Arriving((0, 128, 256), (1, 0))}),
    ),
}  # fmt: skip
#: CDNA's GEMM, likewise.
_CDNA: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("static", "128x128", "gfx950", {"tile": (128, 128), "workers": 2}),
    ("queues", "128x128, stealing over two dies", "gfx942", {
        "tile": (128, 128), "schedule": "dynamic", "queues": 2, "workers": 2, "dies": 2}),
    ("queues", "128x128 staged", "", {"tile": (128, 128), "schedule": "dynamic", "copies": "staged", "layout": "nn"}),
    ("queues", "tails and epilogue", "", {
        "tile": (128, 128), "schedule": "dynamic", "m": 200, "n": 136, "k": 200, "epilogue": True}),
    ("stream-K", "128x128, two dies", "gfx950", {"tile": (128, 128), "schedule": "stream_k", "dies": 2}),
    ("gated", "chunks out of order", "gfx942", {
        "tile": (128, 128), "schedule": "dynamic", "arriving": Arriving((0, 128, 256), (1, 0)), "dies": 2}),
    ("gated", "a chunk is lost", "", {
        "tile": (128, 128), "schedule": "dynamic",
        "arriving": Arriving((0, 128, 256), (1, 0), lost=(0,), allowed=300_000)}),
    ("gated", "a producer fails", "", {
        "tile": (128, 128), "schedule": "dynamic", "arriving": Arriving((0, 128, 256), (1, 0), failed=1)}),
    ("gated", "ragged", "", {
        "tile": (128, 128), "schedule": "dynamic", "dies": 2,
        "arriving": Arriving((0, 5, 5, 130, 256), (3, 1, 0, 2))}),
    ("gated", "stream-K", "", {
        "tile": (128, 128), "schedule": "stream_k", "dies": 2, "arriving": Arriving((0, 128, 256), (1, 0))}),
    ("static", "128x128, float16", "", {"tile": (128, 128), "workers": 2, "dtype": _F16}),
    ("captured", "queues", "gfx950", {
        "tile": (128, 128), "schedule": "dynamic", "queues": 2, "captured": True, "dies": 2}),
    ("captured", "stream-K", "", {"tile": (128, 128), "schedule": "stream_k", "captured": True}),
    ("captured", "gated", "", {
        "tile": (128, 128), "schedule": "dynamic", "captured": True, "arriving": Arriving((0, 128, 256), (1, 0))}),
)  # fmt: skip
#: Attention: name, backends and architectures of the sample, the call.
_ATTENTION: tuple[tuple[str, tuple[tuple[str, str], ...], Call], ...] = (
    ("causal", (("portable", "gfx950"), ("cdna", "gfx942")), Call((128,), (192,), (2, 1), (64, 64), "causal")),
    ("causal, more keys", (), Call((128,), (512,), (2, 1), (64, 64), "causal")),
    ("full, 256 columns", (), Call((130,), (100,), (1, 1), (256, 256))),
    ("window, cap, sinks", (("cdna", "gfx950"),), Call((100,), (130,), (2, 2), (128, 128), "all")),
    ("top left", (), Call((100,), (60,), (1, 1), (64, 64), "top left")),
    ("packed", (), Call((64, 0, 130), (64, 33, 200), (2, 1), (64, 64), "causal", "packed")),
    ("packed, pages of 128", (("portable", "gfx942"),),
        Call((64, 33), (100, 77), (2, 1), (64, 64), "causal", "packed paged", page=128)),
    ("pages of 16", (), Call((64,), (100,), (2, 1), (64, 64), "window", "paged", page=16)),
    ("lengths, sinks", (), Call((64,), (100, 77), (2, 1), (64, 64), "sinks", "lengths")),
    ("a negative scale", (), Call((64,), (100,), (2, 1), (64, 64), "scale")),
    ("unequal columns", (), Call((70,), (90,), (2, 1), (40, 64), "causal")),
)  # fmt: skip
#: Attention with keys that arrive: name, architecture of the sample, the call, how they arrive.
_ARRIVING: tuple[tuple[str, str, Call, Arriving], ...] = (
    ("chunks out of order", "gfx942", Call((64,), (192,), (2, 1), (64, 64), "causal"), Arriving(_UNIFORM, (1, 0, 2))),
    ("ragged, two sequences", "", Call((64,), (96, 96), (2, 1), (64, 64), "causal"),
        Arriving((0, 5, 5, 100, 192), (3, 1, 0, 2))),
    ("a chunk is lost", "gfx950", Call((64,), (192,), (2, 1), (64, 64)),
        Arriving(_UNIFORM, (2, 0, 1), lost=(1,), allowed=300_000)),
    ("a producer fails", "", Call((64,), (192,), (2, 1), (64, 64)), Arriving(_UNIFORM, (2, 0, 1), failed=1)),
)  # fmt: skip
#: Attention whose words are its own, or without a queue: backend, name, what there is beside the call.
_WORDS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("portable", "static", {"kind": "static"}),
    ("portable", "captured", {"captured": True, "dies": 2}),
    ("portable", "captured, gated", {"captured": True, "arriving": Arriving(_UNIFORM, (1, 0, 2))}),
    ("cdna", "static", {"kind": "static"}),
    ("cdna", "captured", {"captured": True, "dies": 2}),
)
_SIZES, _EACH = (70, 0, 1, 40, 0, 25), (0, 1, 2, 3, 4, 5, 6)
#: The grouped GEMM: kernel's row, name, architecture of the sample, what there is; dtype None: 8 bits.
_GROUPED: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("rows", "empty groups, rows of none, two dies", "gfx942", {"dies": 2, "extent": 150}),
    ("rows", "static, float16, B by rows", "", {"schedule": "static", "layout": "n", "dtype": _F16}),
    ("rows", "float32", "", {"sizes": (33, 0, 7), "extent": 40, "dtype": _F32, "k": 96}),
    ("rows", "unaligned", "", {"sizes": (33, 0, 7), "extent": 40, "k": 37}),
    ("rows", "epilogue", "", {"scales": "row", "activation": "gelu"}),
    ("rows", "SwiGLU", "gfx950", {"activation": "swiglu"}),
    ("rows", "8 bits, epilogue", "", {"dtype": None, "scales": "row", "activation": "silu"}),
    ("rows", "8 bits, scales of blocks", "gfx942", {"dtype": None, "k": 272, "scales": "block"}),
    ("rows", "8 bits, scales of blocks, SwiGLU", "", {
        "dtype": None, "k": 272, "scales": "block", "activation": "swiglu"}),
    ("rows", "offsets that are none", "", {"sizes": (1, 1, 1), "ends": (5, 3, 40), "extent": 40}),
    ("K", "empty groups", "", {"along": "k", "extent": 150}),
    ("K", "epilogue", "gfx950", {"along": "k", "scales": "row", "activation": "gelu"}),
    ("gated", "matrices out of order", "gfx950", {"dies": 2, "arriving": Arriving(_EACH, (3, 0, 5, 2, 4, 1))}),
    ("gated", "a matrix is lost", "gfx942", {
        "arriving": Arriving(_EACH, (3, 0, 5, 4, 1), lost=(2,), allowed=300_000)}),
    ("captured", "queues", "", {"extent": 150, "captured": True}),
    ("captured", "gated", "", {"captured": True, "arriving": Arriving(_EACH, (0, 1, 2, 3, 4, 5))}),
)  # fmt: skip
#: The small kernels of the sample.
_SMALL_QUICK = {
    "gfx942": ("two attentions", "late peers and parts", "two calls, late peers"),
    "gfx950": ("ranks' parts", "a peer does not read", "a head is lost"),
}


def cases() -> Iterator[Case]:
    """All of them."""
    for arch, (kernel, name, quick, how) in itertools.product(ARCHS, _PORTABLE):
        yield _gemm("portable", kernel, name, arch, quick, {"m": 192, "n": 128, "k": 128, **how})
    for arch, (kernel, name, quick, how) in itertools.product(ARCHS, _CDNA):
        yield _gemm("cdna", kernel, name, arch, quick, {"m": 256, "n": 256, "k": 256, **how})
    for arch, dtype in itertools.product(ARCHS, (0, 1)):
        for backend, what, kinds in (
            ("portable", "", _FP8),
            ("cdna", "", _FP8),
            ("portable", "converted ", _OTHER_FP8),
        ):
            how = {"dtype": kinds[arch][dtype], "tile": (64, 64) if backend == "portable" else (128, 128)}
            extents = {"m": 128, "n": 64, "k": 128} if backend == "portable" else {"m": 256, "n": 128, "k": 256}
            name = what + str(how["dtype"]).removeprefix("torch.")
            quick = "gfx950" if not dtype and not what else ""
            yield _gemm(backend, "8 bits", name, arch, quick, extents | how)
    yield from _of_dtypes()
    for arch, (name, quick, call, arriving) in itertools.product(ARCHS, _ARRIVING):
        yield Case(
            "portable attention, gated", name, arch,
            functools.partial(
                Attention, "portable", arch, dataclasses.replace(call, dtype=_BF16), dies=2, arriving=arriving
            ),
            quick == arch,
        )  # fmt: skip
    for arch, (backend, name, how) in itertools.product(ARCHS, _WORDS):
        call = Call((64,), (192,), (2, 1), (64, 64), "causal", dtype=_BF16)
        yield Case(
            f"{backend} attention, words", name, arch, functools.partial(Attention, backend, arch, call, **how), False
        )
    for arch, (kernel, name, quick, how) in itertools.product(ARCHS, _GROUPED):
        given = {"sizes": _SIZES, "extent": 136, **how}
        if "dtype" in given and given["dtype"] is None:
            given["dtype"] = _FP8[arch][0]
        make = functools.partial(Grouped, arch, **given)
        yield Case(f"portable grouped GEMM, {kernel}", name, arch, make, quick == arch)
    for arch, (name, quick, how) in itertools.product(ARCHS, BY_SOURCE):
        make = functools.partial(BySource, arch, **how)
        yield Case("portable grouped GEMM by source", name, arch, make, quick == arch)
    for arch, ((kernel, name), steps) in itertools.product(ARCHS, (SMALL | EXPERTS).items()):
        yield Case(kernel, name, arch, functools.partial(Small, steps, arch), name in _SMALL_QUICK.get(arch, ()))
    for arch, backend, (name, quick, call), dtype in itertools.product(
        ARCHS, ("portable", "cdna"), _ATTENTION, (_BF16, _F16, _F32, torch.float8_e4m3fn)
    ):
        narrow = dtype in (_F32, torch.float8_e4m3fn)
        if narrow and (backend == "cdna" or name not in ("causal", "packed")):
            continue
        if dtype == _F16 and name not in ("causal", "pages of 16"):
            continue
        if backend == "cdna" and name == "a negative scale":  # which the plan refuses
            continue
        what = f"{name}, {str(dtype).removeprefix('torch.')}"
        yield Case(
            f"{backend} attention", what, arch,
            functools.partial(Attention, backend, arch, dataclasses.replace(call, dtype=dtype)),
            (backend, arch) in quick and dtype == _BF16,
        )  # fmt: skip


def _of_dtypes() -> Iterator[Case]:
    """Schedules and gates of dtypes that have none of their own above."""
    for arch, (backend, schedules) in itertools.product(ARCHS, _SCHEDULES.items()):
        dtypes = (_F16, _F32, _FP8[arch][0]) if backend == "portable" else (_F16, _FP8[arch][0])
        for dtype, (kernel, how) in itertools.product(dtypes, schedules):
            extents = {"m": 192, "n": 128, "k": 128} if backend == "portable" else {"m": 256, "n": 256, "k": 256}
            tile = (64, 64) if backend == "portable" else (128, 128)
            name = str(dtype).removeprefix("torch.")
            yield _gemm(backend, kernel, name, arch, "", {**extents, "dtype": dtype, "tile": tile, **how})
    for arch, dtype in itertools.product(ARCHS, (_F16, _F32, torch.float8_e4m3fn)):
        call = Call((64,), (192,), (2, 1), (64, 64), "causal", dtype=dtype)
        yield Case(
            "portable attention, gated", f"chunks out of order, {str(dtype).removeprefix('torch.')}", arch,
            functools.partial(Attention, "portable", arch, call, dies=2, arriving=Arriving(_UNIFORM, (1, 0, 2))), False,
        )  # fmt: skip


def _gemm(backend: str, kernel: str, name: str, arch: str, quick: str, how: dict[str, Any]) -> Case:
    return Case(f"{backend} GEMM, {kernel}", name, arch, lambda: Gemm(backend, arch, **how), quick == arch)
