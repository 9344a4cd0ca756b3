"""How far a matmul and its collective can be overlapped, from what each takes alone. For `gpu_all_gather`."""

from __future__ import annotations

from typing import Any, NamedTuple

#: Elements of the output that one tile on every SM makes.
_WAVE = 132 * 128 * 256
#: The peers.
PEERS = ("nccl + mm", "torch fused", "torch native")


class Floor(NamedTuple):
    """The bound of any overlap, milliseconds: ``max(matmul, transfer + one tile) + handshake``.

    Attributes
    ----------
    handshake
        None where the record has none (of older ones the sums'): then it is not in ``total``, which is too low by it,
        and a share of the way there too small.
    """

    matmul: float
    transfer: float
    tile: float
    handshake: float | None

    @property
    def total(self) -> float:
        """The floor."""
        return max(self.matmul, self.transfer + self.tile) + (self.handshake or 0.0)


def floor_of(row: dict[str, Any]) -> Floor:
    """A row's floor: of the faster matmul, the fastest transfer (without its handshake), the shortest handshake."""
    ms: dict[str, float] = row["ms"]
    matmul = min(ms[name] for name in ("mm", "ours mm") if name in ms)
    ways = [name.removeprefix("handshake") for name in ms if name.startswith("handshake")]
    copies = [ms[f"copies{way}"] - ms[f"handshake{way}"] for way in ways if f"copies{way}" in ms]
    return Floor(
        matmul,
        min([ms["nccl"], *copies]),
        matmul * min(1.0, _WAVE / (row["m"] * row["n"])),
        min((ms[f"handshake{way}"] for way in ways), default=None),
    )


class Judged(NamedTuple):
    """A row beside its peers and its floor, milliseconds.

    Attributes
    ----------
    best
        Of the others.
    win
        ``(best - ours) / (best - floor)``; None where that is no share: the floor lies above the best or above ours
        (few bytes, or a form with less latency than the handshake that was measured), as ``why`` says.
    """

    floor: float
    best: float
    ours: float
    win: float | None
    why: str = ""

    @property
    def ratio(self) -> float:
        """The best's time by ours."""
        return self.best / self.ours


def judged(row: dict[str, Any]) -> Judged | None:
    """None where ours, or every peer, failed."""
    ms: dict[str, float] = row["ms"]
    others = [ms[name] for name in PEERS if name in ms]
    if not others or "ours" not in ms:
        return None
    floor, best, ours = floor_of(row).total, min(others), ms["ours"]
    if best <= floor:
        return Judged(floor, best, ours, None, "floor above best")
    if ours < floor:
        return Judged(floor, best, ours, None, "floor above ours")
    return Judged(floor, best, ours, (best - ours) / (best - floor))
