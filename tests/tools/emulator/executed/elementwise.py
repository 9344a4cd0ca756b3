"""Single operations of Triton, compiled for AMD, executed, and compared with numpy: the oracle is not the emulator's.

Each is compiled as LLVM lowers it there: a float32 division is ten instructions, a 64-bit one hundreds, a reduction
moves lanes by DPP and LDS.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from executed.problems import Built, Operands, answer

COUNT = 512


@triton.jit
def _floats(x, y, out, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    a, b = tl.load(x + i), tl.load(y + i)
    results = (
        a + b, a - b, a * b, a / b, tl.fma(a, b, a), tl.maximum(a, b), tl.minimum(a, b), tl.abs(a), tl.floor(a),
        tl.ceil(a), tl.sqrt(tl.abs(a)), tl.exp2(a), tl.log2(tl.abs(a)), tl.rsqrt(tl.abs(a)), tl.exp(a),
        tl.where(a < b, a, b), a.to(tl.float16).to(tl.float32), a.to(tl.bfloat16).to(tl.float32),
        a.to(tl.int32).to(tl.float32), tl.clamp(a, -1.0, 1.0), (a.to(tl.float64) * b).to(tl.float32),
        tl.sum(a, 0) + tl.zeros_like(a), tl.max(a, 0) + tl.zeros_like(a), tl.cumsum(tl.floor(a), 0), tl.flip(a, 0),
        tl.sort(a, 0),
    )  # fmt: skip
    for n in tl.static_range(len(results)):
        tl.store(out + n * COUNT + i, results[n])


@triton.jit
def _integers(x, y, out, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    a, b = tl.load(x + i), tl.load(y + i)
    s = b & 31
    wide = a.to(tl.int64) * b
    unsigned, other = a.to(tl.uint32, bitcast=True), b.to(tl.uint32, bitcast=True)
    results = (
        a + b, a * b, a // b, a % b, a & b, a | b, a ^ b, ~a, a << s, a >> s, tl.maximum(a, b), tl.minimum(a, b),
        tl.abs(a), tl.umulhi(unsigned, other).to(tl.int32, bitcast=True),
        (unsigned // other).to(tl.int32, bitcast=True), (unsigned >> s.to(tl.uint32)).to(tl.int32, bitcast=True),
        (wide >> 13).to(tl.int32), (wide // 77777).to(tl.int32),
        (a < b).to(tl.int32), a.to(tl.int8).to(tl.int32), a.to(tl.int16).to(tl.int32), a.to(tl.uint8).to(tl.int32),
        tl.sum(a, 0) + tl.zeros_like(a), tl.max(a, 0) + tl.zeros_like(a), tl.min(a, 0) + tl.zeros_like(a),
        tl.cumsum(a, 0), tl.xor_sum(a, 0) + tl.zeros_like(a), tl.argmax(a, 0) + tl.zeros_like(a), tl.sort(a, 0),
    )  # fmt: skip
    for n in tl.static_range(len(results)):
        tl.store(out + n * COUNT + i, results[n])


def _truncated(x: np.ndarray) -> np.ndarray:
    return np.clip(np.trunc(x.astype(np.float64)), -(2**31), 2**31 - 1).astype(np.int32).astype(np.float32)


def _bfloat16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).bfloat16().float().numpy()


def _in_f64(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: function(a.astype(np.float64))


#: By name, in the kernels' order: numpy's own, and how many units in the last place the result may be off.
FLOATS: dict[str, tuple[Callable[..., Any], int]] = {
    "+": (np.add, 0), "-": (np.subtract, 0), "*": (np.multiply, 0), "/": (np.divide, 0),
    "fma": (lambda a, b: a.astype(np.longdouble) * b + a, 0), "maximum": (np.maximum, 0), "minimum": (np.minimum, 0),
    "abs": (lambda a, b: np.abs(a), 0), "floor": (lambda a, b: np.floor(a), 0), "ceil": (lambda a, b: np.ceil(a), 0),
    "sqrt": (lambda a, b: np.sqrt(np.abs(a)), 1), "exp2": (_in_f64(np.exp2), 1),
    "log2": (_in_f64(lambda a: np.log2(np.abs(a))), 1), "rsqrt": (_in_f64(lambda a: 1 / np.sqrt(np.abs(a))), 1),
    "exp": (_in_f64(np.exp), 64), "where": (lambda a, b: np.where(a < b, a, b), 0),
    "to float16": (lambda a, b: a.astype(np.float16), 0), "to bfloat16": (lambda a, b: _bfloat16(a), 0),
    "to int32": (lambda a, b: _truncated(a), 0), "clamp": (lambda a, b: np.clip(a, -1, 1), 0),
    "float64 product": (lambda a, b: a.astype(np.float64) * b, 0),
    "sum": (lambda a, b: a.astype(np.float64).sum(), 1024),
    "max": (lambda a, b: a.max(), 0), "cumsum": (lambda a, b: np.floor(a).astype(np.float64).cumsum(), 0),
    "flip": (lambda a, b: a[::-1], 0), "sort": (lambda a, b: np.sort(a), 0),
}  # fmt: skip


#: What the interpreter computes otherwise: it rounds twice, cuts bits off, and has numpy's numbers beyond int32.
NOT_INTERPRETED = ("float fma", "float to bfloat16", "float to int32")


def _divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Towards zero, as C's."""
    return np.trunc(a.astype(np.float64) / b).astype(np.int64)


def _u(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32).astype(np.uint64)


INTEGERS: dict[str, Callable[..., Any]] = {
    "+": lambda a, b: a + b, "*": lambda a, b: a * b, "//": _divided, "%": lambda a, b: a - _divided(a, b) * b,
    "&": lambda a, b: a & b, "|": lambda a, b: a | b, "^": lambda a, b: a ^ b, "~": lambda a, b: ~a,
    "<<": lambda a, b: a << (b & 31), ">>": lambda a, b: a.astype(np.int32) >> (b & 31), "maximum": np.maximum,
    "minimum": np.minimum, "abs": lambda a, b: np.abs(a),
    "umulhi": lambda a, b: _u(a.astype(np.int32)) * _u(b.astype(np.int32)) >> np.uint64(32),
    "unsigned //": lambda a, b: _u(a.astype(np.int32)) // _u(b.astype(np.int32)),
    "unsigned >>": lambda a, b: _u(a.astype(np.int32)) >> (b & 31).astype(np.uint64),
    "64 bits >>": lambda a, b: a * b >> 13,
    "64 bits //": lambda a, b: [int(x) // 77777 if x >= 0 else -(-int(x) // 77777) for x in a * b],
    "<": lambda a, b: a < b, "to int8": lambda a, b: a.astype(np.int8), "to int16": lambda a, b: a.astype(np.int16),
    "to uint8": lambda a, b: a.astype(np.uint8), "sum": lambda a, b: a.sum(), "max": lambda a, b: a.max(),
    "min": lambda a, b: a.min(), "cumsum": lambda a, b: a.cumsum(), "xor_sum": lambda a, b: np.bitwise_xor.reduce(a),
    "argmax": lambda a, b: a.argmax(), "sort": lambda a, b: np.sort(a),
}  # fmt: skip


def _numbers() -> tuple[np.ndarray, np.ndarray]:
    """Finite numbers of all sizes, and the edges of float32."""
    generator = np.random.default_rng(5)
    a, b = generator.standard_normal((2, COUNT)) * np.exp2(generator.integers(-60, 60, (2, COUNT)))
    a[:300], b[:300] = generator.standard_normal((2, 300)) * 8
    a[300:308] = 0.0, -0.0, 2.0**-149, 2.0**-126, 3.4e38, 1e-42, 1.5, 2.5
    b[304:308] = 0.1, 3e-39, 2.0**-127, -7.0
    a[308:316] = (
        1.0,
        1.0,
        -87.5,
        3e38,
        5.0,
        1e-5,
        2.0**100,
        3e38,
    )  # quotients and inverses that are subnormal; too large
    b[308:316] = 1.2e38, 3e38, 2.9e38, 3e38, -(2.0**127), 2e37, 3.3e38, 1e-2
    return a.astype(np.float32), b.astype(np.float32)


def _integer_numbers() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(6)
    x, y = generator.integers(-(2**31), 2**31, (2, COUNT), dtype=np.int64)
    y[: COUNT // 2] = generator.integers(1, 100, COUNT // 2)
    return x, y


def rows(arch: str) -> list[dict[str, Any]]:
    """Operation by operation: how many elements are off by more than they may be."""
    a, b = _numbers()
    found = _run(_floats, arch, a, b, len(FLOATS))
    made = []
    with np.errstate(all="ignore"):
        for got, (name, (oracle, ulps)) in zip(found, FLOATS.items(), strict=True):
            wanted = np.broadcast_to(np.asarray(oracle(a, b)).astype(np.float32), COUNT)
            off = np.abs(got.astype(np.float64) - wanted) > ulps * np.spacing(np.abs(wanted)).astype(np.float64)
            wrong = (got != wanted) & ~(np.isnan(got) & np.isnan(wanted)) & (off | ~np.isfinite(wanted))
            made.append(
                {"arch": arch, "operation": f"float {name}", "wrong": int(wrong.sum()), "at": _first(wrong, a, b)}
            )
    x, y = _integer_numbers()
    found = _run(_integers, arch, x.astype(np.int32), y.astype(np.int32), len(INTEGERS))
    for got, (name, oracle) in zip(found, INTEGERS.items(), strict=True):
        wanted = np.broadcast_to(np.asarray(oracle(x, y)).astype(np.int64, casting="unsafe").astype(np.int32), COUNT)
        wrong = got != wanted
        made.append({"arch": arch, "operation": f"int {name}", "wrong": int(wrong.sum()), "at": _first(wrong, x, y)})
    return made


def interpreted(archs: tuple[str, ...], file: Path) -> list[dict[str, Any]]:
    """Of Triton's interpreter, if this process has it: write what both kernels give to a file. Else compare with it.

    Both round alike but for what is off by units in the last place: see `FLOATS`.
    """
    a, b = _numbers()
    x, y = (one.astype(np.int32) for one in _integer_numbers())
    x >>= 12  # the interpreter's sums may not overflow
    asked = (("float", _floats, a, b, FLOATS), ("int", _integers, x, y, INTEGERS))
    if triton.knobs.runtime.interpret:
        found = {}
        for what, kernel, one, other, names in asked:
            out = torch.zeros((len(names), COUNT), dtype=torch.from_numpy(one).dtype)
            with np.errstate(all="ignore"):
                kernel[(1,)](torch.from_numpy(one), torch.from_numpy(other), out, COUNT)
            found[what] = out.numpy()
        np.savez(file, **found)
        return []
    made = []
    with np.load(file) as wanted, np.errstate(all="ignore"):
        for arch, (what, kernel, one, other, names) in itertools.product(archs, asked):
            found = _run(kernel, arch, one, other, len(names))
            for got, want, name in zip(found, wanted[what], names, strict=True):
                if f"{what} {name}" in NOT_INTERPRETED:
                    continue
                ulps = 2 * FLOATS[name][1] if what == "float" else 0
                off = np.abs(got.astype(np.float64) - want) > ulps * np.spacing(np.abs(want)).astype(np.float64)
                wrong = (got != want) & ~(np.isnan(got) & np.isnan(want)) & (off | ~np.isfinite(want))
                at = _first(wrong, one, other)
                made.append({"arch": arch, "operation": f"{what} {name}", "wrong": int(wrong.sum()), "at": at})
    return made


def _first(wrong: np.ndarray, a: np.ndarray, b: np.ndarray) -> str:
    return f"{a[wrong][0]!r}, {b[wrong][0]!r}" if wrong.any() else ""


def _run(kernel: Any, arch: str, a: np.ndarray, b: np.ndarray, count: int) -> np.ndarray:
    o, like = Operands(), torch.from_numpy(np.zeros((count, COUNT), a.dtype))
    x, y, out = (
        o.of(one, name) for one, name in ((torch.from_numpy(a), "x"), (torch.from_numpy(b), "y"), (like, "out"))
    )
    Built(kernel, {"num_warps": 4}, arch).launch((x, y, out, COUNT), o.memory, 1, seed=3)
    return answer(out, like).numpy()
