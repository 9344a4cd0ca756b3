"""Small grouped products for sanitizers, planned without a GPU, checked on the CPU: see `sanitize`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from gpu_cases import BF16, E4M3, poisoned

from error_rule import check
from grouped_cases import expected, offsets_of
from tilestream.core.device import DeviceProperties
from tilestream.core.operands import HALVES, SCALE_BLOCK, Epilogue, GroupedOperands
from tilestream.ops import grouped_library as library
from tilestream.plan.grouped import plan_groups
from tilestream.plan.plan import Plan

Sizes = tuple[int, ...]


class GroupedCase(NamedTuple):
    """A grouped product, and what is asked of its plan: two workers, several items each.

    Attributes
    ----------
    sizes
        The rows (with ``along`` k, the K) of each group; or rows by source, the sizes of each source's groups.
    """

    sizes: Sizes | tuple[Sizes, ...]
    n: int
    k: int
    variant: str
    tile: tuple[int, int]
    backend: str = "hopper"
    dtype: torch.dtype = BF16
    scales: str = "none"
    activation: str = "none"
    bias: bool = False
    along: str = "rows"
    schedule: str = "dynamic"
    arrives: bool = False
    publishes: bool = False

    #: Rows of a source's place, of which no source has all.
    CAPACITY = 200

    @property
    def sources(self) -> int:
        """0: offsets say where groups end."""
        return len(self.sizes) if isinstance(self.sizes[0], tuple) else 0

    @property
    def ends(self) -> torch.Tensor:
        """The offsets, or the counts."""
        return torch.tensor(self.sizes, dtype=torch.int32) if self.sources else offsets_of(self.sizes)

    def operands(self, device: str) -> GroupedOperands:
        """Random numbers, in as many rows as there are and nine more, of no group; the output is NaN."""
        ends, k, n = self.ends, self.k, self.n
        groups = ends.shape[-1]
        columns = n // 2 if self.activation in HALVES else n
        out_dtype = BF16 if self.dtype == E4M3 else self.dtype

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device)

        if self.along == "k":
            depth = int(ends[-1]) + 9
            a, b = drawn(depth, k).to(self.dtype).t(), drawn(depth, n).to(self.dtype)
            shape: Sizes = (groups, k, n)
        else:
            rows = self.sources * self.CAPACITY or int(ends[-1]) + 9
            a, b, shape = drawn(rows, k).to(self.dtype), drawn(groups, n, k).to(self.dtype).mT, (rows, columns)
        scale_a = scale_b = None
        if self.scales == "block":
            of_k, of_n = -(-k // SCALE_BLOCK), -(-n // SCALE_BLOCK)
            scale_a, scale_b = drawn(of_k, a.shape[0]).exp().t(), drawn(groups, of_n, of_k).exp().mT
        elif self.scales == "row":
            scale_a, scale_b = drawn(a.shape[0], 1).exp(), drawn(groups, 1, n).exp()
        bias = drawn(groups, 1, n).to(out_dtype) if self.bias else None
        out = poisoned(torch.Size(shape).numel(), out_dtype, device).view(shape)
        epilogue = Epilogue(bias=bias, activation=self.activation, scale_a=scale_a, scale_b=scale_b)
        return GroupedOperands(a, b, out, epilogue, ends.to(device))

    def plan(self, device: DeviceProperties, workers: int = 2) -> Plan:
        """The plan, without a GPU."""
        problem = replace(library.problem_of(self.operands("meta")), arrives=self.arrives)
        how: dict[str, Any] = {"tile": self.tile, "device": device, "backend": self.backend}
        plan = plan_groups(problem, workers, self.schedule, **how)
        assert (plan.backend, plan.variant) == (self.backend, self.variant), plan.explain()
        return plan

    def check(self, x: GroupedOperands) -> None:
        """Whether the output is right; what no group has is 0, or in sources' places not written."""
        places = [slice(i * self.CAPACITY, (i + 1) * self.CAPACITY) for i in range(self.sources)] or [slice(None)]
        for i, place in enumerate(places):
            ends = x.offsets[i].cumsum(0) if self.sources else x.offsets
            e = x.epilogue
            if self.sources:
                e = e._replace(scale_a=None if e.scale_a is None else e.scale_a[place])
            mine = x if self.along == "k" else GroupedOperands(x.a[place], x.b, x.out[place], e, ends)
            for answer, maths in expected(mine):
                check(answer, maths)
            if self.along == "rows":
                behind = mine.out[int(ends[-1]) :]
                assert behind.isnan().all() if self.sources else not behind.any()

    def __call__(self, device: DeviceProperties, whole: Any) -> str:
        """A call, whose kernel is the plan's; ``whole`` copies a tensor to the GPU."""
        import tilestream as ts
        from tilestream.launch.cache import launch_cache

        plan, here = self.plan(device), self.operands("cpu")
        a, b, out, offsets = (whole(x) for x in (here.a, here.b, here.out, here.offsets))
        more: dict[str, Any] = {"activation": None if self.activation == "none" else self.activation, "out": out}
        e = here.epilogue
        if self.scales == "row":
            more |= {"scale_a": whole(e.scale_a)[:, 0], "scale_b": whole(e.scale_b)[:, 0]}
        elif self.scales == "block":
            more |= {"scale_a": whole(e.scale_a), "scale_b": whole(e.scale_b)}
        if e.bias is not None:
            more["bias"] = whole(e.bias)[:, 0]
        if self.publishes:
            more["publish"] = ts.Arrival.uniform(self.CAPACITY, self.sources, device="cuda")
        if self.arrives:
            arrival = ts.SourceArrival(offsets, self.CAPACITY)
            for source in range(self.sources):
                arrival.signal_counts(source)
                arrival.signal_rows(source)
            more |= {"arrival": arrival, "deadline": 200.0}
        elif self.sources:
            more["counts"] = offsets
        else:
            more |= {"offsets": offsets, "schedule": self.schedule}
        launch_cache.clear()
        library.plan_groups = lambda *_, **__: plan
        ts.grouped_mm(a, b, workers=2, **more)
        ts.check()
        (launch,) = launch_cache.of("sources" if self.sources else "grouped")
        assert launch.plan is plan
        self.check(here._replace(out=out.cpu()))
        return f"{plan.label} {plan.variant}"


def _cases() -> Iterator[GroupedCase]:
    """Groups without rows, of one row, of some tiles, and of a part of one; the columns are cut off."""
    by_offsets, by_source = (0, 3, 140, 1, 0, 77), ((0, 3, 140), (20, 0, 1), (0, 0, 0))
    tiles = (("cooperative", (128, 96)), ("ping_pong", (64, 128)), ("single", (64, 64)))
    for sizes, (variant, tile) in itertools.product((by_offsets, by_source), tiles):
        yield GroupedCase(sizes, tile[1] + 8, 208, variant, tile, arrives=sizes is by_source)
    blocks: dict[str, Any] = {"dtype": E4M3, "scales": "block"}
    yield GroupedCase(by_offsets, 136, 272, "cooperative", (128, 128), schedule="static", **blocks)
    yield GroupedCase(by_offsets, 272, 208, "cooperative", (128, 128), activation="swiglu", bias=True)
    yield GroupedCase(by_offsets, 136, 208, "cooperative", (128, 128), dtype=E4M3, scales="row")
    yield GroupedCase((0, 70, 200), 136, 136, "cooperative", (128, 128), along="k")
    yield GroupedCase(by_source, 136, 272, "cooperative", (128, 128), publishes=True, **blocks)
    for sizes, arrives in ((by_offsets, False), (by_source, True)):
        yield GroupedCase(sizes, 136, 208, "persistent", (64, 128), "portable", arrives=arrives)
    yield GroupedCase(by_offsets, 136, 272, "persistent", (64, 128), "portable", **blocks)


GROUPED = tuple(_cases())
