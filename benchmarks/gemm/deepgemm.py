"""DeepGEMM's grouped product, a peer of the section ``grouped``. It is left out of a run where it cannot be imported.

DeepGEMM is not installed for this: its wheels are unpacked to a folder on PYTHONPATH. Where there is a network,

    pip download -d wheels --no-deps --only-binary=:all: --python-version 3.12 --implementation cp
        --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64
        sgl-deep-gemm==0.1.4 apache-tvm-ffi==0.1.11
    for wheel in wheels/*.whl; do python -m zipfile -e $wheel peers; done

and then, with torch of CUDA 13, CUDA's compiler in ``$CUDA_HOME/bin`` and its libnvrtc.so.13 where the loader looks,

    CUDA_HOME=/usr/local/cuda LD_LIBRARY_PATH=/usr/local/cuda/lib64 DG_JIT_CACHE_DIR=/tmp/deep_gemm
        PYTHONPATH=src:peers python benchmarks/run.py gemm grouped OUT

DeepGEMM compiles a kernel a layer, and keeps it in ``DG_JIT_CACHE_DIR`` (without it, in ``~/.deep_gemm``).

``m_grouped_bf16_gemm_nt_contiguous`` takes rows whose groups are padded, and the group of each row. Both are made
outside of what is timed; of FLOPs, those of the real rows are counted.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch

#: What a record and the page call it.
NAME = "DeepGEMM"


class Padded(NamedTuple):
    """A product as DeepGEMM takes it.

    Attributes
    ----------
    rows
        ``[padded, K]``: each group's rows, and behind them zeros up to a multiple of the alignment.
    weights
        ``[groups, N, K]``.
    layout
        ``[padded]`` int32: each row's group; -1 of a row that is padding.
    places
        ``[rows]``: where the real rows lie.
    """

    rows: torch.Tensor
    weights: torch.Tensor
    layout: torch.Tensor
    places: torch.Tensor


def imported() -> tuple[Any, str]:
    """The package, or None; and its version, or why it cannot be imported: a library of CUDA's may be missing."""
    try:
        package = importlib.import_module("deep_gemm")
        return package, str(package.__version__)
    except Exception as error:
        return None, refusal(error)


def refusal(error: Exception) -> str:
    """What a record says of a peer that raised."""
    return f"{type(error).__name__}: {error}"[:300]


def padded(package: Any, a: torch.Tensor, b: torch.Tensor, given: list[int]) -> Padded:
    """Of ``a [rows, K]`` and ``b [groups, K, N]``, whose groups have ``given`` rows."""
    alignment = package.get_mk_alignment_for_contiguous_layout()
    layout = torch.tensor(
        [row for group, size in enumerate(given) for row in [group] * size + [-1] * (-size % alignment)],
        dtype=torch.int32, device=a.device,
    )  # fmt: skip
    places = (layout >= 0).nonzero().squeeze(1)
    rows = a.new_zeros(len(layout), a.shape[1])
    rows[places] = a
    return Padded(rows, b.mT, layout, places)


def multiply(package: Any, x: Padded) -> torch.Tensor:
    """``[padded, N]``, of which the rows at ``places`` are the product."""
    out = x.rows.new_empty(len(x.rows), x.weights.shape[1])
    package.m_grouped_bf16_gemm_nt_contiguous(x.rows, x.weights, out, x.layout)
    return out
