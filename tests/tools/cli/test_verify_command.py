import pytest

from tilestream_tools import verify as checker
from tilestream_tools.verify import report as reports

VIOLATION = checker.Violation(
    "deadlock", "worker 0 waits for worker 1", "static, 2 workers", ("worker 0: Poll", "worker 1: Poll")
)


@pytest.fixture
def small(monkeypatch):
    """The sweep's first three configurations of each model."""
    every = reports.configurations
    monkeypatch.setattr(reports, "configurations", lambda model, level: every(model, level)[:3])


def fake_run(monkeypatch, *results):
    asked = {}

    def run(level, progress, *, models, jobs):
        asked.update(level=level, models=tuple(models), jobs=jobs)
        for done, result in enumerate(results, 1):
            progress(result, done, len(results))
        return checker.Report(level, results, 1.0)

    monkeypatch.setattr(checker, "run", run)
    return asked


def test_a_sweep_that_holds(cli, small):
    result = cli("verify", "--quick", "--jobs", 1)
    assert result.exit_code == 0, result.output
    for word in (*checker.MODELS, "every property holds", "quick: "):
        assert word in result.stdout


def test_several_processes(cli, small):
    result = cli("verify", "--quick", "--jobs", 2, "--model", "workers")
    assert result.exit_code == 0, result.output
    assert "ring" not in result.stdout


def test_options_are_handed_on(cli, monkeypatch):
    asked = fake_run(monkeypatch, checker.Result("ring", "a ring", 5, 0.1))
    assert cli("verify", "--jobs", 3, "--model", "ring").exit_code == 0
    assert asked == {"level": "full", "models": ("ring",), "jobs": 3}
    assert cli("verify", "--quick").exit_code == 0
    assert asked["level"] == "quick"
    assert asked["models"] == checker.MODELS
    assert asked["jobs"] >= 1


def test_a_violation_is_printed_with_its_counterexample_and_status_1(cli, monkeypatch):
    fake_run(
        monkeypatch,
        checker.Result("ring", "a ring", 5, 0.1),
        checker.Result("workers", "static, 2 workers", 9, 0.1, VIOLATION),
    )
    result = cli("verify")
    assert result.exit_code == 1
    assert str(VIOLATION) in result.stdout
    assert "NO" in result.stdout
    assert result.stderr == "tilestream: a property does not hold\n"


@pytest.mark.parametrize(("options", "says"), [(("--quick", "--model", "cake"), "cake"), (("--jobs", 0), "jobs")])
def test_an_unknown_model_and_no_process_are_status_2(cli, options, says):
    result = cli("verify", *options)
    assert (result.exit_code, says in result.stderr) == (2, True)
