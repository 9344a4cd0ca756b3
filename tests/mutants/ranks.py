"""The bugs of ranks that the checker must find: in gathers, pushed and pulled, in sums, and in all-reduces."""

from __future__ import annotations

from typing import Any

from mutants.checker import EARLY, OVERWRITTEN, Bug
from mutants.engine import Edit, at, before, delete, move, replace, swap
from tilestream_tools.verify.gather import GatherCase
from tilestream_tools.verify.one_shot import OneShotCase
from tilestream_tools.verify.sums import SumCase

TEXT = "tilestream.core.protocols.gather"
SUM, ONE_SHOT = "tilestream.core.protocols.reduce_scatter", "tilestream.core.protocols.one_shot"


def slots(count: int, module: str, functions: str, places: int) -> tuple[Edit, ...]:
    """So many slots in place of `SLOTS`."""
    return at(f"{module}:{functions}", replace("epoch % SLOTS", f"epoch % {count}", places))


def _gather(
    roles: str, name: str, kind: str, says: str, *edits: tuple[Edit, ...], calls: int = 1,
    expires: tuple[tuple[int, int], ...] = (), grows: bool | None = None, **more: Any,
) -> Bug:  # fmt: skip
    """``roles``: what is replaced of a case. A bug that needs many states is not looked for at smaller sizes."""
    names = roles.split(", ")
    if grows is None:
        grows = not expires and not {"streams", "world", "ways"} & more.keys()

    def make(*texts: Any) -> Any:
        given = dict(zip(names, texts, strict=True))
        return [GatherCase(epochs=n, expires=expires, **given, **more) for n in range(1 if grows else calls, calls + 1)]

    return Bug(name, kind, "gather", says, sum(edits, ()), tuple(f"{TEXT}:{role}" for role in names), make)


def _pull(roles: str, name: str, kind: str, says: str, *edits: tuple[Edit, ...], **more: Any) -> Bug:
    return _gather(roles, name, kind, says, *edits, ways=("pull",), **more)


OVER = ((0, 1),)
FROM_THE_SHARD = at(f"{TEXT}:publish", before("yield AwaitCall(epoch - 1)", "from_slot = False"))
UNTIL_DONE = "while not (yield AwaitDone(epoch)):\n    ..."
OR_GIVE_UP = "if not (yield AwaitDone(epoch)):\n    return None"
TOLD = at(f"{TEXT}:give_up", delete("for peer in peers(rank, world):\n    ..."))
NOT_OVERRULED = at(f"{TEXT}:watch", delete("yield Overrule(epoch)"))
OVERRULED_LATE = at(f"{TEXT}:watch", move("yield Overrule(epoch)", after=UNTIL_DONE))

GATHERS = (
    _gather(
        "begin", "not asked for expiry", OVERWRITTEN,
        "The host does not ask whether the kernel that it has waited for expired.",
        at(f"{TEXT}:begin", delete("if (yield CheckExpired()):\n    return None")), calls=4, expires=((0, 1), (0, 2)),
        strided=True,
    ),
    _gather(
        "begin", "host waits for the side stream", OVERWRITTEN,
        "The host waits for the side stream of the call before the last, and asks of its kernel, which has not ended.",
        at(f"{TEXT}:begin", replace("AwaitKernel(__epoch)", "AwaitSide(__epoch)")), calls=4, expires=OVER, strided=True,
    ),
    _gather(
        "begin", "too far ahead", OVERWRITTEN, "The host runs one call further ahead than there are slots for.",
        at(f"{TEXT}:begin", replace("AwaitKernel(__epoch)", "AwaitKernel(__epoch - 1)")), calls=4, expires=OVER,
        strided=True,
    ),
    _gather(
        "publish, side", "one slot", OVERWRITTEN,
        "One slot for all calls: it is filled while a peer's kernel still reads it.",
        slots(1, TEXT, "publish, push, pull", 3), calls=2, slots=1, sets=1,
    ),
    _gather(
        "publish, side", "two slots and an expiry", OVERWRITTEN,
        "Two slots: enough while every kernel that ends has had its rows. One that expires has not.",
        slots(2, TEXT, "publish, push, pull", 3), calls=3, expires=OVER, slots=2, sets=2, strided=True,
    ),
    _gather(
        "publish", "own rows not in the slot", EARLY,
        "The shard stays where the caller has it, and the kernel looks for it in the slot.",
        at(f"{TEXT}:publish", delete("yield Fill(slot, epoch)"), delete("yield Filled(slot, epoch)")),
    ),
    _gather(
        "publish", "own rows not signalled", "deadlock",
        "The own chunks are in the slot, and no signal says so: the kernel waits for them.",
        at(f"{TEXT}:publish", delete("yield Signal(rank, slot, chunk, epoch)")),
    ),
    _gather(
        "publish", "pushed before the slot is full", EARLY,
        "What leaves out of the own slot does so before it is there.", FROM_THE_SHARD, strided=True,
    ),
    _gather(
        "publish", "order of one stream taken for granted", OVERWRITTEN,
        "A call does not wait for the one before: of another stream, whose kernel may not have had its rows yet.",
        at(f"{TEXT}:publish", delete("yield AwaitCall(epoch - 1)")), calls=4, streams=2,
    ),
    _gather(
        "finish", "tensor free too early", OVERWRITTEN,
        "The calling stream does not wait for the side stream: the caller writes to the tensor while it is pushed.",
        at(f"{TEXT}:finish", replace("yield AwaitSide(epoch)", "yield from ()")), calls=2,
    ),
    _gather(
        "side", "slot of the wrong epoch", EARLY, "A shard goes into the slot of the next epoch.",
        at(
            f"{TEXT}:push",
            replace("Push(peer, slot, chunk, epoch)", "Push(peer, (epoch + 1) % SLOTS, chunk, epoch)"),
            replace("Pushed(peer, slot, chunk, epoch)", "Pushed(peer, (epoch + 1) % SLOTS, chunk, epoch)"),
        ),
    ),
    _gather(
        "side", "pushed before the last kernel", EARLY,
        "The side stream pushes as soon as its last call is done, whatever its own kernel is still waiting for.",
        at(f"{TEXT}:push", delete("yield AwaitPost(epoch)")),
    ),
    _gather(
        "side", "signal before copy", EARLY, "A chunk is signalled when its copy is issued, not when it is done.",
        at(f"{TEXT}:push", swap("yield Pushed(...)", "yield SignalPeer(...)")),
    ),
    _gather(
        "publish, side", "one set of signals", EARLY,
        "One set of signals for all slots: of another shape a word is another rank's, which may be a call ahead.",
        at(f"{TEXT}:publish", replace("Signal(rank, slot, chunk, epoch)", "Signal(rank, 0, chunk, epoch)")),
        at(f"{TEXT}:push", replace("SignalPeer(peer, slot, chunk, epoch)", "SignalPeer(peer, 0, chunk, epoch)")),
        calls=2, sets=1, world=3, chunks=(1, 2), strided=True,
    ),
    _gather(
        "watch", "expiry kept to oneself", "not told", "A rank that has given up keeps it to itself.", TOLD,
        expires=OVER
    ),
    _gather(
        "watch", "kernels not ended", "deadlock",
        "The watchdog tells all ranks, and leaves its own kernels to wait for peers that issue nothing any more.",
        at(f"{TEXT}:watch", delete("while epoch := (yield Oldest()):\n    ...")), calls=2, expires=OVER,
    ),
    _pull(
        "publish", "told before the slot is full", EARLY,
        "Peers are told of the own slot before the shard is there, and pull it.", FROM_THE_SHARD,
    ),
    _pull(
        "side", "signal before pull", EARLY, "A chunk is signalled when its copy is issued, not when it is done.",
        at(f"{TEXT}:pull", swap("yield Pulled(...)", "yield Signal(...)")),
    ),
    _pull(
        "side", "flags written by the reader", EARLY,
        "The flags of peers are written by the rank that waits for them: they say nothing of the peers.",
        at(
            f"{TEXT}:pull",
            replace("for peer in peers(rank, world):\n    yield Flag(peer, epoch)", "yield Release(epoch)"),
        ),
    ),
    _pull(
        "side", "flags ignored", EARLY, "A peer's shard is pulled without a look at its flag.",
        at(f"{TEXT}:pull", delete("yield AwaitFlag(peer, epoch)")),
    ),
    _pull(
        "side", "told after the pull", "deadlock",
        "A rank tells its peers that its shard is there when it has pulled theirs: all wait for each other.",
        at(
            f"{TEXT}:pull",
            move("for peer in peers(rank, world):\n    yield Flag(peer, epoch)", before="yield Done(epoch)"),
        ),
    ),
    _pull(
        "watch", "side stream not let go", "deadlock",
        "The watchdog ends its kernels, and leaves a side stream that pulls to wait for ever.",
        at(f"{TEXT}:watch", replace(f"yield Release(epoch)\n{UNTIL_DONE}", OR_GIVE_UP)), expires=OVER,
    ),
    _pull(
        "watch", "side stream let go once", "deadlock", "A flag that a late peer takes back is not written again.",
        at(f"{TEXT}:watch", replace(UNTIL_DONE, OR_GIVE_UP)), calls=2, expires=OVER,
    ),
    _pull(
        "publish, side", "two slots and a flag that lies", OVERWRITTEN,
        "Two slots: enough while every kernel that ends has had its rows. One that expires has not.",
        slots(2, TEXT, "publish, push, pull", 3), calls=3, expires=((0, 2),), slots=2, sets=2,
    ),
    _pull(
        "watch", "side stream let go under the kernel", EARLY,
        "The side stream is let go while the kernel still waits: it pulls what is not there, and signals it.",
        at(f"{TEXT}:watch", delete("yield Overrule(epoch)"), delete("yield AwaitKernel(epoch)")), expires=OVER,
    ),
)  # fmt: skip


def _role(model: str, case: Any, homes: dict[str, str]) -> Any:
    """Rows of sums, or of all-reduces: ``homes`` has the module of each role's text."""

    def bug(roles: str, name: str, kind: str, says: str, *edits: tuple[Edit, ...], calls: int = 1, **more: Any) -> Bug:
        names = roles.split(", ")
        least = more.get("streams", 1) if model == "sums" else (calls if "expires" in more else 1)

        def make(*texts: Any) -> Any:
            given = dict(zip(names, texts, strict=True))
            return [case(epochs=n, **given, **more) for n in range(least, calls + 1)]

        entries = tuple(homes[role] for role in names)
        return Bug(name, kind, model, says, sum(edits, ()), entries, make)

    return bug


_sum = _role(
    "sums", SumCase,
    {"watch": f"{TEXT}:watch", **{role: f"{SUM}:{role}" for role in ("produce", "scatter", "add_up")}},
)  # fmt: skip
_reduce = _role(
    "reduce", OneShotCase,
    {"watch": f"{TEXT}:watch", "reduce": f"{ONE_SHOT}:reduce", "begin": f"{SUM}:begin_sum"},
)  # fmt: skip

SUMS = (
    _sum(
        "scatter", "told of what is not published", EARLY,
        "A peer is told of a chunk when the kernel has begun, not when the chunk is signalled.",
        at(f"{SUM}:scatter", delete("yield AwaitPublished(step, epoch)")),
    ),
    _sum(
        "produce", "published before it is computed", EARLY,
        "A chunk is signalled while its tiles are still being stored.",
        at(f"{SUM}:produce", swap("yield Computed(...)", "yield Publish(...)")),
    ),
    _sum(
        "scatter", "waited for before telling", "deadlock",
        "Each step a rank waits for its chunk first, and tells of the one that it has for a peer afterwards.",
        at(
            f"{SUM}:scatter",
            move("yield FlagPart(...)", after="yield PulledPart(...)"),
            move("yield AwaitPublished(...)", after="yield PulledPart(...)"),
        ),
    ),
    _sum(
        "scatter", "waited for in a circle", "deadlock",
        "A rank waits for the peer whose chunk it computes, not for the one that computes its own: a circle.",
        at(f"{SUM}:scatter", replace("sender(...)", "(2 * rank - sender(rank, world, parts, step)) % world")), world=3,
    ),
    _sum(
        "add_up", "added before it was pulled", EARLY, "The sum does not wait for the side stream.",
        at(f"{SUM}:add_up", delete("yield AwaitSide(epoch)")),
    ),
    _sum(
        "produce", "sum on another stream", EARLY,
        "A call does not wait for the one before: on another stream its sum may still read what is pulled to.",
        at(f"{SUM}:produce", delete("yield AwaitCall(epoch - 1)")), calls=2, streams=2,
    ),
    _sum(
        "produce, scatter", "one slot for all products", EARLY,
        "One slot for all calls: it is computed into while a peer still pulls from it.",
        slots(1, SUM, "produce, scatter", 2), calls=3,
    ),
    _sum(
        "watch", "let go and not overruled", EARLY,
        "The stream that waits is let go, and nothing says that what comes of it is no number.", NOT_OVERRULED,
        expires=OVER,
    ),
    _sum(
        "watch", "overruled too late", EARLY,
        "The sum is made NaN when the stream that waits has been let go: it may have been added by then.",
        OVERRULED_LATE,
        expires=OVER,
    ),
)  # fmt: skip

FLAG = "for peer in peers(rank, world):\n    yield FlagPeer(peer, epoch)"
AWAIT = "for peer in peers(rank, world):\n    yield AwaitPeer(peer, epoch)"

REDUCES = (
    _reduce(
        "reduce", "told before it is multiplied", EARLY, "The peers are told when the matmul has been started.",
        at(f"{ONE_SHOT}:reduce", move("yield Multiplied(slot, epoch)", after=FLAG)),
    ),
    _reduce(
        "reduce", "one peer heard for all", EARLY, "One peer is waited for, as if its being there said that of all.",
        at(f"{ONE_SHOT}:reduce", replace(AWAIT, "yield AwaitPeer(next(peers(rank, world)), epoch)")), world=3,
    ),
    _reduce(
        "reduce", "one peer told", "deadlock", "One peer is told, and the others wait for ever.",
        at(f"{ONE_SHOT}:reduce", replace(FLAG, "yield FlagPeer(next(peers(rank, world)), epoch)")), world=3,
    ),
    _reduce(
        "reduce", "told when added", "deadlock", "The peers are told behind the sum, for which each waits.",
        at(f"{ONE_SHOT}:reduce", move(FLAG, after="yield Added(slot, epoch)")),
    ),
    _reduce(
        "watch", "let go and not made NaN", EARLY,
        "The stream that waits is let go, and nothing says that what comes of it is no number.", NOT_OVERRULED,
        expires=OVER,
    ),
    _reduce(
        "watch", "made NaN too late", EARLY,
        "The sum is made NaN when the stream that waits has been let go: it may have been added by then.",
        OVERRULED_LATE,
        expires=OVER,
    ),
    _reduce(
        "watch", "given up, and not said", "not told", "A rank that has given up keeps it to itself.", TOLD,
        expires=OVER
    ),
    _reduce(
        "reduce", "one slot for all calls", OVERWRITTEN,
        "One slot: the next product is written where the last is read.",
        slots(1, ONE_SHOT, "reduce", 1), calls=2,
    ),
    _reduce(
        "reduce", "two slots, and one gives up", OVERWRITTEN,
        "Two slots: a rank that lets go of a stream writes over what a late peer reads.",
        slots(2, ONE_SHOT, "reduce", 1), calls=3, expires=((0, 2),),
    ),
    _reduce(
        "begin", "two calls ahead, and one gives up", OVERWRITTEN,
        "The host runs two calls ahead: the third slot is used up before it knows.",
        at(f"{SUM}:begin_sum", replace("AwaitSide(__epoch)", "AwaitSide(__epoch - 1)")), calls=4, expires=((0, 2),),
    ),
)  # fmt: skip

BUGS = (*GATHERS, *SUMS, *REDUCES)
