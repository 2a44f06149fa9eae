"""The record, in both versions: plain safetensors, and no wrong byte in it is ever accepted."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import pytest
import torch
from chunks import MODEL, SHAPE, make_key, make_kv
from hypothesis import given, settings
from hypothesis import strategies as st
from old_record import old_record
from safetensors.torch import load

from vllm_blend.core.kv import KVShape, StoredKV
from vllm_blend.store.keys import ChunkKey
from vllm_blend.store.record import (
    PAGE,
    Layout,
    Preamble,
    Reason,
    Record,
    Rejected,
    checksum,
    layers_in,
    token_ids_in,
)

KEY = make_key()
LONG = make_key(2, num_tokens=500)
"""Its records differ in size by version; those of ``KEY`` do not."""


def written(key: ChunkKey, scored: bool = False) -> bytes:
    return b"".join(Record.of(key, make_kv(key, scored)).parts)


def preamble(key: ChunkKey, data: bytes, num_bytes: int | None = None) -> Preamble:
    def read(offset: int, into: memoryview) -> int:
        part = data[offset : offset + into.nbytes]
        into[: len(part)] = part
        return len(part)

    return Preamble.read(key, len(data) if num_bytes is None else num_bytes, read)


def read(key: ChunkKey, data: bytes) -> list[bytes]:
    """Layers of a record, every byte verified, as the store reads it."""
    found = preamble(key, data)
    layers = []
    for layer, expected in enumerate(found.checksums):
        part = data[found.layout.offset(layer) :][: found.layout.layer_bytes]
        if checksum(key, layer, memoryview(part)) != expected:
            raise Rejected(Reason.CORRUPT)
        layers.append(part)
    return layers


@pytest.mark.parametrize("num_tokens", [1, 19, 99, 989])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scored", [False, True])
def test_a_record_is_a_safetensors_file(num_tokens: int, dtype: torch.dtype, scored: bool) -> None:
    shape = KVShape(num_layers=4, num_kv_heads=2, head_size=16, dtype=dtype)
    key = make_key(num_tokens=num_tokens, model=replace(MODEL, shape=shape))
    data, layout, kv = written(key, scored), Layout.of(key, scored), make_kv(key, scored)
    assert len(data) == layout.num_bytes
    assert layout.preamble_bytes % PAGE == 0
    tensors = load(data)
    assert tuple(tensors["token_ids"].tolist()) == key.token_ids
    assert len(tensors) == 2 + scored + 2 * 4
    found = preamble(key, data)
    assert found.layout == layout and len(found.checksums) == 4
    if kv.scores is None:
        assert found.scores is None
    else:
        assert found.scores is not None
        assert torch.equal(found.scores, kv.scores) and torch.equal(tensors["scores"], kv.scores)
    for layer, (k, v) in enumerate(kv.layers):
        assert torch.equal(tensors[f"layers.{layer}.k"], k)
        assert torch.equal(tensors[f"layers.{layer}.v"], v)
    memory = torch.frombuffer(bytearray(b"".join(read(key, data))), dtype=torch.uint8)
    for (k, v), (k_read, v_read) in zip(kv.layers, layers_in(memory, shape, num_tokens), strict=True):
        assert torch.equal(k, k_read)
        assert torch.equal(v, v_read)


GOOD = written(KEY)
SCORED = written(KEY, scored=True)
RECORDS = [(key, written(key, scored)) for key in (KEY, LONG) for scored in (False, True)]


def test_the_two_versions_may_have_one_size_or_two() -> None:
    assert len(GOOD) == len(SCORED)
    old, new = RECORDS[2][1], RECORDS[3][1]
    assert len(old) < len(new)
    for wrong in (new[: len(old)], old + new[len(old) :]):
        with pytest.raises(Rejected, match="truncated"):
            read(LONG, wrong)


@settings(deadline=None)
@given(st.sampled_from(RECORDS), st.integers(0, 2**62))
def test_no_flipped_bit_passes(record: tuple[ChunkKey, bytes], bit: int) -> None:
    key, data = record[0], bytearray(record[1])
    bit %= 8 * len(data)
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Rejected) as caught:
        read(key, bytes(data))
    assert caught.value.reason in (Reason.CORRUPT, Reason.FOREIGN, Reason.VERSION)


def test_no_flipped_bit_of_the_scores_or_their_checksum_passes() -> None:
    layout, size = Layout.of(KEY, scored=True), len(KEY.id_bytes)
    scores = range(len(layout.head) + size, len(layout.head) + 2 * size)
    assert struct.unpack_from("<20f", SCORED, scores[0]) == tuple(make_kv(KEY, True).scores.tolist())
    for byte in [*scores, *range(layout.preamble_bytes - 16, layout.preamble_bytes)]:
        for bit in range(8):
            damaged = bytearray(SCORED)
            damaged[byte] ^= 1 << bit
            with pytest.raises(Rejected, match="corrupt: scores"):
                preamble(KEY, bytes(damaged))


@settings(deadline=None)
@given(st.sampled_from(RECORDS), st.integers(0, 2**62))
def test_no_truncation_passes(record: tuple[ChunkKey, bytes], length: int) -> None:
    key, whole = record
    cut = whole[: length % len(whole)]
    with pytest.raises(Rejected, match="truncated"):
        read(key, cut)
    if len(cut) < Layout.of(key).preamble_bytes:  # the tier says all is there, and breaks off
        with pytest.raises(Rejected, match="truncated"):
            preamble(key, cut, len(whole))


@settings(deadline=None, max_examples=300)
@given(st.permutations(RECORDS), st.integers(0, 2**62), st.integers(0, 2**62))
def test_no_mixture_of_records_passes(
    records: list[tuple[ChunkKey, bytes]], end: int, start: int
) -> None:
    (key, first), (_, second) = records[:2]
    mixture = first[: end % len(first)] + second[start % len(second) :]
    if (key, mixture) in RECORDS:
        read(key, mixture)
    else:
        with pytest.raises(Rejected):
            read(key, mixture)


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 4095 * 2), st.sampled_from([LONG, KEY]))
def test_no_change_from_one_version_to_the_other_passes(at: int, key: ChunkKey) -> None:
    old, new = (written(key, scored) for scored in (False, True))
    for one, other in ((old, new), (new, old)):
        mixture = one[:at] + other[at:]
        if mixture in (old, new):
            read(key, mixture)
        else:
            with pytest.raises(Rejected):
                read(key, mixture)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_any_scores_are_read_as_they_were_written(bits: list[int]) -> None:
    data = struct.pack(f"<{len(bits)}I", *bits)  # NaN and infinity among them
    key = make_key(num_tokens=len(bits))
    scores = torch.frombuffer(bytearray(data), dtype=torch.float32)
    record = Record.of(key, StoredKV(make_kv(key).layers, scores))
    found = preamble(key, b"".join(record.parts)).scores
    assert found is not None and found.numpy().tobytes() == data


def test_scores_of_another_chunk_do_not_pass() -> None:
    other = make_key(1)
    size, head = len(KEY.id_bytes), len(Layout.of(KEY, scored=True).head)
    theirs = written(other, scored=True)
    data = bytearray(SCORED)
    data[head + size : head + 2 * size] = theirs[head + size : head + 2 * size]
    end = Layout.of(KEY, scored=True).preamble_bytes
    data[end - 16 : end] = theirs[end - 16 : end]  # with their checksum
    with pytest.raises(Rejected, match="corrupt: scores"):
        preamble(KEY, bytes(data))


@pytest.mark.parametrize("num_tokens", [1, 20, 500, 989])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_record_of_version_1_is_a_chunk_without_scores(num_tokens: int, dtype: torch.dtype) -> None:
    key = make_key(num_tokens=num_tokens, model=replace(MODEL, shape=replace(SHAPE, dtype=dtype)))
    data = old_record(key, make_kv(key))
    assert written(key) == data  # software that knows no other reads what is written today
    assert preamble(key, data).scores is None
    assert b"".join(read(key, data)) == data[Layout.of(key).preamble_bytes :]
    assert token_ids_in(data) == key.token_ids
    for grown in (1, 4096, len(written(key, scored=True)) - len(data)):
        if grown:
            with pytest.raises(Rejected, match="truncated"):
                read(key, data + bytes(grown))


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
    header["__metadata__"]["version"] = "3"
    new = GOOD[:8] + json.dumps(header, separators=(",", ":")).encode().ljust(header_bytes)
    cases = {
        written(other): Reason.FOREIGN,
        written(other, scored=True): Reason.FOREIGN,
        written(make_key(salt="other tenant")): Reason.FOREIGN,
        new + GOOD[len(new) :]: Reason.VERSION,
        new + SCORED: Reason.VERSION,  # newer, and longer
        b"\0" * len(GOOD): Reason.FOREIGN,
        b"not a record at all": Reason.TRUNCATED,
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
    with pytest.raises(Rejected, match="other token ids"):
        read(KEY, SCORED.replace(KEY.id_bytes, other.id_bytes))


def test_kv_that_does_not_fit_its_key_is_refused() -> None:
    with pytest.raises(ValueError, match="kv has 3 layers; the model has 4"):
        Record.of(make_key(model=replace(MODEL, shape=replace(SHAPE, num_layers=4))), make_kv(KEY))
    with pytest.raises(ValueError, match="kv.0. has shape .20, 2, 8.; expected"):
        Record.of(make_key(num_tokens=21), make_kv(KEY))
    for scores in (torch.zeros(21), torch.zeros(20, 1), torch.zeros(20, dtype=torch.float64)):
        with pytest.raises(
            ValueError, match="scores of kv are .*; expected torch.float32 .* = .20. in"
        ):
            Record.of(KEY, StoredKV(make_kv(KEY).layers, scores))
    whole = replace(MODEL, shape=replace(SHAPE, dtype=torch.int8))
    with pytest.raises(ValueError, match="cannot store KV of torch.int8; allowed"):
        Layout.of(make_key(model=whole))


@pytest.mark.parametrize("num_tokens", [1, 20, 989])
@pytest.mark.parametrize("scored", [False, True])
def test_token_ids_are_read_from_the_beginning_of_a_record(num_tokens: int, scored: bool) -> None:
    key = make_key(3, num_tokens)
    data = written(key, scored)
    assert token_ids_in(data) == key.token_ids
    assert token_ids_in(data[: Layout.of(key, scored).preamble_bytes]) == key.token_ids
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
