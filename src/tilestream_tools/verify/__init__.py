"""The exhaustive checker of the protocols: schedule, gate, rings, and exchanges between ranks. Pure Python, no GPU.

It has fifteen models, and explores all interleavings of each:

1. `workers`: several workers on queues and gates, with a deadline that may expire and the drain after it. It runs
   `work` of `tilestream.core.loop`, the CPU backend's code, whose workers leave when the launch is over. It also runs
   `work_through` of `gpu_loop`, whose workers store NaN until no item is left; its last worker to leave resets the
   words. It covers both ways to store a tile's parts, `store_and_count` and `fixup`, and arrival order
   (`arrival_order`), in which no worker may wait while there is work.
2. `ring`: the load loop and the math loops of one worker on barriers, stages, slots and C buffers (`protocol`). This is
   the Hopper kernel, operation by operation.
3. `shared_ring`: the warps of one worker over a ring without mbarriers, with one loop for load and math: the CDNA
   kernel. `shared_attention` is the same for attention, whose keys and values are read at different times. The Compute
   of model 1 is this loop. It begins and ends with an empty ring, so the two models need no composition.
4. `gather`: the hosts, streams and watchdogs of several ranks whose shards are pushed or pulled. It runs the code for
   GPUs (`tilestream.core.protocols.gather`), with ranks that are late, give up or are lost. A kernel sees chunks that
   arrive at any moment or never, which is all that model 1 assumes.
5. `attention`: model 2 for the Hopper kernel of attention. Keys and values have a ring each, each consumer has its own
   queries, and consumers may take turns. If keys arrive, the gate is inside the item, and a launch may end there.
6. `publish`: workers that signal the chunks of their output, and readers (`tilestream.core.loop.publish`). Publishing
   follows an item's epilogue, reads nothing that the other parts write, and waits for the worker's own stores only. So
   models 1 and 2 still describe the worker.
7. `sums`: ranks as in model 4 (`ranks`) that pull products and add them: `tilestream.core.protocols.reduce_scatter`. It
   assumes that a signalled chunk is complete, which model 6 shows.
8. `copies`: workers that copy the arriving operand themselves before their first tile (`copies.copy_items`).
   Some start late, or never. The tiles see chunks that arrive, as in model 1. Model 1 also assumes that no signal comes
   after the last worker has left; this holds because copiers are workers.
9. `one_shot`: ranks whose kernels add the contents of all ranks' slots (`tilestream.core.protocols.one_shot`). Ranks
   give up as in model 7.
10. `replay`: ranks whose gathers are replayed from CUDA graphs, without hosts (`tilestream.core.protocols.replay`).
   `tilestream.distributed.graph_calls` performs this protocol.
11. `dispatch`: ranks that send rows to the ranks of their experts and get the results back, in parts whose number
   arrives with them (`tilestream.core.protocols.dispatch`), with ranks that are late, silent or lost.
12. `experts`: the same between GPUs, whose kernels push rows and results in replays of a graph
   (`tilestream.core.protocols.experts`). `tilestream.distributed.graph_experts` performs this protocol.
13. `sources`: workers that take tiles of sources whose counts are known only when they come
   (`tilestream.core.sources`), with sources that are late, empty, lost, or that signal twice.
14. `cluster`: the CTAs of a cluster that add up the shares of a tile's K in each other's shared memory (`cluster`): the
   cluster's barrier with its memory order, rooms that go when their CTA ends, and CTAs without K or rows of their own.
   Clusters share nothing but the output, of which each has tiles of its own.
15. `pair`: model 2 for two CTAs of a cluster, each of which loads a half of what both read into both (TMA multicast).

**Why models 1 and 2 together describe the whole kernel.** In a kernel with load and math loops, a worker is `work`
divided at Compute. The load loop does the part before (Poll, take, gate), puts the item on the item ring and loads it.
The math loop does Compute's epilogue and hands the item in: Count and Reduce, or the operations of `fixup`. A property
can break in two places: the memory that the workers share (counters, signals, abort word, counts, slots of partials,
output), and one worker's rings and C buffers.

*Interface.* A worker's loops exchange the sequence of items handed on, then STOP. Rings are private to the worker, and
C buffers to a math loop. The load loop uses shared memory only in Poll, Take, Peek, Ready and Wait; the math loop only
from the epilogue on.

*Rings.* Model 2 assumes only that the items have positive K counts, that each is handed on after its gate, and that
STOP ends the sequence. Any item or STOP may come at any moment. So model 2 has explored all sequences that a worker's
rings can see, independently of the schedule, the other workers, the chunks and the deadline. No wait hangs, because
none depends on another worker. Each item is multiplied once, from the right stages, and finished in a bounded number of
the worker's own steps, for each answer of `fixup`. STOP makes all loops leave. This needs the gate before the
hand-over: after the gate the math loop's waits always end. Attention's gate is inside the item. Its load loop signals
the stages of missing blocks without a load, and in model 5 any gate may fail.

*Workers.* Model 1 assumes that Compute is done once, in a bounded number of own steps, after its gate and before the
Count of the same item. Model 2 shows this. Model 1 takes Compute and Count as done before the worker's next Poll. In
the kernel the load loop may be ahead of its math loop by the item ring, so load operations of later items may come
before the epilogue, Count and Reduce of earlier ones. These operations commute: Poll, Take, Peek, Ready and Wait read
nothing that the others write, and vice versa. Moving each load operation behind the earlier items' Count gives a run in
model 1's order, with the same items taken, chunks seen and partials added. One event does not move: at an expiry a
worker may have items that are handed on and not finished. It still finishes them, because their chunks have arrived. In
model 1's order they are finished just before the expiry.

*Two consumers.* In ping-pong the epilogues of neighbouring items overlap, so an item's Count and Reduce may precede
those of the previous item. For different tiles they commute: count, slots and output belong to the tile. For one tile
(two shares that one worker took) they are equivalent to those of two workers, which model 1 explores in all orders. In
a cooperative pair each consumer contributes its half of the rows, with its own counts and slots, as for two tiles.

The argument is about `work`. Without a gate `work_through` differs in the Poll only, and the Hopper kernel runs this.
Kernels that run `work_through` with a gate have one loop for each worker and no rings, so they need no composition.

`product` runs both models together at small sizes to test this argument. `tests/mutants` has protocols with one bug
each, and the checker must find all of them.

Sizes are small and complete. Larger sizes add arithmetic only, which the property tests of schedule and arrival cover.
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
