"""Calls with arguments that make no sense, drawn from the signatures of the public functions.

    PYTHONPATH=src:tests python -m soak.malformed [--calls 10000] [--seed N] [--out DIR]

A call is a right one of which one to three arguments are replaced by something of `JUNK`. It may be right all the same;
otherwise it raises an exception of `REFUSALS`, with a message, before anything is launched. Each run adds a row to
DIR/cpu/malformed.json; the exit status is 1 if a call ended otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import math
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import tilestream as ts
from soak.launches import RESULTS, add
from tilestream.launch.cpu.launch import CpuLaunch
from tilestream.ops import execute

#: What a refusal may be. A file that is not there is an OSError.
REFUSALS = (TypeError, ValueError, OSError, NotImplementedError)


def _all_there(rows: int) -> ts.Arrival:
    arrival = ts.Arrival.uniform(max(1, rows // 2), 2)
    for chunk in range(2):
        arrival.signal(chunk)
    return arrival


def _stream() -> ts.Stream:
    return ts.stream_in(torch.ones(6, 4))


def _tensors() -> dict[str, Callable[[], Any]]:
    """Tensors by name: shapes, dtypes, layouts, devices."""
    made: dict[str, Callable[[], Any]] = {}
    for shape in (
        (),
        (0,),
        (1,),
        (4,),
        (5,),
        (6, 4),
        (4, 5),
        (4, 6),
        (5, 4),
        (0, 4),
        (4, 0),
        (2, 6, 4),
        (1, 1, 1, 1, 1),
    ):
        made[f"float32 {list(shape)}"] = lambda shape=shape: torch.ones(shape)
    for dtype in (
        "float64",
        "float16",
        "bfloat16",
        "int8",
        "int32",
        "int64",
        "uint8",
        "bool",
        "complex64",
        "float8_e4m3fn",
    ):
        for shape in ((6, 4), (4, 5), (5,)):
            made[f"{dtype} {list(shape)}"] = lambda dtype=dtype, shape=shape: torch.ones(shape).to(
                getattr(torch, dtype)
            )
    return made | {
        "expanded": lambda: torch.ones(1, 4).expand(6, 4), "transposed": lambda: torch.ones(4, 6).t(),
        "strided": lambda: torch.ones(12, 8)[::2, ::2], "with gradient": lambda: torch.ones(6, 4, requires_grad=True),
        "meta": lambda: torch.ones(6, 4, device="meta"), "sparse": lambda: torch.eye(6, 4).to_sparse(),
        "sparse csr": lambda: torch.eye(6, 4).to_sparse_csr(),
        "conjugate": lambda: torch.ones(6, 4, dtype=torch.complex64).conj(),
        "parameter": lambda: torch.nn.Parameter(torch.ones(6, 4)), "nan": lambda: torch.full((6, 4), math.nan),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(6, 4), 0.1, 0, torch.qint8),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(3, 4)]),
        "no storage": lambda: torch.ones(6, 4).untyped_storage(), "numpy": lambda: np.ones((6, 4), "f4"),
    }  # fmt: skip


#: What no parameter, or another one, takes; made anew for each call.
JUNK: dict[str, Callable[[], Any]] = {
    **{
        repr(value): lambda value=value: value
        for value in (
            None, True, False, 0, 1, 2, 3, -1, -7, 2**31 - 1, 2**31, 2**63, -(2**63) - 1, 2**70, 0.5, -0.0, math.nan,
            math.inf, -math.inf, 1e308, 2j, "", "x", "auto", "static", "stream_k", "float32", "relu", "cpu",
            "cuda", "cuda:99", "meta", "/nowhere/x.npy", "\0", "\ud800", "é" * 300, b"x", (), (1,), (0, 3, 6), (1, 2),
            (16, 16), (0, 0), (-1, 4), (2**40, 2**40), ..., NotImplemented, torch.float32, torch.int8, torch.float16,
            torch.device("meta"), int, Exception,
        )
    },
    "[]": list, "[1, 2]": lambda: [1, 2], "[0, 3, 6]": lambda: [0, 3, 6], "['a']": lambda: ["a"], "{}": dict,
    "{1}": lambda: {1}, "object()": object, "lambda": lambda: lambda: 0, "range(3)": lambda: range(3),
    "iter([])": lambda: iter([]), "numpy scalar": lambda: np.float32(1), "numpy int": lambda: np.int64(2),
    "path": lambda: Path("/nowhere"), "arrival of 6": lambda: _all_there(6), "arrival of 5": lambda: _all_there(5),
    "arrival of 2": lambda: _all_there(2), "a plan": lambda: ts.plan(6, 5, 4), "a stream": _stream,
    "itself": lambda: JUNK, **_tensors(),
}  # fmt: skip

_A, _B = "float32 [6, 4]", "float32 [4, 5]"


def _ones(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.ones(shape)


#: The functions, and the arguments of a right call.
FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Callable[[], Any]]]] = {
    "matmul": (ts.matmul, {"a": JUNK[_A], "b": JUNK[_B]}),
    "mm": (ts.mm, {"a": JUNK[_A], "b": JUNK[_B]}),
    "bmm": (ts.bmm, {"a": _ones(2, 6, 4), "b": _ones(2, 4, 5)}),
    "addmm": (ts.addmm, {"input": _ones(5), "a": JUNK[_A], "b": JUNK[_B]}),
    "linear": (ts.linear, {"x": JUNK[_A], "weight": _ones(5, 4)}),
    "grouped_mm": (ts.grouped_mm, {
        "a": JUNK[_A], "b": _ones(2, 4, 5), "offsets": lambda: torch.tensor([2, 6], dtype=torch.int32),
    }),
    "attention": (ts.attention, {name: _ones(2, 6, 4, 8) for name in "qkv"}),
    "merge_attention": (ts.merge_attention, {
        "o_a": _ones(2, 6, 4, 8), "lse_a": _ones(2, 4, 6), "o_b": _ones(2, 6, 4, 8), "lse_b": _ones(2, 4, 6),
    }),
    "plan": (ts.plan, {"m": lambda: 6, "n": lambda: 5, "k": lambda: 4}),
    "grouped_plan": (ts.grouped_plan, {"m": lambda: 6, "n": lambda: 5, "k": lambda: 4, "groups": lambda: 2}),
    "attention_plan": (ts.attention_plan, {"seqlen_q": lambda: 6}),
    "Arrival.uniform": (ts.Arrival.uniform, {"rows_per_chunk": lambda: 3, "num_chunks": lambda: 2}),
    "Arrival.ragged": (ts.Arrival.ragged, {"bounds": lambda: [0, 3, 6]}),
    "SourceArrival": (ts.SourceArrival, {
        "counts": lambda: torch.zeros(2, 3, dtype=torch.int32), "capacity": lambda: 4,
    }),
    "stream_in": (ts.stream_in, {"source": JUNK[_A]}),
    "stream_experts": (ts.stream_experts, {
        "weights": _ones(2, 4, 5), "offsets": lambda: torch.tensor([2, 6], dtype=torch.int32),
    }),
    "worker_limit": (ts.worker_limit, {"count": lambda: 2}),
}  # fmt: skip


class Malformed(NamedTuple):
    """A function's name, and by parameter the name of what of `JUNK` it is given."""

    function: str
    given: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"{self.function}({', '.join(f'{name}={junk}' for name, junk in self.given)})"


_NAMES = list(JUNK)


@functools.cache
def parameters(function: str) -> list[str]:
    return list(inspect.signature(FUNCTIONS[function][0]).parameters)


def draw(rng: random.Random) -> Malformed:
    """A function, one to three of its parameters, and something for each."""
    function = rng.choice(sorted(FUNCTIONS))
    names = parameters(function)
    names = rng.sample(names, min(len(names), rng.randint(1, 3)))
    return Malformed(function, tuple((name, rng.choice(_NAMES)) for name in names))


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """A block in which the number of launches is counted: its only element."""
    count, run, inline = [0], CpuLaunch.run, execute._run_inline

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*how: Any) -> Any:
            count[0] += 1
            return real(*how)

        return call

    CpuLaunch.run, execute._run_inline = counting(run), counting(inline)  # type: ignore[method-assign]
    try:
        yield count
    finally:
        CpuLaunch.run, execute._run_inline = run, inline  # type: ignore[method-assign]


def attempt(one: Malformed, launches: list[int]) -> tuple[str, str]:
    """How a call ended: ``right``, or the exception's name; and what is wrong with that."""
    function, base = FUNCTIONS[one.function]
    arguments = {name: make() for name, make in base.items()} | {name: JUNK[junk]() for name, junk in one.given}
    launches[0] = 0
    made = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = function(**arguments)
    except REFUSALS as error:
        kind = next(kind for kind in REFUSALS if isinstance(error, kind)).__name__
        return kind, _wrong(error, launches[0])
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        kind = type(error).__name__
        if isinstance(error, RuntimeError) and str(error).startswith(f"{one.function}: "):
            return kind, _wrong(error, launches[0])  # as torch's own: an argument that requires a gradient
        return kind, f"{kind} at {_place(error)}: {error}"
    finally:
        for each in (made, *arguments.values()):
            if isinstance(each, ts.Stream):
                with contextlib.suppress(Exception):
                    each.wait(10.0)
                each.close()
    return "right", ""


def _wrong(error: BaseException, launches: int) -> str:
    if launches:
        return f"launched, and raised {type(error).__name__}: {error}"
    if not str(error).strip():
        return f"{type(error).__name__} without a message"
    if any(text in str(error) for text in _ACCIDENTS):
        return f"an accident at {_place(error)}: {error}"
    return ""


#: Python's and torch's own words, which name no argument.
_ACCIDENTS = (
    "'NoneType' object", "is not subscriptable", "object has no attribute", "unsupported operand type",
    "unhashable type", "object is not iterable", "not supported between", "cannot be interpreted as an integer",
    "is ambiguous", "Invalid device string", "must be Tensor, not", "incompatible function arguments",
    "only integer tensors of a single element", "embedded null",
)  # fmt: skip


def _place(error: BaseException) -> str:
    """Where it was raised, in the package if it was there."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [one for one in frames if "/tilestream" in one.filename] or frames
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"


def run(count: int, seed: int) -> dict[str, Any]:
    """Draw and make so many calls; a row of the record."""
    began, cpu = time.monotonic(), time.process_time()
    ends: Counter[str] = Counter()
    wrong: dict[str, str] = {}

    rng = random.Random(f"malformed {seed}")
    with counted() as launches:
        for _ in range(count):
            one = draw(rng)
            end, fault = attempt(one, launches)
            ends[end] += 1
            if fault:
                wrong.setdefault(fault[:40], f"{one}: {fault}"[:400])
    spent = {"seconds": round(time.monotonic() - began, 1), "cpu_seconds": round(time.process_time() - cpu, 1)}
    return {
        "seed": seed,
        **spent,
        "calls": ends.total(),
        "ends": dict(ends.most_common()),
        "wrong": list(wrong.values()),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make calls with arguments that make no sense.")
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, help="default: the number of runs in the record")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the records")
    given = parser.parse_args(arguments)
    return add("cpu", given.out, "malformed", given.seed, lambda seed: run(given.calls, seed))


if __name__ == "__main__":
    sys.exit(main())
