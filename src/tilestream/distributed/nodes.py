"""A bandwidth model of a gather or a reduce-scatter over several nodes. No torch here.

Inside a *node* GPUs reach each other by NVLink; between nodes each GPU has its own NIC. With ``S`` bytes of a rank's
shard and ``nodes`` nodes of ``local`` GPUs:

- between nodes a GPU receives the shards of its counterparts in the other nodes: ``(nodes - 1) * S``, through its NIC;
- inside its node it receives its peers' shards of each node's rows: ``nodes * (local - 1) * S``, by NVLink.

So a shard crosses between two nodes once, not once for each of the ``local`` GPUs that need it.

A call has ``nodes`` steps: the own node's rows first, then the previous node's, and so on, in the order of arrival. In
a step the gather inside the node overlaps with its matmul, and the step takes the longer of the two. The shard of step
j has arrived when the NIC has received j shards::

    there(0) = 0;  there(j) = j * S / nic
    end(j) = max(end(j - 1), there(j)) + max(matmul / nodes, (local - 1) * S / nvlink)

A reduce-scatter is the same in reverse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilestream.distributed.dispatch import Case, table

#: Bytes a second and direction of a GPU's NIC (400 Gb/s) and of its NVLink (of an H100 or H200, nominal).
NIC, NVLINK = 50e9, 450e9


@dataclass(frozen=True)
class NodeModel:
    """The model of a call; see the module's docstring."""

    #: nodes, local: the number of nodes, and of GPUs in one.
    nodes: int
    local: int
    shard_bytes: int  # bytes of one rank's shard
    matmul: float  # seconds of a GPU's matmul of all rows, alone
    #: nic, nvlink: bytes a second of a GPU in each direction.
    nic: float = NIC
    nvlink: float = NVLINK

    @classmethod
    def of(cls, nodes: int, case: Case, rates: dict[str, Any]) -> NodeModel:
        """The model of a call over ``nodes`` nodes.

        Parameters
        ----------
        case
            The case of the ranks of one node.
        rates
            The device's rates: see ``table.json``.
        """
        flops = rates["flops"] * (2 if case.itemsize == 1 else 1)
        matmul = 2.0 * nodes * case.all_rows * case.n * case.k / flops
        return cls(nodes, case.world, case.shard_bytes, matmul)

    @property
    def nic_bytes(self) -> int:
        """Bytes that a GPU receives through its NIC."""
        return (self.nodes - 1) * self.shard_bytes

    @property
    def nvlink_bytes(self) -> int:
        """Bytes that a GPU receives by NVLink."""
        return self.nodes * (self.local - 1) * self.shard_bytes

    @property
    def flat_bytes(self) -> int:
        """Bytes that a GPU would receive through its NIC if each rank sent its shard to every other rank."""
        return (self.nodes - 1) * self.local * self.shard_bytes

    @property
    def parts(self) -> tuple[float, float, float]:
        """Seconds of the matmul, of the NIC and of NVLink, each alone; the longest is a lower bound of a call."""
        return self.matmul, self.nic_bytes / self.nic, self.nvlink_bytes / self.nvlink

    @property
    def seconds(self) -> float:
        """Modelled seconds of a call."""
        step = max(self.matmul / self.nodes, (self.local - 1) * self.shard_bytes / self.nvlink)
        end = 0.0
        for j in range(self.nodes):
            end = max(end, j * self.shard_bytes / self.nic) + step
        return end

    @property
    def hidden(self) -> bool:
        """Whether the matmuls hide the transfers between nodes: each shard arrives before its step begins."""
        return self.shard_bytes / self.nic <= self.matmul / self.nodes

    def explain(self) -> list[tuple[str, str]]:
        """The model in words."""
        sent = f"{self.nic_bytes / 1e6:.4g} MB through the NIC, {self.nvlink_bytes / 1e6:.4g} MB by NVLink"
        how = "hidden behind the matmul" if self.hidden else "longer than the matmul beside it"
        modelled = (
            f"{self.seconds * 1e3:.3g} ms, floor {max(self.parts) * 1e3:.3g} ms, one after the other "
            f"{sum(self.parts) * 1e3:.3g} ms; what goes between nodes is {how} (nominal: {self.nic / 1e9:g} and "
            f"{self.nvlink / 1e9:g} GB/s a GPU and direction)"
        )
        return [
            ("nodes", f"{self.nodes} of {self.local} GPUs, a step each: the own first, then as they come in"),
            ("bytes", f"{sent}, a GPU; flat it would be {self.flat_bytes / 1e6:.4g} MB through the NIC"),
            ("modelled", modelled),
        ]


def explain(nodes: int, case: Case) -> list[tuple[str, str]]:
    """The model of a call over ``nodes`` nodes in words; ``case`` is that of the ranks of one node."""
    rates = table()["rates"].get(case.device)
    if rates is None or case.device == "cpu":
        return [("nodes", f"{nodes}, each a step")]
    return NodeModel.of(nodes, case, rates).explain()
