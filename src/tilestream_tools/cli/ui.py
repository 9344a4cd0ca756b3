"""What commands share: the console, errors on a line, the exit status, and answers as JSON."""

import contextlib
import functools
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from tilestream.core.errors import TilestreamError
from tilestream_tools.units import one_line

Command = TypeVar("Command", bound=Callable[..., Any])

#: The option of every command that answers with JSON; `found` collects the answer.
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, all else on stderr.")]

BAD_INPUT, FAILED = 2, 1
#: Width of what goes to a file or a pipe: rich's own 80 would break the lines of `Plan.explain`.
PLAIN_WIDTH = 160


@dataclass
class State:
    """Options that come before the command."""

    debug: bool = False
    #: What the command has found, for ``--json``.
    answer: dict[str, Any] = field(default_factory=dict)


state = State()


def found(**facts: Any) -> None:
    """Add to what ``--json`` prints at the command's end."""
    state.answer.update(facts)


@contextlib.contextmanager
def answering(as_json: bool) -> Iterator[None]:
    """With ``as_json``, standard output gets what was `found`, and nothing else."""
    state.answer = {}
    if not as_json:
        yield
        return
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if state.answer:
            typer.echo(json.dumps(state.answer, default=str))


def console(*, stderr: bool = False) -> Console:
    """A console on what ``sys.stdout`` is now; no colours and long lines where it is no terminal."""
    stream = sys.stderr if stderr else sys.stdout
    terminal = stream.isatty()
    return Console(stderr=stderr, highlight=False, width=None if terminal else PLAIN_WIDTH, soft_wrap=False)


def guarded(command: Command) -> Command:
    """Report errors of the input as one line on stderr and status 2, a failed launch as status 1.

    With ``--debug`` the traceback comes before that line. Other exceptions are bugs, and are always raised.
    """

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> Any:
        try:
            with answering(options.get("as_json") is True):
                return command(*args, **options)
        except BrokenPipeError:
            raise  # `tilestream ... | head`: the reader has closed the pipe
        except (TilestreamError, ValueError, TypeError, OSError, EOFError, ImportError, NotImplementedError) as error:
            if state.debug:
                traceback.print_exc()
            fail(one_line(error), FAILED if isinstance(error, TilestreamError) else BAD_INPUT)

    return run  # type: ignore[return-value]


def open_page(page: Path) -> None:
    """Open ``page`` in the browser, or say that there is none."""
    import webbrowser

    if not webbrowser.open(page.absolute().as_uri()):
        typer.echo(f"tilestream: --open: no browser was found here; copy {page} to where there is one", err=True)


def fail(message: str, status: int = BAD_INPUT) -> None:
    """Print an error, and exit with ``status``."""
    typer.echo(f"tilestream: {message}", err=True)
    raise typer.Exit(status)
