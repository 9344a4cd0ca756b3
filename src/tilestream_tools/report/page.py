"""The report as one HTML file: a pure function of what `measure` found."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tilestream_tools import records
from tilestream_tools.report import charts
from tilestream_tools.report.charts import Point, Roof, numbered, rate
from tilestream_tools.report.measure import KIND, SCHEMA, geomean
from tilestream_tools.trace import page as frame
from tilestream_tools.units import count, duration

Data = dict[str, Any]


def write(data: Data, path: Path) -> tuple[Path, Path]:
    """Write ``path`` (HTML) and the JSON that it was made of beside it; both appear whole or not at all."""
    beside = path.with_suffix(".json")
    for where, text in ((path, html(data)), (beside, text_of(data))):
        records.write(where, text)
    return path, beside


def read(path: Path) -> Data:
    """What `write` wrote beside a page.

    Raises
    ------
    ValueError
        If the file is no such thing, or of another version's layout.
    """
    way_out = "; `tilestream report` writes it beside the page"
    return records.read(path, KIND, SCHEMA, "JSON of a report", "measure anew", way_out)


def text_of(data: Data) -> str:
    """The JSON: an entry a line, a call a line, a worker of a timeline a line."""

    def lines(values: Iterable[Any], indent: str) -> str:
        return "[\n" + ",\n".join(f"{indent} {_json(value)}" for value in values) + f"\n{indent}]"

    entries = []
    for name, value in data.items():
        if name == "calls":
            text = lines(value, " ")
        elif name == "timelines":
            parts = []
            for one in value:
                head = _json({key: found for key, found in one.items() if key != "workers"})[:-1]
                parts.append(f'  {head}, "workers": {lines(one["workers"], "  ")}}}')
            text = "[\n" + ",\n".join(parts) + "\n ]"
        else:
            text = _json(value)
        entries.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


# The page -------------------------------------------------------------------------------------------------------------


def html(data: Data) -> str:
    """The page."""
    sections = [
        ("beside", "Beside torch", beside_torch(data)),
        ("roofline", "Roofline", roofline(data)),
        ("overlap", "Overlap won by streaming", overlap(data)),
        ("timelines", "Timelines", timelines(data)),
        ("warm", "What is warm", warm(data)),
        ("plans", "Plans, and what they refuse", plans(data)),
        ("doctor", "Doctor's findings", findings(data)),
    ]
    links = "".join(f'<li><a href="#{name}">{escape(title)}</a></li>' for name, title, _ in sections)
    body = "".join(
        f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(title)}</h2>{text}</section>'
        for name, title, text in sections
    )
    about = data["about"]
    title = f"tilestream on {data['machine']['name']}"
    versions = ", ".join(
        f"{name} {about[name]}" for name in ("tilestream", "torch", "triton", "python") if name in about
    )
    how = "quick, fewer calls and samples" if data["quick"] else "full"
    commit = f", commit {about['commit']}" if about.get("commit") else ""
    head = (
        f'<a class="skip" href="#beside">Skip to the figures</a><header><h1>{escape(title)}</h1>'
        f'<p class="faint">{escape(versions)}{escape(commit)}; {escape(about["date"])}; {how}, '
        f"{data['seconds']:.0f} s</p>{busy(data['machine'])}{cards(data)}"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>'
    )
    return frame.page(title, f"<main>{head}{body}</main>")


def busy(machine: Data) -> str:
    """A sentence where other processes had the machine's cores, too."""
    load, cores = machine.get("load", 0.0), machine.get("cores", 1)
    if load <= 0.5 * cores:
        return ""
    return (
        f"<p>The machine was busy: a load of {load:g} on {count(cores, 'core')} before the report began. Ratios are of "
        "calls that took turns; times are longer than on an idle machine.</p>"
    )


def cards(data: Data) -> str:
    """The report in a handful of numbers."""
    told = []
    measured = [call for _, call in numbered(data["calls"])]
    for kind, name in (("gemm", "matmul"), ("attention", "attention")):
        found = [call["clocks"]["device"]["ratio"] for call in measured if call["call"].startswith(kind)]
        if found:
            told.append(
                (
                    f"torch's time / ours, {name}",
                    f"{geomean(found):.3f}",
                    f"geometric mean of {count(len(found), 'call')}",
                )
            )
    host = [call["clocks"]["host"]["ratio"] for call in measured if "host" in call["clocks"]]
    if host:
        told.append(("torch's / ours, host", f"{geomean(host):.2f}", "what issuing a call costs"))
    stream = data["stream"]
    if "why" not in stream:
        share = max(stream["overlap_won_share"], 0.0)
        told.append(("hidden by streaming", f"{share:.0%}", f"{stream['streamed_over_larger']:.2f} x the larger part"))
    refused = sum("why" in call for call in data["calls"])
    told.append(
        ("calls measured", f"{len(measured)}", f"{refused} not: see plans" if refused else "each answer checked")
    )
    if "kernels" in data["warm"]:
        cached = sum(found for _, found in data["warm"]["kernels"])
        told.append(("kernels warm before", f"{cached} of {len(data['warm']['kernels'])}", "in Triton's cache"))
    rows = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in told
    )
    return f'<dl class="cards">{rows}</dl>'


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]], text: Sequence[int] = (0,)) -> str:
    """A table whose cells are HTML; the columns in ``text`` are left-aligned, the first names its row."""

    def cell(place: int, value: str, tag: str, scope: str) -> str:
        number = "" if place in text else ' class="number"'
        return f"<{tag}{scope}{number}>{value}</{tag}>"

    head = "".join(cell(place, escape(name), "th", ' scope="col"') for place, name in enumerate(heads))
    head = f"<thead><tr>{head}</tr></thead>" if heads else ""

    def row(values: Sequence[str]) -> str:
        first, *others = values
        head_of_row = cell(0, first, "th", ' scope="row"')
        cells = "".join(cell(place, value, "td", "") for place, value in enumerate(others, 1))
        return f"<tr>{head_of_row}{cells}</tr>"

    body = "".join(map(row, rows))
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption, quote=True)}"><table>'
        f"<caption>{escape(caption)}</caption>{head}<tbody>{body}</tbody></table></div>"
    )


def _call(text: str) -> str:
    """A call in a cell, broken behind commas."""
    return escape(text).replace(",", ",<wbr>")


def _why(found: Data) -> str:
    return f"<p>Not measured: {escape(found['why'])}.</p>"


def beside_torch(data: Data) -> str:
    """Ratios and rates of each call, by each clock."""
    measured = numbered(data["calls"])
    if not measured:
        return "<p>No call was measured; the section on plans says why.</p>"
    gpu = data["device"] != "cpu"
    named = [(f"{number}  {short(call['call'])}", call["clocks"]["device"]) for number, call in measured]
    clock = "GPU clock, L2 flushed" if gpu else "host's clock, warm caches"
    parts = [
        f"<p>Torch's time by ours: right of 1 ours is faster. The bar is the middle half of the rounds; {clock}; calls "
        "take turns. Each answer was checked against float64 before it was timed.</p>",
        charts.ratios([(name, one["ratio"], one["band"]) for name, one in named], "torch's time / ours"),
    ]
    heads = ["", "call", "torch", "tilestream", "torch / ours", "rate", "floor / ours"]
    rows, host_rows = [], []
    for number, call in measured:
        one = call["clocks"]["device"]
        ours = one["tilestream"][1]
        row = [
            str(number), _call(call["call"]), duration(one["torch"][1]), duration(ours),
            judged(one["ratio"], one["band"]), rate(call["operations"] / ours),
            f"{call['floor'] / ours:.2f}",
        ]  # fmt: skip
        if host := call["clocks"].get("host"):
            of_host = duration(host["torch"]), duration(host["tilestream"]), f"{host['ratio']:.2f}"
            host_rows.append([str(number), _call(call["call"]), *of_host, duration(call["first"])])
        rows.append(row)
    parts.append(table("Each call: medians; the floor is the roofline's bound", heads, rows, (0, 1)))
    if gpu:
        heads = ["", "call", "torch", "tilestream", "torch / ours", "first call of ours"]
        parts += [
            '<p class="hint">Calls with a floor below 50 us are replayed from CUDA graphs, ours and torch\'s.</p>',
            table("What issuing a call costs the host, of many in a row", heads, host_rows, (0, 1)),
        ]
    return "".join(parts)


def short(call: str) -> str:
    """A call's text as a chart has room for it."""
    kind, _, rest = call.partition(" ")
    text = f"{kind} {rest.replace('bfloat16', 'bf16').replace('float32', 'fp32').replace('float16', 'fp16')}"
    return text if len(text) <= 44 else text[:43] + "…"


def judged(ratio: float, band: Sequence[float]) -> str:
    """The ratio, marked where its quartiles are all on one side of 1."""
    kind, word = ("won", "faster") if band[0] > 1 else ("lost", "slower") if band[1] < 1 else ("", "even")
    return f'<span class="{kind}">{ratio:.3f} {word}</span>'


def roofline(data: Data) -> str:
    """The chart of rates, and the roofs' sources."""
    measured, machine = numbered(data["calls"]), data["machine"]
    if not measured:
        return "<p>No call was measured.</p>"
    points = [
        Point(number, call["call"], call["operations"] / max(call["bytes"], 1),
              *(call["operations"] / call["clocks"]["device"][name][1] for name in ("tilestream", "torch")))
        for number, call in measured
    ]  # fmt: skip
    dtypes: dict[float, list[str]] = {}
    for _, call in measured:
        names = dtypes.setdefault(call["peak"], [])
        names += [call["dtype"]] if call["dtype"] not in names else []
    roofs = [Roof(", ".join(names), peak) for peak, names in dtypes.items()]
    beyond = [
        str(point.number)
        for point in points
        if max(point.ours, point.torch) > min(max(peak for _, peak in roofs), point.intensity * machine["bandwidth"])
    ]
    said = (
        f"<p>Solid: peaks ({escape(machine['source'])}) and {machine['bandwidth'] / 1e9:.4g} GB/s of memory, by which "
        f"plans are made. Dashed: {machine['read'] / 1e9:.4g} GB/s, as <code>torch.sum</code> read here. Numbers are "
        "those of the table above.</p>"
    )
    if beyond:
        said += (
            f"<p>Above the solid roof: {', '.join(beyond)}. Operands that stay in a cache are read faster than memory, "
            "and a nominal peak can be lower than what the chip does.</p>"
        )
    legend = (
        '<ul class="legend"><li><svg class="key" viewBox="0 0 14 14" style="width:14px;display:inline-block" '
        'aria-hidden="true"><circle cx="7" cy="7" r="5" class="ours"/></svg> tilestream</li><li><svg class="key" '
        'viewBox="0 0 14 14" style="width:14px;display:inline-block" aria-hidden="true"><rect x="2" y="2" width="10" '
        'height="10" class="peer"/></svg> torch</li></ul>'
    )
    return said + charts.roofline(points, roofs, machine["bandwidth"], machine["read"]) + legend


def overlap(data: Data) -> str:
    """What streaming hides."""
    found = data["stream"]
    if "why" in found:
        return _why(found)
    ms, problem, bring = found["median_ms"], found["problem"], found["bring"]
    won, hideable = found["overlap_won_ms"], min(ms[bring], ms["multiply"])
    shape = f"[{problem['m']}, {problem['k']}] @ [{problem['k']}, {problem['n']}], {problem['dtype']}"
    said = (
        f"{won:.3g} ms of the {hideable:.3g} ms that could be hidden" if won > 0
        else f"nothing: streamed took {-won:.3g} ms longer than in turn"
    )  # fmt: skip
    return (
        f"<p>{escape(shape)}, {escape(found['origin'])} at {found['gb_per_s'][bring]:.3g} GB/s. Streaming won {said}, "
        f"and took {found['streamed_over_larger']:.2f} times the larger of the two parts; no overlap goes below 1. "
        "Host's clock, idle to idle, medians; every streamed answer was checked.</p>"
        + charts.overlap(ms, bring)
    )  # fmt: skip


def timelines(data: Data) -> str:
    """The launches that were recorded."""
    if not data["timelines"]:
        return "<p>No launch was recorded.</p>"
    said = "<p>A row a worker, a bar a tile, as a launch of its own recorded them; recording costs some time.</p>"
    return said + frame.HELP + "".join(map(frame.figure, data["timelines"]))


def warm(data: Data) -> str:
    """Kernels that the calls launch: cached before, or compiled now."""
    found = data["warm"]
    if "why" in found:
        return f"<p>{escape(found['why'][:1].upper() + found['why'][1:])}.</p>"
    rows = [[_call(call), "in the cache" if cached else "compiled now"] for call, cached in found["kernels"]]
    compiled = sum(not cached for _, cached in found["kernels"])
    said = f"<p>Triton's cache: <code>{escape(found['cache'])}</code>."
    said += (
        f" {count(compiled, 'kernel')} compiled in {found['seconds']:.1f} s.</p>"
        if compiled
        else " All were there.</p>"
    )
    return said + table("Kernels that the calls launch, before this report", ["call", "kernel"], rows, (0, 1))


def plans(data: Data) -> str:
    """What is not done here and why; then each plan in its own words."""
    refused = [[_call(call["call"]), escape(call["why"])] for call in data["calls"] if "why" in call]
    parts = []
    if refused:
        parts.append(table("Calls that were not measured, and why", ["call", "why"], refused, (0, 1)))
    else:
        parts.append("<p>Every call was measured.</p>")
    parts.append("<h3>What plans refused</h3>")
    why: dict[tuple[str, str], list[int]] = {}
    for number, call in enumerate(data["calls"], 1):
        for what, reason in call.get("refused", ()):
            why.setdefault((what, reason), []).append(number)
    rows = [[escape(what), escape(reason), ", ".join(map(str, calls))] for (what, reason), calls in why.items()]
    parts.append(
        table("What was considered and not taken, and for which calls", ["what", "why", "calls"], rows, (0, 1, 2))
    )
    parts.append("<h3>Each plan in its own words</h3>")
    for number, call in enumerate(data["calls"], 1):
        if "explain" in call:
            parts.append(
                f"<details><summary>{number}: {escape(call['call'])}: {escape(call['plan'])}; "
                f"{len(call['refused'])} refused</summary><pre>{escape(call['explain'])}</pre></details>"
            )
    return "".join(parts)


def findings(data: Data) -> str:
    """What `tilestream doctor` prints."""
    return "".join(
        table(title, (), [[escape(name), escape(value)] for name, value in rows], (0, 1))
        for title, rows in data["doctor"]
    )
