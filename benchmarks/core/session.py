"""One run of a subject: its options, the time it has, its records. Importing this imports no torch."""

from __future__ import annotations

import argparse
import gc
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.core.paths import RESULTS
from benchmarks.core.records import Record, Row, folder_of
from benchmarks.core.section import Section

if TYPE_CHECKING:
    from tilestream.trace import LaunchTrace

#: Failures without one success after which a section is given up.
HOPELESS = 4


class OutOfTime(BaseException):
    """The time is over. Not an `Exception`, so that no handler of errors keeps it."""


class Session:
    """One run of a subject.

    Parameters
    ----------
    options
        Of the command line: `run.options`.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.out or RESULTS
        self.dry: bool = options.dry
        self.bad, self.section = 0, ""
        self.end = self.section_end = time.monotonic() + options.seconds
        self._records: dict[str, Record] = {}

    # Time -------------------------------------------------------------------------------------------------------------

    @property
    def left(self) -> float:
        """Seconds that the section has."""
        return self.section_end - time.monotonic()

    def begin(self, share: float) -> None:
        """Give the section that begins this share of the time that is left."""
        now = time.monotonic()
        self.section_end = now + share * (self.end - now)

    def alarm(self) -> None:
        """Have `OutOfTime` raised when the time is over, whatever is running then."""

        def ring(number: int, frame: object) -> None:
            raise OutOfTime

        signal.signal(signal.SIGALRM, ring)
        # Again and again: an exception that is raised in a destructor is lost.
        signal.setitimer(signal.ITIMER_REAL, max(self.end - time.monotonic(), 0.1), 2.0)

    def run(self, sections: dict[str, Section], names: list[str]) -> int:
        """Run the named sections in order, each with its share of the time; how many things went wrong."""
        try:
            for index, name in enumerate(names):
                self.section = name
                self.begin(sections[name].seconds / sum(sections[other].seconds for other in names[index:]))
                if not name.startswith("_"):
                    print(f"== {name}, {self.left:.0f} s", flush=True)
                try:
                    self.call(sections[name])
                except Exception:  # the next section may not need what this one lacks
                    self.bad += 1
                    traceback.print_exc()
        except OutOfTime:
            signal.setitimer(signal.ITIMER_REAL, 0)
            print("the time is over", flush=True)
        for record in self._records.values():
            record.write()
            print(record.path, *(f"{key}: {record.data[key]}" for key in ("failures", "missing") if record.data[key]))
        return self.bad

    def call(self, section: Section) -> None:
        """Run a section."""
        section.load()(self)

    # Records ----------------------------------------------------------------------------------------------------------

    def record(self, name: str, *, cpu: bool = False, **extra: Any) -> Record:
        """The record of that name, or the one that ``--name`` names; sections of one run share it.

        It begins with the rows of the run that ``--resume`` names.
        """
        name = self.options.name or name
        if name not in self._records:
            self._records[name] = Record(name, self.out, cpu=cpu, resume=self.options.resume, **extra)
        self._records[name].data.update(extra)
        return self._records[name]

    def export(self, launch: LaunchTrace, name: str) -> None:
        """Write a launch's trace beside the records of this GPU; of a dry run, of no GPU."""
        import torch

        from tilestream.trace import export

        folder = self.out / folder_of("no gpu" if self.dry else torch.cuda.get_device_name())
        folder.mkdir(parents=True, exist_ok=True)
        print(export(launch, folder / f"{name}.json.gz"))

    def rows(self, record: Record, items: Iterable[Any], measure: Callable[[Any], Row | None]) -> None:
        """Measure each item while there is time; write after each, keep failures and go on.

        A section whose first items all fail is given up: the others would fail, too. ``measure`` may return None where
        there is nothing to write. A row keeps its item's name, by which a run with ``--resume`` knows that it is there.
        """
        items = [item for item in items if self.key_of(item) not in record.earlier]
        begin, before = time.monotonic(), len(record.rows)
        lasting: list[float] = []
        earlier, done = list(record.data["missing"]), 0

        def write() -> list[str]:
            """Write, with all items that are not done as missing: so a killed run leaves them."""
            left = [name_of(item) for item in items[done:]]
            record.data["missing"] = earlier + left
            record.write()
            return left

        write()
        try:
            for item in items:
                hopeless = done >= HOPELESS and len(record.rows) == before
                if hopeless or self.left < 1.2 * max(lasting[-4:], default=0.0):
                    break
                started = time.monotonic()
                try:
                    row = measure(item)
                except Exception as error:
                    self.failed(record, item, error)
                else:
                    if row is not None:
                        record.rows.append({"item": self.key_of(item), **row})
                        print(f"{time.monotonic() - begin:6.1f} s  {summary(row)}", flush=True)
                done += 1
                if done > 1:  # the first item may have taken long to compile
                    lasting.append(time.monotonic() - started)
                record.data["seconds"] = round(time.monotonic() - begin, 1)
                write()
                gc.collect()
                self.free()
        finally:
            if missing := write():
                print(f"not measured: {', '.join(missing)}", flush=True)

    def key_of(self, item: Any) -> str:
        """What a row is known by: its section, and its item's name."""
        return f"{self.section} {name_of(item)}".strip()

    def free(self) -> None:
        """Give memory back after a row. Raises if the device is lost: then nothing more can be measured."""

    def failed(self, record: Record, item: Any, error: Exception) -> None:
        """Write down an item's failure."""
        self.bad += 1
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error}"[:500]
        record.data["failures"].append({"what": name_of(item), "error": what, "at": f"{where.filename}:{where.lineno}"})
        record.write()
        print(f"FAILED {name_of(item)}: {what}", flush=True)
        if self.bad <= 3:
            traceback.print_exception(error)


def name_of(item: Any) -> str:
    return " ".join(map(str, item)) if type(item) is tuple else str(item)


def summary(row: Row) -> str:
    """A row in a line: names first, then figures, without samples."""
    shown = {key: row[key] for key in ("shape", "name", "mode", "what", "activation", "plan") if row.get(key)}
    figures = ("us", "ms", "tflops", "ratio", "ratios", "share", "of_best", "of_larger", "gbps", "win")
    return "  ".join([*map(str, shown.values()), *(f"{key} {row[key]}" for key in figures if key in row)])
