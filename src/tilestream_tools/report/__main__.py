"""``python -m tilestream_tools.report``: `tilestream report` where typer or rich are missing."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tilestream_tools.report.command import OPTIONS, make
from tilestream_tools.units import one_line


def parser() -> argparse.ArgumentParser:
    """The options of `tilestream report`."""
    made = argparse.ArgumentParser(prog="tilestream report", description=OPTIONS["report"])
    made.add_argument("--gemm", action="append", default=[], help=OPTIONS["gemm"])
    made.add_argument("--attention", action="append", default=[], help=OPTIONS["attention"])
    made.add_argument("--shapes", type=Path, help=OPTIONS["shapes"])
    made.add_argument("--device", default="auto", help=OPTIONS["device"])
    made.add_argument("--quick", action="store_true", help=OPTIONS["quick"])
    made.add_argument("--seconds", type=float, help=OPTIONS["seconds"])
    made.add_argument("--out", type=Path, default=Path("report.html"), help=OPTIONS["out"])
    made.add_argument("--from", dest="source", type=Path, help=OPTIONS["source"])
    return made


def main(arguments: list[str] | None = None) -> int:
    """Measure, write, and say where; 2 for bad input."""

    def tell(share: float, what: str) -> None:
        print(f"{share:4.0%}  {what}", file=sys.stderr, flush=True)

    try:
        _, page, beside = make(**vars(parser().parse_args(arguments)), tell=tell)
    except (ValueError, OSError, ImportError, NotImplementedError) as error:
        print(f"tilestream: {one_line(error)}", file=sys.stderr)
        return 2
    print(f"report: {page}, {beside}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
