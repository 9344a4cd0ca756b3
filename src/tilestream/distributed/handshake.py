"""What ranks tell each other before they exchange data, and what is said where they differ. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping

#: Bytes of a greeting: the same for all, since who waits for one does not know whose it is.
GREETING_BYTES = 512


def greeting(fields: Mapping[str, object]) -> bytes:
    """``fields`` as bytes, as long as every other greeting."""
    text = json.dumps({name: str(value) for name, value in fields.items()}, separators=(",", ":")).encode()
    if len(text) > GREETING_BYTES:
        raise ValueError(f"greeting: {len(text)} bytes of {GREETING_BYTES}: {text.decode()}")
    return text.ljust(GREETING_BYTES)


def differ(op: str, mine: bytes, rank: int, theirs: bytes, peer: int) -> ValueError | None:
    """The exception that says what two ranks' greetings differ in; None where they are alike."""
    if mine == theirs:
        return None
    try:
        ours, others = json.loads(mine), json.loads(theirs)
    except ValueError:
        return ValueError(f"{op}: what rank {peer} sent is no greeting of tilestream; its version may be another")
    names = [name for name in {**ours, **others} if ours.get(name) != others.get(name)]
    what = "; ".join(f"{name}: {ours.get(name)} on rank {rank}, {others.get(name)} on rank {peer}" for name in names)
    return ValueError(f"{op}: ranks {rank} and {peer} differ in {what}. All ranks of a group make the same calls")
