"""Auto mode: what is learned of a tenant's prompts is its own."""

from __future__ import annotations

from types import SimpleNamespace

from background import complete

from vllm_blend.server.chunks.chunk_contexts import Contexts
from vllm_blend.server.chunks.chunk_registry import ChunkRegistry
from vllm_blend.server.chunks.shared_index import SharedIndex
from vllm_blend.server.chunks.token_index import Windows
from vllm_blend.server.internal.background_prefill import BackgroundPrefill
from vllm_blend.server.request import BlendRequest
from vllm_blend.server.scheduler.lookup import Lookup

TEXT = tuple(range(5000, 5100))
AUTO = BlendRequest(auto=True)


def ask(lookup: Lookup, background: BackgroundPrefill, tenant: str, number: int) -> tuple[int, int]:
    """Chunks that a prompt with the text reuses, and those that it brings."""
    prompt = (*range(100 * number, 100 * number + 20 + number), *TEXT, 7)
    found = lookup(tenant, prompt, AUTO)
    brought = background.num_waiting
    while background.num_waiting:
        for request in background.start(idle=True):
            complete(background, request.request_id)
    return len(found.spans), brought


def test_each_tenant_learns_for_itself() -> None:
    chunks = ChunkRegistry(10**5)
    background = BackgroundPrefill(chunks, 1000, 1.0, lambda name, *_: SimpleNamespace(request_id=name))
    lookup = Lookup(chunks, background, None, Contexts((1,), (1,)), 16, 8192)
    alone = [ask(lookup, background, "a", number) for number in range(3)]
    assert alone == [(0, 0), (0, 1), (1, 0)]
    # another's text makes no difference, neither to what is reused nor to what is done
    assert [ask(lookup, background, "b", number) for number in range(3)] == alone


def test_an_index_that_tenants_share_is_bounded_fairly() -> None:
    index = SharedIndex(max_tokens=1000, max_owners=3)
    for number in range(5):
        index.add("few", number, Windows.of(range(100 * number, 100 * number + 50)))
    for number in range(40):
        index.add("many", number, Windows.of(range(100 * number, 100 * number + 50)))
        assert index.num_tokens <= 1000
    few, many = index.get("few"), index.get("many")
    assert few is not None and many is not None
    assert (len(few), len(many)) == (5, 15)
    assert 39 in many and 24 not in many
    index.remove("few", 0)
    assert index.num_tokens == 950
    assert index.open("third") == [] and index.open("fourth") == ["few"]  # it was asked first
    assert index.num_tokens == 750 and "few" not in index


def test_what_a_prompt_reuses_makes_no_room_for_what_it_brings() -> None:
    """Memory for one chunk and a half: the known one stays, and the new one is not kept."""
    chunks = ChunkRegistry(150)
    background = BackgroundPrefill(chunks, 1000, 1.0, lambda request_id, *_: request_id)
    lookup = Lookup(chunks, background, None, Contexts((1,), (1,), harvest=True), 16, 8192)
    old, new = tuple(range(100, 200)), tuple(range(300, 400))
    first = lookup("", (9, 9, *old, 5), BlendRequest(spans=((2, 102),)))
    (kept,) = first.harvest
    assert kept.key is not None
    chunks.commit(kept.key)
    both = BlendRequest(spans=((2, 102), (102, 202)))
    found = lookup("", (9, 9, *old, *new, 5), both)
    assert [span.key for span in found.spans] == [kept.key] and kept.key in chunks
    assert (found.missed, found.harvest, chunks.num_pinned) == (1, [], 0)
