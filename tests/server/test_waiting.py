"""What a request waits for, driven by hand: no server, no clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_blend.core.plans import ChunkIds
from vllm_blend.server.request import BlendRequest
from vllm_blend.server.scheduler.waiting import CALIBRATION_S, LOCATE_S, State, Waiting
from vllm_blend.store.controller import Decision

KEY, CHUNK = b"chunk", ChunkIds("", (1, 2, 3))
SPANS = ((0, 3),)
PACED = BlendRequest(spans=SPANS, paced=True)
AUTO = BlendRequest(auto=True)


def test_a_request_that_names_its_ratio_asks_at_once() -> None:
    request = Waiting(BlendRequest(spans=SPANS), 10.0)
    assert request.advance(10.0, calibrated=False, indexed=False) is State.ASK
    request.wait([KEY], 10.5, seconds=2.0)
    assert request.advance(12.4, False, False) is State.CHUNKS
    assert request.advance(12.5, False, False) is State.READY
    assert request.seconds(99.0) == 2.0 and request.told is None


def test_chunks_that_come_end_the_wait() -> None:
    request = Waiting(BlendRequest(spans=SPANS), 0.0)
    request.advance(0.0, False, False)
    request.wait([KEY, b"another"], 0.0, seconds=60.0)
    request.come(b"another", 0.125)
    assert request.advance(0.125, False, False) is State.CHUNKS
    request.come(KEY, 0.25)
    assert request.advance(0.25, False, False) is State.READY
    assert request.seconds(9.0) == 0.25


def test_what_asks_for_nothing_has_not_waited() -> None:
    request = Waiting(BlendRequest(spans=SPANS), 0.0)
    request.advance(0.0, False, False)
    request.wait([], 1.0, seconds=0.0)
    assert request.advance(1.0, False, False) is State.READY
    assert request.seconds(5.0) is None


def test_a_ratio_auto_goes_through_calibration_and_places() -> None:
    request = Waiting(PACED, 0.0)
    assert request.advance(1.0, calibrated=False, indexed=True) is State.CALIBRATION
    assert request.advance(2.0, calibrated=True, indexed=True) is State.ASK and request.paced
    request.locate({KEY: CHUNK}, 2.0)
    assert request.advance(2.1, True, True) is State.PLACES
    request.places[KEY] = ("disk", 100)
    assert request.advance(2.2, True, True) is State.DECIDE
    request.decision, request.tiers = Decision(0.3, (False,), 0, 0, 0, "slow"), ("disk",)
    request.wait([], 2.2, seconds=0.0)
    assert request.advance(2.2, True, True) is State.READY
    told = request.told
    assert told is not None and told["slow_chunks"] == {"disk": 1} and told["load"] == [False]


def test_an_engine_that_is_not_calibrated_in_time_leaves_the_floor() -> None:
    request = Waiting(PACED, 0.0)
    assert request.advance(CALIBRATION_S, calibrated=False, indexed=True) is State.ASK
    assert not request.paced


def test_an_unknown_disk_is_not_waited_for_long() -> None:
    request = Waiting(AUTO, 0.0)
    assert request.advance(LOCATE_S / 2, True, indexed=False) is State.INDEX
    assert request.advance(LOCATE_S, True, indexed=False) is State.ASK
    assert Waiting(AUTO, 0.0).advance(0.0, False, indexed=True) is State.ASK


def test_acts_out_of_turn_are_refused() -> None:
    request = Waiting(PACED, 0.0)
    for act in (lambda: request.locate({}, 0.0), lambda: request.wait([], 0.0, 0.0)):
        with pytest.raises(AssertionError):
            act()


@given(
    blend_request=st.sampled_from([PACED, AUTO, BlendRequest(spans=SPANS, auto=True, paced=True)]),
    steps=st.lists(
        st.tuples(st.floats(0.001, 5), st.booleans(), st.booleans(), st.booleans()), max_size=40
    ),
    seconds=st.floats(0, 3),
)
def test_nobody_waits_for_ever_and_no_state_comes_back(
    blend_request: Any, steps: list[tuple[float, bool, bool, bool]], seconds: float
) -> None:
    """Whatever comes and whenever: the sum of the bounds ends it."""
    now, request = 0.0, Waiting(blend_request, 0.0)
    order, last = list(State), 0
    for step, calibrated, indexed, found in [*steps, *[(LOCATE_S, False, False, False)] * 40]:
        now += step
        state = request.advance(now, calibrated, indexed)
        assert order.index(state) >= last
        last = order.index(state)
        if state is State.ASK and request.paced:
            request.locate({KEY: CHUNK}, now)
        elif state in (State.ASK, State.DECIDE):
            request.wait([KEY], now, seconds)
        elif state is State.PLACES and found:
            request.places[KEY] = (None, 0)
    assert request.state is State.READY
