"""What counts as a whole number, and as a name."""

from __future__ import annotations

import numpy as np
import pytest

from tilestream.core.arguments import is_one_of, is_whole


@pytest.mark.parametrize("x", [0, -3, 2**70, np.int64(4), np.uint8(1)], ids=repr)
def test_integers_of_any_library_are_whole(x):
    assert is_whole(x)


@pytest.mark.parametrize("x", [True, 1.0, "1", None, int, np.ones(1, int), [1], np.float32(2), 1j], ids=repr)
def test_nothing_else_is(x):
    assert not is_whole(x)


def test_an_array_is_no_name():
    names = ("auto", "static", None, False)
    assert all(is_one_of(name, names) for name in names)
    assert not any(is_one_of(x, names) for x in ("x", 3, np.ones(2), [], ["auto"], np.array(["auto"]), ("auto",)))
