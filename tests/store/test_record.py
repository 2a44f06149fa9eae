"""The record: plain safetensors, and no wrong byte in it is ever accepted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from chunks import MODEL, SHAPE, make_key, make_kv
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from vllm_blend.core import KVShape
from vllm_blend.store.keys import ChunkKey
from vllm_blend.store.record import (
    PAGE,
    Layout,
    Reason,
    Record,
    Rejected,
    checksum,
    layers_in,
    token_ids_in,
)

KEY = make_key()


def written(key: ChunkKey) -> bytes:
    return b"".join(Record.of(key, make_kv(key)).parts)


def read(key: ChunkKey, data: bytes) -> list[bytes]:
    """Layers of a record, every byte verified, as the store reads it."""
    layout = Layout.of(key)
    checksums = layout.checksums(data[: layout.preamble_bytes])
    if len(data) != layout.num_bytes:
        raise Rejected(Reason.TRUNCATED)
    layers = []
    for layer, expected in enumerate(checksums):
        part = data[layout.offset(layer) :][: layout.layer_bytes]
        if checksum(key, layer, memoryview(part)) != expected:
            raise Rejected(Reason.CORRUPT)
        layers.append(part)
    return layers


@pytest.mark.parametrize("num_tokens", [1, 19, 99, 989])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_record_is_a_safetensors_file(num_tokens: int, dtype: torch.dtype) -> None:
    shape = KVShape(num_layers=4, num_kv_heads=2, head_size=16, dtype=dtype)
    key = make_key(num_tokens=num_tokens, model=replace(MODEL, shape=shape))
    data, layout, kv = written(key), Layout.of(key), make_kv(key)
    assert len(data) == layout.num_bytes
    assert layout.preamble_bytes % PAGE == 0
    tensors = load(data)
    assert tuple(tensors["token_ids"].tolist()) == key.token_ids
    assert len(tensors) == 2 + 2 * 4
    for layer, (k, v) in enumerate(kv.layers):
        assert torch.equal(tensors[f"layers.{layer}.k"], k)
        assert torch.equal(tensors[f"layers.{layer}.v"], v)
    memory = torch.frombuffer(bytearray(b"".join(read(key, data))), dtype=torch.uint8)
    for (k, v), (k_read, v_read) in zip(kv.layers, layers_in(memory, shape, num_tokens), strict=True):
        assert torch.equal(k, k_read)
        assert torch.equal(v, v_read)


GOOD = written(KEY)


@settings(deadline=None)
@given(st.integers(0, 8 * len(GOOD) - 1))
def test_no_flipped_bit_passes(bit: int) -> None:
    data = bytearray(GOOD)
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Rejected) as caught:
        read(KEY, bytes(data))
    assert caught.value.reason in (Reason.CORRUPT, Reason.FOREIGN, Reason.VERSION)


@settings(deadline=None)
@given(st.integers(0, len(GOOD) - 1))
def test_no_truncation_passes(length: int) -> None:
    with pytest.raises(Rejected) as caught:
        read(KEY, GOOD[:length])
    assert caught.value.reason == Reason.TRUNCATED


def test_layers_cannot_change_places() -> None:
    layout = Layout.of(KEY)
    first, second = (GOOD[layout.offset(layer) :][: layout.layer_bytes] for layer in (0, 1))
    head, tail = GOOD[: layout.offset(0)], GOOD[layout.offset(2) :]
    with pytest.raises(Rejected, match="corrupt"):
        read(KEY, head + second + first + tail)


def test_each_kind_of_foreign_data_has_its_reason() -> None:
    other = make_key(seed=1)
    header_bytes = int.from_bytes(GOOD[:8], "little")
    header = json.loads(GOOD[8 : 8 + header_bytes])
    header["__metadata__"]["version"] = "0"
    old = GOOD[:8] + json.dumps(header, separators=(",", ":")).encode().ljust(header_bytes)
    cases = {
        written(other): Reason.FOREIGN,
        written(make_key(salt="other tenant")): Reason.FOREIGN,
        old + GOOD[len(old) :]: Reason.VERSION,
        b"\0" * len(GOOD): Reason.FOREIGN,
        b"not a record at all": Reason.FOREIGN,
        b"": Reason.TRUNCATED,
    }
    for data, reason in cases.items():
        with pytest.raises(Rejected) as caught:
            read(KEY, data)
        assert caught.value.reason == reason
    # the same digest with other token ids: what a collision would look like
    ids = GOOD.replace(KEY.id_bytes, other.id_bytes)
    with pytest.raises(Rejected, match="other token ids"):
        read(KEY, ids)


def test_kv_that_does_not_fit_its_key_is_refused() -> None:
    with pytest.raises(ValueError, match="kv has 3 layers; the model has 4"):
        Record.of(make_key(model=replace(MODEL, shape=replace(SHAPE, num_layers=4))), make_kv(KEY))
    with pytest.raises(ValueError, match="kv.0. has shape .20, 2, 8.; expected"):
        Record.of(make_key(num_tokens=21), make_kv(KEY))
    whole = replace(MODEL, shape=replace(SHAPE, dtype=torch.int8))
    with pytest.raises(ValueError, match="cannot store KV of torch.int8; allowed"):
        Layout.of(make_key(model=whole))


@pytest.mark.parametrize("num_tokens", [1, 20, 989])
def test_token_ids_are_read_from_the_beginning_of_a_record(num_tokens: int) -> None:
    key = make_key(3, num_tokens)
    data = b"".join(Record.of(key, make_kv(key)).parts)
    assert token_ids_in(data) == key.token_ids
    assert token_ids_in(data[: Layout.of(key).preamble_bytes]) == key.token_ids
    assert token_ids_in(data[:100]) is None
    assert token_ids_in(b"") is None


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 4095), st.integers(0, 255), st.integers(0, 5000))
def test_damage_is_no_error(at: int, byte: int, size: int) -> None:
    key = make_key()
    data = bytearray(b"".join(Record.of(key, make_kv(key)).parts)[:size])
    if at < len(data):
        data[at] ^= byte
    ids = token_ids_in(bytes(data))
    assert ids is None or all(isinstance(one, int) for one in ids)
