"""What a user calls: torch semantics, checked arguments, registered ops, autograd."""

from tilestream.ops.attention import attention, merge_attention
from tilestream.ops.attention_routes import use_attention
from tilestream.ops.attention_transformers import register_attention
from tilestream.ops.grouped import grouped_mm
from tilestream.ops.invariant_torch import use_invariant_torch
from tilestream.ops.matmul import addmm, bmm, linear, matmul, mm

__all__ = [
    "addmm", "attention", "bmm", "grouped_mm", "linear", "matmul", "merge_attention", "mm", "register_attention",
    "use_attention", "use_invariant_torch",
]  # fmt: skip
