"""Damaged files for everything that reads a file: each is read as what it is, or refused by name.

    PYTHONPATH=src:tests python -m soak.parsers [--files 10000] [--seed N] [--out DIR]      # hypothesis
    PYTHONPATH=src:tests python -m soak.parsers --atheris PARSER [--files 10000] [--seed N]     # for Python 3.11, 3.12

A file is random bytes, or a good one that was cut, spliced or had bytes changed; of JSON and YAML also another value in
the place of any value. A parser may return, or raise what its docstring says, with the file's name; nothing else. With
atheris, which is no dependency, what is drawn is guided by the parser's coverage. Each run adds a row to
DIR/cpu/parsers.json; the exit status is 1 if a parser ended otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import inspect
import io
import json
import logging
import os
import struct
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from soak.launches import RESULTS, add
from tilestream.arrival import files
from tilestream.arrival.files import find_matrix
from tilestream.plan import tuned
from tilestream_tools import records
from tilestream_tools.sweep import record as sweep_record
from tilestream_tools.sweep import suite
from tilestream_tools.trace import perfetto
from tilestream_tools.warm import calls

#: What reads files; and the reader of packs, which imports Triton.
READING = (files, tuned, records, sweep_record, suite, perfetto, calls)
PACKS = "tilestream_tools.warm.kernel_cache"


class Parser(NamedTuple):
    """What reads a file, the file's ending, good contents, and what may be raised.

    Attributes
    ----------
    tree
        A good content as a value of JSON, and how such a value becomes a file's content; None: bytes alone.
    """

    read: Callable[[Path], object]
    ending: str
    good: bytes
    tree: Any
    encode: Callable[[Any], bytes]
    raises: tuple[type[Exception], ...]


def _json(tree: Any) -> bytes:
    return json.dumps(tree).encode()


def _safetensors(header: Any) -> bytes:
    text = _json(header)
    return struct.pack("<Q", len(text)) + text + bytes(64)


def _npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros((4, 4), "f4"))
    return file.getvalue()


def _tuned(path: Path) -> object:
    tuned.forget()
    return tuned._read(path)


def _model(path: Path) -> object:
    return calls.described(path, (), (), None, "1,16", "64", None)


def _pack(path: Path) -> object:
    kernel_cache = importlib.import_module(PACKS)
    cache = path.with_name("cache")
    with mock.patch.multiple(kernel_cache, made_by=lambda: _BY, folder=lambda: cache):
        return kernel_cache.unpack(path)


def _tar(tree: Any) -> bytes:
    """A pack of kernels. Its manifest has the digests of its files unless the tree says others."""
    inner = tree if isinstance(tree, dict) else {"": tree}
    texts = {
        str(name): (value if isinstance(value, str) else json.dumps(value)).encode() for name, value in inner.items()
    }
    manifest = inner.get("tilestream.json")
    if isinstance(manifest, dict) and manifest.get("files") == "all":
        digests = {name: hashlib.sha256(text).hexdigest() for name, text in texts.items() if name != "tilestream.json"}
        texts["tilestream.json"] = _json(manifest | {"files": digests})
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, text in texts.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text))
    return file.getvalue()


_HEADER = {
    "__metadata__": {"format": "pt"}, "x": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
    "y": {"dtype": "F16", "shape": [16], "data_offsets": [32, 64]},
}  # fmt: skip
_SUITE = {"dtype": "bfloat16", "shapes": [{"m": 16, "n": 32, "k": 64, "name": "a"}, {"m": 1, "n": 2, "k": 3}]}
_POINT = {
    "shape": "16x32x64", "name": "a", "dtype": "bfloat16", "by": "green", "taken": 1, "left": 2, "units": 3,
    "implementation": "ours", "queues": 1, "seconds": 1e-3, "low": 1e-3, "high": 2e-3, "rounds": 3, "tflops": 1.0,
    "plan": "x", "error": 0.0, "more": {"watts": 1.0},
}  # fmt: skip
_SWEEP = {"kind": "tilestream sweep", "schema": sweep_record.SCHEMA, "about": {}, "points": [_POINT], "refused": []}
_TUNED = {"device": {"problem": {"knobs": {"tile_m": 128}, "seconds": 1e-3}}}
_TRACE = {
    "otherData": {"launches": [{
        "op": "matmul", "label": "x", "workers": 2, "tiles": 1, "begin": 0.0, "end": 2.0,
        "arrivals": {"0": [1.0, None]}, "started": {"0": 0.5},
    }]},
    "traceEvents": [
        {"ph": "X", "pid": 1, "tid": 100, "cat": "compute", "name": "t", "ts": 0.0, "dur": 1.0,
         "args": {"batch": 0, "pm": 0, "pn": 0, "k_begin": 0, "k_end": 1}},
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "x"}},
    ],
}  # fmt: skip

_MODEL = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 100, "torch_dtype": "bfloat16", "text_config": None, "attention_bias": True, "mlp_bias": False,
}  # fmt: skip
_BY = {"tilestream": "0", "triton": "3", "python": "3", "triton's files": "0"}
_PACK = {
    "tilestream.json": {**_BY, "files": "all"}, "ABC2/gemm.json": {"target": {"backend": "cuda"}},
    "ABC2/gemm.cubin": "code", "ABC3/gemm.json": {},
}  # fmt: skip

PARSERS: dict[str, Parser] = {
    "safetensors": Parser(
        lambda path: find_matrix(path, "x"), ".safetensors", _safetensors(_HEADER), _HEADER, _safetensors,
        (ValueError, TypeError),
    ),
    "the only matrix": Parser(
        find_matrix, ".safetensors", _safetensors(_HEADER), _HEADER, _safetensors, (ValueError, TypeError)
    ),
    "npy": Parser(find_matrix, ".npy", _npy(), None, _json, (ValueError, TypeError)),
    "suite": Parser(lambda path: suite.load(str(path)), ".yaml", _json(_SUITE), _SUITE, _json, (ValueError,)),
    "sweep": Parser(sweep_record.read, ".json", _json(_SWEEP), _SWEEP, _json, (ValueError,)),
    "tuned": Parser(_tuned, ".json", _json(_TUNED), _TUNED, _json, ()),
    "trace": Parser(perfetto.load, ".json", _json(_TRACE), _TRACE, _json, (ValueError,)),
    "model": Parser(_model, ".json", _json(_MODEL), _MODEL, _json, (ValueError,)),
    "pack": Parser(_pack, ".tar", _tar(_PACK), _PACK, _tar, (ValueError,)),
}  # fmt: skip

GONE = object()
_VALUES = st.just(GONE) | st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
    | st.sampled_from([0, -1, 2**31, 2**63, "F32", "x", [], {}]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=6,
)  # fmt: skip


def _places(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path to every value of a tree."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [at, *(place for key, value in inner for place in _places(value, (*at, key)))]


def _with(tree: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A tree with another value at a place; `GONE`: without that."""
    if not place:
        return None if value is GONE else value
    if value is GONE and len(place) == 1:
        kept = [one for one in (tree if isinstance(tree, dict) else range(len(tree))) if one != place[0]]
        return {one: tree[one] for one in kept} if isinstance(tree, dict) else [tree[one] for one in kept]
    made = dict(tree) if isinstance(tree, dict) else list(tree)
    made[place[0]] = _with(tree[place[0]], place[1:], value)
    return made


@st.composite
def contents(draw: st.DrawFn, parser: Parser) -> bytes:
    """What is in a file."""
    how = draw(st.sampled_from(["random", "cut", "bytes", "splice", "value", "value", "value"]))
    good = parser.good
    if how == "value" and parser.tree is not None:
        tree = parser.tree
        for _ in range(draw(st.integers(1, 2))):
            tree = _with(tree, draw(st.sampled_from(_places(tree))), draw(_VALUES))
        return parser.encode(tree)
    if how == "random":
        return draw(st.binary(max_size=200))
    if how == "cut":
        return good[: draw(st.integers(0, len(good)))]
    if how == "splice":
        at, to = sorted(draw(st.tuples(st.integers(0, len(good)), st.integers(0, len(good)))))
        return good[:at] + draw(st.binary(max_size=20)) + good[to:]
    changed = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        changed[draw(st.integers(0, len(good) - 1))] = draw(st.integers(0, 255))
    return bytes(changed)


def attempt(parser: Parser, path: Path, content: bytes) -> tuple[str, str]:
    """How reading ended: ``read``, or the exception's name; and what is wrong with that."""
    path.write_bytes(content)
    try:
        parser.read(path)
    except parser.raises as error:
        named = path.name in str(error)
        return type(error).__name__, "" if named else f"does not name the file: {type(error).__name__}: {error}"
    except Exception as error:
        return type(error).__name__, f"{type(error).__name__}: {error}"
    return "read", ""


def _read_many(
    name: str, path: Path, count: int, seed: int, ends: Counter[str], wrong: dict[str, str]
) -> None:  # fmt: skip
    """So many files of one parser."""

    @seeded(seed)
    @settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(contents(PARSERS[name]))
    def each(content: bytes) -> None:
        end, fault = attempt(PARSERS[name], path, content)
        ends[f"{name}: {end}"] += 1
        if fault:
            wrong.setdefault(f"{name} {fault[:40]}", f"{name}: {fault[:200]}: {content[:300]!r}")

    each()


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """A block without the package's warnings: what is tuned warns of a file that it cannot read."""
    logger = logging.getLogger("tilestream")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def run(count: int, seed: int) -> dict[str, Any]:
    """Read so many files, as many of each parser; a row of the record."""
    began, cpu = time.monotonic(), time.process_time()
    ends: Counter[str] = Counter()
    wrong: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, _without_warnings():
        for name, parser in PARSERS.items():
            path = Path(folder) / f"damaged{parser.ending}"
            _read_many(name, path, max(1, count // len(PARSERS)), seed, ends, wrong)
    spent = {"seconds": round(time.monotonic() - began, 1), "cpu_seconds": round(time.process_time() - cpu, 1)}
    return {
        "seed": seed,
        **spent,
        "files": ends.total(),
        "ends": dict(sorted(ends.items())),
        "wrong": list(wrong.values()),
    }


def by_coverage(name: str, count: int, seed: int | None, out: Path) -> None:
    """Read so many files of one parser, which hypothesis draws from what atheris gives; add a row, and end the process.

    It ends with the first file that a parser does not end rightly on.
    """
    import atheris

    parser, folder = PARSERS[name], tempfile.mkdtemp()
    path = Path(folder) / f"damaged{parser.ending}"
    ends: Counter[str] = Counter()
    began, cpu = time.monotonic(), time.process_time()

    @given(contents(parser))
    def each(content: bytes) -> None:
        end, fault = attempt(parser, path, content)
        ends[f"{name}: {end}"] += 1
        if not fault and ends.total() < count:
            return
        wrong = [f"{name}: {fault[:200]}: {content[:300]!r}"] if fault else []
        spent = {"seconds": round(time.monotonic() - began, 1), "cpu_seconds": round(time.process_time() - cpu, 1)}
        found = {**spent, "by": "atheris", "files": ends.total(), "ends": dict(sorted(ends.items())), "wrong": wrong}
        status = add("cpu", out, "parsers", seed, lambda number: {"seed": number, **found})
        sys.stdout.flush()
        os._exit(status)  # libFuzzer calls any other end a fault

    for module in (*READING, *([importlib.import_module(PACKS)] if name == "pack" else [])):  # not torch's functions
        for function in map(inspect.unwrap, filter(callable, list(vars(module).values()))):
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                atheris.instrument_func(function)
    atheris.Setup(
        [sys.argv[0], "-max_len=2000", "-len_control=0", *([f"-seed={seed}"] if seed is not None else [])],
        each.hypothesis.fuzz_one_input,
    )
    with _without_warnings():
        atheris.Fuzz()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Read damaged files.")
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, help="default: the number of runs in the record")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument("--atheris", choices=PARSERS, metavar="PARSER", help=", ".join(PARSERS))
    given = parser.parse_args(arguments)
    if given.atheris:
        by_coverage(given.atheris, given.files, given.seed, given.out)
    return add("cpu", given.out, "parsers", given.seed, lambda seed: run(given.files, seed))


if __name__ == "__main__":
    sys.exit(main())
