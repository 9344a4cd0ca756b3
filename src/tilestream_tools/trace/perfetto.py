"""Traces as Chrome trace events, the JSON that https://ui.perfetto.dev and chrome://tracing open; written and read.

A launch is a process. It has a track a worker, a track with an instant for each chunk's arrival, and a track with the
chunk that was coming in, from which an arrow leads to the first work item that waited for it. The format: "Trace Event
Format", Duration (``X``), Instant (``i``), Flow (``s``, ``f``) and Metadata (``M``) events, times in microseconds.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from tilestream._version import __version__
from tilestream.trace.record import LaunchTrace, Span, SpanKind

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

Event = dict[str, Any]

# Tracks (tids) of a launch: two an operand, then the workers.
_ARRIVALS, _INCOMING, _WORKERS = 1, 2, 10
_OPERANDS = ("A", "B")


def export(launches: LaunchTrace | Iterable[LaunchTrace], path: str | os.PathLike[str]) -> Path:
    """Write ``launches`` as a trace that Perfetto opens; compressed where ``path`` ends with ``.gz``.

    Parameters
    ----------
    launches
        One launch, or those of a `Recorder`.
    path
        ``.json`` or ``.json.gz``.

    Returns
    -------
    Path
        The file.
    """
    path = Path(path)
    launches = [launches] if isinstance(launches, LaunchTrace) else list(launches)
    text = json.dumps(document(launches), separators=(",", ":"), allow_nan=False).encode()
    # No time stamp in the archive: the same trace gives the same bytes.
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    return path


def document(launches: Sequence[LaunchTrace]) -> dict[str, Any]:
    """What `export` writes, as Python objects. Events are sorted by time, metadata first."""
    zero = min((_earliest(launch) for launch in launches), default=0.0)
    metadata: list[Event] = []
    events: list[Event] = []
    for pid, launch in enumerate(launches, 1):
        _Writer(pid, launch, zero, metadata, events).write()
    # Where times are equal, a slice comes before the arrow's end that lies on it.
    events.sort(key=lambda event: (event["ts"], event["pid"], event["ph"] in "sf"))
    headers = [_header(launch, zero) for launch in launches]
    return {
        "traceEvents": metadata + events,
        "displayTimeUnit": "ms",
        "otherData": {"writer": f"tilestream {__version__}", "launches": headers},
    }


def _earliest(launch: LaunchTrace) -> float:
    arrived = [when for times in launch.arrivals.values() for when in times if when is not None]
    first = [spans[0].begin for spans in launch.by_worker if spans]
    return min([launch.begin, *launch.started.values(), *arrived, *first])


def _header(launch: LaunchTrace, zero: float) -> dict[str, Any]:
    return {
        "op": launch.op,
        "label": launch.label,
        "workers": launch.workers,
        "tiles": launch.tiles,
        "begin": _us(launch.begin, zero),
        "end": _us(launch.end, zero) if launch.end else None,
        "started": {str(operand): _us(when, zero) for operand, when in launch.started.items()},
        "arrivals": {
            str(operand): [None if when is None else _us(when, zero) for when in times]
            for operand, times in launch.arrivals.items()
        },
    }


class _Writer:
    """Adds the events of one launch, which is process ``pid``."""

    def __init__(self, pid: int, launch: LaunchTrace, zero: float, metadata: list[Event], events: list[Event]) -> None:
        self.pid, self.launch, self.zero, self.metadata, self.events = pid, launch, zero, metadata, events

    def write(self) -> None:
        launch = self.launch
        self._meta("process_name", 0, name=f"{launch.op} {self.pid}: {launch.label}")
        self._meta("process_sort_index", 0, sort_index=self.pid)
        for operand in sorted(launch.arrivals):
            of = f" of {_OPERANDS[operand]}" if len(launch.arrivals) > 1 else ""
            self._thread(_ARRIVALS + 2 * operand, f"arrivals{of}")
            self._thread(_INCOMING + 2 * operand, f"coming in{of}")
            self._arrivals(operand)
        for worker, spans in enumerate(launch.by_worker):
            self._thread(_WORKERS + worker, f"worker {worker}")
            for span in spans:
                self._span(span)

    def _arrivals(self, operand: int) -> None:
        known = sorted((when, chunk) for chunk, when in enumerate(self.launch.arrivals[operand]) if when is not None)
        first = self._first_after_wait(operand)
        # Without the producer's begin the first chunk is shown coming in from the launch on.
        before = min([self.launch.started.get(operand, self.launch.begin), *(when for when, _ in known[:1])])
        for when, chunk in known:
            name, args = f"chunk {chunk}", {"chunk": chunk, "operand": _OPERANDS[operand]}
            self._event("i", name, "arrival", _ARRIVALS + 2 * operand, when, s="t", args=args)
            self._slice(name, "incoming", _INCOMING + 2 * operand, before, when, args)
            item = first.get(chunk)
            # An arrow begins inside a slice, so halfway.
            middle = (before + when) / 2
            if item is not None and item.begin >= middle:
                flow, halfway = len(self.events), (item.begin + item.end) / 2  # a number that no other arrow has
                self._event("s", "arrival", "flow", _INCOMING + 2 * operand, middle, id=flow)
                self._event("f", "arrival", "flow", _WORKERS + item.worker, halfway, id=flow, bp="e")
            before = when

    def _first_after_wait(self, operand: int) -> dict[int, Span]:
        """For each chunk the first item that its worker began after really waiting for that chunk."""
        first: dict[int, Span] = {}
        times = self.launch.arrivals[operand]
        for spans in self.launch.by_worker:
            waited: set[int] = set()
            for span in spans:
                if span.kind == "wait":
                    when = times[span.chunk] if span.operand == operand and 0 <= span.chunk < len(times) else None
                    if when is not None and when > span.begin:
                        waited.add(span.chunk)
                else:
                    for chunk in waited:
                        if chunk not in first or span.begin < first[chunk].begin:
                            first[chunk] = span
                    waited.clear()
        return first

    def _span(self, span: Span) -> None:
        name = f"wait for chunk {span.chunk}" if span.kind == "wait" else f"{span.kind} {span.pm},{span.pn}"
        args: dict[str, Any] = {
            "batch": span.batch, "pm": span.pm, "pn": span.pn, "k_begin": span.k_begin, "k_end": span.k_end
        }  # fmt: skip
        if span.chunk >= 0:
            args |= {"chunk": span.chunk, "operand": _OPERANDS[span.operand]}
        if span.unit >= 0:
            args["unit"] = span.unit
        self._slice(name, span.kind, _WORKERS + span.worker, span.begin, span.end, args)

    def _slice(self, name: str, category: str, tid: int, begin: float, end: float, args: dict[str, Any]) -> None:
        # The difference of rounded times, so that neighbours neither overlap nor leave a gap.
        ts = _us(begin, self.zero)
        dur = max(0.0, round(_us(end, self.zero) - ts, 3))
        self.events.append({
            "ph": "X", "name": name, "cat": category, "pid": self.pid, "tid": tid, "ts": ts, "dur": dur, "args": args
        })  # fmt: skip

    def _event(self, phase: str, name: str, category: str, tid: int, when: float, **more: Any) -> None:
        ts = _us(when, self.zero)
        self.events.append({"ph": phase, "name": name, "cat": category, "pid": self.pid, "tid": tid, "ts": ts, **more})

    def _thread(self, tid: int, name: str) -> None:
        self._meta("thread_name", tid, name=name)
        self._meta("thread_sort_index", tid, sort_index=tid)

    def _meta(self, what: str, tid: int, **args: Any) -> None:
        self.metadata.append({"ph": "M", "name": what, "pid": self.pid, "tid": tid, "ts": 0, "args": args})


def _us(when: float, zero: float) -> float:
    return round((when - zero) * 1e6, 3)


def load(path: str | os.PathLike[str]) -> list[LaunchTrace]:
    """The launches of a trace that `export` wrote; times count from the trace's beginning.

    Raises
    ------
    ValueError
        If the file is no such trace.
    """
    path = Path(path)
    data = path.read_bytes()
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        found = json.loads(data)
        headers = enumerate(found["otherData"]["launches"], 1)
        return [_launch(pid, header, found["traceEvents"]) for pid, header in headers]
    except (zlib.error, ValueError, KeyError, TypeError, IndexError, AttributeError, EOFError, OSError) as error:
        raise ValueError(f"{path}: no trace written by tilestream ({type(error).__name__}: {error})") from None


def _launch(pid: int, header: Mapping[str, Any], events: Iterable[Mapping[str, Any]]) -> LaunchTrace:
    def seconds(us: float | None) -> float | None:
        return None if us is None else us / 1e6

    launch = LaunchTrace(
        header["op"], header["label"], int(header["workers"]), int(header["tiles"]), header["begin"] / 1e6,
        seconds(header["end"]) or 0.0,
        {int(operand): tuple(map(seconds, times)) for operand, times in header["arrivals"].items()},
        started={int(operand): when / 1e6 for operand, when in header["started"].items()},
    )  # fmt: skip
    for event in events:
        if event["ph"] == "X" and event["pid"] == pid and event["cat"] in get_args(SpanKind):
            args = event["args"]
            begin, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
            worker = event["tid"] - _WORKERS
            operand = _OPERANDS.index(args.get("operand", "A"))
            launch.by_worker[worker].append(Span(
                worker, event["cat"], begin, end, args["batch"], args["pm"], args["pn"], args["k_begin"], args["k_end"],
                args.get("chunk", -1), operand, args.get("unit", -1),
            ))  # fmt: skip
    return launch
