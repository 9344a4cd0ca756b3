import pytest
from typer.testing import CliRunner

from tilestream_tools.cli.app import app


@pytest.fixture
def cli():
    """``cli("plan", 64, 64, 64)``: the result of the command line."""
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, [str(argument) for argument in arguments])
