"""The application: options of all commands, and the commands."""

# No `from __future__ import annotations` in command modules: typer reads the annotations when the program runs.

from typing import Annotated

import typer

from tilestream._version import __version__
from tilestream_tools.cli import demo, doctor, isa, plan, report, sweep, trace, tune, ui, verify, warm

app = typer.Typer(
    name="tilestream",
    help="Persistent matmul and attention kernels: demonstrate, plan, measure, compile ahead, check.",
    epilog="Exit status: 0; 1 for a wrong answer or a violated property; 2 for bad input, said in one line.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tilestream {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that come before the command."""
    ui.state.debug = debug


def _doctor(as_json: ui.Json = False) -> None:
    """Print versions, this machine, and which backends can run.

    Also what is compiled already, and the extras. Put it into a bug report.
    """
    doctor.doctor(as_json)


for command in (
    demo.demo,
    verify.verify,
    plan.plan,
    isa.isa,
    sweep.sweep,
    report.report,
    trace.trace,
    tune.tune,
    warm.warm,
):
    app.command()(ui.guarded(command))
app.command("doctor")(_doctor)
