"""Small launches of portable GEMMs under Triton's concurrency sanitizer: ``python consan_portable.py VARIANT``.

Their copies, and what waits for them, are Triton's own pipeline: the sanitizer counts its groups of copies, and its
multiplications that have not ended. What CTAs of a cluster hand each other, by inline assembly, it does not see.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import sanitize
from consan_program import allocate, alone

#: Programs of a tile, and of a third of its K; the persistent kernel in vectors of 4.
CASES: dict[str, Callable[[], str]] = {
    "one_tile": lambda: sanitize.multiply(1, (64, 64)),
    "one_tile in parts": lambda: sanitize.multiply(3, (64, 64)),
    "portable": lambda: sanitize.product(next(x for x in sanitize.portable_cases() if x.k == 204)),
}


def main() -> None:
    import torch

    torch.manual_seed(0)
    allocate()
    with alone(5 * 60.0):  # compiling takes seconds
        print(CASES[sys.argv[1]]())
    print("clean")


if __name__ == "__main__":
    main()
