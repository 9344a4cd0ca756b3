"""torch's fused ops on this package, for one group at a time."""

from __future__ import annotations

import jobs


def test_torchs_fused_ops_run_on_tilestream_for_one_group_alone(ranks):
    said = ranks.run(2, jobs.torch_ops)
    assert "fused_" in said[0]
    assert "modelled: " in said[0]
