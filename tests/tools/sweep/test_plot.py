"""The picture of sweeps."""

from __future__ import annotations

import sys

import pytest

from tilestream_tools.sweep import plot
from tilestream_tools.sweep.record import Sweep

matplotlib = pytest.importorskip("matplotlib")


@pytest.fixture
def panels(monkeypatch):
    """What each panel's lines are: called so, in one figure."""
    seen = []
    panel = plot._panel

    def spy(axes, shape, *given):
        lines = panel(axes, shape, *given)
        seen.append((shape, {name: line.get_xydata() for name, line in lines.items()}, axes))
        return lines

    monkeypatch.setattr(plot, "_panel", spy)
    return seen


def test_a_panel_a_shape_and_a_line_an_implementation(swept, panels, tmp_path):
    path = plot.draw([("h100", swept)], tmp_path / "sweep.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [shape for shape, _, _ in panels] == ["8192x8192x8192", "4096x8192x28672"]
    _, lines, axes = panels[0]
    assert set(lines) == {"in proportion to what is left", "static", "dynamic", "torch"}
    assert lines["dynamic"][:, 0].tolist() == [68, 124, 132]
    assert lines["dynamic"][-1, 1] == 750
    assert lines["in proportion to what is left"].tolist() == [[0, 0], [132, 750]]
    assert axes.get_xlabel() == "SMs left"
    assert panels[1][2].get_title(loc="left") == "4096x8192x28672  Llama-3 70B down"


def test_several_records_are_laid_over_one_another(swept, make_point, panels, tmp_path):
    other = Sweep({}, [make_point(taken=taken, queues=8) for taken in (8, 64)])
    plot.draw([("one", swept), ("two", other)], tmp_path / "both.svg")
    names = set(panels[0][1])
    assert {"one: dynamic", "one: torch", "two: dynamic, 8 queues"} <= names
    assert not any(name.startswith("two") for name in panels[1][1])


def test_without_the_whole_device_there_is_no_line_of_proportion(make_point, panels, tmp_path):
    plot.draw([("x", Sweep({}, [make_point(taken=8), make_point(taken=16)]))], tmp_path / "x.png")
    assert set(panels[0][1]) == {"dynamic"}


def test_nothing_to_draw(tmp_path):
    with pytest.raises(ValueError, match="the sweeps hold no point"):
        plot.draw([("x", Sweep({}))], tmp_path / "x.png")


def test_without_matplotlib(swept, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'tilestream\[plot\]'"):
        plot.draw([("x", swept)], tmp_path / "x.png")
