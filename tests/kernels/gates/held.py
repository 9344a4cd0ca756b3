"""Cases of the compile gates that hold as their kernels are now: `held.json`, and the run that goes on with it.

There are 15,000 cases over three Tritons, and each takes seconds to compile. So a case that was compiled and had no
fault is remembered by a key: of the kernel's text and of all that it calls, of its arguments' types, its config, the
compiler's options, and the text of the gate's rules. Comments, docstrings and places in a file count for nothing. Who
changes a kernel changes the keys of its cases, and only these are compiled anew, here or by ``make test-all``::

    python tests/kernels/gates/held.py --seconds 3600    compile what is not held, where the last run ended
    python tests/kernels/gates/held.py --count           how many cases are held, of how many

``--triton 3.9.0``, ``--gate "portable gemm"`` and ``--arch gfx942`` restrict it.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import io
import json
import os
import sys
import tempfile
import time
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
RECORD = HERE / "held.json"
#: Hexadecimal digits of a key.
DIGITS = 12


# Keys, by the Triton that compiles ------------------------------------------------------------------------------------


def bare(text: str) -> str:
    """A function's text without comments, docstrings and empty lines; the same under every Python."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and len(node.body) > 1 and ast.get_docstring(node) is not None:
            start, end = node.body[0].lineno - 1, node.body[0].end_lineno
            lines[start:end] = [""] * len(lines[start:end])
    return "\n".join(line.rstrip() for line in lines if line.strip())


def forget_places() -> None:
    """Have Triton's hashes of this package's functions depend on their `bare` text alone.

    A process that has called it compiles nothing.
    """
    from triton.runtime.jit import JITCallable

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "tilestream":
            for function in vars(module).values():
                if isinstance(function, JITCallable) and function.starting_line_number:
                    function._unsafe_update_src(bare(function.src))
                    function.starting_line_number = 0


def rules_text(gate: Any) -> str:
    """The text of a gate's rules and of the gates' functions that they call, as `bare` has it."""
    found = [gate.rules]
    for function in found:  # which grows
        called, own = function.__code__.co_names, function.__globals__
        modules = [own[name] for name in called if inspect.ismodule(own.get(name))]
        for name in called:
            for scope in (own, *map(vars, modules)):
                one = scope.get(name)
                if inspect.isfunction(one) and one.__module__.startswith("gates.") and one not in found:
                    found.append(one)
    return "\n".join(bare(inspect.getsource(function)) for function in found)


def keys(name: str, arch: str) -> Iterator[dict[str, str]]:
    """The name and the key of each case of a gate; run where nothing is compiled."""
    from gates import engine
    from tilestream_tools.isa.build import warm_up

    gate = engine.load(name)
    rules = rules_text(gate)
    for case in engine.cases(gate, "all", arch=arch):
        kernel, filled, options = gate.source(case)
        forget_places()  # of modules that are imported with the case, too
        seen: list[str] = []
        kernel._do_compile = lambda key, *_, seen=seen: seen.append(key)
        try:
            warm_up(kernel, filled, options, case.arch)
        finally:
            del kernel._do_compile
        text = "\n".join((case.arch, kernel.cache_key, *seen, rules))
        yield {"name": case.name, "arch": case.arch, "key": hashlib.sha256(text.encode()).hexdigest()[:DIGITS]}


# The record -----------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """The cases of a gate for an architecture, by a Triton."""

    triton: str
    gate: str
    arch: str


class Held:
    """The keys of cases that hold, by Triton, gate and architecture, in a file."""

    def __init__(self, path: Path = RECORD) -> None:
        self._path = path
        self._all: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def of(self, part: Part) -> set[str]:
        """The keys that are held."""
        return set(self._all.get(" ".join(part), ()))

    def put(self, part: Part, held: set[str]) -> None:
        """Write the keys of a part that are held."""
        from tilestream.core.whole_file import write_whole

        self._all[" ".join(part)] = sorted(held)
        kept = {name: its for name, its in sorted(self._all.items()) if its}
        write_whole(self._path, (json.dumps(kept, indent=0) + "\n").encode())


def named(part: Part, python: str, cache: Path) -> dict[str, str]:
    """The keys of a part's cases, by name."""
    from tritons import gate_rows

    found = gate_rows(python, HERE, part.gate, "keys", "--arch", part.arch, cache=cache, seconds=600)
    return {one["name"]: one["key"] for one in found}


def state_of_sources() -> int:
    """Changes where a source file is written: keys that were made before are then not those of what is compiled."""
    files = [*(HERE.parents[2] / "src").rglob("*.py"), *HERE.glob("*.py")]
    return hash(tuple((str(file), file.stat().st_mtime_ns) for file in sorted(files)))


def left_of(names: dict[str, str], held: set[str]) -> list[str]:
    """The names of cases that are not held."""
    return [name for name, key in names.items() if key not in held]


def faults_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of compiled cases, by name: the rules that are broken, and AMD's instructions that the emulator does not know."""
    from tilestream_tools.emulator.program import unknown_of

    found = {}
    for one in rows:
        unknown = unknown_of({(one["arch"], *form) for form in one["instructions"]})
        if one["faults"] or unknown:
            found[one["name"]] = one["faults"] or unknown
    return found


# The command line -----------------------------------------------------------------------------------------------------


def parts(given: argparse.Namespace) -> list[Part]:
    """Those that are asked for; AMD's and Hopper's before the rest."""
    from test_compile_gates import COUNTS, UNKNOWN

    from tritons import TRITONS

    found = [
        Part(version, gate, arch) for gate, counts in COUNTS.items() for arch in counts for version in TRITONS
        if gate != "trace" and (version, arch) not in UNKNOWN
        and given.triton in ("", version) and given.gate in ("", gate) and given.arch in ("", arch)
    ]  # fmt: skip
    return sorted(found, key=lambda part: not part.arch.startswith(("gfx", "sm_90")))


def run(part: Part, held: Held, until: float, processes: int, cache: Path) -> dict[str, Any]:
    """Compile what is not held of a part, until a time of the monotonic clock; the faults that were found."""
    from tritons import gate_rows, triton

    python, state = triton(part.triton), state_of_sources()
    names = named(part, python, cache)
    known = held.of(part) & set(names.values())  # the keys of texts that are gone are dropped
    left, broken, done = left_of(names, known), {}, 0
    while left and time.monotonic() < until:
        some, left = left[: 16 * processes], left[16 * processes :]
        arguments = (part.gate, *some, "--arch", part.arch, "--processes", str(processes))
        rows = gate_rows(python, HERE, *arguments, cache=cache, seconds=3600)
        if state_of_sources() != state:
            print(f"{' '.join(part)}: a source file has changed meanwhile; begin again", flush=True)
            break
        broken |= (faulty := faults_of(rows))
        known |= {names[one["name"]] for one in rows if one["name"] not in faulty}
        held.put(part, known)
        done += len(rows)
    if done:
        print(f"{' '.join(part)}: {done} compiled, {len(known)} of {len(names)} held", flush=True)
    for name, its in broken.items():
        print(f"  {name}: {its}", flush=True)
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--triton", default="", help="a version; all of them without it")
    parser.add_argument("--gate", default="", help="such as 'portable gemm'")
    parser.add_argument("--arch", default="")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--count", action="store_true", help="compile nothing")
    given = parser.parse_args()
    held, until, broken = Held(), time.monotonic() + given.seconds, {}
    if given.count:
        from tritons import triton
    with tempfile.TemporaryDirectory() as cache:
        for part in parts(given):
            if given.count:
                names = named(part, triton(part.triton), Path(cache))
                left = left_of(names, held.of(part))
                print(f"{' '.join(part)}: {len(names) - len(left)} of {len(names)}", flush=True)
            elif time.monotonic() < until:
                broken |= run(part, held, until, given.processes, Path(cache))
    return int(bool(broken))


if __name__ == "__main__":
    sys.path[:1] = [str(HERE.parents[1]), str(HERE.parents[2] / "src"), str(HERE.parent)]
    sys.exit(main())
