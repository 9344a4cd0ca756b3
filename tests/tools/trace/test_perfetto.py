import gzip
import json
from itertools import pairwise

import pytest

from tilestream.trace import export, load

PHASES = {"M", "X", "i", "s", "f"}


def exported(tmp_path, *launches, name="trace.json"):
    path = export(launches, tmp_path / name)
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if name.endswith(".gz") else data)


def of_phase(document, phase):
    return [event for event in document["traceEvents"] if event["ph"] == phase]


def test_every_event_is_well_formed_and_sorted_behind_the_metadata(make_launch, tmp_path):
    events = exported(tmp_path, make_launch(3, parts=True), make_launch(2, both=True, begin=101.0))["traceEvents"]
    for event in events:
        assert event["ph"] in PHASES
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        assert event.get("dur", -1) >= (0 if event["ph"] == "X" else -1)
        assert event["ph"] != "i" or event["s"] == "t"
    phases = [event["ph"] for event in events]
    first = next(i for i, phase in enumerate(phases) if phase != "M")
    assert "M" not in phases[first:]
    assert all(a["ts"] <= b["ts"] for a, b in pairwise(events[first:]))
    flows = [event["id"] for event in events if event["ph"] == "s"]
    assert len(set(flows)) == len(flows), "of both launches"


def test_names_of_processes_and_tracks(make_launch, tmp_path):
    document = exported(tmp_path, make_launch(3))
    metadata = of_phase(document, "M")
    processes = {event["pid"]: event["args"]["name"] for event in metadata if event["name"] == "process_name"}
    threads = {event["args"]["name"]: event["tid"] for event in metadata if event["name"] == "thread_name"}
    assert processes == {1: "matmul 1: cpu dynamic, 3 workers"}
    assert list(threads) == ["arrivals", "coming in", "worker 0", "worker 1", "worker 2"]
    assert len(set(threads.values())) == len(threads)
    used = {(event["pid"], event["tid"]) for event in document["traceEvents"] if event["ph"] != "M"}
    assert used == {(1, tid) for tid in threads.values()}


def test_slices_of_a_track_do_not_overlap(make_launch, tmp_path):
    tracks = {}
    for event in of_phase(exported(tmp_path, make_launch(3, parts=True)), "X"):
        tracks.setdefault(event["tid"], []).append(event)
    for events in tracks.values():
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.002 for a, b in pairwise(events))


def test_spans_carry_tile_chunk_and_k_range(make_launch, tmp_path):
    launch = make_launch(2, chunks=4, columns=2)
    slices = [event for event in of_phase(exported(tmp_path, launch), "X") if event["cat"] == "tile"]
    spans = [span for span in launch.spans if span.kind == "tile"]
    zero = launch.started[0]
    for event, span in zip(slices, spans, strict=True):
        args = event["args"]
        assert (args["batch"], args["pm"], args["pn"]) == (span.batch, span.pm, span.pn)
        assert (args["k_begin"], args["k_end"], args["chunk"]) == (span.k_begin, span.k_end, span.chunk)
        assert event["ts"] == pytest.approx(1e6 * (span.begin - zero), abs=0.001)
        assert event["dur"] == pytest.approx(1e6 * (span.end - span.begin), abs=0.002)
        assert event["name"] == f"tile {span.pm},{span.pn}"


def test_an_instant_for_each_arrival_on_a_track_of_its_own(make_launch, tmp_path):
    instants = of_phase(exported(tmp_path, make_launch(2, chunks=5)), "i")
    assert [event["name"] for event in instants] == [f"chunk {c}" for c in range(5)]
    assert {event["tid"] for event in instants} == {1}


def test_arrows_lead_from_what_came_in_to_the_first_item_that_waited(make_launch, tmp_path):
    launch = make_launch(2, chunks=4, columns=2)
    document = exported(tmp_path, launch)
    slices = of_phase(document, "X")
    starts = {event["id"]: event for event in of_phase(document, "s")}
    ends = {event["id"]: event for event in of_phase(document, "f")}
    assert starts
    assert starts.keys() == ends.keys()

    def under(event):
        return next(s for s in slices if s["tid"] == event["tid"] and s["ts"] <= event["ts"] < s["ts"] + s["dur"])

    for flow, start in starts.items():
        source, target = under(start), under(ends[flow])
        assert source["cat"] == "incoming"
        assert target["cat"] == "tile"
        assert target["args"]["chunk"] == source["args"]["chunk"]
        assert start["ts"] <= ends[flow]["ts"]
        assert ends[flow]["bp"] == "e"


def test_no_arrow_for_a_gate_that_was_open(make_launch, tmp_path):
    launch = make_launch(2, chunks=4)
    launch.arrivals[0] = (launch.begin - 0.001,) * 4
    assert not of_phase(exported(tmp_path, launch), "s")


def test_compressed_where_the_name_says_so_and_the_same_bytes_each_time(make_launch, tmp_path):
    launch = make_launch(2)
    assert exported(tmp_path, launch, name="t.json.gz") == exported(tmp_path, launch)
    first = (tmp_path / "t.json.gz").read_bytes()
    assert export(launch, tmp_path / "u.json.gz").read_bytes() == first


def test_several_launches_share_one_clock(make_launch, tmp_path):
    document = exported(tmp_path, make_launch(1, begin=10.0), make_launch(1, begin=11.0))
    firsts = {}
    for event in of_phase(document, "X"):
        firsts.setdefault(event["pid"], event["ts"])
    assert firsts[2] - firsts[1] == pytest.approx(1e6)


def test_without_arrival_only_workers(make_launch, tmp_path):
    document = exported(tmp_path, make_launch(2, arrival=False))
    assert {event["ph"] for event in document["traceEvents"]} == {"M", "X"}
    assert all("chunk" not in event["args"] for event in of_phase(document, "X"))


def test_nothing_recorded_is_a_valid_trace(tmp_path):
    assert exported(tmp_path)["traceEvents"] == []


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_load_gives_back_what_was_exported(make_launch, tmp_path, name):
    before = [make_launch(3, parts=True), make_launch(2, both=True, begin=101.0)]
    before[0].arrivals[0] = (*before[0].arrivals[0][:-1], None)  # never arrived
    after = load(export(before, tmp_path / name))
    zero = before[0].started[0]
    assert len(after) == 2

    def near(times):
        return [when if when is None else pytest.approx(when - zero, abs=1e-8) for when in times]

    for old, new in zip(before, after, strict=True):
        assert (new.op, new.label, new.workers, new.tiles) == (old.op, old.label, old.workers, old.tiles)
        assert new.tiles_done == old.tiles_done
        assert new.end - new.begin == pytest.approx(old.end - old.begin, abs=1e-8)
        assert (list(new.started), list(new.started.values())) == (list(old.started), near(old.started.values()))
        for operand, times in old.arrivals.items():
            assert list(new.arrivals[operand]) == near(times)
        for spans, back in zip(old.by_worker, new.by_worker, strict=True):
            for span, other in zip(spans, back, strict=True):
                assert span._replace(begin=0, end=0) == other._replace(begin=0, end=0)


@pytest.mark.parametrize(
    "data", [b"", b"not json", b"{}", b"[]", b'{"otherData": {"launches": [{}]}, "traceEvents": []}', b"\x1f\x8bxx"]
)
def test_load_refuses_what_is_no_trace(tmp_path, data):
    path = tmp_path / "t.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="no trace written by tilestream"):
        load(path)
