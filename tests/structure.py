"""What the source says of its own structure: layers, circles of imports, argument lists, lines.

`test_structure.py` holds the limits. ``python tests/structure.py`` writes the table of docs/design.md;
``--measure`` prints the figures of a checkout as JSON, ``--check`` fails where the table is stale.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DESIGN = ROOT / "docs" / "design.md"
#: The figures before parts were values: measured at commit 99afc00 by this script.
BEFORE = ROOT / "docs" / "structure_before.json"

#: Which packages a package may import. What is not named may import everything.
LAYERS: dict[str, tuple[str, ...]] = {
    "core": (),
    "runtime": ("core",),
    "trace": ("core", "tilestream_tools"),  # names that are looked up in the tools
    "arrival": ("core", "runtime"),
    "plan": ("core",),
    "kernels": ("core",),
    "launch": ("core", "runtime", "trace", "arrival", "plan", "kernels"),
    "ops": ("core", "runtime", "trace", "arrival", "plan", "kernels", "launch"),
    "distributed": ("core", "runtime", "trace", "arrival", "plan", "kernels", "launch", "ops"),
}
#: Modules at the top that any layer may import: they import nothing themselves.
LEAVES = ("tilestream._version",)
#: A list of so many parameters or arguments is long.
LONG = 12


class Import(NamedTuple):
    """One import of a module of this project, wherever in the file it stands."""

    importer: str
    imported: str
    line: int


class ArgumentList(NamedTuple):
    """The parameters of a definition, or the arguments of a call."""

    where: str
    name: str
    kind: str
    count: int
    lines: int
    entry: bool


def modules(src: Path) -> dict[str, Path]:
    """Module name -> file, of every package below ``src``."""
    found = {}
    for path in sorted(src.rglob("*.py")):
        parts = path.relative_to(src).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def parsed(path: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(src: Path) -> list[Import]:
    """Every import between modules below ``src``, those in functions and under TYPE_CHECKING included."""
    known, found = modules(src), []
    for importer, path in known.items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                both = [f"{node.module}.{alias.name}" for alias in node.names]
                named = [name if name in known else node.module for name in both]
            else:
                continue
            found += [Import(importer, name, node.lineno) for name in named if name in known and name != importer]
    return found


def package(module: str) -> str:
    """The layer of a module: ``tilestream.core.grid`` is in ``core``; ``tilestream.schedule`` is at the top."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "tilestream" else parts[0]


def broken_arrows(src: Path) -> list[str]:
    """Imports that the layers forbid."""
    return sorted(
        f"{one.importer}:{one.line} imports {one.imported}"
        for one in imports(src)
        if package(one.importer) in LAYERS
        and package(one.imported) not in (package(one.importer), *LAYERS[package(one.importer)])
        and one.imported not in LEAVES
    )


def circles(src: Path) -> list[list[str]]:
    """The strongly connected sets of several modules, by Tarjan's algorithm."""
    edges: dict[str, set[str]] = {}
    for one in imports(src):
        edges.setdefault(one.importer, set()).add(one.imported)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(edges.get(module, ())):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            at = stack.index(module)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                found.append(sorted(component))

    for module in modules(src):
        if module not in index:
            visit(module)
    return sorted(found, key=len, reverse=True)


def _is_jitted(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def _is_partition(node: ast.Tuple) -> bool:
    """``(loop, (arguments ...))``, as `gl.warp_specialize` takes a partition."""
    return len(node.elts) == 2 and isinstance(node.elts[0], ast.Name) and isinstance(node.elts[1], ast.Tuple)


def argument_lists(folder: Path, src: Path) -> Iterator[ArgumentList]:
    """Every parameter list and argument list below ``folder``.

    A kernel's own entry is a jitted function that no other jitted text names. It is compiled with flat numbers (a
    struct's are specialised in spite of ``do_not_specialize``) and groups them: building a struct is no call here.
    """
    files = sorted(folder.rglob("*.py"))
    used = {
        node.id
        for path in files
        for jitted in ast.walk(parsed(path))
        if isinstance(jitted, ast.FunctionDef) and _is_jitted(jitted)
        for node in ast.walk(jitted)
        if isinstance(node, ast.Name)
    }
    for path in files:
        where = path.relative_to(src).as_posix()
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                every += [one for one in (node.args.vararg, node.args.kwarg) if one is not None]
                lines = max((one.end_lineno or 0 for one in every), default=0) - node.lineno + 1 if every else 0
                entry = _is_jitted(node) and node.name not in used
                yield ArgumentList(f"{where}:{node.lineno}", node.name, "parameters", len(every), lines, entry)
            elif isinstance(node, ast.Tuple) and _is_partition(node):
                name, passed = ast.unparse(node.elts[0]), node.elts[1].elts
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                yield ArgumentList(f"{where}:{node.lineno}", name, "arguments", len(passed), lines, False)
            elif isinstance(node, ast.Call):
                passed = [*node.args, *(one.value for one in node.keywords)]
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                name = ast.unparse(node.func)
                kind = "grouping" if name[:1].isupper() else "arguments"
                yield ArgumentList(f"{where}:{node.lineno}", name, kind, len(passed), lines, False)


def lines_of(folder: Path) -> int:
    """Lines of Python below ``folder``."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))


def measure(root: Path) -> dict[str, object]:
    """The figures of a checkout."""
    src = root / "src"
    library = src / "tilestream"
    lines = {f"src/tilestream/{one.name}": lines_of(one) for one in sorted(library.iterdir()) if one.is_dir()}
    lines = {name: count for name, count in lines.items() if count}
    lists = list(argument_lists(library / "kernels", src))
    inner = [one for one in lists if one.kind == "parameters" and not one.entry]
    calls = [one for one in lists if one.kind == "arguments"]
    spent = sum(one.lines for one in lists if one.count >= LONG)
    return {
        "lines": {
            "src/tilestream": lines_of(library), **lines,
            **{one: lines_of(root / one) for one in ("src/tilestream_tools", "tests", "benchmarks")},
        },
        "longest_entry": max((one.count for one in lists if one.entry), default=0),
        "longest_parameters": max(one.count for one in inner),
        "longest_call": max(one.count for one in calls),
        "long_definitions": sum(one.count >= LONG for one in lists if one.kind == "parameters"),
        "long_calls": sum(one.count >= LONG for one in calls),
        "argument_share": round(100 * spent / lines_of(library / "kernels"), 1),
        "circles": [len(one) for one in circles(src)],
    }  # fmt: skip


# The table -----------------------------------------------------------------------------------------------------------

BEGIN, END = "<!-- structure: made by tests/structure.py -->", "<!-- end of structure -->"


def table(before: dict, now: dict) -> str:
    """The Markdown of docs/design.md."""
    names = [*before["lines"], *(name for name in now["lines"] if name not in before["lines"])]
    rows = [
        (f"lines of `{name}`", *(_lines(one["lines"].get(name)) for one in (before, now)))
        for name in names
        if before["lines"].get(name) or now["lines"].get(name)
    ]
    rows += [
        (label, *(str(one[key]) for one in (before, now)))
        for label, key in (
            ("parameters of the longest kernel entry", "longest_entry"),
            ("parameters of the longest other function in `kernels/`", "longest_parameters"),
            ("arguments of the longest call in `kernels/`", "longest_call"),
            (f"definitions in `kernels/` with {LONG} parameters and more", "long_definitions"),
            (f"calls in `kernels/` with {LONG} arguments and more", "long_calls"),
            ("share of such lists in the lines of `kernels/`, %", "argument_share"),
            ("forms of an arrival between `ts.matmul` and the polling lane", "arrival_forms"),
        )
    ]
    rows.append(("circles of files (files in each)", *(_circles(one["circles"]) for one in (before, now))))
    lines = ["| | before | now |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def _lines(count: int | None) -> str:
    return "-" if not count else f"{round(count, -2):,}"


def _circles(sizes: list[int]) -> str:
    return f"{len(sizes)} ({', '.join(map(str, sizes))})" if sizes else "0"


def arrival_forms(root: Path) -> int:
    """The forms that the codec of arrivals lists in its docstring, as ``1. ...`` lines."""
    text = (root / "src" / "tilestream" / "arrival" / "flat.py").read_text(encoding="utf-8")
    return len(re.findall(r"^\d+\. ", ast.get_docstring(ast.parse(text)) or "", re.M))


def figures() -> tuple[dict, dict]:
    """Those of before, and of this checkout."""
    now = measure(ROOT)
    now["arrival_forms"] = arrival_forms(ROOT)
    return json.loads(BEFORE.read_text(encoding="utf-8")), now


def main() -> int:
    """Write, print or check."""
    if "--measure" in sys.argv:
        root = Path(sys.argv[sys.argv.index("--measure") + 1])
        print(json.dumps(measure(root), indent=1))
        return 0
    text = DESIGN.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    old, _, tail = rest.partition(END)
    made = f"\n\n{table(*figures())}\n\n"
    if "--check" in sys.argv:
        return int(old != made)
    DESIGN.write_text(f"{head}{BEGIN}{made}{END}{tail}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
