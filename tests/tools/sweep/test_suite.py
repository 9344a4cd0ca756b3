"""Suites: those that ship, files of one's own, and what is wrong with a file."""

from __future__ import annotations

import pytest

from tilestream_tools.sweep import suite
from tilestream_tools.sweep.suite import Shape

yaml = pytest.importorskip("yaml")


def test_the_suite_that_ships():
    assert "8k" in suite.names()
    found = suite.load("8k")
    assert (found.name, found.dtype) == ("8k", "bfloat16")
    assert Shape(8192, 8192, 8192) in found.shapes
    assert Shape(4096, 8192, 28672, "Llama-3 70B down") in found.shapes
    assert all(8192 in (s.m, s.n, s.k) for s in found.shapes)
    assert len(set(found.shapes)) == len(found.shapes)


@pytest.mark.parametrize("name", suite.names())
def test_every_suite_that_ships_can_be_read(name):
    assert suite.load(name).shapes


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("dtype: float16\nshapes:\n  - {m: 1, n: 2, k: 3}\n  - {m: 4, n: 5, k: 6, name: second}\n")
    found = suite.load(str(path))
    assert (found.name, found.dtype) == ("mine", "float16")
    assert found.shapes == (Shape(1, 2, 3), Shape(4, 5, 6, "second"))
    assert str(found.shapes[1]) == "4x5x6"
    assert found.shapes[1].operations == 240


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("- 1", "a suite is a mapping with a list of `shapes`"),
        ("shapes: []", "a suite is a mapping with a list of `shapes`"),
        ("shapes: [{m: 1, n: 2, k: 3}]\nsize: 3", "size: a suite has `shapes` and `dtype`"),
        ("dtype: int8\nshapes: [{m: 1, n: 2, k: 3}]", "dtype: 'int8'; it must be one of bfloat16, float16, float32"),
        ("shapes: [{m: 1, n: 2, k: 3}, {m: 1, n: 2}]", "shape 2: {'m': 1, 'n': 2}; a shape has m, n, k and"),
        ("shapes: [{m: 1, n: 2, k: 3, o: 4}]", "a shape has m, n, k and, if you like, name"),
        ("shapes: [{m: 0, n: 2, k: 3}]", "shape 1: m: 0; an extent is a positive whole number"),
        ("shapes: [{m: true, n: 2, k: 3}]", "shape 1: m: True; an extent is a positive whole number"),
        ("shapes: [{m: 8192^3, n: 2, k: 3}]", "shape 1: m: '8192^3'; an extent is a positive whole number"),
        ("shapes: [", "no YAML: "),
        ("shapes: !!python/object:os.system {}", "no YAML: "),
    ],
)
def test_what_is_wrong_with_a_file(text, what, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as raised:
        suite.load(str(path))
    assert what in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_suite_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"suite '16k': give a \.yaml file, or one of 8k, cpu"):
        suite.load("16k")
    with pytest.raises(FileNotFoundError):
        suite.load(str(tmp_path / "none.yaml"))


def test_shapes_by_name():
    assert Shape.parse("4096x8192X28672") == Shape(4096, 8192, 28672)
    for text in ("4096", "1x2", "1x2x3x4", "0x1x2", "ax2x3", "1x2x-3", ""):
        with pytest.raises(ValueError, match="give M, N and K as 4096x8192x28672"):
            Shape.parse(text)
