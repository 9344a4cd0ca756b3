"""torchtitan's override with torchtitan itself, where it is installed, between ranks over gloo."""

from __future__ import annotations

import pytest
import torchtitan_jobs as jobs

pytest.importorskip("torchtitan")


@pytest.mark.timeout(1100)
@pytest.mark.parametrize("job", [jobs.overlaps, jobs.has_nothing_to_overlap], ids=lambda job: job.__name__)
def test_torchtitans_group_runs_here(ranks, job):
    assert ranks.run(2, job, bound=850.0)  # most of it imports torchtitan
