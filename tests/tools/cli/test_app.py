import json
import subprocess
import sys

import pytest

import tilestream
from tilestream.core.errors import ArrivalTimeout
from tilestream_tools import cli as package

COMMANDS = ("demo", "verify", "plan", "isa", "sweep", "report", "trace", "tune", "warm", "doctor")


def python(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=850, check=False
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_listed_and_has_help(cli, command):
    assert f"\n  {command} " in cli("--help").output
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
        "import sys\nfrom tilestream_tools.cli import main\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules, file=sys.stderr)",
        *arguments,
    )
    assert done.stderr == "False\n"
    assert done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_answers_with_json(cli, command):
    assert "--json" in cli(command, "--help").output


def test_with_json_standard_output_is_one_object(cli):
    result = cli("plan", 64, 32, 16, "--json")
    found = json.loads(result.stdout)
    assert (found["problem"]["m"], found["backend"], found["floor"]["binds"]) == (64, "cpu", "bytes")
    assert result.stderr == tilestream.plan(64, 32, 16).explain() + "\n"


def test_an_error_leaves_standard_output_empty(cli):
    result = cli("plan", 64, 32, 16, "--tile", "x", "--json")
    assert (result.exit_code, result.stdout) == (2, "")


def test_as_a_module():
    run = subprocess.run(
        [sys.executable, "-m", "tilestream", "plan", "64", "64", "64", "--dtype", "bf16"], capture_output=True,
        text=True, timeout=850, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == tilestream.plan(64, 64, 64, dtype="bfloat16").explain() + "\n"


def test_completion_can_be_installed(cli):
    assert "--install-completion" in cli("--help").output


@pytest.mark.parametrize("missing", ["typer", "rich"])
@pytest.mark.parametrize("more", [[], ["--json"]], ids=["text", "json"])
def test_doctor_needs_no_extra(missing, more):
    done = python(
        f"import sys\nsys.modules[{missing!r}] = None\nfrom tilestream_tools.cli import main\nmain()", "doctor", *more
    )
    assert (done.returncode, done.stderr) == (0, "")
    versions = json.loads(done.stdout)["versions"]["tilestream"] if more else done.stdout
    assert tilestream.__version__ in versions


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_one_line_says_what_to_install(missing):
    done = python(
        f"import sys\nsys.modules[{missing!r}] = None\nfrom tilestream_tools.cli import main\nmain()", "--help"
    )
    assert done.returncode == 2
    assert done.stderr == f"tilestream: the command line needs {missing}: pip install 'tilestream[cli]'\n"


def test_main_is_the_entry_point(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tilestream", "--version"])
    with pytest.raises(SystemExit) as ended:
        package.main()
    assert ended.value.code == 0
    assert tilestream.__version__ in capsys.readouterr().out


@pytest.mark.parametrize("during", ["typer", "tilestream_tools.cli.app"])
def test_ctrl_c_while_modules_are_imported_is_status_130(during):
    done = python(
        "import sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {during!r}: raise KeyboardInterrupt\n"
        "from tilestream_tools.cli import main\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "main()",
        "plan", "64", "64", "64",
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


LATE = ArrivalTimeout("matmul", 0, 3, "tile 1", 1.0, 1.0)


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ValueError("x=3:\n  it is even"), 2, "x=3: it is even"),
        (TypeError("a float"), 2, "a float"),
        (FileNotFoundError(2, "No such file or directory", "there"), 2, "there: No such file or directory"),
        (OSError("odd"), 2, "odd"),
        (EOFError(), 2, "EOFError"),
        (ImportError("pip install it"), 2, "pip install it"),
        (ModuleNotFoundError("No module named 'triton'", name="triton"), 2, "triton is missing: pip install triton"),
        (ModuleNotFoundError("No module named 'y'", name="y"), 2, "y is missing: pip install 'tilestream[cli]'"),
        (NotImplementedError("device='cuda'"), 2, "device='cuda'"),
        (LATE, 1, str(LATE)),
    ],
)
def test_what_is_wrong_is_one_line_and_with_debug_a_traceback(cli, monkeypatch, error, status, line):
    def broken(*_, **__):
        raise error

    monkeypatch.setattr(tilestream, "plan", broken)
    result = cli("plan", 4, 4, 4)
    assert (result.exit_code, result.stderr, result.stdout) == (status, f"tilestream: {line}\n", "")
    assert isinstance(result.exception, SystemExit)
    debugged = cli("--debug", "plan", 4, 4, 4)
    assert (debugged.exit_code, debugged.stdout) == (status, "")
    assert debugged.stderr.startswith("Traceback (most recent call last):")
    assert debugged.stderr.endswith(f"tilestream: {line}\n")


def test_a_bug_keeps_its_traceback(cli, monkeypatch):
    monkeypatch.setattr(tilestream, "plan", lambda *_, **__: [].pop())
    assert isinstance(cli("plan", 4, 4, 4).exception, IndexError)
