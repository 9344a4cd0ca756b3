"""The plugin of vLLM, by the entry point ``vllm.general_plugins``: attention, and the linear layers.

``--attention-backend CUSTOM`` and ``--quantization tilestream`` ask for them; installed alone it changes nothing.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

#: Releases whose interfaces this was written for and is tested with. In another one the cache may lie otherwise.
RELEASES = ("0.33.",)
ATTENTION = "tilestream.integrations.vllm.attention.TilestreamBackend"


def register() -> None:
    """Make the backend and the linear method known to vLLM. vLLM calls it in each of its processes."""
    import vllm

    if not vllm.__version__.startswith(RELEASES):
        logger.warning(
            "tilestream's plugin is for vLLM %s and is not registered with %s: install one of these",
            ", ".join(f"{release}x" for release in RELEASES), vllm.__version__,
        )  # fmt: skip
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != ATTENTION:
        logger.warning(
            "vLLM's attention backend CUSTOM is %s, of another plugin; VLLM_PLUGINS=tilestream loads this one alone",
            custom.get_path(),
        )
    else:
        register_backend(custom, ATTENTION)
    from tilestream.integrations.vllm import linear

    linear.register()
