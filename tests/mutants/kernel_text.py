"""The bugs that the tests of the kernels' text, and the compile gates, must see: one row each.

`tests/kernels/test_hopper_protocol.py` runs the text of the Hopper GEMM on stand-ins and compares its operations with
what the checker explores. A row is seen if the operations differ, or if a stand-in is asked for nonsense.
"""

from __future__ import annotations

from mutants.engine import Edit, at, before, delete, move, replace, swap

HOPPER, DEVICE = "tilestream.kernels.hopper", "tilestream.kernels.device"
GEMM, LOAD, MULTIPLY = f"{HOPPER}.gemm", f"{HOPPER}.load", f"{HOPPER}.multiply"
EPILOGUE, GATE, ITEMS = f"{HOPPER}.epilogue", f"{HOPPER}.gate", f"{DEVICE}.items"
STEPS, PROMOTED, RS_TAIL = f"{LOAD}:load_steps", f"{MULTIPLY}:multiply_promoted", f"{MULTIPLY}:multiply_rs_tail"

MAKE_EMPTY = "make_barriers(C.STAGES, C.HALVES)"
BUFFER = "WHO * C.BUFFERS + i % C.BUFFERS"

HOPPER_GEMM: dict[str, tuple[Edit, ...]] = {
    "consumers that take no turns have barriers for it": at(
        f"{GEMM}:gemm", replace('C.CONSUMERS == "ping_pong"', "True")
    ),
    "a barrier more than there are stages": at(
        f"{GEMM}:gemm", replace(MAKE_EMPTY, "make_barriers(C.STAGES + 1, C.HALVES)")
    ),
    "a stage is free when one of two has read it": at(
        f"{GEMM}:gemm", replace(MAKE_EMPTY, "make_barriers(C.STAGES, 1)")
    ),
    "the stage at hand is given back": at(
        f"{MULTIPLY}:multiply, multiply_rs_tail", replace("before(stage, C.STAGES)", "stage", 4)
    ),
    "empty is not awaited": at(STEPS, delete("mbarrier.wait(ring.empty.index(stage), phase ^ 1)")),
    "empty is awaited in the wrong phase": at(STEPS, replace("phase ^ 1", "phase")),
    "bytes of one part are expected": at(STEPS, replace("C.COLUMNS * __bits", "C.WIDTHS[0] * __bits")),
    "one part is loaded": at(STEPS, replace("gl.static_range(len(C.WIDTHS))", "(0,)")),
    "a part is loaded from the map of another": at(STEPS, replace("loads.y[i]", "loads.y[0]")),
    "a part is loaded to the stages of another": at(STEPS, replace("ring.y[i]", "ring.y[0]")),
    "all parts are loaded from the first column": at(
        STEPS, replace("source.column + start_of(C.WIDTHS, i)", "source.column")
    ),
    "a half is loaded twice": at(f"{LOAD}:load_x", replace("source.row + half * C.HALF_ROWS", "source.row")),
    "the item is not given back": at(f"{GEMM}:receive", delete("mbarrier.arrive(items.empty.index(...))")),
    "order is awaited in the other phase": at(
        f"{GEMM}:await_turn", replace("(number // 2) ^ (1 - WHO)", "(number // 2) ^ WHO")
    ),
    "order is handed on with the first part": at(PROMOTED, replace("i == len(C.WIDTHS) - 1", "i == 0")),
    "order is handed on with every part": at(PROMOTED, replace("i == len(C.WIDTHS) - 1", "True")),
    "order is handed on at every step": at(PROMOTED, replace("k == steps - 1", "True")),
    "the other's stages are not stepped over": at(f"{GEMM}:skip_stages", replace("skip(...)", "place")),
    "a stage is given back with every part": at(
        PROMOTED, move("mbarrier.arrive(ring.empty.index(stage))", after="sums = sums + __sum"),
    ),
    "parts in flight, not stages": at(
        f"{MULTIPLY}:multiply", replace("wait_mma(start_mma(x, ring.y, stage, accs, 0, True, ...), PARTS)",
                                        "wait_mma(start_mma(x, ring.y, stage, accs, 0, True, C.Y_K_MAJOR), 1)"),
    ),
    "a narrow part is not waited for": at(RS_TAIL, replace("wait_mma(__values, WIDE)", "wait_mma(__values, WIDE + 1)")),
    "a narrow part has x of the stage before": at(RS_TAIL, delete("held = x.load(LAYOUT)", 2, nth=1)),
    "a narrow part begins anew": at(
        RS_TAIL,
        replace("start_mma(held, __y, __s, __a, WIDE, True, __k)", "start_mma(held, __y, __s, __a, WIDE, False, __k)"),
    ),
    "one stage is left in flight": at(f"{MULTIPLY}:multiply", replace("wait_mma(accs, 0)", "wait_mma(accs, 1)")),
    "a product is not waited for": at(PROMOTED, replace("warpgroup_mma_wait(0, __p)", "warpgroup_mma_wait(1, __p)")),
    "each step begins anew": at(
        f"{MULTIPLY}:multiply",
        replace("start_mma(x, __y, __s, __a, 0, True, __k)", "start_mma(x, __y, __s, __a, 0, False, __k)"),
    ),
    "the first part is multiplied again": at(PROMOTED, replace("ring.y[i]", "ring.y[0]")),
    "the other half is multiplied": at(
        f"{MULTIPLY}:multiply, multiply_rs_tail, multiply_promoted",
        replace("stage * C.HALVES + HALF", "stage * C.HALVES + 1 - HALF", 5),
    ),
    "a store too many is left": at(
        f"{EPILOGUE}:pending", replace("0 if i == 0 and strips % buffers else buffers - 1", "buffers")
    ),
    "odd strips are not waited for": at(
        f"{EPILOGUE}:pending", replace("0 if i == 0 and strips % buffers else buffers - 1", "buffers - 1")
    ),
    "every tile begins with no store": at(f"{EPILOGUE}:pending", replace("i == 0 and strips % buffers", "i == 0")),
    "both consumers have the same buffers": at(f"{EPILOGUE}:store_tile", replace(BUFFER, "i % C.BUFFERS")),
    "one buffer for all strips": at(f"{EPILOGUE}:store_tile", replace(BUFFER, "WHO * C.BUFFERS")),
    "a strip too few": at(
        f"{EPILOGUE}:store_tile", replace("gl.static_range(STRIPS)", "gl.static_range(STRIPS - 1)")
    ),
    "strips of the first part": at(f"{EPILOGUE}:strip_of", replace("accs[PART]", "accs[0]")),
    "a buffer is filled and not fenced": at(f"{EPILOGUE}:store_strip", delete("fence_async_shared()")),
    "stores read on at the end": at(f"{GEMM}:math_loop", delete("tma.store_wait(0)")),
    "parts are counted before all have written": at(f"{EPILOGUE}:fixup", delete("barrier()", 2, nth=0)),
    "the count is not restored": at(f"{EPILOGUE}:fixup", delete("gl.store(count, 0)")),
    "no contributor looks first": at(
        f"{EPILOGUE}:fixup",
        replace("gl.atomic_add(count, 0, sem=__a, scope=__b)", "gl.atomic_add(count, 1, sem=__a, scope=__b)"),
    ),
    "the gate is not asked": at(f"{ITEMS}:next_item", replace("if C.GATED:\n    ...", "pass")),
    "the gate is asked for STOP": at(f"{ITEMS}:next_item", replace("found != 0", "True", count=3)),
    "the gate is told the tensor cores' rows": at(
        f"{ITEMS}:next_item",
        replace(
            "pass_gate(item, passed, work, words, gate, watch, __noted, __waited, C)",
            "pass_gate(Item(item.batch, item.pn, item.pm, *item[3:]), passed, work, words, gate, watch, __noted, "
            "__waited, C)",
        ),
    ),
    "the gate is told the tensor cores' extents": at(
        f"{GEMM}:gemm", replace("m, n = columns, rows", "m, n = rows, columns")
    ),
    "what the gate saw is not fenced": at(f"{GATE}:backwards", delete("over = fenced(over)")),
    "K runs on in a void item": at(
        f"{GATE}:backwards", replace("tl.where(over != 0, item.k_end, item.k_begin)", "item.k_begin")
    ),
    "an item is void though all has arrived": at(
        f"{GATE}:backwards", replace("tl.where(over != 0, item.k_begin, item.k_end)", "item.k_begin")
    ),
    "over is forgotten": at(f"{ITEMS}:next_item", replace("with_over(passed, over)", "with_over(passed, 0)")),
    "quarantine is forgotten": at(
        f"{ITEMS}:begin_worker", replace("Passed(over, __a, __b, __c, __d)", "Passed(0, __a, __b, __c, __d)")
    ),
    "the last one out is told that all went well": at(f"{ITEMS}:finish_worker", replace("passed.over", "0")),
    "a void item is nobody's": at(f"{GEMM}:is_mine", replace("steps != 0", "steps > 0")),
    "a void item is multiplied": at(f"{MULTIPLY}:product", replace("steps < 0", "steps < -99")),
    "a void item is STOP": at(f"{GEMM}:math_loop", replace("going = steps", "going = tl.maximum(steps, 0)")),
    "local rows are looked for among the others": at(STEPS, replace("source.is_local", "not source.is_local")),
    "batches of local rows lie apart": at(
        f"{LOAD}:find_local", replace("tile // local.period * local.tiles + at", "at")
    ),
    "the rows before the local ones are taken for them": at(
        f"{LOAD}:find_local", replace("(at >= 0) & (at < local.tiles)", "at < local.tiles")
    ),
    "a void item is a number": at(f"{MULTIPLY}:poison", replace('__zero + float("nan")', "__zero")),
    "order is kept by a void item": at(
        f"{MULTIPLY}:poison", delete('if C.CONSUMERS == "ping_pong":\n    ...')
    ),
}  # fmt: skip

ATTENTION, MATH, BRING = f"{HOPPER}.attention", f"{HOPPER}.attention_math", f"{HOPPER}.attention_load"
STEP, LOAD_KEYS, LOAD_BLOCK = f"{MATH}:math_step", f"{BRING}:load_keys", f"{BRING}:load_block"
OWN, LEAVE_OUT, BLOCKS = f"{MATH}:own_blocks", f"{MATH}:leave_out", f"{MATH}:attend_blocks"
LAST_VALUES = f"{BRING}:last_values_of"
HAND_OVER = "mbarrier.arrive(ring.order.index((WHO + 1) % C.CONSUMERS))"

#: Bugs of the Hopper attention's text. `tests/kernels/hopper/test_hopper_attention_text.py` runs it on a machine of
#: threads, and sees a wrong number, a deadlock, or a stand-in that is asked for nonsense.
HOPPER_ATTENTION: dict[str, tuple[Edit, ...]] = {
    "K is not waited for": at(STEP, delete("mbarrier.wait(ring.k_full.index(stage), phase)")),
    "V is not waited for": at(
        f"{MATH}:math_step, last_product", delete("mbarrier.wait(ring.v_full.index(at.stage), at.phase)", 2)
    ),
    "Q is not waited for": at(f"{ATTENTION}:math_loop", delete("mbarrier.wait(ring.q_full.index(q_at), q.phase)")),
    "K's stage is given back too early": at(
        STEP, swap("x = warpgroup_mma_wait(1, (x,))", "mbarrier.arrive(ring.k_empty.index(stage))")
    ),
    "V's stage is not given back": at(STEP, delete("mbarrier.arrive(ring.v_empty.index(at.stage))")),
    "a K part too few": at(BLOCKS, delete("mbarrier.arrive(ring.k_empty.index(at.stage))")),
    "Q is given back at once": at(f"{BRING}:load_queries", delete("mbarrier.wait(ring.q_empty.index(stage), ...)")),
    "Q's phase stays": at(f"{ATTENTION}:math_loop", delete("q = next_stage(q, C.QUERIES)")),
    "the accumulator is not scaled": at(
        STEP,
        replace("rescale_o(o, rescale, __columns, __lazily)", "rescale_o(o, rescale * 0 + 1, __columns, __lazily)")
    ),
    "keys are left out that the consumer's last rows see": at(
        OWN, replace("first + (C.CONSUMER_POSITIONS - 1)", "first")
    ),
    "keys are left out that its first rows see": at(
        OWN, replace("gl.maximum(first + mask.causal_offset_left, 0)", "gl.maximum(at + mask.causal_offset_left, 0)")
    ),
    "the last row's last key is left out": at(
        OWN, replace("C.CONSUMER_POSITIONS - 1", "C.CONSUMER_POSITIONS - 2")
    ),
    "what is left out is not given back": at(LEAVE_OUT, delete("mbarrier.arrive(ring.k_empty.index(stage))")),
    "values that are left out are not given back": at(
        LEAVE_OUT, delete("mbarrier.arrive(ring.v_empty.index(stage))")
    ),
    "turns at what is left out are kept": at(LEAVE_OUT, delete(HAND_OVER)),
    "the diagonal is one off": at(
        f"{DEVICE}.attention_tile:locate_tile",
        replace("diagonal_k - diagonal_q + right + 1", "diagonal_k - diagonal_q + right"),
    ),
    "the window is one off": at(
        f"{DEVICE}.attention_tile:locate_tile",
        replace("diagonal_k - diagonal_q - left", "diagonal_k - diagonal_q - left + 1"),
    ),
    "the first block is not masked": at(
        BLOCKS, replace("(first_block >= plain_end) | (first_block < plain_begin)", "False")
    ),
    "the window's blocks are left out": at(
        BLOCKS, replace("range(begin, plain_begin)", "range(begin + 1, plain_begin)")
    ),
    "masked blocks from the wrong end": at(BLOCKS, replace("last - 1 - (j - plain_end)", "j + 1")),
    "a cap of another sign": at(
        f"{DEVICE}.softmax:softcap", replace("2.0 * softcap_scale * scores", "-2.0 * softcap_scale * scores")
    ),
    "the sum is not rescaled": at(STEP, replace("sums.row_sum * rescale", "sums.row_sum")),
    "infinity less infinity": at(f"{DEVICE}.softmax:update_max", delete("if MASKED:\n    ...")),
    "heads of another pack": at(f"{BRING}:load_queries", replace("tile.head * C.PACK", "tile.head")),
    "the second consumer has the first's rows": at(
        f"{MATH}:rows_of_consumer", replace("__first + WHO * C.CONSUMER_POSITIONS", "__first")
    ),
    "keys of another head": at(
        f"{BRING}:load_keys, last_values_of", replace("tile.head // extents.q_heads_per_kv", "tile.head", 3)
    ),
    "one consumer's buffer for both": at(f"{MATH}:store_tile", replace(BUFFER, "i % C.BUFFERS")),
    "stores read on": at(f"{ATTENTION}:math_loop", delete("tma.store_wait(0)")),
    "turns are not handed on": at(f"{MATH}:math_step, leave_out", delete(HAND_OVER, 2)),
    "too few bytes are expected": at(f"{BRING}:fill_stage", replace("C.BLOCK * COLUMNS", "C.BLOCK * (COLUMNS - 8)")),
    "what a page has behind the keys": at(
        LOAD_BLOCK, replace("gl.minimum(gl.maximum(rows.keys - row + row % C.PAGE, 0), C.PAGE)", "C.PAGE")
    ),
    "a page from its start": at(LOAD_BLOCK, replace("gl.minimum(row % C.PAGE, length)", "row * 0")),
    "a sequence's neighbour": at(f"{BRING}:place", replace("BEYOND - length + first", "BEYOND - length + first - 1")),
    "a stage is not filled when the launch is over": at(
        f"{BRING}:fill_stage", delete("mbarrier.arrive(loads.full.index(at.at))")
    ),
    "the last values are another block's": at(
        LAST_VALUES, replace("first = tile.begin * C.BLOCK", "first = (tile.end - 1) * C.BLOCK")
    ),
    "the last values are another head's": at(LAST_VALUES, replace("tile.head", "0 * tile.head")),
    "the last values are another sequence's": at(
        LAST_VALUES,
        replace(
            "KeyRows(tile.batch, tile.origin_v, __k, __h)", "KeyRows(0 * tile.batch, 0 * tile.origin_v, __k, __h)"
        ),
    ),
    "the last values are all of the tensor's rows": at(
        LAST_VALUES, replace("tile.keys", "extents.seqlen_k + extents.tokens_k")
    ),
    "the last values come once more": at(
        f"{ATTENTION}:load_loop", delete("last = LastValues(zero, last.rows, last.first)")
    ),
    "an item without blocks asks for no ticket": at(LOAD_KEYS, replace("begin == end", "False")),
    "a ticket is asked for at each block": at(
        LOAD_KEYS, replace("j == gl.maximum(begin, end - EARLY)", "j == j")
    ),
    "another ticket than the one that was asked for": at(
        f"{ATTENTION}:load_loop", replace("with_asked(cursor, asked)", "with_asked(cursor, zero)")
    ),
    "a void item is not marked": at(LOAD_KEYS, delete("put(items.slots, slot, VOID, passed.over, 1)")),
    "a mark is not looked at": at(
        f"{MATH}:store_tile", replace('gl.where(void, float("nan"), factor)', 'gl.where(False, float("nan"), factor)')
    ),
    "blocks that arrive are not masked at the end": at(STEP, replace("block * C.BLOCK", "0")),
    "a strip is stored, and not fenced": at(f"{MATH}:store_strip", delete("fence_async_shared()")),
    "values are converted, and not fenced": at(
        f"{HOPPER}.attention_convert:convert_loop", delete("fence_async_shared()")
    ),
    "a chunk is there, and not fenced": at(LOAD_KEYS, replace("fenced(passed.over)", "passed.over")),
    "the slot is given back early": at(
        f"{ATTENTION}:math_loop",
        before("if going != 0:\n    ...", "mbarrier.arrive(items.empty.index(slot.at))"),
    ),
}  # fmt: skip

#: Attention's load loop hands nothing on: its math loops wait for ever.
ENDLESS = at(f"{BRING}:hand_on", delete("mbarrier.arrive(items.full.index(at))"))

#: Modules of the Hopper GEMM that a compiled mutant edits, each after those that it imports.
HOPPER_MODULES = (EPILOGUE, GEMM)

_SHUFFLED = "gl.convert_layout(x, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))"

#: Mutants that `tests/kernels/test_compile_gates.py` compiles: its gate must see them.
COMPILED: dict[str, tuple[Edit, ...]] = {
    "no turns": HOPPER_GEMM["consumers that take no turns have barriers for it"],
    # Out of a layout that the compiler does not see through.
    "scattered": at(
        f"{EPILOGUE}:store_strip",
        replace(
            "buffer.store(x.to(e.map.dtype))",
            f"buffer.store(gl.inline_asm_elementwise('mov.b32 $0, $1;', '=r,r', [{_SHUFFLED}], dtype=gl.float32, "
            "is_pure=False, pack=1).to(e.map.dtype))",
        ),
    ),
}
