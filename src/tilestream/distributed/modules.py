"""The two halves of a tensor-parallel layer with sequence parallelism, as modules."""

from __future__ import annotations

import math

import torch
from torch import nn

from tilestream.distributed.api import all_gather_matmul, matmul_reduce_scatter
from tilestream.distributed.group_state import Group, place_of


def _share(name: str, what: str, features: int, world: int) -> int:
    if features % world:
        raise ValueError(f"{name}: {what}={features}; it is a multiple of the {world} ranks")
    return features // world


class _ParallelLinear(nn.Module):
    """A Linear with this rank's share of a weight, and a bias."""

    bias: nn.Parameter | None

    def __init__(
        self, rows: int, columns: int, bias: int, dim: int, group: Group,
        device: torch.device | str | None, dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dim, self.group = dim, group
        self.weight = nn.Parameter(torch.empty(rows, columns, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(bias, device=device, dtype=dtype)) if bias else None
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def _copy(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        with torch.no_grad():
            self.weight.copy_(weight)
            if self.bias is not None and bias is not None:
                self.bias.copy_(bias)


class ColumnParallelLinear(_ParallelLinear):
    """A Linear whose output features are divided between the ranks.

    ``[..., rows / world, ..., K]`` to ``[..., rows, ..., N / world]``. The rows are gathered while the matmul runs; the
    backward pass reduce-scatters the input's gradient likewise.

    Parameters
    ----------
    in_features, out_features
        K and N, of all ranks together; N is a multiple of the number of ranks.
    bias, device, dtype
        As for `torch.nn.Linear`.
    dim
        The dimension of rows that is cut.
    group
        The process group; None: the default one.
    activation
        As for `tilestream.distributed.all_gather_matmul`.

    Raises
    ------
    ValueError
        If N is not a multiple of the number of ranks.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, dim: int = 0,
        group: Group = None, activation: str | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        _, world = place_of("ColumnParallelLinear", group)
        share = _share("ColumnParallelLinear", "out_features", out_features, world)
        super().__init__(share, in_features, share if bias else 0, dim, group, device, dtype)
        self.activation = activation

    @classmethod
    def of(
        cls, linear: nn.Linear, *, dim: int = 0, group: Group = None, activation: str | None = None
    ) -> ColumnParallelLinear:
        """From this rank's share of ``linear``."""
        (rank, world), weight, bias = place_of("ColumnParallelLinear", group), linear.weight, linear.bias
        made = cls(
            linear.in_features, linear.out_features, bias is not None, dim=dim, group=group, activation=activation,
            device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
        own = None if bias is None else bias.chunk(world)[rank]
        made._copy(weight.chunk(world)[rank], own)
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of all rows, for this rank's columns."""
        result = all_gather_matmul(
            x, self.weight.t(), gather_dim=self.dim, group=self.group, bias=self.bias, activation=self.activation
        )
        assert isinstance(result, torch.Tensor)
        return result


class RowParallelLinear(_ParallelLinear):
    """A Linear whose input features are divided between the ranks.

    ``[..., rows, ..., K / world]`` to ``[..., rows / world, ..., N]``. The ranks' parts of the sum are sent while the
    matmul runs; the backward pass gathers the gradient likewise. The bias is added to each rank's own rows, so its
    gradient covers only those: sum it over the ranks, like every parameter's in a sequence-parallel region.

    Parameters
    ----------
    in_features, out_features
        K and N, of all ranks together; K is a multiple of the number of ranks.
    bias, device, dtype, dim, group
        As for `ColumnParallelLinear`.

    Raises
    ------
    ValueError
        If K is not a multiple of the number of ranks.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, dim: int = 0,
        group: Group = None, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        _, world = place_of("RowParallelLinear", group)
        share = _share("RowParallelLinear", "in_features", in_features, world)
        super().__init__(out_features, share, out_features if bias else 0, dim, group, device, dtype)

    @classmethod
    def of(cls, linear: nn.Linear, *, dim: int = 0, group: Group = None) -> RowParallelLinear:
        """From this rank's share of ``linear``."""
        (rank, world), weight, bias = place_of("RowParallelLinear", group), linear.weight, linear.bias
        made = cls(
            linear.in_features, linear.out_features, bias is not None, dim=dim, group=group, device=weight.device,
            dtype=weight.dtype,
        )  # fmt: skip
        made._copy(weight.chunk(world, 1)[rank], bias)
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of this rank's rows."""
        return matmul_reduce_scatter(x, self.weight.t(), scatter_dim=self.dim, group=self.group, bias=self.bias)
