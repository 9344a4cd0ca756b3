"""The plugin of SGLang, by the entry point ``sglang.srt.plugins``: attention of prefills.

``--prefill-attention-backend tilestream --decode-attention-backend triton`` asks for it.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)

NAME = "tilestream"
#: Releases whose interfaces this was written for and is tested with. In another one the cache may lie otherwise.
RELEASES = ("0.5.23",)


def register() -> None:
    """Make the backend known to SGLang, which calls this in each of its processes before it reads its arguments."""
    from sglang.version import __version__

    if not __version__.startswith(RELEASES):
        logger.warning(
            "tilestream's plugin is for SGLang %s and is not registered with %s: install one of these",
            ", ".join(RELEASES), __version__,
        )  # fmt: skip
        return
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(NAME)(_made)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])


def _made(runner: Any) -> Any:
    """The backend of a model runner."""
    if runner.model_config.is_encoder_decoder:
        raise ValueError(
            "--prefill-attention-backend tilestream: the model has cross attention, which neither this backend nor "
            "SGLang's Triton backend below it computes: use flashinfer"
        )
    from tilestream.integrations.sglang.attention import TilestreamAttnBackend

    return TilestreamAttnBackend(runner)
