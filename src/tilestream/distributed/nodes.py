"""What a gather or a sum over several nodes costs: a model of its bandwidths. No torch here.

A *node* is what GPUs reach each other in by NVLink; between nodes each GPU has a NIC of its own. With ``S`` bytes of a
rank's shard, ``nodes`` of ``local`` GPUs each:

- between nodes a GPU receives the shards of its like in the other nodes: ``(nodes - 1) * S``, through its NIC;
- inside a node it receives, of each node's shards, those of its peers: ``nodes * (local - 1) * S``, by NVLink.

So a shard crosses between two nodes once, and not once for each of the ``local`` GPUs there that need it.

A call is ``nodes`` steps: the own node's rows first, then those of the node before, and so on, as they come in. A step
is a gather inside the node beside its matmul, and takes the longer of the two. A step's shard is there when the NIC has
brought as many shards::

    there(0) = 0;  there(j) = j * S / nic
    end(j) = max(end(j - 1), there(j)) + max(matmul / nodes, (local - 1) * S / nvlink)

The sum is the same, read from its end to its beginning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilestream.distributed.dispatch import Case, table

#: Bytes a second and direction of a GPU's NIC (400 Gb/s) and of its NVLink (of an H100 or H200, nominal).
NIC, NVLINK = 50e9, 450e9


@dataclass(frozen=True)
class NodeModel:
    """A call over several nodes; see the module.

    Attributes
    ----------
    nodes, local
        How many, and the GPUs of one.
    shard_bytes
        Of one rank.
    matmul
        Seconds of a GPU's matmul by itself, of all rows.
    nic, nvlink
        Bytes a second and direction of a GPU.
    """

    nodes: int
    local: int
    shard_bytes: int
    matmul: float
    nic: float = NIC
    nvlink: float = NVLINK

    @property
    def between_bytes(self) -> int:
        """Bytes that a GPU receives through its NIC."""
        return (self.nodes - 1) * self.shard_bytes

    @property
    def inside_bytes(self) -> int:
        """Bytes that a GPU receives by NVLink."""
        return self.nodes * (self.local - 1) * self.shard_bytes

    @property
    def flat_bytes(self) -> int:
        """Bytes that it would receive through its NIC if every rank sent its shard to every other by itself."""
        return (self.nodes - 1) * self.local * self.shard_bytes

    @property
    def floor(self) -> float:
        """Seconds that no order of the same transfers goes below: the longest of matmul, NIC and NVLink."""
        return max(self.matmul, self.between_bytes / self.nic, self.inside_bytes / self.nvlink)

    @property
    def seconds(self) -> float:
        """Of a call, as it is run."""
        step = max(self.matmul / self.nodes, (self.local - 1) * self.shard_bytes / self.nvlink)
        end = 0.0
        for j in range(self.nodes):
            end = max(end, j * self.shard_bytes / self.nic) + step
        return end

    @property
    def unfused(self) -> float:
        """Seconds of the three one after the other."""
        return self.between_bytes / self.nic + self.inside_bytes / self.nvlink + self.matmul

    @property
    def hidden(self) -> bool:
        """Whether what goes between nodes is hidden behind the matmuls: a shard comes in no later than a step ends."""
        return self.shard_bytes / self.nic <= self.matmul / self.nodes

    def explain(self) -> list[tuple[str, str]]:
        """In words."""
        sent = f"{self.between_bytes / 1e6:.4g} MB through the NIC, {self.inside_bytes / 1e6:.4g} MB by NVLink"
        how = "hidden behind the matmul" if self.hidden else "longer than the matmul beside it"
        return [
            (
                "nodes",
                f"{self.nodes} of {self.local} GPUs, a step each: the own first, then as they come in",
            ),
            ("bytes", f"{sent}, a GPU; flat it would be {self.flat_bytes / 1e6:.4g} MB through the NIC"),
            (
                "modelled",
                f"{self.seconds * 1e3:.3g} ms, floor {self.floor * 1e3:.3g} ms, one after the other "
                f"{self.unfused * 1e3:.3g} ms; what goes between nodes is {how} (nominal: {self.nic / 1e9:g} and "
                f"{self.nvlink / 1e9:g} GB/s a GPU and direction)",
            ),
        ]


def columns_to_hide(itemsize: int, flops: float, local: int, nic: float = NIC) -> float:
    """Columns of B on a GPU from which on the NIC is hidden, whatever the rows, K and the number of nodes.

    A shard of ``r`` rows is ``r * K * itemsize`` bytes, a step's matmul ``2 * local * r * N * K`` operations: what is
    left is ``N >= itemsize * flops / (2 * local * nic)``. The same of a sum, whose rows have N and whose matmul K.
    """
    return itemsize * flops / (2 * local * nic)


def explain(nodes: int, case: Case) -> list[tuple[str, str]]:
    """Of a call over ``nodes`` nodes, in words; ``case`` is of the ranks of one."""
    rates = table()["rates"].get(case.device)
    if rates is None or case.device == "cpu":
        return [("nodes", f"{nodes}, each a step")]
    return model(nodes, case.world, case.rows, case.width, case.itemsize, case.n, case.k, rates).explain()


def model(
    nodes: int, local: int, rows: int, width: int, itemsize: int, n: int, k: int, rates: dict[str, Any]
) -> NodeModel:
    """Of a call.

    Parameters
    ----------
    rows, width, itemsize
        Of a rank's shard: of what travels.
    n, k
        Columns of all B together, and the length of the sums that a rank computes.
    rates
        Of the device: see ``table.json``.
    """
    flops = rates["flops"] * (2 if itemsize == 1 else 1)
    return NodeModel(nodes, local, rows * width * itemsize, 2.0 * nodes * local * rows * n * k / flops)
