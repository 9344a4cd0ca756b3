"""Common names for functions whose names differ in Triton 3.6, 3.7 and 3.9. Kernels of this package call these.

============================  ==============================  ==========================
name                          3.6, 3.7                        3.9
============================  ==============================  ==========================
``copy_to_shared``            ``async_copy_global_to_shared`` ``async_load``
``tma_load``                  ``async_copy_global_to_shared`` ``async_load``
``tma_store``                 ``async_copy_shared_to_global`` ``async_store``
``reinterpret``               ``_reinterpret``                ``reinterpret``
``barrier``                   ``thread_barrier`` (3.6)        ``barrier`` (3.7, too)
============================  ==============================  ==========================
"""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

#: Threads' copies, for which `commit` closes a group.
copy_to_shared = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
commit, wait_for_groups = async_copy.commit_group, async_copy.wait_group
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
#: A view of the same bytes of shared memory with another shape and layout.
reinterpret = getattr(gl.shared_memory_descriptor, "_reinterpret", None) or gl.shared_memory_descriptor.reinterpret
#: Makes a plain integer function callable in kernels of this package: see `tilestream.kernels.device.jit`.
device = gluon.jit


@gluon.constexpr_function
def _in_boxes(shape, box):
    return [math.prod(shape) // math.prod(box), *box]


@gluon.jit
def viewed(buffer, tensor_map):
    """A view of shared memory as a box of ``tensor_map``, with the batch as first dimension."""
    return reinterpret(buffer, tensor_map.dtype, tensor_map.block_type.shape, tensor_map.layout)


@gluon.jit
def boxes(stages, tensor_map):
    """A view of ``stages`` as consecutive boxes of ``tensor_map``."""
    shape: gl.constexpr = _in_boxes(stages.shape, tensor_map.block_type.shape)
    return reinterpret(stages, tensor_map.dtype, shape, tensor_map.layout)


@gluon.jit
def in_blocks(stages, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """A view of ``stages`` as consecutive blocks of ``ROWS`` rows and ``COLUMNS`` columns, those of a box."""
    shape: gl.constexpr = _in_boxes(stages.shape, [ROWS, COLUMNS])
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], stages.dtype)
    return reinterpret(stages, stages.dtype, shape, layout)
