"""The pictures of the documentation: which there are, their sizes, and their texts on a page of 800 pixels."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest
from benchmarks.core.paths import DOCS, IMAGES
from benchmarks.report import pages, plots

from tilestream_tools import palette

pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")

#: Words that name a device, or say that there was none.
DEVICE = re.compile(r"H100|H200|AMD EPYC|simulated")
#: Of a figure: texts may touch, and their boxes have some air.
TOUCH = 1.5


def texts(figure):
    """(what, text, its box in pixels of a page, its points) of every text of a figure that has been drawn."""
    found = [("figure", text) for text in figure.texts]
    found += [("title", figure._suptitle)] * (figure._suptitle is not None and figure._suptitle not in figure.texts)
    found += [("legend", text) for legend in figure.legends for text in legend.get_texts()]
    for axes in figure.axes:
        found += [("axes", text) for text in (axes.title, axes._left_title, axes._right_title, *axes.texts)]
        for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
            found.append((f"{name} label", axis.label))
            place = axis.get_transform().transform  # a logarithmic axis is even in it
            low, high = sorted(map(float, place(axis.get_view_interval())))
            slack = 1e-6 * (high - low)
            ticks = [tick for tick in axis.get_major_ticks() if low - slack <= place(tick.get_loc()) <= high + slack]
            found += [(f"{name} tick", tick.label1) for tick in ticks if tick.label1.get_visible()]
    scale = figure.dpi / palette.DPI
    return [
        (what, text.get_text(), text.get_window_extent().extents / scale, text.get_fontsize())
        for what, text in found
        if text.get_text().strip() and text.get_visible()
    ]


def DRAWS(test):  # noqa: N802
    """Marks tests of every picture, drawn anew: 10 s of CPU."""
    return pytest.mark.timeout(900)(pytest.mark.slow(test))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Every picture: its file, its title, and its texts."""
    folder, found = tmp_path_factory.mktemp("images"), {}
    saved = palette.save

    def save(figure, path, title):
        saved(figure, path, title)
        found[path.name] = (path, title, texts(figure), figure.get_size_inches() * palette.DPI)
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(palette, "save", save)
        plots.main([str(folder)])
    return found


def test_the_committed_pictures_are_those_that_are_shown():
    text = "".join(path.read_text(encoding="utf-8") for path in (*DOCS.rglob("*.md"), DOCS.parent / "README.md"))
    assert {path.name for path in IMAGES.iterdir()} == set(re.findall(r"images/(\w+\.png)\)", text))
    for path in IMAGES.iterdir():
        with Image.open(path) as picture:
            assert DEVICE.search(picture.text["Title"]), path.name
            assert picture.width == palette.SCALE * palette.WIDTH, path.name
            assert 400 <= picture.height <= 1300, path.name


@DRAWS
def test_every_picture_that_is_shown_is_drawn_and_no_other(drawn):
    assert set(drawn) == {path.name for path in IMAGES.iterdir()}
    shown = set(re.findall(r"\(\.\./images/(\w+\.png)\)", "".join(map(pages.text, pages.PAGES))))
    assert shown <= set(drawn)
    for name, (path, title, *_) in drawn.items():
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 5000
        with Image.open(path) as new, Image.open(IMAGES / name) as old:
            assert new.text["Title"] == old.text["Title"] == title, "run python benchmarks/run.py report pictures"
            assert new.size == old.size, name


@DRAWS
def test_each_names_its_device_and_labels_its_axes(drawn):
    for name, (_, title, found, _) in drawn.items():
        told = " ".join(text for _, text, *_ in found)
        assert DEVICE.search(title), name
        assert title in told.replace("\n", " "), name
        labels = [text for what, text, *_ in found if what == "x label"]
        assert labels or name.startswith("gemm_"), f"{name}: no label of x"
        ylabels = [text for what, text, *_ in found if what == "y label"]
        rows = [text for what, text, *_ in found if what == "y tick" and re.match("[a-z]", text)]
        assert ylabels or rows, f"{name}: neither a label of y nor named rows"


@DRAWS
def test_texts_are_large_enough_stay_inside_and_do_not_collide(drawn):
    wrong = []
    for name, (_, _, found, (width, height)) in drawn.items():
        assert width == pytest.approx(palette.WIDTH, abs=0.1)
        for what, text, (left, low, right, high), points in found:
            if points < palette.SMALL:
                wrong.append(f"{name}: {what} {text!r} has {points} points")
            if left < -TOUCH or low < -TOUCH or right > width + TOUCH or high > height + TOUCH:
                wrong.append(f"{name}: {what} {text!r} leaves the picture")
        for one, other in combinations(found, 2):
            (a, b, c, d), (e, f, g, h) = one[2], other[2]
            if min(c, g) - max(a, e) > TOUCH and min(d, h) - max(b, f) > TOUCH + 1:
                wrong.append(f"{name}: {one[:2]} and {other[:2]}")
    assert not wrong


def test_the_check_sees_a_collision_and_a_text_outside():
    figure = palette.figure(800, 200)
    figure.text(0.5, 0.5, "one", fontsize=9)
    figure.text(0.5, 0.52, "other", fontsize=9)
    figure.text(0.99, 0.5, "beyond the edge", fontsize=4)
    figure.draw_without_rendering()
    with pytest.raises(AssertionError) as wrong:
        test_texts_are_large_enough_stay_inside_and_do_not_collide({"x": (None, "", texts(figure), (800, 200))})
    for words in ("'one') and", "leaves the picture", "has 4.0 points"):
        assert words in str(wrong.value)


@DRAWS
def test_legends_list_what_is_there_alone(drawn):
    def legend(name):
        return [text for what, text, *_ in drawn[name][2] if what == "legend"]

    assert legend("gather_x2_pull_h200.png") == ["tile", "part of a tile's K range", "a chunk arrives"]
    assert "adding up a tile's parts" not in legend("gather_x2_push_h200.png"), "nowhere a pixel wide"
    assert legend("attention_timeline_h200.png") == ["tile"]
    assert "copy of its own rows" in legend("mlp_x2_h200.png")
    assert set(legend("gemm_h100.png")) >= {"won", "lost", "geometric mean"}


@DRAWS
def test_they_are_in_the_field_s_words(drawn):
    told = {name: " ".join(text for _, text, *_ in found) for name, (_, _, found, _) in drawn.items()}
    assert "head dim 64, non-causal" in told["attention_h100.png"]
    assert "reduce-scatter" in told["mlp_x2_h200.png"]
    assert not [name for name, text in told.items() if re.search(r"columns of a head|\bfull\b|\bGather\b", text)]


@DRAWS
def test_times_below_a_millisecond_are_in_microseconds(drawn):
    told = [text for _, text, *_ in drawn["trace_static_beside.png"][2]]
    assert "us from the launch" in told
    assert any("in 286 us" in text for text in told), "as docs/scheduling.md says it"


def test_a_picture_made_again_has_the_same_bytes(tmp_path):
    first, second = tmp_path / "a.png", tmp_path / "b.png"
    for path in (first, second):
        figure = palette.figure(100, 50)
        figure.text(0.1, 0.5, "x")
        palette.save(figure, Path(path), "a title")
    assert first.read_bytes() == second.read_bytes()


def test_the_committed_reports_are_made_of_their_json():
    from tilestream_tools.report import page

    made = sorted((DOCS / "report").glob("*.json"))
    assert made
    linked = (DOCS / "howto" / "report.md").read_text(encoding="utf-8")
    for path in made:
        text = path.with_suffix(".html").read_text(encoding="utf-8")
        how = f"python -m tilestream_tools.report --from {path} --out {path.with_suffix('.html')}"
        assert text == page.html(page.read(path)), how
        assert f"../report/{path.stem}.html" in linked
        assert len(text) < 600_000
