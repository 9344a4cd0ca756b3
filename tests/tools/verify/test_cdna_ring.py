"""Model 3: the ring without mbarriers keeps what it promises."""

from __future__ import annotations

import pytest

from tilestream_tools.verify import configurations, explore
from tilestream_tools.verify.search import search
from tilestream_tools.verify.shared_ring import Copy, SharedCase, SharedRing, direct, staged


@pytest.mark.parametrize("case", configurations("shared", "quick"), ids=str)
def test_every_property_holds(case):
    result = explore("shared", case)
    assert result.violation is None, str(result.violation)
    assert result.states > 20


@pytest.mark.slow
@pytest.mark.parametrize("case", configurations("shared", "full"), ids=str)
def test_every_property_holds_at_larger_sizes(case):
    result = explore("shared", case)
    assert result.violation is None, str(result.violation)


def test_reductions_change_no_verdict():
    for text in (direct, staged):
        case = SharedCase(SharedRing(3, 1, 2), ((2, True), (1, False)), text)
        assert search(case.build(True)).fault is search(case.build(False)).fault is None


def leaves_copies_behind(ring, item):
    """A worker leaves with copies in flight."""
    yield Copy(0, item, 0)


def test_leaving_with_copies_in_flight_is_a_fault():
    fault = search(SharedCase(SharedRing(), ((1, False),), leaves_copies_behind).build()).fault
    assert fault is not None
    assert fault.kind == "left too early"
