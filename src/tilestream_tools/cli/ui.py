"""What the commands share: consoles, errors in one line, numbers as text."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import typer
from rich.console import Console

from tilestream.core.errors import TilestreamError

Command = TypeVar("Command", bound=Callable[..., Any])

BAD_INPUT, FAILED = 2, 1
#: Width of what goes to a file or a pipe: rich's own 80 would break the lines of `Plan.explain`.
PLAIN_WIDTH = 160


@dataclass
class State:
    """Options that come before the command."""

    debug: bool = False


state = State()


def console(*, stderr: bool = False) -> Console:
    """A console on what ``sys.stdout`` is now; no colours and long lines where it is no terminal."""
    stream = sys.stderr if stderr else sys.stdout
    terminal = stream.isatty()
    return Console(stderr=stderr, highlight=False, width=None if terminal else PLAIN_WIDTH, soft_wrap=False)


def guarded(command: Command) -> Command:
    """Report errors of the input as one line on stderr and status 2, a failed launch as status 1.

    With ``--debug`` the exception is raised. Other exceptions are bugs, and are always raised.
    """

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> Any:
        try:
            return command(*args, **options)
        except BrokenPipeError:
            raise  # `tilestream ... | head`: the reader has closed the pipe
        except (TilestreamError, ValueError, TypeError, OSError, EOFError, ImportError, NotImplementedError) as error:
            if state.debug:
                raise
            fail(one_line(error), FAILED if isinstance(error, TilestreamError) else BAD_INPUT)

    return run  # type: ignore[return-value]


def fail(message: str, status: int = BAD_INPUT) -> None:
    """Print an error, and exit with ``status``."""
    typer.echo(f"tilestream: {message}", err=True)
    raise typer.Exit(status)


def one_line(error: BaseException) -> str:
    """The error's message as one line, with the file's name first where it is about a file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, ModuleNotFoundError):
        package = "triton" if error.name == "triton" else "'tilestream[cli]'"
        return f"{error.name} is missing: pip install {package}"
    return " ".join(str(error).split()) or type(error).__name__


def size(count: float) -> str:
    """Bytes in the largest unit that fits."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def milliseconds(seconds: float) -> str:
    """A time, always in ms so that times compare at a glance."""
    return f"{seconds * 1e3:.1f}" if seconds >= 0.01 else f"{seconds * 1e3:.3f}"
