"""vLLM's linear method: layers without quantization multiply by `tilestream.linear`.

vLLM chooses a linear method by the quantization's name, so this is one, which quantizes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.envs as envs
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.platforms import current_platform

from tilestream.ops.matmul import linear

NAME = "tilestream"


class TilestreamLinearMethod(UnquantizedLinearMethod):
    """vLLM's weights as they are. In batch-invariant mode, and on its CPU platform, vLLM multiplies."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias`` for ``[..., K]``."""
        if envs.VLLM_BATCH_INVARIANT or current_platform.is_cpu():  # which packs the weight its own way
            theirs: torch.Tensor = super().apply(layer, x, bias)
            return theirs
        return linear(x, layer.weight, bias)


class TilestreamConfig(QuantizationConfig):
    """``--quantization tilestream``: for checkpoints that are not quantized."""

    def get_name(self) -> str:
        """The name under which it is registered."""
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """The dtypes of activations and weights."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """The least compute capability: that of the portable kernels, Ampere."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """No files: only the model is read."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TilestreamConfig:
        """Refuse a checkpoint's own quantization.

        Raises
        ------
        ValueError
            Always: vLLM calls it only for a checkpoint that is quantized.
        """
        raise ValueError(
            f"quantization={NAME!r}: the checkpoint is quantized ({config.get('quant_method', config)}); {NAME} is for "
            "weights as they are: leave quantization= away"
        )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> TilestreamLinearMethod | None:
        """The method of a linear layer; experts and embeddings keep vLLM's."""
        return TilestreamLinearMethod() if isinstance(layer, LinearBase) else None


def register() -> None:
    """Make the method known. A second time changes nothing."""
    if NAME not in QUANTIZATION_METHODS:
        register_quantization_config(NAME)(TilestreamConfig)
