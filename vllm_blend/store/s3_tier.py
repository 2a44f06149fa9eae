"""Records as objects of an S3 bucket, shared by every process and machine that reaches it.

Which objects there are is known from listings, at the start and every ``refresh_s``, so that a chunk
that is not there costs no request. Credentials are boto3's: ``AWS_ACCESS_KEY_ID`` and the others of the
environment, or a role. Needs the extra ``s3``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from vllm_blend.core.cpus import use_others
from vllm_blend.store.index import Index
from vllm_blend.store.keys import DIGEST_BYTES, DIGEST_VERSION, ChunkKey
from vllm_blend.store.record import PAGE, Reason, Record, Rejected
from vllm_blend.store.secrets import check_address
from vllm_blend.store.tier import Stats, TierError

SUFFIX = ".safetensors"
PIECE = 1 << 20
"""Bytes that are taken from a response at a time."""


class S3Tier:
    """Records in a bucket.

    Args:
        bucket: it must be there.
        budget_bytes: of all records under ``prefix``. Who shares the bucket counts by listings, so it
            may be exceeded by what is written between two of them.
        prefix: of every object's key.
        endpoint_url: of a server other than AWS's.
        timeout_s: of a connection, and between two pieces of an answer.
        refresh_s: seconds between two listings.
        client: a boto3 client of your own, instead of ``endpoint_url`` and ``timeout_s``.

    Raises:
        ValueError: if ``endpoint_url`` has a user or a password in it, since it may be shown.
    """

    def __init__(
        self,
        bucket: str,
        budget_bytes: int,
        *,
        prefix: str = "vllm_blend",
        endpoint_url: str | None = None,
        timeout_s: float = 5.0,
        refresh_s: float = 60.0,
        client: Any = None,
    ) -> None:
        check_address("endpoint_url of s3", endpoint_url)
        self.name = "s3"
        self.quick = True
        self.stats = Stats()
        self.bucket = bucket
        self.budget_bytes = budget_bytes
        self._prefix = f"{prefix}/v{DIGEST_VERSION}/"
        config = Config(
            connect_timeout=min(timeout_s, 2.0),
            read_timeout=timeout_s,
            retries={"total_max_attempts": 1},  # the store pauses the tier instead
        )
        self._client = client or boto3.client("s3", endpoint_url=endpoint_url, config=config)
        self._index = Index()
        self._lock = threading.Lock()
        self._refresh_s = refresh_s
        self._closed = threading.Event()
        self._listed = threading.Event()
        self._lister = threading.Thread(target=self._keep_listing, name="s3-list", daemon=True)
        self._lister.start()

    def wait_listed(self, timeout_s: float = 60.0) -> bool:
        """Waits until the bucket has been listed once; False if that takes longer."""
        return self._listed.wait(timeout_s)

    def contains(self, key: ChunkKey) -> bool:
        with self._lock:
            return key.digest in self._index

    def open(self, key: ChunkKey) -> S3Source | None:
        if not self.contains(key):
            return None
        source = self.source(key.digest)
        if source is None:
            with self._lock:
                self._index.remove(key.digest)
            raise Rejected(Reason.GONE)
        with self._lock:
            self._index.put(key.digest, source.num_bytes)
        return source

    def write(self, record: Record) -> None:
        digest, size = record.key.digest, record.num_bytes
        if self.contains(record.key) and not record.scored:
            return
        if size > self.budget_bytes:
            raise TierError("too_large", f"{size} bytes", pause=False)
        with _errors():
            if record.adds_to(self._beginning(digest, len(record.head))):
                self._make_room(size)
                body = b"".join(record.parts)
                self._client.put_object(Bucket=self.bucket, Key=self._object(digest), Body=body)
        with self._lock:
            self._index.put(digest, size)

    def discard(self, key: ChunkKey) -> None:
        self.remove(key.digest)

    def remove(self, digest: bytes) -> None:
        """Removes a record by its name."""
        with self._lock:
            self._index.remove(digest)
        with _errors():
            self._client.delete_object(Bucket=self.bucket, Key=self._object(digest))

    def source(self, digest: bytes) -> S3Source | None:
        """A record by its name; None: there is none."""
        source = S3Source(self._client, self.bucket, self._object(digest))
        with _errors():
            try:
                source.seek(0)
            except ClientError as error:
                if _status(error) != 404:
                    raise
                return None
        return source

    def usage(self) -> dict[str, int]:
        with self._lock:
            return {"entries": len(self._index), "bytes": self._index.num_bytes}

    def close(self) -> None:
        self._closed.set()
        self._client.close()

    def listed(self) -> dict[bytes, tuple[float, int]]:
        """When each record was written, and its size, by digest.

        Raises:
            TierError: if the bucket cannot be listed.
        """
        found: dict[bytes, tuple[float, int]] = {}
        with _errors():
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self.bucket, Prefix=self._prefix):
                for item in page.get("Contents", []):
                    if (digest := _digest(item["Key"], self._prefix)) is not None:
                        found[digest] = item["LastModified"].timestamp(), item["Size"]
        return found

    def refresh(self) -> None:
        """Lists the bucket: what others added and removed.

        Raises:
            TierError: if that fails.
        """
        before = set(self._index.digests())
        found = self.listed()
        new = sorted(found.keys() - before, key=lambda digest: found[digest])
        with self._lock:
            for digest in new:
                if digest not in self._index:
                    self._index.put(digest, found[digest][1])
            for digest in before - found.keys():
                self._index.remove(digest)

    def _object(self, digest: bytes) -> str:
        return f"{self._prefix}{digest.hex()}{SUFFIX}"

    def _beginning(self, digest: bytes, num_bytes: int) -> bytes:
        """The first bytes of an object; empty: there is none. Raises boto3's errors."""
        name, part = self._object(digest), f"bytes=0-{num_bytes - 1}"
        try:
            answer = self._client.get_object(Bucket=self.bucket, Key=name, Range=part)
        except ClientError as error:
            if _status(error) not in (404, 416):  # 416: it has no bytes
                raise
            return b""
        with closing(answer["Body"]) as body:
            return bytes(body.read())

    def _keep_listing(self) -> None:
        use_others()
        while not self._closed.is_set():
            try:
                self.refresh()
                self._listed.set()
            except TierError as error:
                self.stats.add(f"list_failed.{error.kind}")
            self._closed.wait(self._refresh_s)

    def _make_room(self, num_bytes: int) -> None:
        while self._index.num_bytes + num_bytes + PAGE > self.budget_bytes:
            with self._lock:
                digest = self._index.oldest()
                if digest is None:
                    return
                self._index.remove(digest)
            self._client.delete_object(Bucket=self.bucket, Key=self._object(digest))
            self.stats.add("evictions")


class S3Source:
    """An object, read in order from one answer; a jump asks again.

    Attributes:
        num_bytes: of the object, once it was asked for.
    """

    def __init__(self, client: Any, bucket: str, name: str) -> None:
        self.num_bytes = 0
        self._tag: str | None = None
        self._client = client
        self._bucket = bucket
        self._name = name
        self._body: Any = None
        self._at = 0

    def seek(self, offset: int) -> None:
        """Asks for the object from ``offset`` on.

        Raises boto3's errors, and Rejected if it was replaced since it was first asked for.
        """
        self.close()
        answer = self._client.get_object(Bucket=self._bucket, Key=self._name, Range=f"bytes={offset}-")
        self._body, self._at = answer["Body"], offset
        self.num_bytes = int(answer["ContentLength"]) + offset
        tag, self._tag = self._tag, answer.get("ETag")
        if tag not in (None, self._tag):
            raise Rejected(Reason.GONE, "replaced")

    def read(self, offset: int, into: memoryview) -> int:
        done = 0
        with _errors():
            if offset != self._at:
                self.seek(offset)
            while done < into.nbytes:
                piece = self._body.read(min(PIECE, into.nbytes - done))
                if not piece:
                    break
                into[done : done + len(piece)] = piece
                done += len(piece)
        self._at = offset + done
        return done

    def close(self) -> None:
        if self._body is not None:
            self._body.close()
            self._body = None


def _status(error: ClientError) -> int:
    """Of the answer."""
    return int(error.response["ResponseMetadata"]["HTTPStatusCode"])


def _digest(name: str, prefix: str) -> bytes | None:
    """The digest in an object's key, or None if it is not a record's."""
    try:
        digest = bytes.fromhex(name.removeprefix(prefix).removesuffix(SUFFIX))
    except ValueError:
        return None
    return digest if len(digest) == DIGEST_BYTES else None


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", "client_error")
        raise TierError(str(status), str(error)) from error
    except (BotoCoreError, HTTPError, OSError) as error:
        raise TierError(type(error).__name__, str(error)) from error
