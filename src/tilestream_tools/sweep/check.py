"""The check that what is timed gives right answers: the error rule, on a sample of rows where the whole is too much."""

from __future__ import annotations

from collections.abc import Callable

import torch

#: Takes rows of a product in float64, and their numbers.
Finish = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def errors(got: torch.Tensor, peer: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    """Maximum and Frobenius error of both against an fp64 reference, relative to its scale.

    Raises
    ------
    AssertionError
        If ours is more than twice the peer's plus one unit in the last place: then no time of it counts.
    """
    scale, norm = reference.abs().max().item(), reference.norm().item()
    figures = {
        "max": ((got.double() - reference).abs().max() / scale).item(),
        "frobenius": ((got.double() - reference).norm() / norm).item(),
        "peer_max": ((peer.double() - reference).abs().max() / scale).item(),
        "peer_frobenius": ((peer.double() - reference).norm() / norm).item(),
    }
    ulp = torch.finfo(got.dtype).eps
    for kind in ("max", "frobenius"):
        if not figures[kind] <= 2 * figures[f"peer_{kind}"] + ulp:
            raise AssertionError(
                f"wrong answer: {kind} error {figures[kind]:.3g}, the peer's {figures[f'peer_{kind}']:.3g}"
            )
    return figures


def sampled_rows(m: int, most: int = 256) -> torch.Tensor:
    """Row numbers over all of ``m``, the first and the last among them."""
    rows: torch.Tensor = torch.linspace(0, m - 1, min(m, most), dtype=torch.float64).round().long().unique()
    return rows


class Check:
    """The error rule on a sample of rows, and all of the answer against the peer's.

    Parameters
    ----------
    peer
        ``[rows, N]``, the same maths by torch in the same dtype.
    rows
        Which rows ``reference`` has.
    reference
        ``[len(rows), N]`` float64.
    """

    def __init__(self, peer: torch.Tensor, rows: torch.Tensor, reference: torch.Tensor) -> None:
        self.peer, self.rows, self.reference = peer, rows.to(peer.device), reference

    @classmethod
    def of_product(cls, a: torch.Tensor, b: torch.Tensor, peer: torch.Tensor, finish: Finish | None = None) -> Check:
        """For ``finish(a @ b)``, where ``finish`` takes float64 rows and their numbers, counted through all batches.

        Parameters
        ----------
        a, b, peer
            Matrices, or ``[B, M, K]``, ``[B, K, N]`` and ``[B, M, N]``.
        """
        a, b = (x if x.dim() == 3 else x[None] for x in (a, b))
        m = a.shape[1]
        rows = sampled_rows(len(a) * m).to(a.device)
        parts = []
        for batch in (rows // m).unique().tolist():  # rows are in order, so those of a batch follow one another
            few = a[batch, rows[rows // m == batch] % m].double()
            parts.append(torch.cat([few @ part.double() for part in b[batch].split(8192, dim=1)], dim=1))
        reference = torch.cat(parts)
        return cls(peer.flatten(0, -2), rows, reference if finish is None else finish(reference, rows))

    @classmethod
    def of_attention(
        cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, peer: torch.Tensor, causal: bool | str = False
    ) -> Check:
        """For attention; Q ``[B, S, H, D]``, K and V ``[B, keys, Hkv, D]``, ``peer`` ``[B * S, H * D]``.

        ``causal`` is that of `tilestream.attention`.
        """
        (batch, queries, heads, columns), (keys, heads_kv) = q.shape, k.shape[1:3]
        rows = sampled_rows(batch * queries, 64).to(q.device)
        last = torch.arange(queries, device=q.device) + (0 if causal == "top_left" else keys - queries)
        parts = []
        for which in range(batch):  # rows are in order, so those of a sequence follow one another
            at = rows[rows // queries == which] - which * queries
            few = q[which, at].double().view(len(at), heads_kv, heads // heads_kv, columns)
            scores = torch.einsum("rgpd,kgd->rgpk", few, k[which].double()) / columns**0.5
            if causal:
                hidden = torch.arange(keys, device=q.device) > last[at, None]
                scores.masked_fill_(hidden[:, None, None], -torch.inf)
            seen = torch.einsum("rgpk,kgd->rgpd", scores.softmax(-1), v[which].double())
            parts.append(seen.reshape(len(at), -1))
        return cls(peer, rows, torch.cat(parts))

    def __call__(self, got: torch.Tensor) -> dict[str, float]:
        """The errors of an answer; batches are rows behind one another.

        Raises
        ------
        AssertionError
            If an element is not finite, the sampled rows break the error rule, or the rest is further from the peer
            than two answers that keep it can be.
        """
        got = got.flatten(0, -2)
        figures = errors(got[self.rows], self.peer[self.rows], self.reference)
        scale, ulp = self.reference.abs().max().item(), torch.finfo(got.dtype).eps
        largest = apart = norm = 0.0
        for mine, theirs in zip(got.split(2048), self.peer.split(2048), strict=True):
            if not torch.isfinite(mine).all().item():
                raise AssertionError(f"wrong answer: {int((~torch.isfinite(mine)).sum())} elements are not finite")
            difference = mine.float() - theirs.float()
            largest = max(largest, difference.abs().max().item())
            apart += difference.double().square().sum().item()
            norm += theirs.double().square().sum().item()
        found = {"max": largest / scale, "frobenius": (apart / norm) ** 0.5}
        for kind, value in found.items():
            if not value <= 3 * figures[f"peer_{kind}"] + (4 if kind == "max" else 1) * ulp:
                raise AssertionError(f"wrong answer: {kind} distance of all rows to the peer's answer is {value:.3g}")
        return {name: float(f"{value:.3g}") for name, value in figures.items()}


def poison(m: int, n: int, dtype: torch.dtype, device: str) -> None:
    """Leave NaN where the next output of this shape will most likely be allocated."""
    torch.full((m, n), float("nan"), dtype=dtype, device=device)
