"""A store from plain values, e.g. a server's JSON.

open_store({"host_gb": 16, "disk": {"folder": "/var/cache/chunks", "budget_gb": 200},
            "redis": {"url": "redis://127.0.0.1:6379/0", "budget_gb": 64,
                      "password": {"env": "REDIS_PASSWORD"}}})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm_blend.store.secrets import read_secret
from vllm_blend.store.store import ChunkStore
from vllm_blend.store.tier import Tier


def _disk(**options: Any) -> Tier:
    from vllm_blend.store.disk import DiskTier

    return DiskTier(**options)


def _redis(**options: Any) -> Tier:
    from vllm_blend.store.redis_tier import RedisTier

    return RedisTier(**options)


def _s3(**options: Any) -> Tier:
    from vllm_blend.store.s3_tier import S3Tier

    return S3Tier(**options)


TIERS: dict[str, tuple[Callable[..., Tier], str, frozenset[str]]] = {
    "disk": (_disk, "folder", frozenset({"fsync", "direct"})),
    "redis": (_redis, "url", frozenset({"prefix", "timeout_s", "username", "password"})),
    "s3": (_s3, "bucket", frozenset({"prefix", "timeout_s", "endpoint_url", "refresh_s"})),
}
"""Fastest first: what makes the tier, what it must be told, and what it may be told."""

OPTIONS = frozenset({"load_threads", "timeout_s", "storage", "checksum_key"})


def open_store(values: Mapping[str, Any]) -> ChunkStore:
    """Makes a store and its tiers.

    Args:
        values: ``host_gb`` (10**9 bytes of host memory, required); ``gpu_gb`` (of the GPU's, so that
            vLLM has less); ``disk``, ``redis``, ``s3``, each a mapping with ``budget_gb``, its place
            (``folder``, ``url`` or ``bucket``) and the tier's other arguments; ``write_behind_gb``,
            ``load_threads``, ``timeout_s``, ``storage``; ``checksum_key`` and Redis' ``password`` as
            ``{"env": NAME}`` or ``{"file": PATH}``.

    Raises:
        ValueError: names what is unknown, missing or out of range.
        ImportError: if a tier's package is not installed; says which extra brings it.
    """
    check_values(values)
    tiers = [_tier(name, values[name]) for name in TIERS if values.get(name) is not None]
    options = {name: values[name] for name in OPTIONS & values.keys()}
    if "checksum_key" in options:
        options["checksum_key"] = read_secret("checksum_key", options["checksum_key"]).encode()
    for name in ("gpu", "write_behind"):
        if f"{name}_gb" in values:
            options[f"{name}_bytes"] = _bytes("store", f"{name}_gb", values)
    return ChunkStore(tiers, host_bytes=_bytes("store", "host_gb", values), **options)


def check_values(values: Mapping[str, Any]) -> None:
    """Raises ValueError, which names the key that is unknown or missing, or the size that is none."""
    _check("store", values, {"host_gb"}, {*TIERS, *OPTIONS, "gpu_gb", "write_behind_gb"})
    for name in ("host_gb", "gpu_gb", "write_behind_gb"):
        if name in values:
            _bytes("store", name, values)
    for name, (_, place, optional) in TIERS.items():
        tier = values.get(name)
        if tier is None:
            continue
        if not isinstance(tier, Mapping):
            kind = type(tier).__name__  # the value may hold a password
            raise ValueError(f"{name} is a {kind}; expected a mapping with {place} and budget_gb")
        _check(name, tier, {place, "budget_gb"}, optional)
        _bytes(name, "budget_gb", tier)


def _tier(name: str, values: Mapping[str, Any]) -> Tier:
    make = TIERS[name][0]
    options = {key: value for key, value in values.items() if key != "budget_gb"}
    if "password" in options:
        options["password"] = read_secret(f"password of {name}", options["password"])
    try:
        return make(budget_bytes=_bytes(name, "budget_gb", values), **options)
    except ImportError as error:
        raise ImportError(f"{name} needs a package: pip install 'vllm-blend[{name}]'") from error


def _check(
    where: str, values: Mapping[str, Any], required: set[str], optional: set[str] | frozenset[str]
) -> None:
    if missing := sorted(required - values.keys()):
        raise ValueError(f"{where} has no {missing[0]!r}")
    if unknown := sorted(values.keys() - required - optional):
        allowed = ", ".join(sorted(required | optional))
        raise ValueError(f"unknown key {unknown[0]!r} of {where}; allowed: {allowed}")


def _bytes(where: str, name: str, values: Mapping[str, Any]) -> int:
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise ValueError(f"{name} of {where} is {value!r}; expected a number of GB, 0 or more")
    return round(value * 1e9)
