"""The handshake: what ranks compare before they exchange data, and the error where they differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

#: Bytes of a handshake. All have the same size, because a receiver does not know which op the sender calls.
HANDSHAKE_BYTES = 512
#: Hexadecimal digits in place of a value that there is no room for.
_DIGITS = 16


def encode(fields: Mapping[str, object]) -> bytes:
    """``fields`` as `HANDSHAKE_BYTES` bytes; if there is no room, of the longest values a hash alone."""
    said = {name: str(value) for name, value in fields.items()}
    while len(text := json.dumps(said, separators=(",", ":")).encode()) > HANDSHAKE_BYTES:
        longest = max(said, key=lambda name: len(said[name]))
        if len(said[longest]) <= _DIGITS:
            raise ValueError(f"handshake: {len(text)} bytes of {HANDSHAKE_BYTES}: {text.decode()}")
        said[longest] = hashlib.sha256(said[longest].encode()).hexdigest()[:_DIGITS]
    return text.ljust(HANDSHAKE_BYTES)


def difference(op: str, mine: bytes, rank: int, theirs: bytes, peer: int) -> ValueError | None:
    """The exception that names the fields in which two ranks' handshakes differ; None if they are equal."""
    if mine == theirs:
        return None
    try:
        ours, others = json.loads(mine), json.loads(theirs)
    except ValueError:
        return ValueError(f"{op}: rank {peer} sent no handshake of tilestream; its version may differ")
    names = [name for name in {**ours, **others} if ours.get(name) != others.get(name)]
    what = "; ".join(f"{name}: {ours.get(name)} on rank {rank}, {others.get(name)} on rank {peer}" for name in names)
    return ValueError(f"{op}: ranks {rank} and {peer} differ in {what}. All ranks of a group make the same calls")
