"""What a user calls: torch semantics, checked arguments, registered ops, autograd."""

from tilestream.ops.attention import attention, merge_attention
from tilestream.ops.attention_routes import use_attention
from tilestream.ops.attention_transformers import register_attention
from tilestream.ops.matmul import addmm, bmm, linear, matmul, mm

__all__ = [
    "addmm", "attention", "bmm", "linear", "matmul", "merge_attention", "mm", "register_attention", "use_attention",
]  # fmt: skip
