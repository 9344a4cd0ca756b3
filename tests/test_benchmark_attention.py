"""The timeline of a call of attention: what the page says of its record, and the picture."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from tilestream.trace import LaunchTrace, export
from tilestream.trace.record import Span

ROOT = Path(__file__).parent.parent


@pytest.fixture
def render(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("render_attention")


def launch() -> LaunchTrace:
    """Four workers of which one leaves after 0.9 ms, the others after 1."""
    made = LaunchTrace("attention", "causal, 16384 tokens, a GPU: hopper dynamic, 4 workers", 4, 9, 10.0)
    for worker in range(4):
        made.by_worker[worker].append(Span(worker, "tile", 10.0, 10.0006, 0, 3, worker, 0, 1))
        end = 10.0009 if worker == 2 else 10.001
        made.by_worker[worker].append(Span(worker, "tile", 10.0006, end, 0, 2, worker, 0, 1))
    made.by_worker[3][-1] = made.by_worker[3][-1]._replace(end=10.0008)
    made.by_worker[3].append(Span(3, "tile", 10.0008, 10.001, 0, 1, 0, 0, 1))
    made.end = 10.001
    return made


def test_how_even_a_launch_is(render: ModuleType) -> None:
    busy, first, least, most, longest = render.evenness(launch())
    assert (least, most) == (2, 3)
    assert busy == pytest.approx(0.975)
    assert first == pytest.approx(0.9)
    assert longest == pytest.approx(0.6)


def test_the_page_says_whose_timeline_it_is(render: ModuleType, tmp_path: Path) -> None:
    assert render.sections(tmp_path) == []
    export(launch(), tmp_path / "gpu_trace_attention_h200.json.gz")
    (text,) = render.sections(tmp_path)
    assert text.startswith("## Attention, the timeline of a call: causal, 16384 tokens, a GPU\n")
    assert "hopper dynamic, 4 workers; 9 tiles in 1.000 ms" in text
    assert "at a tile 97.5% of the launch; the first of them leaves after 90.0% of it. Each did 2 to 3 tiles" in text
    assert "the longest took 60.0% of it" in text
    assert "(images/attention_timeline_h200.png)" in text


def test_the_picture_is_drawn(render: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    export(launch(), tmp_path / "gpu_trace_attention.json.gz")
    render.TIMELINES.plots(tmp_path, tmp_path / "images")
    assert (tmp_path / "images" / "attention_timeline.png").read_bytes().startswith(b"\x89PNG")
