"""Choices of experts sorted, for calls with kernels and calls with messages alike."""

from __future__ import annotations

import pytest
import torch

from tilestream.distributed.moe_dispatch import sorted_rows
from tilestream.launch.choices import sort


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "top_k", "count"), [(0, 2, 4), (5, 0, 4), (1, 1, 1), (9, 3, 6), (200, 8, 64)])
def test_choices_are_sorted_by_expert_and_then_by_place(tokens, top_k, count, dtype):
    choices = torch.randint(count, (tokens, top_k), generator=torch.Generator().manual_seed(tokens)).to(dtype)
    flat = choices.flatten().tolist()
    wanted = sorted(range(len(flat)), key=lambda i: (flat[i], i))
    chosen = sort(choices, count)
    assert chosen.order.tolist() == wanted
    assert chosen.place.tolist() == [wanted.index(i) for i in range(len(flat))]
    assert chosen.starts.tolist() == [sum(expert < i for expert in flat) for i in range(count + 1)]
    assert (chosen.order.dtype, chosen.place.dtype, chosen.starts.dtype) == (torch.int64, torch.int64, torch.int32)
    again, counts = sorted_rows(choices, count, 1)
    assert all(torch.equal(one, other) for one, other in zip(chosen, again, strict=True))
    assert counts.tolist() == [[flat.count(expert) for expert in range(count)]]
    assert counts.dtype == torch.int64, "as ranks send them"


def test_choices_of_no_expert_come_last_and_have_no_rows():
    choices = torch.tensor([[3, -1], [4, 0], [2**40, 3]])
    order, place, starts = sort(choices, 4)
    assert order.tolist() == [3, 0, 5, 1, 2, 4]
    assert place.tolist() == [1, 3, 4, 0, 5, 2]
    assert starts.tolist() == [0, 1, 1, 1, 3]


@pytest.mark.parametrize(
    ("choices", "wrong"), [([0, 3, -1, 4], -1), ([0, 4, -1], 4), ([2**40], 2**40), ([1, 3, 3], None)]
)
def test_messages_refuse_the_first_choice_of_no_expert(choices, wrong):
    choices = torch.tensor([choices]).t().expand(-1, 2)  # not contiguous
    if wrong is None:
        assert sorted_rows(choices, 4, 2)[1].tolist() == [[0, 2], [0, 4]]
        return
    with pytest.raises(ValueError, match=f"expert {wrong} is chosen; the 2 ranks have 4, numbered from 0"):
        sorted_rows(choices, 4, 2)
