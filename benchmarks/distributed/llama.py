"""What is fused of a Llama of torch's own parallel styles, what is not and why, and its losses beside the unfused ones.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_llama.py [--into FOLDER]

One process a GPU, as many as there are. The model is that of `tests/gpu/distributed_jobs.py`, its blocks alone and with
embedding and head; 50 steps of SGD, as it is and compiled under `tilestream.distributed.async_tp`. The record
``gpu_llama_x<world>`` has both losses and the handle's report, a row a model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.core.harness import RESULTS, GpuRecord
from benchmarks.core.paths import ROOT
from benchmarks.distributed.ranks import on_each_gpu


def rank_main(rank: int, world: int, into: str) -> None:
    """One rank."""
    tests = ROOT / "tests"
    sys.path[:0] = [str(tests), str(tests / "gpu")]
    import distributed_jobs

    record = GpuRecord(f"gpu_llama_x{world}", Path(into), world=world) if rank == 0 else None
    for whole in (False, True):
        plain, ours, sites = distributed_jobs.llama(rank, world, whole)
        if record is not None:
            rounded = {"plain": [round(x, 5) for x in plain], "ours": [round(x, 5) for x in ours]}
            record.rows.append({"model": "whole" if whole else "blocks", "losses": rounded, "sites": sites})
            record.write()
            print(*sites, plain[0], plain[-1], ours[-1], sep="\n", flush=True)
        distributed_jobs.llama_holds(plain, ours, sites)


def main() -> None:
    """All ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", default=str(RESULTS), help="the folder of the record")
    on_each_gpu(rank_main, parser.parse_args().into, seconds=120)
