"""The command line: ``tilestream demo | verify | plan | isa | sweep | trace | tune | warm | doctor``.

Needs the extra ``cli``. A command imports torch only when it computes something, so ``--help`` is quick.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line: what the ``tilestream`` script calls."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        name = error.name or str(error)
        print(f"tilestream: the command line needs {name}: pip install 'tilestream[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    from tilestream_tools.cli.app import app

    app(prog_name="tilestream")
