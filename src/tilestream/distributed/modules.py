"""The two halves of a tensor-parallel layer with sequence parallelism, as modules."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
from torch import nn

from tilestream.distributed.api import all_gather_matmul, matmul_reduce_scatter
from tilestream.distributed.group_state import Group, place_of

P = TypeVar("P", bound="_ParallelLinear")


class _ParallelLinear(nn.Module):
    """A Linear with this rank's share of a weight, and of the bias if the output features are divided."""

    #: The name of the divided features, and their dimension of the weight.
    _features, _weight_dim = "", 0
    bias: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, dim: int = 0, group: Group = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dim, self.group = dim, group
        shape = [out_features, in_features]
        name, features = type(self).__name__, shape[self._weight_dim]
        _, world = place_of(name, group)
        if features % world:
            raise ValueError(f"{name}: {self._features}={features}; it must be a multiple of the {world} ranks")
        shape[self._weight_dim] //= world
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(shape[0], device=device, dtype=dtype)) if bias else None
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    @classmethod
    def of(cls: type[P], linear: nn.Linear, *, dim: int = 0, group: Group = None, **options: Any) -> P:
        """A module with this rank's share of ``linear``; ``options`` are those of the module."""
        (rank, world), weight, bias = place_of(cls.__name__, group), linear.weight, linear.bias
        made = cls(
            linear.in_features, linear.out_features, bias is not None, dim=dim, group=group, device=weight.device,
            dtype=weight.dtype, **options,
        )  # fmt: skip
        with torch.no_grad():
            made.weight.copy_(weight.chunk(world, cls._weight_dim)[rank])
            if made.bias is not None:
                made.bias.copy_(bias.chunk(world)[rank] if cls._weight_dim == 0 else bias)
        return made


class ColumnParallelLinear(_ParallelLinear):
    """A Linear whose output features are divided between the ranks.

    It maps ``[..., rows / world, ..., K]`` to ``[..., rows, ..., N / world]``. The matmul overlaps with the gather of
    the rows; the backward pass overlaps with the reduce-scatter of the input's gradient.

    Parameters
    ----------
    in_features, out_features
        K and N over all ranks; N is a multiple of the number of ranks.
    bias, device, dtype
        See `torch.nn.Linear`.
    dim
        The dimension of the rows that is divided between the ranks.
    group
        The process group; None: the default group.
    activation
        See `tilestream.distributed.all_gather_matmul`.

    Raises
    ------
    ValueError
        If N is not a multiple of the number of ranks.
    """

    _features, _weight_dim = "out_features", 0

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, dim: int = 0,
        group: Group = None, activation: str | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias, dim=dim, group=group, device=device, dtype=dtype)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of all rows, for this rank's columns."""
        result = all_gather_matmul(
            x, self.weight.t(), gather_dim=self.dim, group=self.group, bias=self.bias, activation=self.activation
        )
        assert isinstance(result, torch.Tensor)
        return result


class RowParallelLinear(_ParallelLinear):
    """A Linear whose input features are divided between the ranks.

    It maps ``[..., rows, ..., K / world]`` to ``[..., rows / world, ..., N]``. The matmul overlaps with the exchange of
    the ranks' parts of the sum; the backward pass overlaps with the gather of the gradient. The bias is added to each
    rank's own rows, so its gradient covers only those rows: sum it over the ranks, like the gradient of every parameter
    in a sequence-parallel region.

    Parameters
    ----------
    in_features, out_features
        K and N over all ranks; K is a multiple of the number of ranks.
    bias, device, dtype, dim, group
        See `ColumnParallelLinear`.

    Raises
    ------
    ValueError
        If K is not a multiple of the number of ranks.
    """

    _features, _weight_dim = "in_features", 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of this rank's rows."""
        return matmul_reduce_scatter(x, self.weight.t(), scatter_dim=self.dim, group=self.group, bias=self.bias)
