"""The exhaustive checker of the protocols: schedule, gate, rings, and a gather's ranks. Pure Python, no GPU.

Nine models, each explored through every interleaving:

1. `workers`: several workers on queues, gates, an expiry and the drain after it. It runs `tilestream.core.loop`
   itself, the text that the backends run: `work`, whose workers leave when the launch is over, and `work_through`,
   whose workers hand in NaN until no item is left, the last of them out resetting the words; and both ways to hand in
   the parts of a tile, `hand_in` and `settle`. Also in arrival order (`arrival_order`), where nobody may wait beside
   work.
2. `ring`: the load loop and the math loops of one worker on barriers, stages, slots and C buffers (`protocol`): the
   Hopper kernel, operation by operation.
3. `shared_ring`: the warps of one worker over a ring without mbarriers, in one loop for load and math: the CDNA kernel,
   and with keys and values that are read at different times (`shared_attention`) that of attention.
   There model 1's Compute is that loop; it begins and ends with nothing of the ring in use, so nothing is to compose.
4. `gather`: the hosts, streams and watchdogs of several ranks whose shards are pushed or pulled: the text that GPUs
   perform (`tilestream.core.protocols.gather`), with ranks that are late, give up or are lost. What it is to a kernel
   is chunks that come at any moment or never, which is all that model 1 asks of the world.
5. `attention`: model 2 for the Hopper kernel of attention: a ring for keys and one for values, queries of their own,
   consumers that may take turns; where keys arrive, the gate inside of an item, and what comes of the item when the
   launch ends there.
6. `publish`: workers that signal the chunks of their output, and readers (`tilestream.core.loop.publish`). It comes
   behind an item's epilogue, looks at nothing that the other parts write and waits for the worker's own stores alone:
   so it takes nothing away from what models 1 and 2 say of a worker.
7. `sums`: ranks as in model 4 (`ranks`), for products that they pull and add: the text is
   `tilestream.core.protocols.reduce_scatter`. Of the kernel it takes what model 6 says: a chunk that is signalled is
   complete.
8. `copies`: workers that copy what arrives themselves, before their first tile (`tilestream.core.copy_items`), some
   of which start late, or never. What comes of it for the tiles is chunks that arrive, as in model 1; what model 1 asks
   of the world besides, that nobody's signal comes after the last worker has left, holds since copiers are workers.
9. `one_shot`: ranks whose kernels add what is in all ranks' slots (`tilestream.core.protocols.one_shot`), as
   model 7 in what happens when one gives up.

**Why the first two together are the whole of a kernel.** In a kernel with load and math loops a worker is `work` cut in
two at Compute: the load loop does what comes before (Poll, take, gate), then puts the item on the item ring and loads
it; the math loop does Compute's epilogue and what comes after, by which it hands an item in: Count and Reduce, or those
of `settle`. A property can be broken in two places: the memory the workers share (counters, signals, abort word,
counts, slots of partials, the output), and one worker's rings and C buffers.

*Interface.* What a worker's loops tell each other is the sequence of items handed on, then STOP. Rings are private to
the worker, C buffers to a math loop; the load loop touches shared memory only in Poll, Take, Peek, Ready and Wait, the
math loop only from the epilogue on.

*Rings.* Model 2 assumes nothing of the sequence but that it is one of items with positive K counts, each handed on
after its gate, ended by STOP: it lets any item or STOP come at any moment. So whatever the schedule, the other workers,
the chunks and the deadline do, each worker's rings see a sequence model 2 has explored: none of its waits hangs (none
depends on anything outside), each item handed on is multiplied once, from the right stages, and finished in a bounded
number of the worker's own steps, whatever `settle` says of a part; STOP makes all its loops leave. That is also why a
gate comes before handing on: after it, nothing the math loop waits for can fail to come. Attention's comes later,
inside of the item: its load loop fills the stages of what does not come with nothing, and in model 5 any gate may fail.

*Workers.* Model 1 assumes of Compute that it is done once, in bounded own steps, after its gate and before the Count of
the same item: what model 2 gives. It takes Compute, and Count, as done before the worker's next Poll. In the whole, the
load loop may be ahead of its math loop by the item ring. Then load operations of later items come earlier, relative to
the epilogue, Count and Reduce of earlier ones, than in model 1. They commute: Poll, Take, Peek, Ready and Wait read
nothing those write, and the other way round. Moving each back behind the earlier items' Count gives a run in model 1's
order, with the same items taken, chunks seen and partials added. One thing does not move: an expiry may find a worker
with items handed on and not finished. They are finished all the same, their chunks being there: model 1's order has
them finished just before the expiry.

*Two consumers.* In ping-pong the epilogues of neighbouring items overlap, so what a worker does to hand in one item may
come before that of the item before it. Of different tiles these commute: count, slots and output are the tile's own. Of
one tile (two shares that one worker took) they are what two workers' would be, which model 1 has in every order. In a
cooperative pair each consumer hands in its half of the rows, with counts and slots of its own: two tiles, as far as
these words go.

That is said of `work`. Without a gate `work_through` is the same but for the Poll, and that is how the Hopper kernel
runs. The kernels that run `work_through` with a gate have one loop a worker and no rings: nothing to compose.

`product` runs those two models together where it fits, to doubt this argument rather than to trust it. `tests/mutants`
holds protocols with one thing wrong each, all of which must be found.

Sizes: small, and all of them. What larger sizes add is arithmetic, which the property tests of `schedule` and `arrival`
cover.
"""

from tilestream_tools.verify.faults import KINDS, Violation
from tilestream_tools.verify.report import Report, Result, explore, run
from tilestream_tools.verify.sweep import MODELS, Level, configurations

__all__ = [
    "KINDS",
    "MODELS",
    "Level",
    "Report",
    "Result",
    "Violation",
    "configurations",
    "explore",
    "run",
]
