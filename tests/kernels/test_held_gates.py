"""The record of cases of compile gates that hold: keys that move with the code alone, and no case with a fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytest.importorskip("triton")

from gates import engine, held
from gates.held import DIGITS, RECORD, Held, Part
from test_compile_gates import COUNTS

from tritons import TRITONS

PART = Part("3.9.0", "portable gemm", "gfx942")


def test_comments_docstrings_and_empty_lines_are_no_text():
    one = '@jit\ndef f(x):\n    """Says."""\n    # why\n    return x + 1\n'
    other = '@jit\n\ndef f(x):\n    """Says\n    more."""\n\n    return x + 1  # how\n'
    assert held.bare(one) == held.bare(other) == "@jit\ndef f(x):\n    return x + 1"
    assert held.bare(one) != held.bare(one.replace("+ 1", "+ 2"))
    assert held.bare('def f():\n    return f"# {x}"\n') == 'def f():\n    return f"# {x}"', "no comment"
    assert held.bare('def f():\n    """Only this."""\n') == 'def f():\n    """Only this."""', "a body is left"


KERNEL = """
import triton
import triton.language as tl
C = tl.constexpr({constant})

@triton.jit
def more(x):
    {docstring}
    return x + {number} + C

@triton.jit
def kernel(p):
    tl.store(p, more(tl.load(p)))  {comment}
"""


def key(tmp_path, monkeypatch, name, shift="", number=1, constant=1, docstring="pass", comment="") -> str:
    """Triton's hash of a kernel in a file of its own, as `held.keys` has it."""
    path = tmp_path / f"{name}.py"
    path.write_text(shift + textwrap.dedent(KERNEL).format(**locals()))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tilestream.some", raising=False)
    module = __import__(name)
    monkeypatch.setitem(sys.modules, "tilestream.some", module)
    held.forget_places()
    return module.kernel.cache_key


def test_a_key_moves_with_the_code_of_the_kernel_and_of_what_it_calls(tmp_path, monkeypatch):
    def make(name, **how):
        return key(tmp_path, monkeypatch, f"{name}_module", **how)

    first = make("first", docstring='"""Says."""')
    assert make("moved", docstring='"""Says."""', shift="# a\n# b\n") == first
    assert make("told", docstring='"""Says more."""', comment="# why") == first
    assert make("number", docstring='"""Says."""', number=2) != first
    assert make("constant", docstring='"""Says."""', constant=2) != first


def test_the_record_is_of_gates_that_there_are():
    for name, its in json.loads(RECORD.read_text(encoding="utf-8")).items():
        version, *gate, arch = name.split()
        assert version in TRITONS
        assert 0 < len(its) <= COUNTS[" ".join(gate)][arch]
        assert its == sorted(set(its))
        assert {len(one) for one in its} == {DIGITS}


@pytest.fixture
def compiling(monkeypatch, tmp_path):
    """Gates of five cases, of which one has a fault and one an unknown instruction; the names that were compiled."""
    names, compiled = {f"case {i}": f"{i:012x}" for i in range(5)}, []
    monkeypatch.setattr(held, "named", lambda part, python, cache: dict(names))

    def rows(python, gate, name, *words, cache, seconds):
        chosen = words[: words.index("--arch")]
        compiled.extend(chosen)
        return [
            {"name": one, "arch": "gfx942", "faults": {"spills": [8, "0"]} if one == "case 1" else {},
             "instructions": [["v_unheard_of", "v0"]] if one == "case 2" else [["s_waitcnt", "vmcnt(0)"]]}
            for one in chosen
        ]  # fmt: skip

    monkeypatch.setattr("tritons.gate_rows", rows)
    monkeypatch.setattr("tritons.triton", lambda version: "python")
    return names, compiled


def test_a_case_without_a_fault_is_compiled_once(compiling, tmp_path):
    names, compiled = compiling
    record = tmp_path / "held.json"
    until = time.monotonic() + 1e6
    broken = held.run(PART, Held(record), until, 1, tmp_path)
    assert broken.keys() == {"case 1", "case 2"}
    assert "v_unheard_of" in str(broken["case 2"])
    assert Held(record).of(PART) == {names[f"case {i}"] for i in (0, 3, 4)}
    compiled.clear()
    names["case 3"] = "f" * 12  # its kernel has another text
    held.run(PART, Held(record), until, 1, tmp_path)
    assert compiled == ["case 1", "case 2", "case 3"]
    assert Held(record).of(PART) == {names[f"case {i}"] for i in (0, 3, 4)}, "the old key is dropped"


def test_no_case_is_compiled_behind_the_time(compiling, tmp_path):
    assert held.run(PART, Held(tmp_path / "held.json"), time.monotonic() - 1, 1, tmp_path) == {}
    assert compiling[1] == []


def test_what_was_compiled_while_a_file_changed_is_not_held(compiling, tmp_path, monkeypatch, capsys):
    states = iter(range(9))
    monkeypatch.setattr(held, "state_of_sources", lambda: next(states))
    assert held.run(PART, Held(tmp_path / "held.json"), time.monotonic() + 1e6, 1, tmp_path) == {}
    assert Held(tmp_path / "held.json").of(PART) == set()
    assert "a source file has changed meanwhile" in capsys.readouterr().out


def test_a_key_moves_with_rules_that_another_gate_has():
    text = held.rules_text(engine.load("hopper grouped sources"))
    for function in ("rules", "kernel_rules", "shared_words"):
        assert f"def {function}(" in text
    assert "def cases(" not in text, "a case more is no other rule"


def test_gates_load_where_there_is_no_torch():
    """A Triton's own environment has none."""
    code = (
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch':\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "from gates import engine\n"
        f"for gate in {list(COUNTS)}:\n"
        "    engine.load(gate)\n"
    )
    gates = Path(engine.__file__).parent
    paths = os.pathsep.join(map(str, (gates.parent, gates.parents[1], gates.parents[2] / "src")))
    environment = {**os.environ, "PYTHONPATH": paths}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
