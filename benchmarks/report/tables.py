"""What pages share: Markdown tables, means, and the sentences that say where a record is from and what it lacks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from benchmarks.core.records import Data, Row

#: Of what was not measured, how many are named on a page.
NAMED = 4


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, numbers right-aligned."""
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])


def columns(rows: Iterable[Row], fields: dict[str, str], without: str = "-") -> str:
    """A table whose cells are format fields of its rows, by their heads; ``without`` stands for what a row lacks."""

    def cell_of(row: Row, field: str) -> str:
        try:
            return field.format_map(row)
        except KeyError:
            return without

    return table(list(fields), [[cell_of(row, field) for field in fields.values()] for row in rows])


def of(key: str, names: Iterable[str], form: str = ".3f", suffix: str = "") -> dict[str, str]:
    """Fields of a row's figures by name, as `columns` takes them: ``{"ours, us": "{us[ours]:.1f}"}``."""
    return {f"{name}{suffix}": f"{{{key}[{name}]:{form}}}" for name in names}


def geomean(values: Iterable[float]) -> float:
    """Geometric mean; NaN of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def cell(value: float | None, form: str = ".3f", without: str = "-") -> str:
    """A number, or what stands for a number that is not there."""
    return without if value is None else format(value, form)


def cells(values: dict[str, float], names: Iterable[str], form: str = ".3f", without: str = "-") -> list[str]:
    return [cell(values.get(name), form, without) for name in names]


def versions(data: Data) -> str:
    return f"torch {data['torch']}, Triton {data.get('triton', 'none')}, commit `{data['commit']}`, {data['date']}"


def where(data: Data) -> str:
    """On what a record was made."""
    if "cores" in data:
        device = f"{data['device']}, {data['cores']} cores, torch {data['torch']}"
        return f"{device}, {data['dtype']}, commit `{data['commit']}`, {data['date']}"
    if "driver" in data:
        software, _, day = versions(data).partition(", commit")
        return f"{data['device']}, {software}, driver {data['driver']}, {data['power_limit']}, commit{day}"
    return f"{data['device']}, {versions(data)}"


def device_of(data: Data) -> str:
    """The device's short name, with the number of ranks where there are several."""
    device = str(data["device"]).removeprefix("NVIDIA ")
    return f"{data['world']} x {device}" if "world" in data else device


def incomplete(data: Data) -> list[str]:
    """A sentence on what a record lacks, if it does."""
    parts = []
    if failed := [f"{one['what']} ({one['error']})" for one in data.get("failures", ()) if isinstance(one, dict)]:
        parts.append(f"Failed: {'; '.join(failed)}.")
    planned, done = data.get("planned"), len(data["rows"]) + len(data.get("failures", ()))
    if planned and done < planned:
        why = "" if data.get("missing") else ": the run was cut off"
        parts.append(f"{len(data['rows'])} of {planned} planned rows{why}.")
    if data.get("missing"):
        names = ", ".join(data["missing"][:NAMED])
        more = f", and {len(data['missing']) - NAMED} more, which the record names" * (len(data["missing"]) > NAMED)
        parts.append(f"Not measured, for want of time: {names}{more}.")
    return [" ".join(parts).replace("|", "/").replace("\n", " ")] if parts else []


def by_clocks(values: Iterable[float | None], form: str = ".3f") -> str:
    """A figure as called, and with the host ahead; ``-`` where there is none. One alone stands alone."""
    return " : ".join(cell(value, form) for value in values)


def verdict(ratio: float, band: Sequence[float]) -> str:
    """``won``, ``lost``, or ``even`` where 1 lies between the quartiles of the rounds' ratios."""
    low, high = band
    if low <= 1 <= high:
        return "even"
    return "won" if ratio > 1 else "lost"


def mask(row: Row) -> str:
    return "causal" if row["causal"] else "non-causal"
