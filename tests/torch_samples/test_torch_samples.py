"""Torch's own samples of matmuls and attention, through this project's ops: see `samples`."""

from __future__ import annotations

import pytest
import samples
import torch

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="differences.json is of the samples and the ops of torch 2.13"
)


@pytest.mark.parametrize("check", samples.CHECKS)
def test_a_part_of_the_checks(check):
    count = samples.run(check, whole=False)
    print(f"{check}: {count.agreed} of {count.ran} as torch")
    assert count.ran >= 5
    assert not count.problems


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_check_and_the_page():
    counts = {check: samples.run(check) for check in samples.CHECKS}
    assert not [problem for count in counts.values() for problem in count.problems]
    assert samples.page(counts) == samples.PAGE.read_text(encoding="utf-8"), "run tests/torch_samples/samples.py"


def test_a_difference_that_is_not_listed_and_one_that_no_longer_differs_are_problems(monkeypatch):
    def calls():
        yield "mm/0", lambda: ""
        yield "mm/1", lambda: "stride"
        yield "mm/2", lambda: 1 / 0
        yield "mm/3", lambda: "listed"

    listed = dict.fromkeys(("made/mm/0", "made/mm/3", "made/bmm/*"), "a reason")
    monkeypatch.setitem(samples.CHECKS, "made", (calls, 1))
    monkeypatch.setattr(samples, "allowed", lambda: listed)
    count = samples.run("made")
    assert (count.ran, count.agreed, count.reasons) == (4, 1, {"a reason": 1})
    assert count.problems == [
        "made/mm/0: no longer differs; narrow 'made/mm/0' in differences.json, or remove it",
        "made/mm/1: stride",
        "made/mm/2: raises ZeroDivisionError: division by zero",
        "'made/bmm/*' in differences.json matches no check; remove it",
    ]


def test_a_comparison_sees_values_strides_and_dtypes():
    x = torch.randn(4, 6)
    assert samples.differs(x.clone(), x) == ""
    assert "values" in samples.differs(x * (1 + 1e-5), x)
    assert "values" in samples.differs(x * float("nan"), x)
    assert "stride" in samples.differs(x.mT.contiguous().mT, x)
    assert samples.differs(x.mT.contiguous().mT, x, strides=False) == ""
    assert "dtype" in samples.differs(x.double(), x)
    assert "shape" in samples.differs(x[:1], x)
    assert samples.differs((x, x + 1), (x, x)).startswith("[1] values")
