import itertools
import sys

import pytest
from matplotlib.collections import PolyCollection

from tilestream.trace.draw import default_size, draw, figure
from tilestream.trace.record import LaunchTrace, Span


def collections(figure):
    found = {}
    for made in figure.axes[0].collections:
        if made.get_gid() is not None:
            assert made.get_gid() not in found, "one collection a kind, whatever the number of spans"
            found[made.get_gid()] = made
    return found


def boxes(collection):
    """(x0, x1, y0, y1) of each bar."""
    return [path.get_extents().extents[[0, 2, 1, 3]].tolist() for path in collection.get_paths()]


def row_labels(figure):
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def words(figure):
    return [text.get_text() for text in figure.texts]


def legend_words(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("workers", [1, 2, 5, 16])
def test_one_row_a_worker(make_launch, workers):
    made = figure(make_launch(workers))
    assert row_labels(made) == ["arrivals", "reading", *(f"worker {w}" for w in range(workers))]
    assert len(boxes(collections(made)["idle"])) == workers


def test_every_tile_is_a_bar_at_its_time_in_its_row(make_launch):
    launch = make_launch(3, chunks=5, columns=4)
    found = collections(figure(launch))
    tiles = [span for span in launch.spans if span.kind == "tile"]
    rows = boxes(found["idle"])
    for span, (x0, x1, y0, y1) in zip(tiles, boxes(found["tile"]), strict=True):
        assert x0 == pytest.approx(1e3 * (span.begin - launch.begin))
        assert x1 == pytest.approx(1e3 * (span.end - launch.begin))
        assert rows[span.worker][2] < y0 < y1 < rows[span.worker][3]


def test_tiles_are_coloured_by_chunk(make_launch):
    launch = make_launch(2, chunks=6, columns=3)
    found = collections(figure(launch))
    chunks = [span.chunk for span in launch.spans if span.kind == "tile"]
    colours = [tuple(colour) for colour in found["tile"].get_facecolors()]
    of_chunk = dict(zip(chunks, colours, strict=True))
    assert len(set(of_chunk.values())) == 6
    assert [of_chunk[chunk] for chunk in chunks] == colours
    marks = [tuple(colour) for colour in found["arrivals 0"].get_facecolors()]
    assert marks == [of_chunk[chunk] for chunk in range(6)]


def test_waits_are_hatched_and_passing_an_open_gate_is_not_drawn(make_launch):
    launch = make_launch(2)
    waits = collections(figure(launch))["wait"]
    assert waits.get_hatch()
    real = [span for span in launch.spans if span.kind == "wait" and span.end - span.begin > 1e-6]
    assert 0 < len(waits.get_paths()) == len(real) < sum(span.kind == "wait" for span in launch.spans)


def test_arrivals_are_marked_at_their_times(make_launch):
    launch = make_launch(2, chunks=8)
    marks = collections(figure(launch))["arrivals 0"]
    assert [x for x, _ in marks.get_offsets()] == pytest.approx(
        [1e3 * (when - launch.begin) for when in launch.arrivals[0]]
    )


def test_reading_runs_from_one_arrival_to_the_next(make_launch):
    launch = make_launch(2, chunks=4)
    reads = boxes(collections(figure(launch))["reading 0"])
    edges = [-2.0] + [1e3 * (when - launch.begin) for when in launch.arrivals[0]]
    assert [(x0, x1) for x0, x1, _, _ in reads] == [
        (pytest.approx(a), pytest.approx(b)) for a, b in itertools.pairwise(edges)
    ]


def test_no_reading_row_where_nobody_knows_when_it_began(make_launch):
    launch = make_launch(2)
    launch.started.clear()
    made = figure(launch)
    assert row_labels(made) == ["arrivals", "worker 0", "worker 1"]
    assert "reading 0" not in collections(made)


def test_parts_and_reduces_differ_from_tiles(make_launch):
    made = figure(make_launch(4, parts=True))
    found = collections(made)
    heights = {kind: boxes(found[kind])[0][3] - boxes(found[kind])[0][2] for kind in ("tile", "part", "reduce")}
    assert heights["part"] < heights["tile"] == heights["reduce"]
    assert len(found["reduce"].get_facecolors()) == 1
    assert {"part of a tile's K range", "adding up a tile's parts"} <= set(legend_words(made))


def test_without_arrival_neutral_and_no_colour_bar(make_launch):
    made = figure(make_launch(2, arrival=False))
    assert len(made.axes) == 1
    assert len({tuple(colour) for colour in collections(made)["tile"].get_facecolors()}) == 1
    assert legend_words(made) == ["tile"]
    assert "waiting" not in words(made)[1]


def test_colour_bar_is_labelled_chunk(make_launch):
    made = figure(make_launch(2))
    assert made.axes[1].get_ylabel() == "chunk"
    assert all(tick == int(tick) for tick in made.axes[1].get_yticks())


def test_two_operands_have_rows_and_colour_bars_of_their_own(make_launch):
    made = figure(make_launch(2, both=True))
    assert row_labels(made)[:3] == ["arrivals A", "reading A", "arrivals B"]
    assert [axes.get_ylabel() for axes in made.axes[1:]] == ["chunk of A's rows", "chunk of B's columns"]


def test_hundreds_of_workers_and_thousands_of_tiles_stay_few_collections(make_launch):
    launch = make_launch(132, chunks=64, columns=64)
    made = figure(launch)
    axes = made.axes[0]
    assert len(collections(made)["tile"].get_paths()) == 4096
    assert len(axes.collections) < 10
    assert len(axes.patches) == 0
    labels = row_labels(made)
    assert 10 < len(labels) < 50, "labels do not touch"
    assert not collections(made)["wait"].get_hatch(), "rows are too thin for strokes"


def test_title_and_summary(make_launch):
    launch = make_launch(2, chunks=4, columns=2)
    assert words(figure(launch))[0] == "matmul: cpu dynamic, 2 workers"
    heading, summary = words(figure(launch, title="mine"))
    assert heading == "mine"
    assert "8 of 8 tiles on 2 workers" in summary
    assert "last of 4 chunks" in summary


def test_arrivals_long_before_the_launch_stay_at_the_left_edge(make_launch):
    launch = make_launch(2, chunks=4)
    launch.arrivals[0] = (50.0, None, *launch.arrivals[0][2:])
    launch.started[0] = 40.0
    made = figure(launch)
    left, right = made.axes[0].get_xlim()
    assert left > -0.15 * right
    assert len(collections(made)["arrivals 0"].get_offsets()) == 3


def test_a_launch_without_work_is_drawn():
    launch = LaunchTrace("matmul", "empty", 1, 0, 5.0, 5.0)
    assert row_labels(figure(launch)) == ["worker 0"]


def test_a_launch_cut_short_is_drawn_up_to_its_last_span():
    launch = LaunchTrace("matmul", "cut", 1, 4, 5.0, arrivals={0: (None, None)})
    launch.by_worker[0].append(Span(0, "wait", 5.0, 5.5, 0, 0, 0, 0, 1, 0))
    assert figure(launch).axes[0].get_xlim()[1] == pytest.approx(500, rel=0.02)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_draw_writes_a_picture(make_launch, tmp_path, suffix):
    path = draw(make_launch(4), tmp_path / f"timeline.{suffix}")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    if suffix == "png":
        assert int.from_bytes(data[16:20], "big") == 1600


@pytest.mark.parametrize("workers", [1, 4, 16, 132])
def test_default_size_fits_a_screen(make_launch, workers):
    width, height = default_size(make_launch(workers, chunks=4))
    assert width == 1600
    assert 300 <= height <= (720 if workers <= 16 else 1200)


def test_size_in_pixels(make_launch, tmp_path):
    data = draw(make_launch(2), tmp_path / "t.png", size=(1000, 500)).read_bytes()
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (1000, 500)


def test_without_matplotlib_the_extra_is_named(make_launch, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ImportError, match=r"tilestream\[plot\]"):
        draw(make_launch(2), tmp_path / "t.png")


def test_pyplot_is_not_touched(make_launch, tmp_path):
    draw(make_launch(2), tmp_path / "t.png")
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_bars_are_polygons_not_patches(make_launch):
    assert isinstance(collections(figure(make_launch(2)))["tile"], PolyCollection)
