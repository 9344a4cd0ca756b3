"""Which tests run a function: measured once, so that a mutant meets the tests that can see it, and few others.

    cd tests; python -m mutants.reach [--seconds 600]       # resumable: a file's tests again only if it has changed

``.reach.json`` (not in the repository) has the seconds of each test of the files that are close to a module, and the
package's functions that ran in its process. Without it a mutant meets the whole files of `mutants.closest`.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mutants.closest import INTERPRETED, SRC, TESTS, closest, module_of
from mutants.warm import Warm

MAP = Path(__file__).parent / ".reach.json"
#: Test files of a mutant at most, and the seconds of their tests: of the first file, of each other.
FILES, FIRST, OTHER = 7, 25.0, 10.0


class Batch(NamedTuple):
    """Tests of one file that run together, and their seconds."""

    file: str
    tests: list[str]
    seconds: float


@functools.cache
def _read() -> dict[str, Any]:
    """By file: the hash of its text, the seconds of each test, and its functions' tests by number."""
    return json.loads(MAP.read_text(encoding="utf-8")) if MAP.exists() else {}


def _hash(file: str) -> str:
    return hashlib.sha1((TESTS / file).read_bytes()).hexdigest()[:12]


def batches(module: str, function: str, share: float = 1.0) -> list[Batch]:
    """The tests that run a function, a batch a file, the closest file first; none if no test is known to run it.

    ``share``: of the seconds that are spent.
    """
    while function:
        found = {}
        for file, of in _read().items():
            at = of["names"].get(f"{module}:{function}")
            if at:
                found[file] = [list(of["tests"].items())[number] for number in at]
        if found:
            near = closest(module)
            order = sorted(found, key=lambda file: (near.index(file) if file in near else len(near), -len(found[file])))
            return [
                _batch(file, found[file], share * (OTHER if at else FIRST)) for at, file in enumerate(order[:FILES])
            ]
        function = function.rpartition(".")[0]
    return []


def _batch(file: str, tests: list[tuple[str, float]], most: float) -> Batch:
    """The quickest case of every test function, then the second of every one, until the seconds are spent."""
    of_function = defaultdict(list)
    for name, seconds in sorted(tests, key=lambda one: one[1]):
        of_function[name.partition("[")[0]].append((name, seconds))
    chosen, spent = [], 0.0
    for name, seconds in filter(None, itertools.chain(*itertools.zip_longest(*of_function.values()))):
        if spent + seconds <= most or not chosen:
            chosen.append(name)
            spent += seconds
    return Batch(file, chosen, spent)


def files() -> Iterator[str]:
    """The files to measure: those that are close to any module, the closest of each first."""
    modules = [module_of(path) for path in sorted(SRC.rglob("*.py"))]
    near = itertools.chain(*itertools.zip_longest(*map(closest, modules)))
    return iter(dict.fromkeys(filter(None, near)))


def measure(seconds: float) -> None:
    """Run what is not known, until the seconds are over: the quick tier; one case a function in the interpreter."""
    end, known = time.monotonic() + seconds, dict(_read())
    servers = {interpreted: Warm(interpreted) for interpreted in (False, True)}
    try:
        for file in files():
            if known.get(file, {}).get("hash") == _hash(file):
                continue
            if time.monotonic() > end:
                return
            began, interpreted = time.monotonic(), file.startswith(INTERPRETED)
            tests = [file] if interpreted else [file, "--tier", "quick"]
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "reach.json"
                outcome = servers[interpreted].run(
                    SRC, tests, cpu=600, seconds=900, cases=int(interpreted), reach=str(path)
                )  # fmt: skip
                found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"names": [], "tests": {}}
            names: dict[str, list[int]] = defaultdict(list)
            for number, (_, reached) in enumerate(found["tests"].values()):
                for at in reached:
                    names[found["names"][at]].append(number)
            tests_of = {name: spent for name, (spent, _) in found["tests"].items()}
            known[file] = {"hash": _hash(file), "tests": tests_of, "names": names}
            MAP.write_text(json.dumps(known), encoding="utf-8")
            print(f"{outcome.status} {len(tests_of)} tests {time.monotonic() - began:.0f} s {file}", flush=True)
    finally:
        for one in servers.values():
            one.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure which tests run which functions.")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no file after these")
    measure(parser.parse_args().seconds)
