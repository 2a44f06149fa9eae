"""Finding known sequences: against a search that compares everything with everything."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_blend.server.chunks.token_index import WINDOW, SequenceIndex, Windows

tokens = st.lists(st.integers(0, 3), min_size=0, max_size=90)


def longest_at(prompt: list[int], position: int, known: list[list[int]]) -> int:
    """Length of the longest piece of a known sequence that the prompt has at ``position``."""
    best = 0
    for sequence in known:
        for offset in range(len(sequence)):
            length = 0
            while (
                position + length < len(prompt)
                and offset + length < len(sequence)
                and prompt[position + length] == sequence[offset + length]
            ):
                length += 1
            best = max(best, length)
    return best


@settings(deadline=None)
@given(st.lists(tokens, max_size=4), st.data())
def test_runs_are_known_tokens_and_none_that_is_long_enough_is_missed(
    known: list[list[int]], data: st.DataObject
) -> None:
    pieces = data.draw(st.lists(st.sampled_from(known) | tokens if known else tokens, max_size=4))
    prompt = sum(pieces, [])
    index = SequenceIndex(max_tokens=10**6)
    for number, sequence in enumerate(known):
        index.add(number, Windows.of(sequence))
    runs = index.find(Windows.of(prompt))
    end = 0
    for run in runs:
        assert run.start >= end
        assert run.end - run.start >= WINDOW
        assert isinstance(run.key, int)
        offsets = slice(run.offset, run.offset + run.end - run.start)
        assert known[run.key][offsets] == prompt[run.start : run.end]
        end = run.end
    covered = {at for run in runs for at in range(run.start, run.end)}
    for position in range(len(prompt)):
        length = longest_at(prompt, position, known)
        if length >= 2 * WINDOW - 1:  # it holds a whole window of the index
            assert covered & set(range(position, position + length))


def test_a_run_is_as_long_as_it_can_be() -> None:
    known = list(range(100, 200))
    index = SequenceIndex(max_tokens=1000)
    index.add("a", Windows.of(known))
    prompt = [1, 2, *known[7:93], 3, *known]
    runs = index.find(Windows.of(prompt))
    assert [(run.start, run.end, run.offset) for run in runs] == [(2, 88, 7), (89, 189, 0)]
    assert [run.end - run.start for run in index.find(Windows.of(prompt), min_tokens=90)] == [100]


def test_the_same_hash_is_not_the_same_tokens() -> None:
    index = SequenceIndex(max_tokens=1000)
    index.add("a", Windows.of(range(WINDOW)))
    (value,) = index._windows
    other = list(range(50, 50 + WINDOW))
    windows = Windows.of(other)
    index._windows = {int(v): ("a", 0) for v in windows.hashes} | {value: ("a", 0)}
    assert index.find(windows) == []


@given(st.integers(0, 60), st.integers(0, 60))
def test_a_prompts_head_has_the_windows_of_its_tokens(num_tokens: int, count: int) -> None:
    head, alone = Windows.of(range(num_tokens)).head(count), Windows.of(range(min(count, num_tokens)))
    assert head.tokens.tolist() == alone.tokens.tolist()
    assert head.hashes.tolist() == alone.hashes.tolist()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(16, 60)), max_size=20))
def test_the_oldest_go_first_and_leave_nothing_behind(adds: list[tuple[int, int]]) -> None:
    index = SequenceIndex(max_tokens=100)
    for key, length in adds:
        index.add(key, Windows.of([key * 1000 + at for at in range(length)]))
        assert index.num_tokens <= 100
    for key in list(index._sequences):
        index.remove(key)
    assert (index.num_tokens, len(index), index._windows) == (0, 0, {})
