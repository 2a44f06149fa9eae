"""Chunks in host memory: bounded, least recently used first, never changed while in use."""

from __future__ import annotations

import gc

from chunks import make_key, make_kv, same

from vllm_blend.core.kv import StoredKV
from vllm_blend.store.host import HostTier
from vllm_blend.store.keys import ChunkKey
from vllm_blend.store.record import Layout

SIZE = -(-Layout.of(make_key()).payload_bytes // 4096) * 4096


def put(tier: HostTier, key: ChunkKey) -> bool:
    """Whether it found room in the arena."""
    slot = tier.reserve(key)
    for (k, v), (k_new, v_new) in zip(slot.layers, make_kv(key).layers, strict=True):
        k.copy_(k_new)
        v.copy_(v_new)
    tier.publish(slot)
    return slot.extent is not None


def test_what_is_published_is_found() -> None:
    tier, key = HostTier(4 * SIZE), make_key()
    assert tier.get(key) is None
    slot = tier.reserve(key)
    assert tier.get(key) is None  # not before it is whole
    tier.abandon(slot)
    assert put(tier, key)
    kv = tier.get(key)
    assert same(kv, make_kv(key))
    assert tier.get(key) is kv
    assert tier.get(make_key(salt="other")) is None
    tier.discard(key)
    assert not tier.contains(key)
    assert same(kv, make_kv(key))


def test_the_least_recently_used_make_room_but_not_those_in_use() -> None:
    tier, keys = HostTier(3 * SIZE), [make_key(i) for i in range(8)]
    for key in keys[:3]:
        assert put(tier, key)
    in_use = tier.get(keys[0])
    for key in keys[3:6]:
        assert put(tier, key)
    assert [tier.contains(key) for key in keys[:6]] == [True, False, False, False, True, True]
    also, third = tier.get(keys[5]), tier.get(keys[4])
    assert not put(tier, keys[6])  # nothing may go: memory of its own, not kept
    assert not tier.contains(keys[6])
    assert tier.stats["overflows"] == 1
    assert tier.stats["evictions"] == 3
    assert same(in_use, make_kv(keys[0]))
    assert same(also, make_kv(keys[5]))
    del in_use, also, third
    gc.collect()
    assert put(tier, keys[7])
    assert not tier.contains(keys[0])


def test_a_tensor_of_it_alone_keeps_the_memory() -> None:
    tier, keys = HostTier(SIZE), [make_key(i) for i in range(2)]
    put(tier, keys[0])
    kv = tier.get(keys[0])
    assert isinstance(kv, StoredKV)
    part = kv.layers[1][0][3:5]
    expected = make_kv(keys[0]).layers[1][0][3:5]
    del kv
    tier.discard(keys[0])
    assert not put(tier, keys[1])
    assert (part == expected).all()
    del part
    assert put(tier, keys[1])


def test_a_chunk_that_must_not_go_yet_is_asked_for_once() -> None:
    asked: list[ChunkKey] = []
    keys = [make_key(i) for i in range(4)]

    def may_evict(key: ChunkKey) -> bool:
        asked.append(key)
        return key is not keys[0]

    tier = HostTier(2 * SIZE, may_evict=may_evict)
    for key in keys[:3]:
        put(tier, key)
    assert asked == [keys[0], keys[1]]
    assert tier.contains(keys[0]) and not tier.contains(keys[1])
    put(tier, make_key(9, num_tokens=40))  # needs both places
    assert tier.contains(keys[0])
    assert tier.stats["overflows"] == 1


def test_usage_counts_what_is_held() -> None:
    tier, key = HostTier(4 * SIZE), make_key()
    put(tier, key)
    kv = tier.get(key)
    usage = tier.usage()
    assert (usage["entries"], usage["entries_in_use"], usage["bytes"]) == (1, 1, SIZE)
    del kv
    assert tier.usage()["entries_in_use"] == 0
    tier.close()
    assert tier.usage()["bytes"] == 0
