"""Choices of experts, sorted: what ranks send by, with Triton's kernels or without. No Triton here."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Chosen(NamedTuple):
    """Choices sorted by expert."""

    order: torch.Tensor  # ``int64[T * top_k]``: the choices, those of no expert last
    place: torch.Tensor  # ``int64[T * top_k]``: its inverse
    starts: torch.Tensor  # ``int32[world * E + 1]``: where each expert's begin; the last: where those of no expert do


def sort(choices: torch.Tensor, count: int) -> Chosen:
    """The choices sorted by expert, on their device: no host reads how many each has.

    A choice of an expert that does not exist (there are ``count``) is sorted behind all others.
    """
    flat = choices.reshape(-1)
    narrow = torch.int16 if count < 2**15 else torch.int32  # a radix sort takes half as long
    experts = flat.clamp(-1, count).remainder(count + 1).to(narrow)  # -1 becomes `count`
    by_expert, order = experts.sort(stable=True)
    each = torch.arange(count + 1, dtype=narrow, device=flat.device)
    starts = torch.searchsorted(by_expert, each, out_int32=True)
    place = torch.empty_like(order)
    place.scatter_(0, order, torch.arange(len(order), device=flat.device))
    return Chosen(order, place, starts)
