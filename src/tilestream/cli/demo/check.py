"""Is the answer right? The error rule, on sampled tiles, against float64."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

#: Operations in float64 that a check may cost, about: a second of one core.
_BUDGET = 2e10
_K_BLOCK = 16384


@dataclass(frozen=True)
class Verdict:
    """What a check found. Errors are against float64, over the sampled tiles; ``allowed`` is what the rule allows.

    The rule: maximum and Frobenius error at most twice those of torch.mm in the same dtype on the same inputs, plus one
    ulp at the result's scale; and not one element of the whole output left as it was before (NaN).
    """

    tiles: int
    elements: int
    missing: int
    maximum: float
    maximum_torch: float
    maximum_allowed: float
    frobenius: float
    frobenius_torch: float
    frobenius_allowed: float

    @property
    def right(self) -> bool:
        """Whether the answer passes."""
        return not self.missing and self.maximum <= self.maximum_allowed and self.frobenius <= self.frobenius_allowed


class Checker:
    """Checks outputs of ``x @ w``; remembers the references of the tiles it samples each time.

    Parameters
    ----------
    x, w
        ``[m, k]`` and ``[k, n]``. ``x`` may be on the CPU while the rest is on a GPU: what is checked is then the copy,
        too, and only sampled rows are copied once more.
    by_torch
        ``torch.mm(x, w)``: the error to be compared with.
    tile
        Rows and columns of a tile.
    """

    def __init__(self, x: torch.Tensor, w: torch.Tensor, by_torch: torch.Tensor, tile: tuple[int, int]) -> None:
        self._x, self._w, self._torch = x, w, by_torch
        m, n = by_torch.shape
        self._tile = min(tile[0], m), min(tile[1], n)
        self._grid = math.ceil(m / self._tile[0]), math.ceil(n / self._tile[1])
        cost = 2.0 * self._tile[0] * self._tile[1] * x.shape[1]
        self._sample = self._choose(round(min(16, max(5, _BUDGET / cost))))
        self._references: dict[tuple[int, int], torch.Tensor] = {}

    def check(self, out: torch.Tensor) -> Verdict:
        """Check ``out``, on the sampled tiles and on the one that differs most from torch's answer."""
        tiles = sorted({*self._sample, self._strangest(out)})
        ours: list[torch.Tensor] = []
        theirs: list[torch.Tensor] = []
        references: list[torch.Tensor] = []
        missing = int((torch.isnan(out) & torch.isfinite(self._torch)).sum())
        for tile in tiles:
            if tile not in self._references:
                self._references[tile] = self._reference(tile)
            reference, rows, columns = self._references[tile], *self._slices(tile)
            # Where the true value is not finite there is no error to measure.
            finite = reference.isfinite()
            references.append(reference[finite])
            ours.append(out[rows, columns][finite].double() - references[-1])
            theirs.append(self._torch[rows, columns][finite].double() - references[-1])
        reference, own, other = torch.cat(references), torch.cat(ours), torch.cat(theirs)
        if not reference.numel():
            return Verdict(len(tiles), 0, missing, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        epsilon = torch.finfo(out.dtype).eps
        scale, norm = float(reference.abs().max()), float(reference.norm())
        ulp = epsilon * 2.0 ** math.floor(math.log2(scale)) if scale > 0 else epsilon
        most, most_torch = float(own.abs().max()), float(other.abs().max())
        whole, whole_torch = float(own.norm()), float(other.norm())
        return Verdict(
            tiles=len(tiles),
            elements=reference.numel(),
            missing=missing,
            maximum=most,
            maximum_torch=most_torch,
            maximum_allowed=2 * most_torch + ulp,
            frobenius=whole,
            frobenius_torch=whole_torch,
            frobenius_allowed=2 * whole_torch + epsilon * norm,
        )

    def _choose(self, count: int) -> list[tuple[int, int]]:
        """The corners, where tails are, and others at random, the same each time."""
        rows, columns = self._grid
        chosen = {(0, 0), (0, columns - 1), (rows - 1, 0), (rows - 1, columns - 1)}
        dice = random.Random(0)
        while len(chosen) < min(count, rows * columns):
            chosen.add((dice.randrange(rows), dice.randrange(columns)))
        return sorted(chosen)

    def _strangest(self, out: torch.Tensor) -> tuple[int, int]:
        """The tile with the largest difference from torch's answer: a wrong tile is found wherever it is."""
        difference = (out - self._torch).abs_()
        difference[~torch.isfinite(self._torch)] = 0.0
        worst = int(difference.nan_to_num_(nan=math.inf).argmax())
        row, column = divmod(worst, out.shape[1])
        return row // self._tile[0], column // self._tile[1]

    def _slices(self, tile: tuple[int, int]) -> tuple[slice, slice]:
        (rows, columns), (pm, pn) = self._tile, tile
        return slice(pm * rows, (pm + 1) * rows), slice(pn * columns, (pn + 1) * columns)

    def _reference(self, tile: tuple[int, int]) -> torch.Tensor:
        rows, columns = self._slices(tile)
        w = self._w[:, columns]
        x = self._x[rows].to(w.device)
        total = torch.zeros(x.shape[0], w.shape[1], dtype=torch.float64, device=w.device)
        for begin in range(0, x.shape[1], _K_BLOCK):
            total.addmm_(x[:, begin : begin + _K_BLOCK].double(), w[begin : begin + _K_BLOCK].double())
        return total
