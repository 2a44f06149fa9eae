"""Prompts that come in parts: they are served as by vLLM alone, and told why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from asking import REPORT, answer, blending_engine, drain, outputs, prompt_of, report, scheduler
from engines import Engine
from vllm import SamplingParams

from vllm_blend.core.plans import BlendPlan, ChunkSpan


@pytest.fixture(scope="module")
def server(tiny: Any) -> Iterator[Engine]:
    with blending_engine(tiny("llama")) as engine:
        yield engine


def send(engine: Engine, ids: list[int], field: Any, more: bool) -> None:
    """A part of a streamed prompt; ``more`` come."""
    llm = engine.llm.llm_engine
    extra = None if field is None else {"blend": field}
    params = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, detokenize=False, extra_args=extra
    )
    request = llm.input_processor.process_inputs(
        "streamed", {"prompt_token_ids": ids}, params, ("generate",), resumable=more
    )
    core = llm.engine_core.engine_core
    core.add_request(*core.preprocess_add_request(request))


def step(engine: Engine) -> tuple[list[int], list[dict[str, Any]]]:
    """The next part's answer, and the reports that came with it."""
    core = engine.llm.llm_engine.engine_core.engine_core
    tokens: list[int] = []
    reports = []
    for _ in range(50):
        results, _ = core.step_fn()
        for result in results.values():
            for output in result.outputs:
                tokens += output.new_token_ids
                if output.kv_transfer_params:
                    reports.append(output.kv_transfer_params["blend"])
                if output.finish_reason is not None:
                    return tokens, reports
    raise AssertionError("no answer")


def test_a_streamed_prompt_is_not_blended_and_says_so(server: Engine) -> None:
    prompt, spans = prompt_of(server, [1, 2, 3], size=200)
    first, cut = spans[0], spans[1][0] + 5
    later = [[start - cut, end - cut] for start, end in spans[2:]]

    def ask(fields: list[Any]) -> tuple[list[list[int]], list[dict[str, Any]]]:
        scheduler(server).reset_prefix_cache()
        answers, reports = [], []
        for ids, field, more in zip((prompt[:cut], prompt[cut:]), fields, (True, True), strict=True):
            send(server, ids, field, more)
            tokens, told = step(server)
            answers.append(tokens)
            reports += told
        send(server, [1], None, more=False)
        drain(server)
        return answers, reports

    outputs(server, [prompt], [{"spans": spans}])
    drain(server)  # all chunks are known
    plain, _ = ask([None, None])
    found, reports = ask([{"spans": [first]} | REPORT, {"spans": later} | REPORT])
    assert found == plain
    assert {told["why_not"] for told in reports} and all("streamed" in r["why_not"] for r in reports)
    assert all(told["reused_tokens"] == 0 for told in reports)
    assert scheduler(server).blend_chunks.num_pinned == 0
    # its blocks are exact, and named so: what another request reads of them is its own
    alone = answer(*outputs(server, [prompt], [None]))
    scheduler(server).reset_prefix_cache()
    assert answer(*outputs(server, [prompt], [None])) == alone
    scheduler(server).reset_prefix_cache()
    (blended,) = outputs(server, [prompt], [{"spans": spans} | REPORT])
    assert report(blended)["reused_tokens"] == 600
    assert len(scheduler(server).blend_reports) == 0


def test_a_plan_of_a_script_is_refused_for_a_streamed_prompt(server: Engine) -> None:
    from engines import collect

    prompt, (span,) = prompt_of(server, [5])
    (kv,) = collect(server, [prompt[slice(*span)]])
    with pytest.raises(ValueError, match="streamed cannot be blended"):
        send(server, prompt, BlendPlan((ChunkSpan(span[0], kv),)), more=True)
