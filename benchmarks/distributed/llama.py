"""What is fused of a Llama of torch's own parallel styles, what is not and why, and its losses beside the unfused ones.

The model is that of `tests/gpu/distributed_jobs.py`, its blocks alone and with embedding and head; 50 steps of SGD, as
it is and compiled under `tilestream.distributed.async_tp`. A row a model: both losses and the handle's report.
"""

from __future__ import annotations

import sys

from benchmarks.core.paths import ROOT
from benchmarks.core.session import Session
from benchmarks.distributed.ranks import record_of


def llama(rank: int, world: int, session: Session) -> None:
    tests = ROOT / "tests"
    sys.path[:0] = [str(tests), str(tests / "gpu")]
    import distributed_jobs

    record = record_of(session, rank, "llama")
    for whole in (False, True):
        plain, ours, sites = distributed_jobs.llama(rank, world, whole)
        if record is not None:
            rounded = {"plain": [round(x, 5) for x in plain], "ours": [round(x, 5) for x in ours]}
            record.add({"model": "whole" if whole else "blocks", "losses": rounded, "sites": sites})
            print(*sites, plain[0], plain[-1], ours[-1], sep="\n", flush=True)
        distributed_jobs.llama_holds(plain, ours, sites)
