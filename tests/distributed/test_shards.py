"""The places of shards and chunks; and the handshake."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilestream.core.protocols.handshake import HANDSHAKE_BYTES, difference, encode
from tilestream.distributed.shards import Shards

shards = st.builds(
    Shards.of,
    st.lists(st.integers(1, 5), min_size=2, max_size=4),
    st.just(0),
    st.integers(1, 8),
    st.integers(1, 4),
)


@given(st.data())
def test_the_parts_of_all_ranks_cover_each_chunk_once(data):
    shape = data.draw(st.lists(st.integers(0, 5), min_size=2, max_size=4))
    dim = data.draw(st.integers(0, len(shape) - 2))
    world, parts = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 4))
    of = Shards.of(shape, dim, world, parts)
    bounds = of.bounds()
    seen = {}
    for rank in range(world):
        for part in of.of_rank(rank):
            first = (part.batch * world + rank) * of.rows
            assert bounds[part.chunk] == first + part.begin
            assert bounds[part.chunk + 1] == first + part.end
            assert of.rank_of(part.chunk) == rank
            assert part.chunk not in seen
            seen[part.chunk] = rank
    assert sorted(seen) == list(range(len(bounds) - 1))
    assert bounds[-1] == of.total


@given(shards, st.data())
def test_arrivals_have_the_same_chunks_and_begin_with_the_own_shard(of, data):
    rank = data.draw(st.integers(0, of.world - 1))
    arrival = of.arrival(rank)
    assert arrival.chunks(of.total).bounds == of.bounds()
    assert of.rank_of(arrival.pivot) == rank
    assert arrival.pivot == next(of.of_rank(rank)).chunk


def test_a_handshake_names_the_fields_that_differ():
    mine = encode({"op": "all_gather_matmul", "a_shard": [4, 8], "columns": 6})
    assert len(mine) == HANDSHAKE_BYTES
    assert difference("op", mine, 0, mine, 1) is None
    theirs = encode({"op": "all_gather_matmul", "a_shard": [5, 8], "form": "fused"})
    said = str(difference("all_gather_matmul", mine, 0, theirs, 3))
    assert said == (
        "all_gather_matmul: ranks 0 and 3 differ in a_shard: [4, 8] on rank 0, [5, 8] on rank 3; columns: 6 on rank 0, "
        "None on rank 3; form: None on rank 0, fused on rank 3. All ranks of a group make the same calls"
    )
    assert "sent no handshake of tilestream" in str(difference("op", mine, 0, b"x" * HANDSHAKE_BYTES, 1))
    assert json.loads(mine)["columns"] == "6"


def test_a_handshake_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match=f"bytes of {HANDSHAKE_BYTES}"):
        encode({f"field {number}": "x" for number in range(40)})


def test_every_handshake_has_one_size():
    """Up to it a value stays as it is: a receiver reads as many bytes whatever the sender says."""
    room = HANDSHAKE_BYTES - len('{"op":""}')
    for length in (1, room - 1, room, room + 1, 2 * room):
        said = encode({"op": "x" * length})
        assert len(said) == HANDSHAKE_BYTES
        assert (json.loads(said)["op"] == "x" * length) == (length <= room)


def test_of_what_a_handshake_has_no_room_for_there_is_a_hash():
    long = {"op": "all_gather_matmul", "kind": "K 8, " * 80, "a_shard": "[1, " * 60}
    mine, other = encode(long), encode({**long, "kind": "K 9, " * 80})
    assert len(mine) == len(other) == HANDSHAKE_BYTES
    assert b"[1, [1, " in mine, "the longest alone, if that suffices"
    error = str(difference("op", mine, 0, other, 1))
    assert "differ in kind: " in error
    assert "a_shard" not in error
    assert encode({**long, "a_shard": "[2, " * 200}) != encode({**long, "a_shard": "[3, " * 200}), "or several"
