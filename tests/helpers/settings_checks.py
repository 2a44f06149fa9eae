"""Whether the package takes settings that a page or a file shows; nothing is opened."""

from __future__ import annotations

import inspect
from typing import Any

import pytest


def check_json(kind: str, values: Any) -> None:
    if kind == "server":
        from vllm_blend.server.config import ServerSettings

        settings = ServerSettings.from_mapping(values["vllm_blend"])
        if settings.store is not None:
            check_json("store", settings.store)
    elif kind == "request":
        from vllm_blend.server.request import BlendRequest

        BlendRequest.parse(values, BlendRequest())
    else:
        assert kind == "store"
        check_store(values)


def check_store(values: Any) -> None:
    """Whether ``open_store`` takes the values; nothing is opened."""
    from vllm_blend.store import ChunkStore, DiskTier, RedisTier, S3Tier, config

    makers = {"disk": DiskTier, "redis": RedisTier, "s3": S3Tier}
    with pytest.MonkeyPatch.context() as patch:
        tiers = {
            name: (inspect.signature(makers[name]).bind, *rest)
            for name, (_, *rest) in config.TIERS.items()
        }
        patch.setattr(config, "TIERS", tiers)
        patch.setattr(config, "read_secret", lambda name, place: "a secret")
        patch.setattr(config, "ChunkStore", inspect.signature(ChunkStore).bind)
        config.open_store(values)
