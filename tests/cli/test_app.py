import subprocess
import sys

import pytest

import tilestream
from tilestream import cli as package
from tilestream.core.errors import ArrivalTimeout

COMMANDS = ("demo", "verify", "plan", "isa", "sweep", "trace", "tune", "doctor")


def python(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_help_lists_every_command(cli):
    result = cli("--help")
    assert result.exit_code == 0
    for command in COMMANDS:
        assert f"\n  {command} " in result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(cli, command):
    result = cli(command, "--help")
    assert result.exit_code == 0
    assert result.output.startswith("Usage:")


def test_version(cli):
    assert cli("--version").output == f"tilestream {tilestream.__version__}\n"


def test_unknown_command_is_status_2(cli):
    assert cli("sing").exit_code == 2


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["demo", "--help"], ["plan", "64", "64", "64"], ["sweep", "--help"]]
)
def test_torch_is_not_imported_before_something_is_computed(arguments):
    done = python(
        "import sys\nfrom tilestream.cli import main\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules, file=sys.stderr)",
        *arguments,
    )
    assert done.stderr == "False\n"
    assert done.stdout


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_one_line_says_what_to_install(missing):
    done = python(f"import sys\nsys.modules[{missing!r}] = None\nfrom tilestream.cli import main\nmain()", "--help")
    assert done.returncode == 2
    assert done.stderr == f"tilestream: the command line needs {missing}: pip install 'tilestream[cli]'\n"


def test_main_is_the_entry_point(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tilestream", "--version"])
    with pytest.raises(SystemExit) as ended:
        package.main()
    assert ended.value.code == 0
    assert tilestream.__version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ValueError("x=3:\n  it is even"), 2, "tilestream: x=3: it is even\n"),
        (TypeError("a float"), 2, "tilestream: a float\n"),
        (
            FileNotFoundError(2, "No such file or directory", "there"),
            2,
            "tilestream: there: No such file or directory\n",
        ),
        (OSError("odd"), 2, "tilestream: odd\n"),
        (EOFError(), 2, "tilestream: EOFError\n"),
        (ImportError("pip install it"), 2, "tilestream: pip install it\n"),
        (
            ModuleNotFoundError("No module named 'y'", name="y"),
            2,
            "tilestream: y is missing: pip install 'tilestream[cli]'\n",
        ),
        (NotImplementedError("device='cuda'"), 2, "tilestream: device='cuda'\n"),
    ],
)
def test_what_is_wrong_is_one_line(cli, monkeypatch, error, status, line):
    def broken(*_, **__):
        raise error

    monkeypatch.setattr(tilestream, "plan", broken)
    result = cli("plan", 4, 4, 4)
    assert (result.exit_code, result.stderr, result.stdout) == (status, line, "")


def test_a_failed_launch_is_status_1(cli, monkeypatch):
    def broken(*_, **__):
        raise ArrivalTimeout("matmul", 0, 3, "tile 1", 1.0, 1.0)

    monkeypatch.setattr(tilestream, "plan", broken)
    result = cli("plan", 4, 4, 4)
    assert result.exit_code == 1
    assert result.stderr.startswith("tilestream: matmul: arrival's chunk 3 did not arrive")


def test_debug_shows_the_exception(cli):
    result = cli("--debug", "plan", 4, 4, 4, "--schedule", "best")
    assert isinstance(result.exception, ValueError)
    assert isinstance(cli("plan", 4, 4, 4, "--schedule", "best").exception, SystemExit)


def test_a_bug_keeps_its_traceback(cli, monkeypatch):
    monkeypatch.setattr(tilestream, "plan", lambda *_, **__: [].pop())
    assert isinstance(cli("plan", 4, 4, 4).exception, IndexError)
