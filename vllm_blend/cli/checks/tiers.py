"""Whether a store's tiers can be reached, read and written."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_blend.cli.checks.finding import Finding, note, ok, wrong
from vllm_blend.cli.checks.install import host_memory
from vllm_blend.store.config import TIERS
from vllm_blend.store.secrets import check_key, read_secret

TIMEOUT_S = 3.0


def check_tiers(store: Mapping[str, Any]) -> Iterator[Finding]:
    """Of the values of ``open_store``."""
    yield from _check_keys(store)
    if "checksum_key" in store:
        yield from _check_secret("checksum_key", store["checksum_key"], key=True)
    host = store.get("host_gb")
    if isinstance(host, int | float) and host * 1e9 > 0.8 * host_memory():
        yield wrong(
            "store",
            f"host_gb is {host:g}, and this machine has {host_memory() / 1e9:.0f} GB of memory",
            "Lower host_gb; a disk tier holds what does not fit.",
        )
    checks = {"disk": _check_disk, "redis": _check_redis, "s3": _check_s3}
    for name in TIERS:
        if isinstance(values := store.get(name), Mapping):
            yield from checks[name](values)


def _check_keys(store: Mapping[str, Any]) -> Iterator[Finding]:
    """What ``open_store`` would refuse before it reaches for a tier."""
    from vllm_blend.store.config import check_values

    try:
        check_values(store)
    except ValueError as error:
        yield wrong("store", str(error), "Mend this key. docs/settings.md#store lists all keys.")


def _check_secret(name: str, place: Any, key: bool = False) -> Iterator[Finding]:
    try:
        secret = read_secret(name, place)
        if key:
            check_key(secret.encode())
    except ValueError as error:
        yield wrong("store", str(error), "Set it where the server runs; every server needs the same.")


def _check_disk(values: Mapping[str, Any]) -> Iterator[Finding]:
    folder, budget = Path(str(values.get("folder", ""))), float(values.get("budget_gb") or 0) * 1e9
    there = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        yield wrong(
            "disk",
            f"{there} cannot be written to: {error.strerror or error}",
            "Give a folder that the server's user may write to.",
        )
        return
    usage = shutil.disk_usage(there)
    used = sum(path.stat().st_size for path in folder.glob("v*/*/*") if path.is_file())
    if budget > usage.free + used:
        yield wrong(
            "disk",
            f"budget_gb is {budget / 1e9:g}, and {there} has {(usage.free + used) / 1e9:.1f} GB for it",
            "Lower budget_gb; what is over it fails to be written, and is counted.",
        )
    else:
        yield ok("disk", f"{folder}: {used / 1e9:.1f} of {budget / 1e9:g} GB used; can be written to")
    if folder.exists() and (mode := stat.S_IMODE(folder.stat().st_mode)) & 0o077:
        yield note(
            "disk",
            f"{folder} has mode {mode:03o}: others can read it, and KV tells what the text was",
            f"chmod 700 {folder}",
        )
    if folder.exists() and os.geteuid() not in (0, owner := folder.stat().st_uid):
        yield wrong(
            "disk",
            f"{folder} belongs to user {owner}, this is user {os.geteuid()}",
            "Let all servers that share a folder run as one user.",
        )


def _check_redis(values: Mapping[str, Any]) -> Iterator[Finding]:
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        yield wrong("redis", "the package redis is not installed", "pip install 'vllm-blend[redis]'")
        return
    password = None
    if "password" in values:
        problems = list(_check_secret("password of redis", values["password"]))
        yield from problems
        if problems:
            return
        password = read_secret("password of redis", values["password"])
    url = str(values.get("url", ""))
    client: Any = redis.Redis.from_url(
        url,
        username=values.get("username"),
        password=password,
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
    )
    try:
        version = client.info("server")["redis_version"]
        memory = client.info("memory")
    except (redis.RedisError, OSError) as error:
        yield wrong(
            "redis",
            f"{url} does not answer: {error}",
            "Start Redis, or mend url, username and password; requests go on without the tier.",
        )
        return
    finally:
        with suppress(redis.RedisError, OSError):
            client.close()
    yield ok("redis", f"{url}: version {version}, {memory['used_memory'] / 1e9:.1f} GB used")
    budget = float(values.get("budget_gb") or 0) * 1e9
    most, policy = memory.get("maxmemory", 0), memory.get("maxmemory_policy", "noeviction")
    if most and policy != "noeviction":
        yield wrong(
            "redis",
            f"maxmemory-policy is {policy}: Redis drops records, and what counts them, by itself",
            "redis-cli CONFIG SET maxmemory-policy noeviction; the tier keeps to budget_gb.",
        )
    if most and most < budget:
        yield wrong(
            "redis",
            f"maxmemory is {most / 1e9:.2f} GB, budget_gb {budget / 1e9:g}",
            "Raise maxmemory above budget_gb, or lower budget_gb.",
        )


def _check_s3(values: Mapping[str, Any]) -> Iterator[Finding]:
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        yield wrong("s3", "the package boto3 is not installed", "pip install 'vllm-blend[s3]'")
        return
    bucket = str(values.get("bucket", ""))
    once = {"total_max_attempts": 1}
    config = Config(connect_timeout=TIMEOUT_S, read_timeout=TIMEOUT_S, retries=once)
    try:
        client = boto3.client("s3", endpoint_url=values.get("endpoint_url"), config=config)
        client.list_objects_v2(Bucket=bucket, MaxKeys=1)
    except (BotoCoreError, ClientError, ValueError) as error:
        yield wrong(
            "s3",
            f"bucket {bucket} cannot be listed: {error}",
            "Make the bucket, mend endpoint_url, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
        )
        return
    yield ok("s3", f"bucket {bucket} can be listed")
