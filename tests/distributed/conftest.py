"""The pool of ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def ranks():
    """See `pool.Pool`."""
    from pool import Pool

    pool = Pool()
    yield pool
    pool.close()
