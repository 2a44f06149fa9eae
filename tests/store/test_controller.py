"""The controller against a simulation of every choice it could have made."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import combinations, pairwise
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_blend.store.compute_time import RATIOS, ComputeTime, Measurement
from vllm_blend.store.controller import Controller, Decision, Located, Offer, recommend
from vllm_blend.store.load_time import LoadTime, SharedClock

LAYERS = 32
COMPUTE = ComputeTime(fixed=2e-3, token=1e-6, row=1.9e-5, pair=5e-10)  # about Mistral-7B on an H100
BYTES = 131072  # of a token's KV
BANDWIDTHS = [25e6, 100e6, 400e6, 1e9, 3e9, 10e9, 55e9]


def simulate(load_s: float, compute_s: float) -> float:
    """Layers are loaded one after the other; each is computed when it and the one before are ready."""
    loaded = done = 0.0
    for _ in range(LAYERS):
        loaded += load_s / LAYERS
        done = max(done, loaded) + compute_s / LAYERS
    return done


def brute_force(
    controller: Controller, chunks: list[Located], other: int, ratio: float | None = None
) -> float:
    """The least simulated time over all sets of chunks and, without ``ratio``, all ratios."""
    best = float("inf")
    total = sum(chunk.num_tokens for chunk in chunks) + other
    for count in range(len(chunks) + 1):
        for loaded in combinations(range(len(chunks)), count):
            load_s = controller._load_s(chunks, set(loaded))
            reused = sum(chunks[i].num_tokens for i in loaded)
            for r in np.linspace(controller.floor, 1, 30) if ratio is None else [ratio]:
                rows = total - reused + r * reused
                best = min(best, simulate(load_s, COMPUTE.seconds(total, rows)))
    return best


@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
@pytest.mark.parametrize("num_tokens", [500, 8000, 32000])
def test_within_five_percent_of_the_best_choice(bandwidth: float, num_tokens: int) -> None:
    loads = {"disk": LoadTime(1e-4, bandwidth)}
    controller = Controller(COMPUTE, loads, LAYERS)
    chunks = [Located(num_tokens // 4, num_tokens // 4 * BYTES, "disk")] * 4
    decision = controller.decide(chunks, 50)
    reused = sum(c.num_tokens for c, load in zip(chunks, decision.load, strict=True) if load)
    rows = num_tokens + 50 - reused + decision.ratio * reused
    real = simulate(
        controller._load_s(chunks, {i for i, load in enumerate(decision.load) if load}),
        COMPUTE.seconds(num_tokens + 50, rows),
    )
    assert real <= 1.05 * brute_force(controller, chunks, 50)
    assert decision.ttft_s == pytest.approx(real, rel=0.05)
    assert decision.ratio >= controller.floor


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(50, 4000), st.sampled_from(["host", "disk", "s3"])),
        min_size=1,
        max_size=5,
    ),
    st.floats(6, 9),
    st.integers(1, 500),
)
def test_mixed_tiers(parts: list[tuple[int, str]], speed: float, other: int) -> None:
    loads = {
        "host": LoadTime(0, 5e10),
        "disk": LoadTime(1e-4, 3e9),
        "s3": LoadTime(0.03, 10**speed),
    }
    controller = Controller(COMPUTE, loads, LAYERS)
    chunks = [Located(n, n * BYTES, tier) for n, tier in parts]
    decision = controller.decide(chunks, other)
    assert decision.ttft_s <= 1.05 * brute_force(controller, chunks, other)
    total = sum(n for n, _ in parts) + other
    assert decision.ttft_s <= COMPUTE.seconds(total, total) * (1 + 1e-9)
    assert controller.floor <= decision.ratio <= 1
    assert decision.reason


def test_the_ratio_rises_as_the_tier_gets_slower_until_loading_is_not_worth_it() -> None:
    ratios, loaded, reasons = [], [], []
    for bandwidth in reversed(BANDWIDTHS):
        controller = Controller(COMPUTE, {"disk": LoadTime(0, bandwidth)}, LAYERS)
        decision = controller.decide([Located(8000, 8000 * BYTES, "disk")], 50)
        ratios.append(decision.ratio)
        loaded.append(decision.load[0])
        reasons.append(decision.reason)
    assert all(a <= b for a, b in pairwise(ratios))
    assert ratios[0] == 0.15 and "quality floor" in reasons[0]
    assert loaded[0] and not loaded[-1]
    assert "no load is faster" in reasons[-1]
    assert any("hides behind the load" in reason for reason in reasons)


def test_many_chunks_are_decided_nearly_as_well_as_by_trying_every_set() -> None:
    loads = {"disk": LoadTime(1e-4, 4e8), "s3": LoadTime(0.03, 2e8)}
    controller = Controller(COMPUTE, loads, LAYERS)
    sizes = [100, 300, 250, 800, 120, 90, 400, 640, 333, 77]
    chunks = [Located(n, n * BYTES, "disk" if i % 3 else "s3") for i, n in enumerate(sizes)]
    decision = controller.decide(chunks, 50)
    assert any(decision.load) and not all(decision.load)
    assert decision.ttft_s <= 1.05 * brute_force(controller, chunks, 50, controller.floor)


def test_a_request_of_very_many_chunks_is_decided_soon() -> None:
    loads = {"disk": LoadTime(1e-4, 3e9), "s3": LoadTime(0.03, 2e8)}
    controller = Controller(COMPUTE, loads, LAYERS, overlap=False)
    sizes = random.Random(0).choices(range(50, 400), k=1000)
    chunks = [Located(n, n * BYTES, "disk" if i % 3 else "s3") for i, n in enumerate(sizes)]
    plans = 0
    stock = controller._plan

    def counted(*args: Any) -> Decision:
        nonlocal plans
        plans += 1
        return stock(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller, "_plan", counted)
        decision = controller.decide(chunks, 50)
    assert plans < 50
    assert any(decision.load) and not all(decision.load)
    assert decision.ttft_s < controller.decide([], 50 + sum(sizes)).ttft_s


def test_without_overlap_the_floor_is_the_best_ratio() -> None:
    controller = Controller(COMPUTE, {"disk": LoadTime(0, 1e10)}, LAYERS, overlap=False)
    decision = controller.decide([Located(8000, 8000 * BYTES, "disk")], 50)
    assert decision.ratio == controller.floor
    assert decision.ttft_s == decision.load_s + decision.compute_s


def test_a_chunk_on_a_slow_tier_is_computed_and_the_others_are_loaded() -> None:
    loads = {"host": LoadTime(0, 5e10), "s3": LoadTime(0.05, 2e7)}
    chunks = [
        Located(2000, 2000 * BYTES, "host"),
        Located(500, 500 * BYTES, "s3"),
        Located(2000, 2000 * BYTES, None),  # nowhere
        Located(1000, 0, None),  # on the GPU
    ]
    decision = Controller(COMPUTE, loads, LAYERS).decide(chunks, 50)
    assert decision.load == (True, False, False, True)
    assert "1 chunks are faster computed than loaded" in decision.reason
    nothing = Controller(COMPUTE, loads, LAYERS).decide([], 50)
    assert nothing.load == () and nothing.ttft_s == COMPUTE.seconds(50, 50)


def measured(longest: int, noise: Callable[[], float] = lambda: 1.0) -> Measurement:
    """What follows from prefills that take ``COMPUTE``'s times; each first run compiles."""
    found, seen = Measurement(longest, 12, (*RATIOS, 1.0), repeat=3), Counter[Any]()
    while (run := found.next) is not None:
        size, ratio = run
        rows = size if ratio is None else 12 + ratio * (size - 12)
        seen[run] += 1
        found.took(9.0 if seen[run] == 1 else noise() * COMPUTE.seconds(size, rows))
    assert len(found.seconds) == 3 * 4 and set(seen.values()) == {4}
    return found


def test_compute_time_is_found_from_measurements() -> None:
    times = measured(4096).times
    assert times is not None
    for n in (500, 3000, 30000):
        for ratio in (0.15, 0.4, 1.0):
            expected = pytest.approx(COMPUTE.seconds(n, ratio * n))
            assert times.blended.seconds(n, ratio * n) == expected
        assert times.full.seconds(n, n) == pytest.approx(COMPUTE.seconds(n, n), rel=0.2)
    assert times.blended.rows_in(times.blended.seconds(3000, 700), 3000) == pytest.approx(700)
    assert times.blended.rows_in(0.0, 3000) == 0
    noise = np.random.default_rng(0)
    noisy = measured(16000, lambda: noise.uniform(0.95, 1.05)).times
    assert noisy is not None
    rough = noisy.blended
    assert min(rough.fixed, rough.token, rough.row, rough.pair) >= 0
    assert rough.seconds(8000, 2000) == pytest.approx(COMPUTE.seconds(8000, 2000), rel=0.1)
    assert ComputeTime.fit([(1000, 1000, 0.1)]).seconds(1000, 1000) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="samples is empty"):
        ComputeTime.fit([])


def test_load_times_are_learned_online() -> None:
    load = LoadTime(0.5, 1e6)
    assert not load.measured
    assert load.seconds(1_000_000) == 1.5
    for size in (1, 4, 2, 8, 3):
        load.observe(size << 20, 0.01 + (size << 20) / 1e9)
    assert load.measured
    assert load.seconds(50 << 20) == pytest.approx(0.01 + (50 << 20) / 1e9)
    for _ in range(200):  # the tier has become ten times slower
        load.observe(4 << 20, 0.1 + (4 << 20) / 1e8)
    assert load.seconds(4 << 20) == pytest.approx(0.1 + (4 << 20) / 1e8, rel=0.01)
    odd = LoadTime()
    for size, seconds in ((1 << 20, 0.9), (2 << 20, 0.1)):  # the larger one was faster
        odd.observe(size, seconds)
    assert odd.line()[0] >= 0 and odd.line()[1] > 0


def test_a_load_that_takes_too_long_counts_before_it_has_ended() -> None:
    at = 0.0
    load = LoadTime(0, 1e6, now=lambda: at)
    load.observe(1_000_000, 1.0)
    with load.loading(2_000_000), load.loading(2_000_000) as started:
        at = 3.0  # half of it is each one's
        assert load.seconds(2_000_000) == pytest.approx(2.0)
        at = 40.0
        assert load.seconds(2_000_000) > 15
        load.loaded(2_000_000, started)
    slow = load.seconds(2_000_000)
    assert 8 < slow < 20  # the other one never came: it says nothing any more
    at = 100.0
    assert load.seconds(2_000_000) == slow


def test_how_long_the_loads_under_way_still_take() -> None:
    at = 0.0
    load = LoadTime(now=lambda: at)
    with load.loading(1_000_000):
        assert load.seconds_left() == inf  # no load has been seen
    load.observe(1_000_000, 1.0)
    assert load.seconds_left() == 0
    with load.loading(2_000_000), load.loading(3_000_000):
        assert load.seconds_left() == pytest.approx(5.0)
        at = 2.0
        assert load.seconds_left() == pytest.approx(3.0)
        at = 5.0  # the first of them takes longer than that
        assert load.seconds_left() == inf


def test_the_cheapest_storage_that_is_fast_enough() -> None:
    offers = [
        Offer("RAM", LoadTime(0, 50e9), 3.0),
        Offer("NVMe", LoadTime(1e-4, 6e9), 0.1),
        Offer("object store", LoadTime(0.02, 1e8), 0.02),
    ]
    controller = Controller(COMPUTE, {}, LAYERS)
    work = dict(num_tokens=6000, num_other_tokens=50, bytes_per_token=BYTES, stored_tokens=10**6)
    hidden = recommend(offers, controller, **work, target_s=None)
    assert hidden.offer.name == "RAM"  # 0.8 GB at 6 GB/s takes longer than recomputing 15%
    assert recommend(offers, controller, **work, target_s=0.3).offer.name == "NVMe"
    relaxed = recommend(offers, controller, **work, target_s=60)
    assert relaxed.offer.name == "object store"
    assert relaxed.price == pytest.approx(10**6 * BYTES / 1e9 * 0.02)
    assert "2 others are fast enough and dearer" in relaxed.reason
    strict = recommend(offers, controller, **work, target_s=1e-6)
    assert strict.offer.name == "RAM" and "none is within" in strict.reason
    with pytest.raises(ValueError, match="offers is empty"):
        recommend([], controller, **work)
    with pytest.raises(ValueError, match="floor is 2; allowed: 0 to 1"):
        Controller(COMPUTE, {}, LAYERS, floor=2)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 100)), min_size=1, max_size=40))
def test_loads_that_share_a_tier_are_charged_its_time(steps: list[tuple[bool, int]]) -> None:
    """However loads overlap, their times add up to the time in which any was under way."""
    at = busy = 0
    clock = SharedClock(lambda: at)
    running: list[tuple[Any, float]] = []
    charged = 0.0
    for begins, wait in [*steps, *[(False, 1)] * len(steps)]:
        if begins:
            load = clock.running()
            running.append((load, load.__enter__()))
        elif running:
            load, started = running.pop(0)
            charged += clock.seconds(started)
            load.__exit__(None, None, None)
        at += wait
        busy += wait if running else 0
    assert charged == pytest.approx(busy)


def test_recomputation_leaves_some_of_the_load_s_time() -> None:
    loads = {"disk": LoadTime(0, 1e10)}
    chunks = [Located(8000, 8000 * BYTES, "disk")]
    whole = Controller(COMPUTE, loads, LAYERS).decide(chunks, 50)
    most = Controller(COMPUTE, loads, LAYERS, hide=0.8).decide(chunks, 50)
    assert whole.compute_s == pytest.approx(whole.load_s)
    assert most.compute_s == pytest.approx(0.8 * most.load_s)
    with pytest.raises(ValueError, match="hide is -1; allowed: 0 to 1"):
        Controller(COMPUTE, loads, LAYERS, hide=-1)


def test_full_prefill_may_have_times_of_its_own() -> None:
    chunks = [Located(8000, 8000 * BYTES, "disk")]
    loads = {"disk": LoadTime(0, 1e10)}
    quick = Controller(COMPUTE, loads, LAYERS, full=ComputeTime(1e-3, 0, 0, 0)).decide(chunks, 50)
    assert not any(quick.load) and quick.ttft_s == 1e-3
