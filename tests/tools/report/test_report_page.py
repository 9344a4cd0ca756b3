"""The report's page without a browser: what is in it, that it is well formed and loads nothing, its colours."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from colours import BLIND, contrast, distance, luminance, schemes
from reports import TEXTS, arriving, made_up

from tilestream_tools.report import charts, page
from tilestream_tools.trace import page as frame

CSS = Path(frame.__file__).with_name("page.css")
VOID = {"meta", "link", "wbr", "br"}


class Read(HTMLParser):
    """Elements, their attributes and texts; complains where an element is closed that is not open."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.texts, self.ids = [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(params=["cpu", "h100"])
def data(request):
    return made_up(request.param)


def test_is_well_formed_and_loads_nothing(data):
    text = page.html(data)
    read = Read(text)
    assert len(read.ids) == len(set(read.ids))
    links = {attributes["href"] for tag in ("a", "link") for attributes in read.all(tag)}
    assert links - {"data:,"} == {f"#{name}" for name in read.ids}
    assert not any("src" in attributes for _, attributes in read.elements)
    assert not re.search(r"https?://|url\(|@import", text)


def test_every_section_says_something(data):
    read = Read(page.html(data))
    text = "".join(read.texts)
    for words in ("Beside torch", "Roofline", "Overlap won by streaming", "Timelines", "What is warm", "Plans, and",
                  "Doctor's findings", "no: torch sees no GPU", "1.8 ms of the 2 ms that could be hidden"):  # fmt: skip
        assert words in text
    for call in data["calls"]:
        assert call["call"] in text
        assert call.get("why", call.get("explain")) in text
        for _, why in call.get("refused", ()):
            assert why in text
    assert data["machine"]["name"] in text, "escaped, not swallowed"


def test_a_gpu_s_report_has_both_clocks_and_what_was_warm():
    text = "".join(Read(page.html(made_up("h100"))).texts)
    for words in (
        "What issuing a call costs the host",
        "GPU clock, L2 flushed",
        "in the cache",
        "compiled now",
        "5 us",
    ):
        assert words in text
    text = "".join(Read(page.html(made_up("cpu"))).texts)
    assert "issuing" not in text
    assert "nothing is compiled" in text


def test_what_was_not_measured_is_said(data):
    why = {"call": TEXTS["cpu"][0], "dtype": "float32", "why": "no <reason>"}
    nothing = data | {"calls": [why], "stream": {"why": "no disk"}, "timelines": [], "warm": {"why": "no Triton"}}
    text = "".join(Read(page.html(nothing)).texts)
    for words in ("No call was measured", "no <reason>", "no disk", "No launch was recorded", "No Triton"):
        assert words in text


@pytest.mark.parametrize(("load", "said"), [(0.9, False), (7.5, True)])
def test_a_busy_machine_is_said(data, load, said):
    machine = data["machine"] | {"load": load, "cores": 2}
    text = "".join(Read(page.html(data | {"machine": machine})).texts)
    assert ("The machine was busy: a load of 7.5 on 2 cores" in text) == said


def test_ratios_are_judged_by_their_quartiles():
    assert "won" in page.judged(1.1, (1.05, 1.2))
    assert "lost" in page.judged(0.9, (0.8, 0.95))
    assert "even" in page.judged(1.1, (0.9, 1.2))


def test_everything_that_is_used_has_a_name(data):
    read = Read(page.html(data))
    for tag in ("canvas", "button"):
        assert read.all(tag)
        assert all(attributes.get("aria-label") for attributes in read.all(tag))
    assert all(attributes.get("aria-label") or attributes.get("aria-hidden") for attributes in read.all("svg"))
    assert all(attributes["tabindex"] == "0" for attributes in read.all("canvas"))
    assert ("html", {"lang": "en"}) in read.elements


def test_the_page_is_made_of_the_json_alone(data, tmp_path):
    made, beside = page.write(data, tmp_path / "r.html")
    assert made.read_text() == page.html(page.read(beside)) == page.html(data)
    assert {path.name for path in tmp_path.iterdir()} == {"r.html", "r.json"}
    assert json.loads(beside.read_text()) == json.loads(json.dumps(data))
    assert max(map(len, beside.read_text().splitlines())) < 20_000, "a change is a few lines of a diff"


@pytest.mark.parametrize(("text", "says"), [
    ("{", "no JSON of a report"), ("[]", "no JSON of a report"), ('{"kind": "x"}', "writes it beside the page"),
    ('{"kind": "tilestream report", "schema": 0}', "schema 0; this version reads 1: measure anew"),
])  # fmt: skip
def test_other_files_are_refused(tmp_path, text, says):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=re.escape(says)):
        page.read(tmp_path / "x.json")


# Timelines ------------------------------------------------------------------------------------------------------------


def test_a_timeline_holds_every_span_and_arrival():
    launch = arriving(workers=4, chunks=4)
    found = frame.timeline(launch, title="t")
    assert [len(spans) for spans in found["workers"]] == [
        sum(span.kind != "wait" or span.end > span.begin + 5e-8 for span in spans) for spans in launch.by_worker
    ]
    assert found["arrivals"] == {"0": [0.0, 100.0, 200.0, None]}
    assert found["started"] == {"0": pytest.approx(-100)}
    part = next(span for span in found["workers"][1] if span[0] == list(frame.KINDS).index("part"))
    assert part[6:] == [0, 64, part[8], 0]
    assert part[2] == pytest.approx(300, abs=0.02)
    assert "16 of 16 tiles on 4 workers in" in found["summary"]


def test_a_launch_cut_short_ends_with_its_last_span():
    launch = arriving(workers=1)
    last, launch.end = launch.end, 0.0
    assert frame.timeline(launch)["length"] == pytest.approx(1e6 * (last - launch.begin), abs=0.02)


def test_a_script_in_a_label_stays_text(tmp_path):
    launch = arriving(workers=1)
    launch.label = "</script><script>alert(1)</script>"
    text = frame.write([launch], tmp_path / "t.html", title="<b>").read_text()
    assert "<script>alert" not in text
    assert "<b>" not in text
    embedded = re.search(r'<script type="application/json">(.*?)</script>', text)[1]
    assert json.loads(embedded)["label"] == launch.label


def test_the_legend_lists_what_is_there_alone(tmp_path):
    quiet = arriving(workers=2)
    quiet.arrivals, quiet.started = {}, {}
    for spans in quiet.by_worker:
        spans[:] = [span for span in spans if span.kind == "tile"]
    told = "".join(Read(frame.figure(frame.timeline(quiet))).texts)
    assert "a tile" in told
    for words in ("waiting", "part", "adding up", "arrives", "chunk"):
        assert words not in told
    told = "".join(Read(frame.figure(frame.timeline(arriving()))).texts)
    for words in (*frame.KINDS.values(), "a chunk arrives", "first to last chunk"):
        assert words in told


# Charts and colours ---------------------------------------------------------------------------------------------------


def test_numbers_of_points_that_coincide_stand_below_one_another():
    points = [charts.Point(number, "x", 100.0, 1e11, 1e11) for number in (1, 2, 3)]
    svg = charts.roofline(points, [charts.Roof("float32", 5e11)], 2e10, 1e10)
    found = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="middle">(\d)</text>', svg)
    assert [number for _, _, number in found] == ["1", "2", "3"]
    assert all(float(b[1]) - float(a[1]) >= 13 for a, b in pairwise(found))


@pytest.mark.parametrize("values", [(1.0, 1.0), (0.02, 40.0), (1000.0, 1.0)])
def test_ratios_beyond_the_axis_stand_at_its_edge(values):
    svg = charts.ratios([(str(x), x, (0.9 * x, 1.1 * x)) for x in values], "ratio")
    assert all(0 < float(x) < charts.WIDTH for x in re.findall(r'cx="([\d.]+)"', svg))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_marks_have_contrast_in_both_schemes(scheme):
    colour = schemes(CSS)[scheme]
    for ground in ("page", "raised"):
        for text in ("text", "faint", "good", "bad"):
            assert contrast(colour[text], colour[ground]) >= 4.5, (text, ground)
    for mark in ("ours", "peer", "bring", "reduce", "focus"):
        assert contrast(colour[mark], colour["page"]) >= 3, mark
    assert contrast(colour["ours"], colour["page"]) >= 4.5, "links"
    assert contrast(colour["wait-line"], colour["wait"]) >= 2


@pytest.mark.parametrize("who", BLIND)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_are_told_apart_by_everybody(scheme, who):
    colour = schemes(CSS)[scheme]
    for one, other in combinations(("ours", "peer", "bring"), 2):
        assert distance(colour[one], colour[other], who) > 10, (one, other)
    assert distance(colour["ours"], colour["reduce"], who) > 10
    stops = colour["ramp"].split(", ")
    assert [luminance(x) for x in stops] == sorted(luminance(x) for x in stops), "chunks by lightness"
    assert all(distance(a, b, who) > 10 for a, b in pairwise(stops))
