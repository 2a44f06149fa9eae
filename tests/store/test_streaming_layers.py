"""Layers that arrive one by one."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from chunks import SHAPE, make_key, make_kv

from vllm_blend.store.streaming_layers import ChunkLost, StreamingKV, StreamingLayers

KEY = make_key()


def late(timeout_s: float = 60) -> StreamingKV:
    return StreamingKV(StreamingLayers(make_kv(KEY).layers, "x", timeout_s))


def test_shapes_are_known_before_anything_has_arrived() -> None:
    kv = late(timeout_s=0)
    kv.check(SHAPE, KEY.num_tokens)
    assert kv.num_tokens == KEY.num_tokens
    assert kv.num_bytes == 3 * 2 * 20 * 2 * 8 * 4
    assert len(kv.layers) == 3
    with pytest.raises(ValueError, match="expected"):
        kv.check(SHAPE, KEY.num_tokens + 1)


def test_a_layer_is_handed_out_when_it_has_arrived() -> None:
    kv = late()
    asked, seen = threading.Event(), []

    def use() -> None:
        asked.set()
        for layer in range(3):
            k, _ = kv.layers[layer]
            seen.append((layer, kv.layers.arrived, k.shape[0]))

    thread = threading.Thread(target=use)
    thread.start()
    asked.wait()
    for _ in range(3):
        kv.layers.arrive()
    thread.join(60)
    assert [layer for layer, _, _ in seen] == [0, 1, 2]
    assert all(arrived > layer for layer, arrived, _ in seen)
    kv.wait()
    assert kv.layers[-1] is kv.layers.tensors[2]
    assert len(kv.layers[0:2]) == 2
    with pytest.raises(IndexError):
        kv.layers[3]


def test_a_lost_layer_is_an_error_for_it_and_those_after_it() -> None:
    kv = late()
    kv.layers.arrive()
    kv.layers.lose("disk: corrupt")
    assert kv.layers[0]
    for layer in (1, 2):
        with pytest.raises(ChunkLost, match="chunk x cannot be loaded: disk: corrupt"):
            kv.layers[layer]
    with pytest.raises(ChunkLost):
        list(kv.layers)


def test_waiting_has_an_end() -> None:
    kv = late(timeout_s=0.01)
    with pytest.raises(ChunkLost, match="layer 0 did not arrive within 0.01 s"):
        kv.layers[0]


def test_all_waits_together_have_an_end() -> None:
    """As those of a step, so that a slow tier holds it up once, not once a layer."""
    kv = late()
    kv.layers.arrive()
    kv.layers.hurry(0.05)
    assert kv.layers[0] and not kv.layers.is_lost
    with pytest.raises(ChunkLost, match="layer 1 did not arrive within 0.0"):
        kv.layers[1]
    assert kv.layers.is_lost
    kv.layers.arrive()
    with pytest.raises(ChunkLost):
        kv.layers[2]
    kv.layers.arrive()
    assert kv.layers[2] and not kv.layers.is_lost  # it came after all


def test_how_long_it_still_takes() -> None:
    kv = late()
    assert kv.layers.seconds_left == math.inf
    kv.layers.arrive()
    assert kv.layers.seconds_left == math.inf
    kv.layers._began_at -= 30
    kv.layers.arrive()
    assert 5 <= kv.layers.seconds_left < 6
    kv.layers.arrive()
    assert kv.layers.seconds_left == 0


def test_before_its_first_layers_what_is_believed_of_its_tier_counts() -> None:
    layers = StreamingLayers(make_kv(KEY).layers, "x", 60, lambda: 7.0)
    assert layers.seconds_left == 7
    layers.arrive()
    assert layers.seconds_left == 7
    layers.arrive()
    assert layers.seconds_left < 1
    layers.arrive()
    assert layers.seconds_left == 0


def test_a_part_of_the_tokens_waits_for_layers_one_by_one() -> None:
    kv = late()
    part = kv.tokens(3, 8)
    assert part.num_tokens == 5 and not part.has(0)
    part.check(SHAPE, 5)
    kv.layers.arrive()
    assert part.has(0) and not part.has(1)
    for found, whole in zip(part.layers[0], kv.layers.tensors[0], strict=True):
        assert torch.equal(found, whole[3:8])
    kv.layers.lose("gone")
    with pytest.raises(ChunkLost):
        part.layers[1]
