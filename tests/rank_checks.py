"""What the jobs of ranks on the CPU and on GPUs share: inputs that every rank can make, and how results are checked."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from error_rule import Maths, check

#: ``random(seed, *shape, dtype=...)``: the same numbers on each rank, on the job's device.
Random = Callable[..., torch.Tensor]


def raised(call) -> str:
    """What ``call`` raised: the type's name and the message."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def told(what: str) -> None:
    """Let the ranks that `hear` go on."""
    dist.distributed_c10d._get_default_store().set(what, "told")


def hear(*what: str) -> None:
    """Wait until all of this is `told`."""
    dist.distributed_c10d._get_default_store().wait(list(what), datetime.timedelta(seconds=300))


def slowest(seconds: float, call: Callable[[], object]) -> float:
    """A deadline that no rank's call like this one misses: ten times what it took on the slowest, at least so many."""
    began = time.monotonic()
    call()
    spent = torch.tensor([10 * (time.monotonic() - began)])
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return max(seconds, spent.item())


class Gathered(NamedTuple):
    """The operands of a gather: each rank's shard, all of them together, and what belongs to each B."""

    shards: list[torch.Tensor]
    whole: torch.Tensor
    bs: list[torch.Tensor]
    biases: list[torch.Tensor] | None
    scales: list[torch.Tensor] | None
    scale_whole: torch.Tensor | None
    scales_b: list[torch.Tensor] | None

    @classmethod
    def random(
        cls, random: Random, world: int, shape: Sequence[int], dim: int, columns: Sequence[int], dtype: torch.dtype,
        *, bias: torch.dtype | None = None, scaled: str = "", k_contiguous: bool = False,
    ) -> Gathered:  # fmt: skip
        """``bias``: its dtype. ``scaled``: one scale a ``row``, or one a ``tensor``. ``k_contiguous``: of each B."""
        shards = [random(10 * r + 1, *shape, dtype=dtype) for r in range(world)]
        whole = torch.cat([x.view(torch.uint8) for x in shards], dim).view(dtype)
        k, float32 = whole.shape[-1], torch.float32
        bs = [
            random(500 + i, n, k, dtype=dtype).t() if k_contiguous else random(500 + i, k, n, dtype=dtype)
            for i, n in enumerate(columns)
        ]
        biases = [random(900 + i, n, dtype=bias) for i, n in enumerate(columns)] if bias else None
        if not scaled:
            return cls(shards, whole, bs, biases, None, None, None)
        one, rows = scaled == "tensor", (*shape[:-1], 1)
        scales = [random(70 + r, *((1,) if one else rows), dtype=float32).abs() + 0.5 for r in range(world)]
        scales_b = [random(80 + i, 1 if one else n, dtype=float32).abs() + 0.5 for i, n in enumerate(columns)]
        return cls(shards, whole, bs, biases, scales, torch.cat([x.expand(rows) for x in scales], dim), scales_b)

    def arguments(self, rank: int) -> dict[str, object]:
        """A rank's keyword arguments."""
        scale = None if self.scales is None else self.scales[rank]
        return {"bias": self.biases, "scale_a": scale, "scale_b": self.scales_b}

    def check(self, outs: Sequence[torch.Tensor], a: torch.Tensor | None = None, activation: str | None = None) -> None:
        """Against all shards side by side, multiplied by torch; ``a``: what was gathered, bit by bit."""
        assert a is None or a.view(torch.uint8).equal(self.whole.view(torch.uint8)), tuple(self.whole.shape)
        for i, (out, b) in enumerate(zip(outs, self.bs, strict=True)):
            assert out.shape == (*self.whole.shape[:-1], b.shape[-1])
            maths = Maths(
                self.whole.flatten(0, -2), b, bias=None if self.biases is None else self.biases[i],
                activation=activation, scale_b=None if self.scales_b is None else self.scales_b[i],
                scale_a=None if self.scale_whole is None else self.scale_whole.flatten(0, -2),
            )  # fmt: skip
            check(out.flatten(0, -2), maths)


class Summed(NamedTuple):
    """The operands of a sum of all ranks' products, and what belongs to the sum."""

    operands: list[tuple[torch.Tensor, torch.Tensor]]
    bias: torch.Tensor | None
    scales: tuple[torch.Tensor | None, torch.Tensor | None]
    reduce_op: str

    @classmethod
    def random(
        cls, random: Random, world: int, rows: Sequence[int], k: int, n: int, dtype: torch.dtype, *,
        reduce_op: str = "sum", bias: torch.dtype | None = None, scaled: str = "", k_contiguous: bool = True,
    ) -> Summed:  # fmt: skip
        """As of `Gathered`."""
        operands = [
            (
                random(10 * r + 3, *rows, k, dtype=dtype),
                random(10 * r + 4, n, k, dtype=dtype).t() if k_contiguous else random(10 * r + 4, k, n, dtype=dtype),
            )
            for r in range(world)
        ]
        added = None if bias is None else random(5, n, dtype=bias)
        if not scaled:
            return cls(operands, added, (None, None), reduce_op)
        shapes = ((1,), (1,)) if scaled == "tensor" else ((*rows, 1), (n,))
        of_a, of_b = (random(7 + i, *shape, dtype=torch.float32).abs() + 0.5 for i, shape in enumerate(shapes))
        return cls(operands, added, (of_a, of_b), reduce_op)

    def arguments(self) -> dict[str, object]:
        """Every rank's keyword arguments."""
        of_a, of_b = self.scales
        return {"bias": self.bias, "scale_a": of_a, "scale_b": of_b, "reduce_op": self.reduce_op}

    def check(self, out: torch.Tensor, what: object, *, dim: int | None = None, rank: int = 0, **how) -> None:
        """`check_sum` against the exact sum, beside that of rounded products; ``dim``: of a rank's part along it."""
        dtype = self.operands[0][0].dtype
        travels = torch.bfloat16 if dtype.itemsize == 1 else dtype
        assert out.dtype == travels, what
        products = [x.double() @ y.double() for x, y in self.operands]
        for scale in self.scales:
            products = products if scale is None else [x * scale.double() for x in products]
        over = len(products) if self.reduce_op == "avg" else 1
        exact, theirs = sum(products) / over, sum(x.to(travels).float() for x in products) / over
        if self.bias is not None:
            exact, theirs = exact + self.bias.double(), theirs + self.bias.float()
        if dim is not None:
            exact, theirs = (x.chunk(len(products), dim)[rank] for x in (exact, theirs))
        check_sum(out, exact, theirs, what, **how)


def check_sum(
    out: torch.Tensor, exact: torch.Tensor, theirs: torch.Tensor, what: object = "", *, ulps: int = 1, frobenius=False
) -> None:
    """The largest error is at most twice that of ``theirs``, plus ``ulps`` at the result's scale.

    ``frobenius``: so is the norm of all errors.
    """
    assert out.shape == exact.shape, what
    if not exact.numel():
        return
    ulp = ulps * torch.finfo(out.dtype).eps * exact.abs().max()
    error, other = ((x.double() - exact).abs() for x in (out, theirs.to(out.dtype)))
    assert error.max() <= 2 * other.max() + ulp, (what, error.max().item(), other.max().item())
    if frobenius:
        norm, norm_of_theirs = error.norm(), other.norm()
        assert norm <= 2 * norm_of_theirs + ulp * exact.numel() ** 0.5, (what, norm.item(), norm_of_theirs.item())


def same_on_every_rank(out: torch.Tensor) -> None:
    """Every rank has the same bits."""
    first = out.clone().view(torch.uint8)
    dist.broadcast(first, 0)
    assert first.equal(out.view(torch.uint8)), "ranks have other bits"
