"""Which server a request goes to, by what was sent."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_blend.api.routing import MIN_CHARS, REMEMBERED, Router, chunks_of

SERVERS = ["a", "b", "c"]


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    """Of texts that are long enough for chunks."""
    parts = [{"type": "text", "text": text * MIN_CHARS} for text in texts]
    return {"model": "m", "messages": [{"role": "user", "content": parts}], **more}


def test_a_gateway_needs_neither_vllm_nor_torch() -> None:
    code = "import sys, vllm_blend.api.routing; print(*{'vllm', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_prompt_goes_where_most_of_its_chunks_went() -> None:
    router = Router(SERVERS)
    first = router.choose(chat("one", "two"))
    second = router.choose(chat("three"))
    third = router.choose(chat("four"))
    assert {first, second, third} == set(SERVERS), "new chunks spread"
    assert router.choose(chat("two", "new")) == first
    assert router.choose(chat("four", "new too")) == third
    assert router.choose(chat("one", "two", "three")) == first


def test_length_decides_and_not_number() -> None:
    router = Router(SERVERS)
    long = router.choose(chat("long" * 100))
    short = router.choose(chat("s", "t", "u"))
    assert long != short
    assert router.choose(chat("s", "t", "u", "long" * 100)) == long


def test_what_everybody_asks_for_comes_to_lie_on_several() -> None:
    router = Router(SERVERS, slack=1.25)
    chosen = Counter(router.choose(chat("of all")) for _ in range(300))
    assert set(chosen) == set(SERVERS)
    assert max(chosen.values()) <= 300 / 3 * 1.25 + 10


def test_owners_share_no_chunk() -> None:
    one = chunks_of(chat("text"))
    assert one.keys().isdisjoint(chunks_of(chat("text", cache_salt="t")))
    assert one.keys().isdisjoint(chunks_of(chat("text") | {"model": "adapter"}))
    assert one == chunks_of(chat("text", temperature=0.5))
    pairs = [{"model": "a", "cache_salt": "b"}, {"model": "a b"}, {"model": 'a", "b'}]
    assert len({key for pair in pairs for key in chunks_of(chat("c") | pair)}) == 3


def test_a_text_is_the_same_chunk_however_it_is_marked() -> None:
    """The separator as an object, as JSON, and around chunks of a message or a prompt."""
    cut = "|".join(word * MIN_CHARS for word in ("head", "one", "two", "why"))
    text = {"model": "m", "prompt": cut, "vllm_xargs": {"blend": {"separator": "|"}}}
    there = chunks_of(chat("head", "one", "two", "why"))
    assert len(there) == 4
    assert chunks_of(text) == there
    assert chunks_of(text | {"vllm_xargs": {"blend": json.dumps({"separator": "|"})}}) == there
    message = {"role": "user", "content": cut}
    assert chunks_of({**text, "messages": [message]}) == there
    ids, field = list(range(40)), {"vllm_xargs": {"blend": {"spans": [[10, 40]]}}}
    one = chunks_of({"model": "m", "prompt": ids, **field})
    assert len(one) == 1
    assert one == chunks_of({"model": "m", "prompt": [7] * 10 + ids[10:], **field})
    assert one != chunks_of({"model": "m", "prompt": ids})


def test_what_is_too_short_to_be_reused_counts_for_nothing() -> None:
    short = {"role": "user", "content": "x" * (MIN_CHARS - 1)}
    assert not chunks_of({"messages": [short] * 1000})


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": None},
        {"messages": [None, {"content": 3}, {"content": [None, {"type": "image_url"}, {"text": 7}]}]},
        {"prompt": {"a": 1}},
        {"prompt": "", "vllm_xargs": {"blend": "{"}},
        {"prompt": [], "vllm_xargs": {"blend": {"spans": [[1], "x"]}}},
        {"prompt": None, "vllm_xargs": {"blend": "[" * 10**5}},
        {"messages": [], "vllm_xargs": {"blend": {"separator": 7}}},
    ],
)
def test_what_is_no_request_goes_somewhere(body: dict[str, Any]) -> None:
    assert not chunks_of(body)
    assert Router(SERVERS).choose(body) in SERVERS


def test_text_that_is_no_utf8_is_a_chunk() -> None:
    assert len(chunks_of(chat("\ud800", "\ud801"))) == 2


def test_a_server_that_is_down_gets_nothing_and_one_that_is_back_is_found() -> None:
    router = Router(SERVERS, slack=100)
    home = router.choose(chat("one"))
    rest = [name for name in SERVERS if name != home]
    assert router.choose(chat("one"), among=rest) in rest
    router.forget(home)
    assert router.choose(chat("one")) in rest


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"^servers is empty"):
        Router([])
    with pytest.raises(ValueError, match=r"^chunks is 0; allowed: 1 and more"):
        Router(SERVERS, chunks=0)
    for slack in (0.9, float("nan")):
        with pytest.raises(ValueError, match=rf"^slack is {slack}; allowed: 1 and more"):
            Router(SERVERS, slack=slack)
    router = Router(SERVERS)
    for among in ([], ["d"], ["a", "d"]):
        with pytest.raises(ValueError, match=r"^among is .*; allowed: some of a, b, c"):
            router.choose(chat("one"), among=among)
    with pytest.raises(ValueError, match=r"^server is 'd'; allowed: a, b, c"):
        router.forget("d")


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, 12), max_size=5), st.sets(st.sampled_from(SERVERS))),
        max_size=80,
    ),
    chunks=st.integers(1, 9),
    slack=st.floats(1, 4),
)
def test_memory_is_bounded_and_no_server_has_more_than_its_share(
    prompts: list[tuple[list[int], set[str]]], chunks: int, slack: float
) -> None:
    router = Router(SERVERS, chunks, slack)
    lately: list[str] = []
    for numbers, up in prompts:
        among = sorted(up) or SERVERS
        sent = Counter(lately[-REMEMBERED * len(SERVERS) :])
        mean = sum(sent[name] for name in among) / len(among)
        chosen = router.choose(chat(*(f"chunk {n}" for n in numbers)), among)
        assert chosen in among
        assert sent[chosen] < slack * mean + 1
        lately.append(chosen)
        held = {name: set(own) for name, own in router._held.items()}
        assert all(len(own) <= chunks for own in held.values())
        told = {(d, name) for d, names in router._holders.items() for name in names}
        assert told == {(d, name) for name, own in held.items() for d in own}
        assert all(router._holders.values()), "nothing is kept of a chunk that no server has"
