"""The structure that docs/design.md promises: layers, no circles, short argument lists, a bounded library."""

from __future__ import annotations

import subprocess
import sys

import structure
from structure import ROOT, argument_lists, broken_arrows, circles, lines_of

SRC = ROOT / "src"
KERNELS = SRC / "tilestream" / "kernels"
#: Of parameters of a function in kernels/ that is no kernel's entry, and of arguments of a call there.
MOST = 10


def test_layers_import_downwards_only():
    assert not broken_arrows(SRC)


def test_there_is_no_circle_of_files():
    assert not circles(SRC)


def test_the_library_works_without_the_tools():
    found = {
        one.importer
        for one in structure.imports(SRC)
        if structure.package(one.imported) == "tilestream_tools" != structure.package(one.importer)
    }
    assert found == {"tilestream.trace"}  # for the type checker: `tilestream.trace.draw` is found by its name


def test_kernels_pass_parts_not_fields():
    lists = argument_lists(KERNELS, SRC)
    assert not [one for one in lists if one.count > MOST and not one.entry and one.kind != "grouping"]


def test_the_library_and_its_tests_grow_no_more():
    # They had come down to 34,000 and 47,200. Then came native calls, derivatives of every order, DTensor's strategies,
    # calls on the CPU that are looked up, a kernel that merges attentions, compiling ahead, prepared sequences, equal
    # bits, grouped products and mixtures of experts, streams and ranks inside CUDA graphs, a cost model of row pitches,
    # pairs of CTAs, native threads that copy experts, rows by source, also on Hopper, rows that kernels push, attention
    # whose values are taken in strips, traces of replays, programs of equal calls between ranks and of mixtures,
    # workers on the CPU that stay, products of a program a tile, clusters that add up a tile, and checks of unfilled
    # operands where graphs run; of tests alone, those of the report in a browser, of pictures, of all mutants, two
    # Hopper kernels' whole texts in threads, compiled orders, worlds of 3 to 8 ranks, equal bits between GPUs, oracles
    # of the emulator, dry benchmarks of ranks, a cluster's instructions, sanitizers' cases of every kernel, faults of
    # ranks on GPUs, formats, and a runner of torch's own tests.
    assert lines_of(SRC / "tilestream") <= 55_400
    assert lines_of(ROOT / "tests") <= 97_100


def test_the_demonstration_stays_an_example():
    assert len((ROOT / "examples" / "demo.py").read_text(encoding="utf-8").splitlines()) <= 400


def test_the_table_of_the_design_is_of_this_structure():
    run = subprocess.run([sys.executable, str(ROOT / "tests" / "structure.py"), "--check"], check=False)
    assert run.returncode == 0, "make the table anew: python tests/structure.py"


def test_a_forbidden_import_a_circle_and_a_long_call_are_found(tmp_path):
    core, plan = tmp_path / "tilestream" / "core", tmp_path / "tilestream" / "plan"
    for folder in (tmp_path / "tilestream", core, plan):
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
    (plan / "a.py").write_text("from tilestream.core import b\n")
    (core / "b.py").write_text("def f():\n    from tilestream.plan import a\n    a(*range(3), 1, 2, 3, x=4)\n")
    assert broken_arrows(tmp_path) == ["tilestream.core.b:2 imports tilestream.plan.a"]
    assert circles(tmp_path) == [["tilestream.core.b", "tilestream.plan.a"]]
    calls = [one.count for one in argument_lists(core, tmp_path) if one.kind == "arguments"]
    assert sorted(calls) == [1, 5]
