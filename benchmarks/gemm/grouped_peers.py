"""The peers of grouped products beside torch: DeepGEMM, quack and CUTLASS, each where it can be imported.

Each is given what it wants outside of what is timed. A peer may have several configurations: the fastest whose answer
is right is the one a row has. `deepgemm`, `quack` and `cutlass` say how to install them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.core.records import Row
from benchmarks.core.timing import Call
from benchmarks.gemm import cutlass, deepgemm


class Ways(NamedTuple):
    """How a peer computes one product.

    Attributes
    ----------
    calls
        By configuration.
    rows
        Of what a call returns, the product's rows.
    about
        What the record is told of it.
    """

    calls: dict[str, Call]
    rows: Callable[[torch.Tensor], torch.Tensor]
    about: Row


class Peer(NamedTuple):
    """A package that can be imported here.

    Attributes
    ----------
    name, version
        As the record has them.
    ways
        Of ``a [rows, K]``, ``b [groups, K, N]`` and the rows of each group.
    configs
        The names of its configurations.
    by_shape
        Whether its kernels are compiled anew for each layer, or each configuration once.
    build
        Compiles a configuration, by name; other peers do so at the first call.
    """

    name: str
    version: str
    ways: Callable[[torch.Tensor, torch.Tensor, list[int]], Ways]
    configs: Sequence[str] = ("",)
    by_shape: bool = False
    build: Callable[[str], None] = lambda name: None


def _as_given(out: torch.Tensor) -> torch.Tensor:
    return out


def of_deepgemm(package: Any, a: torch.Tensor, b: torch.Tensor, given: list[int]) -> Ways:
    """DeepGEMM's, of padded groups."""
    x = deepgemm.padded(package, a, b, given)
    calls = {"": lambda: deepgemm.multiply(package, x)}
    return Ways(calls, lambda out: out[x.places], {"padded_rows": len(x.rows)})


#: quack's configurations: tile, whether it is ping-pong, cluster, whether tiles are taken from a counter. The first is
#: its own default.
_QUACK = {
    "128x192 ping-pong, cluster 2x1": (128, 192, True, (2, 1), False),
    "128x192 ping-pong, cluster 2x1, dynamic": (128, 192, True, (2, 1), True),
    "128x256 cooperative, cluster 2x1": (128, 256, False, (2, 1), False),
    "256x128 cooperative, cluster 2x1": (256, 128, False, (2, 1), False),
    "128x128 ping-pong, cluster 1x2, dynamic": (128, 128, True, (1, 2), True),
}


def of_quack(interface: Any, a: torch.Tensor, b: torch.Tensor, given: list[int]) -> Ways:
    """quack's, by its configurations."""
    config = importlib.import_module("quack.gemm_config").GemmConfig
    ends = torch.tensor([0, *given], device=a.device).cumsum(0).to(torch.int32)

    def call(tile_m: int, tile_n: int, pingpong: bool, cluster: tuple[int, int], dynamic: bool) -> torch.Tensor:
        out = a.new_empty(a.shape[0], b.shape[2])
        made = config(
            tile_m=tile_m, tile_n=tile_n, pingpong=pingpong, cluster_m=cluster[0], cluster_n=cluster[1],
            is_dynamic_persistent=False,
        )  # fmt: skip
        interface.gemm_tuned.fn(a, b, out, cu_seqlens_m=ends, config=made, dynamic_scheduler=dynamic)
        return out

    return Ways({name: functools.partial(call, *one) for name, one in _QUACK.items()}, _as_given, {})


def of_cutlass(names: list[str], a: torch.Tensor, b: torch.Tensor, given: list[int]) -> Ways:
    """CUTLASS's, by configurations."""
    return Ways({name: _Later(functools.partial(cutlass.Product, name, a, b, given)) for name in names}, _as_given, {})


class _Later:
    """A call that is made when it is first called: what it raises is its own configuration's."""

    def __init__(self, make: Callable[[], Call]) -> None:
        self._make = make
        self._call: Call | None = None

    def __call__(self) -> torch.Tensor:
        if self._call is None:
            self._call = self._make()
        out: torch.Tensor = self._call()
        return out


def found() -> tuple[list[Peer], dict[str, str]]:
    """The peers that are here; and the others, with the reason."""
    peers, absent = [], {}
    package, said = deepgemm.imported()
    if package is None:
        absent[deepgemm.NAME] = said
    else:
        peers.append(Peer(deepgemm.NAME, said, functools.partial(of_deepgemm, package), by_shape=True))
    try:
        version = str(importlib.import_module("quack").__version__)
        interface = importlib.import_module("quack.gemm_interface")
        peers.append(Peer("quack", version, functools.partial(of_quack, interface), tuple(_QUACK)))
    except Exception as error:
        absent["quack"] = deepgemm.refusal(error)
    names, said = cutlass.imported()
    if names:
        peers.append(Peer(cutlass.NAME, said, functools.partial(of_cutlass, names), names, build=cutlass.build))
    else:
        absent[cutlass.NAME] = said
    return peers, absent
