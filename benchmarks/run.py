"""Run benchmarks: ``python benchmarks/run.py SUBJECT [SECTION,...] [OUT] [OPTIONS]``.

From a checkout, with ``PYTHONPATH=src`` or tilestream installed. Without a subject, lists subjects; without a section,
runs the usual ones. Records go to OUT/<device>/ (default: benchmarks/results/) and are written again after each row.
Answers are checked in the run that times them; an answer that breaks the error rule of docs/design.md and a figure
above the device's peak are failures: they are in the record, and the exit status is 1. COMMIT names the commit where
the tree is a copy without its history.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.core.section import SUBJECTS, Section, named, sections


def listing(subjects: tuple[str, ...] = SUBJECTS) -> str:
    """The subjects and their sections; ``*`` marks the usual ones."""
    lines = []
    for subject in subjects:
        lines += ["", f"{subject}: {importlib.import_module(f'benchmarks.{subject}').__doc__.strip()}"]
        shown = {name: section for name, section in sections(subject).items() if not name.startswith("_")}
        lines += [f"  {name:17} {'*' if one.usual else ' '} {one.what}" for name, one in shown.items()]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The parser for sections that are no tools."""
    made = argparse.ArgumentParser(
        description=__doc__, epilog=listing(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("subject", choices=SUBJECTS)
    made.add_argument("sections", nargs="?", help="with commas")
    made.add_argument("out", nargs="?", type=Path, help="folder of the records")
    made.add_argument("--seconds", type=float, default=540, help="for all sections (default: 540)")
    made.add_argument(
        "--dry",
        action="store_true",
        help="gemm, contention, distributed, attention arrival and transformers, arrival experts: on the CPU, small",
    )
    made.add_argument("--name", help="name of the record, where a run measures a part of it")
    made.add_argument("--shapes", help="MxNxK,... instead of the section's own")
    made.add_argument("--rounds", type=int, help="samples of each call")
    made.add_argument("--within", type=float, default=float("inf"),
                      help="gemm search, sweep: skip plans expected to take so many times the best")  # fmt: skip
    made.add_argument(
        "--seed", type=int, default=1, help="gemm random: what is drawn (default: 1; 1 and 2 are published)"
    )
    made.add_argument("--count", type=int, default=200, help="gemm random, sweep: how many problems (default: 200)")
    made.add_argument("--small", action="store_true", help="gemm sweep: problems of few operations")
    made.add_argument(
        "--resume", type=Path, help="the record, or the folder of records, of a run that was cut off, to go on with"
    )
    made.add_argument("--copiers", type=lambda text: [int(count) for count in text.split(",")], default=[],
                      help="arrival stream: counts of workers that copy, instead of peers")  # fmt: skip
    made.add_argument("--portable", action="store_true", help="arrival stream: by the portable kernel")
    made.add_argument("--op", choices=("gather", "scatter", "both"), default="both", help="distributed gather")
    made.add_argument("--tokens", type=int, default=8192, help="distributed mlp, mlp_timeline")
    made.add_argument("--ways", nargs="*", choices=("push", "pull"), help="distributed gather_timeline: each of these")
    made.add_argument("--folder", type=Path, help="cpu stream: where the file is written")
    return made


def options(*arguments: str) -> argparse.Namespace:
    """Parse the command line; ``sections`` becomes a list of known names."""
    made = parser()
    found = made.parse_args(arguments)
    there = sections(found.subject)
    usual = [name for name, section in there.items() if section.usual]
    found.sections = found.sections.split(",") if found.sections else usual
    unknown = [name for name in found.sections if name not in there or there[name].tool]
    if unknown or not found.sections:
        what = f"no section {', '.join(unknown)}" if unknown else "name a section"
        made.error(f"{what}; there are:{listing((found.subject,))}")
    if found.dry and found.out is None:
        made.error("--dry: name a folder; its figures are no records")
    return found


def main(arguments: list[str]) -> int:
    """Run what the command line names; 1 if anything went wrong."""
    if not arguments or (arguments == ["--help"]):
        print(__doc__ + listing())
        return 0
    tool: Section | None = None
    if len(arguments) > 1 and arguments[0] in SUBJECTS:
        tool = sections(arguments[0]).get(arguments[1])
    if tool is not None and tool.tool:
        return int(tool.load()(arguments[2:]) or 0)
    found = options(*arguments)
    package = importlib.import_module(f"benchmarks.{found.subject}")
    session = named(getattr(package, "SESSION", "core.session:Session"))(found)
    return 1 if session.run(package.SECTIONS, found.sections) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
