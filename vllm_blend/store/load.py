"""Loads from slower tiers: one for all who ask, layer by layer, each verified before it is used."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from vllm_blend.core.cpus import use_others
from vllm_blend.core.kv import StoredKV
from vllm_blend.store.host import HostTier, Slot
from vllm_blend.store.keys import ChunkKey
from vllm_blend.store.record import Layout, Preamble, Reason, Rejected, checksum
from vllm_blend.store.streaming_layers import ChunkLost, StreamingKV, StreamingLayers
from vllm_blend.store.tier import Source, TierError
from vllm_blend.store.tier_client import Lane

logger = logging.getLogger("vllm.vllm_blend.store")


@dataclass(eq=False)
class Load:
    """One chunk on its way into host memory.

    Attributes:
        opened: the KV as soon as a record is found whose header is right, or None.
        lane: what it is read from, once it is opened.
        reason: why there is no KV.
    """

    key: ChunkKey
    opened: Future[StreamingKV | None] = field(default_factory=Future)
    lane: Lane | None = None
    reason: Reason = Reason.ABSENT

    def wait(self, timeout_s: float, layerwise: bool) -> StoredKV | None:
        """The KV; whole, unless ``layerwise``. None, with a ``reason``, if it cannot be had in time."""
        try:
            late = self.opened.result(timeout_s)
            if late is None or layerwise:
                return late
            return late.wait()
        except (TimeoutError, ChunkLost):
            if self.reason is Reason.ABSENT:
                self.reason = Reason.UNAVAILABLE
            return None


class Loads:
    """The loads under way.

    Args:
        host: where chunks are loaded to.
        lanes: slower tiers, fastest first.
        threads: loads that run at once.
        timeout_s: how long one layer may take.
        promote: called with a chunk that was found, and the faster lanes that did not have it.
    """

    def __init__(
        self,
        host: HostTier,
        lanes: Sequence[Lane],
        threads: int,
        timeout_s: float,
        promote: Callable[[ChunkKey, StoredKV, Sequence[Lane]], None],
    ) -> None:
        self._host = host
        self._lanes = lanes
        self._timeout_s = timeout_s
        self._promote = promote
        self._loads: dict[bytes, Load] = {}
        self._lock = threading.Condition()
        self._pool = ThreadPoolExecutor(threads, "chunk-load", use_others)
        self._checkers = ThreadPoolExecutor(threads, "chunk-check", use_others)
        self._closed = False

    def start(self, key: ChunkKey) -> Load | StoredKV:
        """The load of a chunk: the one under way, or a new one; the KV if a load just ended."""
        with self._lock:
            load = self._loads.get(key.digest)
            if load is not None and load.key.id_bytes == key.id_bytes:
                return load
            if (kv := self._host.get(key)) is not None:
                return kv
            load = Load(key)
            if self._closed:
                load.reason = Reason.CLOSED
                load.opened.set_result(None)
            else:
                self._loads[key.digest] = load
                self._pool.submit(self._run, load)
            return load

    def flush(self, timeout_s: float) -> bool:
        """Waits until no load is under way; False if that takes longer."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._loads, timeout_s)

    def close(self) -> None:
        """Ends the loads; those under way are lost after their present layer."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(cancel_futures=True)
        self._checkers.shutdown()
        for load in list(self._loads.values()):
            load.reason = Reason.CLOSED
            load.opened.set_result(None)
        self._loads.clear()

    def _run(self, load: Load) -> None:
        try:
            self._load(load)
        except Exception:
            # as text: a handler that kept the exception would keep the chunk's memory in use
            trace = traceback.format_exc()
            logger.error("vllm_blend store: a load failed in an unexpected way: %s", trace)
            load.reason = Reason.UNAVAILABLE
        finally:
            with self._lock:
                self._loads.pop(load.key.digest, None)
                self._lock.notify_all()
            if not load.opened.done():
                load.opened.set_result(None)
            elif (late := load.opened.result()) is not None:
                late.layers.lose(str(load.reason))  # says nothing where all layers have arrived

    def _load(self, load: Load) -> None:
        """Reads from the first lane that has the chunk; where one fails, goes on with the next."""
        key = load.key
        slot: Slot | None = None
        missing: list[Lane] = []
        num_bytes = Layout.of(key).payload_bytes
        for lane in self._lanes:
            with lane.load_time.loading(num_bytes) as started:
                source = lane.open(key)
                if isinstance(source, Reason):
                    if source is not Reason.ABSENT:
                        load.reason = source
                    else:
                        missing.append(lane)
                    continue
                try:
                    preamble = Preamble.read(key, source.num_bytes, source.read)
                    if slot is None:
                        slot = self._host.reserve(key)
                        slot.scores = preamble.scores
                        believed = lane.load_time.seconds_left
                        layers = StreamingLayers(slot.layers, str(key), self._timeout_s, believed)
                        load.opened.set_result(StreamingKV(layers, slot.scores))
                    elif slot.scores is None:
                        slot.scores = preamble.scores
                    load.lane = lane
                    self._read_layers(load, slot, source, preamble, started)
                except Rejected as rejected:
                    load.reason = lane.reject(key, rejected)
                    missing.append(lane)
                except TierError as error:
                    load.reason = lane.fail(error)
                except Exception:
                    if slot is not None:  # it is not published: nothing fails after that
                        self._host.abandon(slot)
                    raise
                else:
                    if missing:
                        self._promote(key, StoredKV(slot.layers, slot.scores), missing)
                    return
                finally:
                    source.close()
        if slot is not None:
            self._host.abandon(slot)

    def _read_layers(
        self, load: Load, slot: Slot, source: Source, preamble: Preamble, started: float
    ) -> None:
        """Reads the layers that have not arrived yet; each is verified while the next one is read."""
        layout, checksums = preamble.layout, preamble.checksums
        late = load.opened.result()
        assert late is not None
        memory: memoryview = slot.memory.numpy().data
        first = late.layers.arrived
        checked: Future[str] | None = None
        try:
            for layer in range(first, layout.num_layers):
                if self._closed:
                    raise TierError("closed", pause=False)
                into = memory[layer * layout.layer_bytes : (layer + 1) * layout.layer_bytes]
                count = source.read(layout.offset(layer), into)
                if count != layout.layer_bytes:
                    raise Rejected(Reason.TRUNCATED, f"{count} bytes of layer {layer}")
                if checked is not None and checked.done() and checked.result():
                    break
                check = partial(self._check, load, slot, layout, layer, first, started)
                checked = self._checkers.submit(check, into, checksums[layer], checked)
        finally:
            # whatever happened: what is verified arrives, and then no more
            wrong = checked.result() if checked is not None else ""
        if wrong:
            raise Rejected(Reason.CORRUPT, wrong)

    def _check(
        self,
        load: Load,
        slot: Slot,
        layout: Layout,
        layer: int,
        first: int,
        started: float,
        data: memoryview,
        expected: bytes,
        before: Future[str] | None,
    ) -> str:
        """Verifies a layer, which arrives after the one before it; returns what is wrong, or ""."""
        right = checksum(load.key, layer, data) == expected
        wrong = before.result() if before is not None else ""
        if wrong or not right:
            return wrong or f"layer {layer}"
        late = load.opened.result()
        assert late is not None and load.lane is not None
        if layer + 1 == layout.num_layers:
            load.lane.loaded((layer + 1 - first) * layout.layer_bytes, started)
            self._host.publish(slot)  # first, so that it is never found nowhere
        late.layers.arrive()
        return ""
