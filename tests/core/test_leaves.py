"""One function, three executions: the leaves are written in what Triton and Gluon compile, and compute the same there.

Compiling needs Triton, and no GPU. The interpreter runs in a process of its own, since it replaces ``triton.jit``.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from types import FunctionType

import pytest

from int31 import on_int31
from tilestream.core import attention, chunks, copy_items, integers, queues, raster, ring, sources, stream_k, swizzle

SRC = Path(integers.__file__).parents[2]


def functions_of(module) -> list[FunctionType]:
    members = vars(module).values()
    return [f for f in members if inspect.isfunction(f) and f.__module__ == module.__name__ and f.__name__[0] != "_"]


MODULES = (integers, raster, queues, ring, stream_k, swizzle, attention)
LEAVES = {f.__name__: f for m in MODULES for f in functions_of(m)}
LEAVES |= {"chunk_of": chunks.chunk_of, "pivot_tile": chunks.pivot_tile, "piece_chunk": copy_items.piece_chunk}
LEAVES |= {f.__name__: f for f in (sources.counts_word, sources.rows_word, sources.source_of_turn, sources.share_of)}
del LEAVES["next_base"]  # the host's alone: it counts in 64 bits

#: Arguments in each leaf's range; the first of each is also what compiling specialises nothing on.
ARGUMENTS = {
    "cdiv": [(1000, 7), (0, 5), (2**30, 3)],
    "part_begin": [(2**31 - 1, 100, 50), (10, 3, 2), (3, 7, 6)],
    "part_size": [(2**31 - 1, 100, 50), (10, 3, 0), (3, 7, 6)],
    "part_of": [(2**31 - 1, 100, 2**30), (10, 3, 9), (3, 7, 2)],
    "row_major": [(17, 5, 4), (2**31 - 2, 1, 2**31 - 1)],
    "grouped": [(17, 5, 4, 2), (19, 5, 4, 3), (2**31 - 2, 2**31 - 1, 1, 7)],
    "chunk_major": [(17, 5, 4, 2, 2, 1), (3, 5, 4, 4, 3, 2), (2**31 - 2, 2**31 - 1, 1, 2**30, 9, 4)],
    "longest_first": [(17, 5, 4, 2), (19, 5, 4, 3), (2**31 - 2, 1, 2**31 - 1, 7)],
    "home_queue": [(131, 8), (3, 1)],
    "left": [(10, 3), (10, 13)],
    "neighbour": [(17, 304, 8), (303, 304, 8), (9, 11, 8), (0, 1, 1)],
    "rank": [(3, 77, 131), (2**31 - 1, 1023, 1022), (0, 0, 5)],
    "ranked": [(3 * 1024 + 633, 131), (2**30 + 1023, 1023), (0, 5)],
    "remainder_tiles": [(133, 132), (5, 7)],
    "share_part": [(17, 23, 10), (17, 19, 10)],
    "slot": [(3, 2), (0, 0)],
    "step": [(1, 0, 3), (2, 1, 3), (0, 0, 1)],
    "skip": [(1, 1, 5, 3), (2, 0, 0, 3), (0, 1, 2**31 - 2, 1), (11, 1, 2**31 - 12, 12)],
    "before": [(2, 3), (0, 3), (0, 1)],
    "after": [(2, 3), (0, 3), (0, 1)],
    "swizzled": [(13, 5, 2, 4), (2**31 - 1, 2**31 - 1, 1, 2**30)],
    "row_of": [(133, 8), (0, 1), (2**31 - 1, 64)],
    "diagonal": [(100, 300), (300, 100), (0, 2**31 - 1)],
    "seen_keys": [(17, 200, 0, 64, 0, 300), (17, 0, 200, 64, 300, 300), (2**29, 0, 7, 2**30, 2**30, 2**29)],
    "key_blocks": [(128, 255, 44, 0, 300, 0, 300, 64), (0, 7, 0, 90, 12, 20, 10, 4), (0, 0, 0, 0, 9, 9, 0, 128)],
    "blocks_of_part": [
        (0, 12, 0, 0, 300, 400, 64), (5, 9, 700, 720, 100, 120, 64),
        (2**24, 2**24 + 9, 2**30, 2**30 + 9, 2**31 - 200, 2**31 - 129, 128),
    ],
    "share_of_keys": [(3, 5, 11, 12, 4, 2), (0, 0, 0, 2, 3, 2), (2**30, 2**30, 2**30 + 9, 2**31 - 1, 7, 6)],
    "late_bound": [
        (3, 203, 12, 19, 5, 40), (0, 2**25, 162, 94, 2**22, 2**23 - 1), (2**30, 2**31 - 1, 256, 0, 0, 1),
    ],
    "comes_before": [(10, 3, 9, 2), (10, 3, 10, 4), (10, 4, 10, 3)],
    "halved": [(3, 9, 100, 100), (3, 9, 101, 100), (3, 4, 50, 60)],
    "chunk_of": [(1000, 128), (2**31 - 1, 3)],
    "piece_chunk": [(17, 3, 8, 7), (0, 1, 1, 0), (2**31 - 2, 7, 2**28, 5)],
    "counts_word": [(3, 256), (2**20, 1000)],
    "rows_word": [(3, 7, 256), (2**20, 999, 1000)],
    "source_of_turn": [(3, 5, 8), (2**30, 2**30 - 1, 2**30)],
    "share_of": [(131, 40), (5, 2**31 - 1)],
    "pivot_tile": [(100, 300, 64, 7), (100, 101, 64, 2), (512, 512, 64, 8)],
}  # fmt: skip


def test_every_leaf_is_listed():
    assert ARGUMENTS.keys() == LEAVES.keys()


# What a leaf is made of -----------------------------------------------------------------------------------------------

_ALLOWED = (
    ast.FunctionDef, ast.arguments, ast.arg, ast.Assign, ast.If, ast.Return, ast.BinOp, ast.Compare, ast.Call, ast.Name,
    ast.Load, ast.Store, ast.Constant, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.BitXor,
    ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq, ast.BoolOp, ast.And, ast.Or,
)  # fmt: skip


def faults(source: str) -> list[str]:
    """What in a leaf's source a device's compiler lacks, or would do otherwise."""
    (function,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(function, ast.FunctionDef)
    found = []
    body = function.body[1:] if ast.get_docstring(function) else function.body
    parameters = [a.arg for a in function.args.args]
    if len(parameters) != sum(isinstance(node, ast.arg) for node in ast.walk(function)) or function.args.defaults:
        found.append("parameters other than plain ones")
    returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
    if len(returns) != 1 or body[-1] is not returns[0] or returns[0].value is None:
        found.append("not one return, at the end")
    known = {*parameters, "min", "max"}
    known |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Tuple) and node is returns[0].value:
                continue
            if not isinstance(node, _ALLOWED):
                found.append(type(node).__name__)
            elif isinstance(node, ast.Call) and (
                ast.unparse(node.func) not in ("min", "max") or len(node.args) != 2 or node.keywords
            ):
                found.append(f"a call of {ast.unparse(node.func)}")
            elif isinstance(node, ast.Constant) and type(node.value) is not int:
                found.append(f"the constant {node.value!r}")
            elif isinstance(node, ast.Compare) and len(node.ops) > 1:
                found.append("a chain of comparisons")
            elif isinstance(node, ast.Name) and node.id not in known:
                found.append(f"the global {node.id}")
    return found


@pytest.mark.parametrize("name", LEAVES)
def test_leaf_uses_only_what_devices_have(name):
    assert faults(inspect.getsource(LEAVES[name])) == []


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("if a < b:\n  return a\n return b", "not one return, at the end"),
        ("return a / b", "Div"),
        ("return a & b", "BitAnd"),
        ("return a << b", "LShift"),
        ("return -a", "UnaryOp"),
        ("return a if a < b else b", "IfExp"),
        ("while a < b:\n  a = a + 1\n return a", "While"),
        ("for i in a:\n  b = b + 1\n return b", "For"),
        ("c, d = divmod(a, b)\n return c", "a call of divmod"),
        ("return abs(a)", "a call of abs"),
        ("return min(a, b, 3)", "a call of min"),
        ("return cdiv(a, b)", "a call of cdiv"),
        ("return a * 1.5", "the constant 1.5"),
        ("return a + LIMIT", "the global LIMIT"),
        ("return a + (0 <= a < b)", "a chain of comparisons"),
        ("assert a < b\n return a", "Assert"),
        ("return (lambda x: x)(a)", "Lambda"),
        ("return [a, b]", "List"),
    ],
)
def test_what_is_no_leaf_is_found(body, fault):
    assert fault in faults(f"def leaf(a, b):\n {body}\n")


@pytest.mark.parametrize("name", LEAVES)
def test_leaf_stays_in_31_bits_on_its_examples(name):
    for arguments in ARGUMENTS[name]:
        expected = LEAVES[name](*arguments)
        assert on_int31(LEAVES[name], *arguments) == expected


# What compilers make of it --------------------------------------------------------------------------------------------

#: The lines that import a language, its compiler, and its store.
LANGUAGES = {
    "triton": ("import triton\nimport triton.language as tl", "triton.jit", "tl.store"),
    "gluon": (
        "from triton.experimental import gluon\nfrom triton.experimental.gluon import language as gl",
        "gluon.jit", "gl.store",
    ),
}  # fmt: skip


def kernel_source(name: str, language: str, bare: bool = False) -> str:
    """A kernel that stores what a leaf computes."""
    leaf, (imports, jit, store) = LEAVES[name], LANGUAGES[language]
    result = leaf(*ARGUMENTS[name][0])
    values = [f"result[{i}]" for i in range(len(result))] if isinstance(result, tuple) else ["result"]
    parameters = ", ".join(inspect.signature(leaf).parameters)
    return "\n".join(
        [
            imports,
            f"from {leaf.__module__} import {name} as bare",
            "leaf = bare" if bare else f"leaf = {jit}(bare)",
            f"@{jit}",
            f"def kernel({parameters}, out):",
            f"    result = leaf({parameters})",
            *(f"    {store}(out + {i}, {value})" for i, value in enumerate(values)),
        ]
    )


@pytest.fixture(scope="module")
def triton(tmp_path_factory):
    triton = pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield triton


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("target", [("cuda", 90, 32), ("hip", "gfx942", 64)], ids=["sm90", "gfx942"])
def test_leaf_compiles(triton, name, language, target, tmp_path, monkeypatch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    module_name = f"compiled_{language}_{name}"
    (tmp_path / f"{module_name}.py").write_text(kernel_source(name, language))
    monkeypatch.syspath_prepend(tmp_path)
    kernel = importlib.import_module(module_name).kernel
    signature = dict.fromkeys(inspect.signature(LEAVES[name]).parameters, "i32") | {"out": "*i32"}
    source = (ASTSource if language == "triton" else GluonASTSource)(kernel, signature, {})
    assembly = triton.compile(source, target=GPUTarget(*target)).asm["ptx" if target[0] == "cuda" else "amdgcn"]
    assert "st.global" in assembly or "global_store" in assembly
    # Integers stay integers of 32 bits, and nothing is called.
    for foreign in (".f64", "div.s64", "mul.lo.s64", "call.uni", "v_div_fmas_f64", "s_swappc"):
        assert foreign not in assembly


_INTERPRET = """
import importlib, json, sys
import torch
cases = json.load(sys.stdin)
sys.path.insert(0, sys.argv[1])
for name, rows in cases.items():
    kernel = importlib.import_module("interpreted_" + name).kernel
    got = []
    for row in rows:
        out = torch.full((4,), -7, dtype=torch.int32)
        kernel[(1,)](*row, out)
        got.append(out.tolist())
    print(json.dumps([name, got]))
"""


def random_arguments(name: str, rng: random.Random) -> tuple[int, ...]:
    """Arguments in a leaf's range, of small grids."""
    m, n = rng.randint(1, 9), rng.randint(1, 9)
    group, t = rng.randint(1, 5), rng.randrange(m * n)
    begin = rng.randint(0, 900)
    return {
        "row_major": (t, m, n),
        "grouped": (t, m, n, group),
        "chunk_major": (t, m, n, rng.randrange(m), rng.randint(1, 5), group),
        "longest_first": (t, m, n, group),
        "share_part": (t, t + m, n),
        "part_of": (m * n, group, t),
        "step": (t % n, t % 2, n),
        "skip": (t % n, t % 2, begin, n),
        "before": (t % n, n),
        "after": (t % n, n),
        "neighbour": (t, m * n, group),
        "swizzled": (begin, t, 2 ** (m % 3), 2 ** (n % 5)),
        "blocks_of_part": (t % n, t % n + n, *(rng.randint(0, 300) for _ in range(4)), 16),
        "share_of_keys": (*sorted(rng.randint(0, 20) for _ in range(4)), n, t % n),
        "pivot_tile": (begin, begin + rng.randint(0, 99), rng.choice([16, 64, 100]), m + 9),
    }.get(name) or tuple(rng.randint(1, 99) for _ in inspect.signature(LEAVES[name]).parameters)


def test_interpreter_computes_the_same(triton, tmp_path):
    rng = random.Random(2)
    cases = {name: [*ARGUMENTS[name], *(random_arguments(name, rng) for _ in range(12))] for name in LEAVES}
    for name in LEAVES:
        (tmp_path / f"interpreted_{name}.py").write_text(kernel_source(name, "triton", bare=True))
    done = subprocess.run(
        [sys.executable, "-c", _INTERPRET, str(tmp_path)], input=json.dumps(cases), capture_output=True, text=True,
        timeout=850, check=False, env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(SRC)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = dict(map(json.loads, done.stdout.splitlines()))
    assert seen.keys() == LEAVES.keys()
    for name, rows in cases.items():
        for row, got in zip(rows, seen[name], strict=True):
            result = LEAVES[name](*row)
            expected = result if isinstance(result, tuple) else (result,)
            assert tuple(got) == (*expected, *[-7] * (4 - len(expected))), (name, row)
