"""A model for the commands that need its configuration, or a server of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat_tokenizers import make_tokenizer
from engines import tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template."""
    folder = tiny_model(
        "llama", tmp_path_factory.mktemp("model"), vocab_size=1280, max_position_embeddings=4096
    )
    make_tokenizer("qwen").save_pretrained(folder)
    return folder
