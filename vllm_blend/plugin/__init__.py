"""vLLM's entry into this package (``vllm.general_plugins``): makes its models able to blend.

vLLM calls ``register`` in every process. It is repeatable, and imports no model code.
"""

from __future__ import annotations

import logging

from vllm_blend.compat.version import why_not_registered


def register() -> None:
    """Installs the hooks by which vLLM blends; with another vLLM it warns and leaves vLLM as it is."""
    if reason := why_not_registered():
        logging.getLogger("vllm.vllm_blend").warning("vllm_blend: %s. Blending is off.", reason)
        return
    from vllm_blend.plugin.hooks import install_front_hooks

    install_front_hooks()
