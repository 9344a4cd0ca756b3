"""Flags in host memory that ranks share: which rank writes which, and where they are."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys

import pytest

from tilestream.distributed import host_flags
from tilestream.distributed.host_flags import LINE, GroupFlags, offer, size_of, withdraw

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


@pytest.fixture(autouse=True)
def no_driver(monkeypatch):
    """A GPU that maps host memory at its own address."""
    monkeypatch.setattr(host_flags, "map_host_memory", lambda address, size: address)


@pytest.fixture
def offered():
    found = offer(3)
    yield found
    withdraw(found)


def test_each_rank_and_op_has_its_own_flags(offered):
    group = GroupFlags(offered, 1, 3)
    places = []
    for op, of in itertools.product(OPS, range(3)):
        mine = group.of(op)
        places += [mine.flag(of, writer) for writer in range(3)]
        places += [mine.flag(of, 3), mine.flag(of, 4)]  # abort, void
    assert len(set(places)) == len(OPS) * 3 * 5
    assert all(x % LINE == min(places) % LINE for x in places), "each has its own line"
    assert min(places) - group._gpu >= LINE, "behind the token"
    assert max(places) + 4 <= group._gpu + size_of(3)


@pytest.mark.parametrize("op", OPS)
def test_flags_are_visible_to_the_other_ranks(offered, op):
    first, second = (GroupFlags(offered, rank, 3).of(op) for rank in (0, 1))
    # Like a stream of the second rank, in its own mapping of the first rank's flag.
    ctypes.c_int32.from_address(second.flag(0, 1)).value = 7
    assert first.peer_flags() == [0, 7, 0]
    assert second.peer_flags() == [0, 0, 0]
    first.release(2, 9)
    assert first.peer_flags() == [0, 7, 9]
    assert not first.aborted()
    second.abort(0)
    assert first.aborted()
    assert not second.aborted()
    assert int(first.void) == 0
    first.make_void(4)
    first.make_void(6)  # the first is kept
    assert int(first.void) == 4
    assert int(second.void) == 0
    assert first.void.data_ptr() == first.flag(0, 4)
    others = [GroupFlags(offered, 0, 3).of(other) for other in OPS if other != op]
    assert all(x.peer_flags() == [0, 0, 0] and not x.aborted() and not int(x.void) for x in others)


def test_flags_are_visible_to_other_processes(offered):
    mine = GroupFlags(offered, 0, 3).of("matmul_all_reduce")
    program = (
        "import sys; from tilestream.distributed import host_flags;"
        "host_flags.map_host_memory = lambda address, size: address;"
        "host_flags.GroupFlags(sys.argv[1], 2, 3).of('matmul_all_reduce').abort(0)"
    )
    subprocess.run([sys.executable, "-c", program, offered], check=True, timeout=850)
    assert mine.aborted()


def test_withdrawn_memory_stays_mapped_and_is_not_found_again():
    found = offer(2)
    mine, theirs = (GroupFlags(found, rank, 2).of(OPS[0]) for rank in (0, 1))
    withdraw(found)
    withdraw(found)  # harmless
    theirs.abort(0)
    assert mine.aborted()
    with pytest.raises(OSError, match="tilestream-"):
        GroupFlags(found, 1, 2)


def test_memory_with_another_token_is_refused(offered):
    path, _ = offered.split(" ")
    with pytest.raises(OSError, match="is not what was offered"):
        GroupFlags(f"{path} {'0' * 16}", 1, 3)
