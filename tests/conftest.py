"""The fixture of a fake GPU, tiers of tests, and hypothesis profiles.

The same examples each run by default, so that a red `make test` means a change of the code.
"""

from __future__ import annotations

import gc
import logging
import os
import sys

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ("tiers",)

_common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("repeatable", derandomize=True, max_examples=200, **_common)
#: HYPOTHESIS_PROFILE=explore: other examples each time, and more of them; what it finds becomes an @example.
settings.register_profile("explore", max_examples=1000, print_blob=True, **_common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.hookimpl(hookwrapper=True)
def pytest_collection():
    """What is imported and collected stays to the end, so garbage is not looked for in it: 1 s each time.

    Else a third of the time of collecting goes to that, and tests that collect garbage themselves take twice as long.
    """
    gc.disable()
    yield
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _process_stays_as_it_was():
    """A test that turns torch's gradients or this package's warnings off for its process fails, and not later tests."""
    yield
    torch = sys.modules.get("torch")  # only tests that use it import it
    if torch is not None and not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        pytest.fail("the test left torch's gradients off for its process")
    logger = logging.getLogger("tilestream")
    if not logger.isEnabledFor(logging.WARNING):
        logging.disable(logging.NOTSET)
        logger.disabled = False
        logger.setLevel(logging.NOTSET)
        pytest.fail("the test left this package's warnings off for its process")


@pytest.fixture
def cuda():
    """A GPU made of the CPU: see `fake_cuda`."""
    from fake_cuda import fake_cuda  # only tests that ask for it import torch

    with fake_cuda() as made:
        yield made
