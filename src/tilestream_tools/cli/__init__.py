"""The command line: ``tilestream demo | verify | plan | isa | sweep | report | trace | tune | warm | doctor``.

Needs the extra ``cli``, but for ``doctor`` and ``report``. A command imports torch only when it computes something, so
``--help`` is quick.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line: what the ``tilestream`` script calls."""
    try:
        _run()
    except KeyboardInterrupt:  # while modules are imported: typer ends a command by itself
        raise SystemExit(130) from None


def _run() -> None:
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        if sys.argv[1:2] == ["doctor"] and set(sys.argv[2:]) <= {"--json"}:
            from tilestream_tools.cli.doctor import doctor

            doctor("--json" in sys.argv)
            return
        if sys.argv[1:2] == ["report"] and "--json" not in sys.argv and "--open" not in sys.argv:
            from tilestream_tools.report.__main__ import main as report

            raise SystemExit(report(sys.argv[2:])) from None
        name = error.name or str(error)
        print(f"tilestream: the command line needs {name}: pip install 'tilestream[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    from tilestream_tools.cli.app import app

    app(prog_name="tilestream")
