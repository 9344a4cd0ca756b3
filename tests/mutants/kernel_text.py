"""The bugs that the tests of the kernels' text, and the compile gates, must see.

`tests/kernels/test_hopper_protocol.py` runs the text of the Hopper GEMM on stand-ins and compares its operations with
what the checker explores. A bug is seen if the operations differ, or if a stand-in is asked for nonsense.
"""

from __future__ import annotations

from mutants.engine import Edit, at, delete, replace
from mutants.table import read

HOPPER, DEVICE = "tilestream.kernels.hopper", "tilestream.kernels.device"
PORTABLE = "tilestream.kernels.portable"
GEMM, EPILOGUE = f"{HOPPER}.gemm", f"{HOPPER}.epilogue"
STEPS, STEP = f"{HOPPER}.load:load_steps", f"{HOPPER}.attention_math:math_step"

MODULES = {
    **{name: f"{HOPPER}.{name}" for name in ("gemm", "load", "multiply", "epilogue", "gate", "ring", "pair")},
    **{name: f"{HOPPER}.{name}" for name in ("grouped", "grouped_sources")},
    **{name: f"{HOPPER}.{name}" for name in ("attention", "attention_convert", "attention_load", "attention_math")},
    **{name: f"{DEVICE}.{name}" for name in ("attention_tile", "items", "softmax")},
    **{name: f"{PORTABLE}.{name}" for name in ("cluster", "one_tile")},
}

HOPPER_GEMM: dict[str, tuple[Edit, ...]] = {row.name: row.edits for row in read("hopper_gemm.txt", MODULES)}

#: Bugs of the Hopper attention's text. `tests/kernels/hopper/test_hopper_attention_text.py` runs it on a machine of
#: threads, and sees a wrong number, a deadlock, or a stand-in that is asked for nonsense.
HOPPER_ATTENTION: dict[str, tuple[Edit, ...]] = {row.name: row.edits for row in read("hopper_attention.txt", MODULES)}

#: Bugs of the text of a cluster that adds up a tile: `tests/kernels/test_cluster_protocol.py` runs it.
CLUSTER: dict[str, tuple[Edit, ...]] = {row.name: row.edits for row in read("portable_cluster.txt", MODULES)}

#: Attention's load loop hands nothing on: its math loops wait for ever.
ENDLESS = at(f"{HOPPER}.attention_load:hand_on", delete("mbarrier.arrive(items.full.index(at))"))

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
