"""A launch of each variant and store of the Hopper kernel, of stream_k and of a batch, small, for compute-sanitizer.

``compute-sanitizer --tool memcheck|racecheck|synccheck|initcheck python tests/gpu/sanitize.py``: `test_gpu_sanitize`
runs it and reads the summary. Answers are checked on the CPU, so that nothing else is sanitized that takes long.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from hopper_cases import E4M3, FEW, FULL, HopperCase, ways


def cases() -> Iterator[HopperCase]:
    """Each variant, two workers, several items each, of which the last is cut off in all directions."""
    for row in FEW:
        bm, bn = ways(row)[0]
        case = (3 * bm - 5, bn + 8, 3 * row.block_k(2) + 9, row.variant, (bm, bn))
        for kind, out in itertools.product(("static", "dynamic", "stream_k"), ("rows", "odd")):
            yield HopperCase(*case, schedule=kind, out=out, workers=2 if kind != "stream_k" else 5, stages=3)
        yield HopperCase(*case, out="columns", bias=True, activation="relu", layout="tt", workers=2)
        yield HopperCase(*case, batch=3, schedule="stream_k", workers=7, residual="rows", beta=2.0)
        yield HopperCase(*case, dtype=E4M3, layout="nt", scales="row", workers=2)
    yield HopperCase(200, 136, 200, FEW[0].variant, ways(FEW[0])[0], layout="nt", activation="gelu", **FULL)


def main() -> None:
    import torch

    from error_rule import check
    from tilestream.runtime.properties import cuda_properties

    torch.manual_seed(0)
    for case in cases():
        here = case.operands("cpu")
        # Copied in one piece each, with the gaps: a kernel of torch's that fills them would be sanitized, too.
        there = {name: None if t is None else _whole(t) for name, t in here.items()}
        plan, _ = case.plan(cuda_properties())
        out, _ = case.output("cpu")
        result = _whole(out)
        plan.run(**there, out=result, alpha=case.alpha, beta=case.beta, activation=case.activation)
        check(result.cpu(), case.maths(here))
        print(case.name, flush=True)
    print("all right")


def _whole(tensor):
    """``tensor`` on the GPU, in a copy of all of its storage."""
    import torch

    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return storage.cuda().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


if __name__ == "__main__":
    main()
