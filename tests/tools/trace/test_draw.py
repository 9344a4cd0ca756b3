import itertools
import sys

import pytest
from matplotlib.collections import PolyCollection

from tilestream.trace.record import LaunchTrace, Span
from tilestream_tools.trace.draw import default_size, draw, figure


class Drawn:
    """What is in a figure of a launch."""

    def __init__(self, launch, **how):
        self.launch, self.figure = launch, figure(launch, **how)
        self.axes = self.figure.axes[0]
        self.kinds = {made.get_gid(): made for made in self.axes.collections if made.get_gid() is not None}
        named = [made.get_gid() for made in self.axes.collections if made.get_gid() is not None]
        assert len(named) == len(self.kinds), "one collection a kind, whatever the number of spans"

    def boxes(self, kind):
        """(x0, x1, y0, y1) of each bar."""
        return [path.get_extents().extents[[0, 2, 1, 3]].tolist() for path in self.kinds[kind].get_paths()]

    @property
    def rows(self):
        return [label.get_text() for label in self.axes.get_yticklabels()]

    @property
    def words(self):
        return [text.get_text() for text in self.figure.texts]

    @property
    def legend(self):
        return [text.get_text() for text in self.figure.legends[0].get_texts()]

    def spans(self, kind):
        return [span for span in self.launch.spans if span.kind == kind]

    def ms(self, when):
        return pytest.approx(1e3 * (when - self.launch.begin))


@pytest.mark.parametrize("workers", [1, 2, 5, 16])
def test_one_row_a_worker(make_launch, workers):
    made = Drawn(make_launch(workers))
    assert made.rows == ["arrivals", "transfer", *(f"worker {w}" for w in range(workers))]
    assert len(made.boxes("idle")) == workers


def test_every_tile_is_a_bar_at_its_time_in_its_row_coloured_by_chunk(make_launch):
    made = Drawn(make_launch(3, chunks=6, columns=4))
    tiles, rows = made.spans("tile"), made.boxes("idle")
    assert isinstance(made.kinds["tile"], PolyCollection), "not a patch each"
    for span, (x0, x1, y0, y1) in zip(tiles, made.boxes("tile"), strict=True):
        assert (x0, x1) == (made.ms(span.begin), made.ms(span.end))
        assert rows[span.worker][2] < y0 < y1 < rows[span.worker][3]
    colours = [tuple(colour) for colour in made.kinds["tile"].get_facecolors()]
    of_chunk = dict(zip((span.chunk for span in tiles), colours, strict=True))
    assert len(set(of_chunk.values())) == 6
    assert [of_chunk[span.chunk] for span in tiles] == colours
    marks = [tuple(colour) for colour in made.kinds["arrivals 0"].get_facecolors()]
    assert marks == [of_chunk[chunk] for chunk in range(6)]


def test_waits_are_hatched_and_passing_an_open_gate_is_not_drawn(make_launch):
    made = Drawn(make_launch(2))
    assert made.kinds["wait"].get_hatch()
    real = [span for span in made.spans("wait") if span.end - span.begin > 1e-6]
    assert 0 < len(made.boxes("wait")) == len(real) < len(made.spans("wait"))


def test_arrivals_are_marked_at_their_times_and_the_transfer_runs_from_one_to_the_next(make_launch):
    made = Drawn(make_launch(2, chunks=4))
    times = [made.ms(when) for when in made.launch.arrivals[0]]
    assert [x for x, _ in made.kinds["arrivals 0"].get_offsets()] == times
    assert [(x0, x1) for x0, x1, _, _ in made.boxes("transfer 0")] == list(
        itertools.pairwise([pytest.approx(-2.0), *times])
    )


def test_no_transfer_row_where_its_beginning_is_not_known(make_launch):
    launch = make_launch(2)
    launch.started.clear()
    made = Drawn(launch)
    assert made.rows == ["arrivals", "worker 0", "worker 1"]
    assert "transfer 0" not in made.kinds


def test_parts_and_reduces_differ_from_tiles(make_launch):
    made = Drawn(make_launch(4, parts=True))
    heights = {kind: made.boxes(kind)[0][3] - made.boxes(kind)[0][2] for kind in ("tile", "part", "reduce")}
    assert heights["part"] < heights["tile"] == heights["reduce"]
    assert len(made.kinds["reduce"].get_facecolors()) == 1
    assert {"part of a tile's K range", "adding up a tile's parts"} <= set(made.legend)


def test_without_arrival_neutral_and_no_colour_bar(make_launch):
    made = Drawn(make_launch(2, arrival=False))
    assert len(made.figure.axes) == 1
    assert len({tuple(colour) for colour in made.kinds["tile"].get_facecolors()}) == 1
    assert made.legend == ["tile"]
    assert "waiting" not in made.words[1]


def test_each_operand_has_rows_and_a_colour_bar_of_its_own(make_launch):
    one, two = Drawn(make_launch(2)), Drawn(make_launch(2, both=True))
    assert one.figure.axes[1].get_ylabel() == "chunk"
    assert all(tick == int(tick) for tick in one.figure.axes[1].get_yticks())
    assert two.rows[:3] == ["arrivals A", "transfer A", "arrivals B"]
    assert [axes.get_ylabel() for axes in two.figure.axes[1:]] == ["chunk of A's rows", "chunk of B's columns"]


def test_hundreds_of_workers_and_thousands_of_tiles_stay_few_collections(make_launch):
    made = Drawn(make_launch(132, chunks=64, columns=64))
    assert len(made.boxes("tile")) == 4096
    assert len(made.axes.collections) < 10
    assert len(made.axes.patches) == 0
    assert 10 < len(made.rows) < 50, "labels do not touch"
    assert not made.kinds["wait"].get_hatch(), "rows are too thin for strokes"


def test_title_and_summary(make_launch):
    launch = make_launch(2, chunks=4, columns=2)
    assert Drawn(launch).words[0] == "matmul: cpu dynamic, 2 workers"
    heading, summary = Drawn(launch, title="mine").words
    assert heading == "mine"
    assert "8 of 8 tiles on 2 workers" in summary
    assert "last of 4 chunks" in summary


def test_arrivals_long_before_the_launch_stay_at_the_left_edge(make_launch):
    launch = make_launch(2, chunks=4)
    launch.arrivals[0] = (50.0, None, *launch.arrivals[0][2:])
    launch.started[0] = 40.0
    made = Drawn(launch)
    left, right = made.axes.get_xlim()
    assert left > -0.15 * right
    assert len(made.kinds["arrivals 0"].get_offsets()) == 3


def test_a_launch_without_work_or_cut_short_is_drawn_up_to_its_last_span():
    assert Drawn(LaunchTrace("matmul", "empty", 1, 0, 5.0, 5.0)).rows == ["worker 0"]
    launch = LaunchTrace("matmul", "cut", 1, 4, 5.0, arrivals={0: (None, None)})
    launch.by_worker[0].append(Span(0, "wait", 5.0, 5.5, 0, 0, 0, 0, 1, 0))
    assert Drawn(launch).axes.get_xlim()[1] == pytest.approx(500, rel=0.02)


def test_draw_writes_a_picture_and_leaves_pyplot_alone(make_launch, tmp_path):
    assert draw(make_launch(4), tmp_path / "t.svg").read_bytes().startswith(b"<?xml")
    for size, expected in ((None, default_size(make_launch(2))), ((1000, 500), (1000, 500))):
        data = draw(make_launch(2), tmp_path / "t.png", size=size).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == expected
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


@pytest.mark.parametrize("workers", [1, 4, 16, 132])
def test_default_size_fits_a_screen(make_launch, workers):
    width, height = default_size(make_launch(workers, chunks=4))
    assert width == 1600
    assert 300 <= height <= (1000 if workers <= 16 else 1200), "two pixels for each of a page"


def test_a_picture_is_of_one_launch(make_launch, tmp_path):
    with pytest.raises(
        TypeError, match=r"^draw: launch is a list; it must be one launch, such as recorder.launches\[0\]$"
    ):
        draw([make_launch(2)], tmp_path / "t.png")


def test_without_matplotlib_the_extra_is_named(make_launch, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ImportError, match=r"tilestream\[plot\]"):
        draw(make_launch(2), tmp_path / "t.png")
