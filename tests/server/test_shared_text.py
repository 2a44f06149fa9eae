"""Prompts whose documents share text, marked and found: no step fails to blend, and where all of it is
recomputed answers are full prefill's."""

from __future__ import annotations

from contextlib import AbstractContextManager
from random import Random
from typing import Any

import pytest
from asking import REPORT, answer, cutting_engine, drain, outputs, report, scheduler
from engines import Engine, make_engine

POLICIES = ["static", "ahead*static", "hkvd", "random"]
LONGEST = 1500
"""Tokens of a prompt before its question."""


class Prompts:
    """Random prompts over a few documents, some of which have a part of another in their midst."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._choose, self._engine = Random(seed), engine
        self._documents = [engine.ids(self._choose.randint(20, 200), 1000 + i) for i in range(40)]

    def next(self) -> tuple[list[int], dict[str, Any]]:
        """A prompt's token ids, and its ``blend`` field."""
        choose, spans = self._choose, []
        prompt = self._noise(30)
        for _ in range(choose.randint(1, 5)):
            document = self._document()
            if len(prompt) + len(document) > LONGEST:
                break
            if choose.random() < 0.7:
                spans.append([len(prompt), len(prompt) + len(document)])
            prompt += document
            if choose.random() < 0.5:
                prompt += self._noise(20)
        field: dict[str, Any] = {"spans": spans} if spans else {}
        field |= {"auto": choose.random() < 0.7, "policy": choose.choice(POLICIES)}
        return prompt + self._noise(20), field | {"recomp_ratio": choose.choice([0.1, 1.0])} | REPORT

    def _noise(self, most: int) -> list[int]:
        return list(self._engine.ids(self._choose.randint(1, most), self._choose.randrange(10**6)))

    def _document(self) -> list[int]:
        choose = self._choose
        document, other = choose.sample(self._documents, 2)
        if choose.random() < 0.5:
            return document
        cut, start = choose.randrange(len(document)), choose.randrange(len(other))
        edited = document[:cut] + other[start : start + choose.randint(5, 120)] + document[cut:]
        if choose.random() < 0.3:
            self._documents[choose.randrange(len(self._documents))] = edited[:300]
        return edited


def whole(folder: Any) -> AbstractContextManager[Engine]:
    settings = {"vllm_blend": {"ram_gb": 0.005}}
    return make_engine(folder, enable_prefix_caching=True, additional_config=settings)


def cut(folder: Any) -> AbstractContextManager[Engine]:
    return cutting_engine(folder, 150, ram_gb=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("engine_of", [whole, cut])
def test_marked_and_found_text_overlap_as_they_like(tiny: Any, engine_of: Any) -> None:
    choose, reused, harvested = Random(1), 0, 0
    with engine_of(tiny("llama")) as engine:
        drain(engine)
        prompts = Prompts(engine, seed=1)
        for _ in range(40):
            batch = [prompts.next() for _ in range(choose.randint(1, 4))]
            token_ids, fields = [ids for ids, _ in batch], [field for _, field in batch]
            plain = [answer(one) for one in outputs(engine, token_ids, [None] * len(batch))]
            scheduler(engine).reset_prefix_cache()
            found = outputs(engine, token_ids, fields)
            for field, one, full in zip(fields, found, plain, strict=True):
                assert field["recomp_ratio"] < 1 or answer(one) == full, field
            told = [report(one) for one in found]
            assert not any("failed" in one["why_not"] for one in told), fields
            reused += sum(one["reused_tokens"] for one in told)
            harvested += sum(one["harvested_chunks"] for one in told)
            if choose.random() < 0.3:
                scheduler(engine).reset_prefix_cache()
    assert reused > 5_000 and harvested > 20
