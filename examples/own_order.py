"""A tile order of your own: along the diagonals, from a function; the plan says what it makes of it.

python examples/own_order.py
"""

import torch

import tilestream as ts


def diagonal(t: int, num_m: int, num_n: int) -> tuple[int, int]:
    """Position ``t`` of a walk over the wrapped diagonals of a ``num_m`` x ``num_n`` grid."""
    row, step = t % num_m, t // num_m
    return row, (row + step) % num_n


def main() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(1000, 700), torch.randn(700, 900)
    plan = ts.plan(1000, 900, 700, workers=2, tile=(256, 256), schedule="dynamic", order=diagonal)
    print(plan.explain())
    print("largest difference from torch:", (plan.run(a, b) - a @ b).abs().max().item())
    try:
        ts.plan(1000, 900, 700, tile=(256, 256), order=[0, 1, 1, 2])
    except ValueError as error:
        print("refused:", error)


if __name__ == "__main__":
    main()
