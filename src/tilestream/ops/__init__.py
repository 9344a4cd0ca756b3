"""What a user calls: torch semantics, checked arguments, registered ops, autograd. One file an op."""

from tilestream.ops.addmm import addmm
from tilestream.ops.attention import attention, merge_attention
from tilestream.ops.attention_routes import register_attention, use_attention
from tilestream.ops.linear import linear
from tilestream.ops.matmul import matmul
from tilestream.ops.mm import bmm, mm

__all__ = [
    "addmm",
    "attention",
    "bmm",
    "linear",
    "matmul",
    "merge_attention",
    "mm",
    "register_attention",
    "use_attention",
]
