"""Models that take images too blend prompts of text, by the probe that any model gets; a prompt with an
image is vLLM's own.

A family is a row of ``helpers/wrappers.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from asking import REPORT, answer, drain, prompt_of, report, scheduler
from engines import Engine, collect, make_engine
from families import row_folder
from processes import needs_compiler
from test_families import check_identities
from wrappers import BEGIN_VISION, END_VISION, IMAGE, NEEDS_TORCHVISION, WRAPPERS

from vllm_blend.core.plans import BlendPlan, ChunkSpan
from vllm_blend.core.settings import BlendSettings
from vllm_blend.plugin import step_requests

TEXT_ONLY = {"limit_mm_per_prompt": {"image": 0, "video": 0}}


def rows(*names: str) -> list[Any]:
    """Those whose image processors transformers runs on torchvision alone need it here too."""
    return [
        pytest.param(name, marks=[needs_torchvision] if name in NEEDS_TORCHVISION else [])
        for name in names
    ]


def has_torchvision() -> bool:
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):  # a build for another torch
        return False
    return True


needs_torchvision = pytest.mark.skipif(not has_torchvision(), reason="torchvision is not installed")


def folder(name: str) -> Any:
    return row_folder(name, WRAPPERS[name])


@pytest.fixture(scope="module", params=rows(*WRAPPERS))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with make_engine(folder(request.param)) as engine:
        yield engine


@pytest.mark.covers("prompts of text in a multimodal model", backend="CPU_ATTN", family="{engine}")
def test_exact_kv_at_any_rows_is_full_prefill(engine: Engine) -> None:
    assert engine.llm.model_config.supports_multimodal_inputs  # the model gets embeddings, not ids
    check_identities(engine)


@pytest.mark.covers("multimodal model without images", backend="CPU_ATTN", family="{name}")
@pytest.mark.parametrize("name", rows("idefics3", "gemma3_mm", "qwen3_vl"))
def test_where_no_images_are_taken(name: str) -> None:
    with make_engine(folder(name), **TEXT_ONLY) as engine:
        assert not engine.llm.model_config.supports_multimodal_inputs
        check_identities(engine)


@pytest.mark.covers("torch.compile of a multimodal model", backend="CPU_ATTN", family="{name}")
@pytest.mark.parametrize("name", rows("idefics3", "qwen3_vl"))
@needs_compiler
def test_compiled(name: str) -> None:
    with make_engine(folder(name), enforce_eager=False) as engine:
        check_identities(engine)


# --- prompts with an image ---------------------------------------------------------------------------


def with_image(engine: Engine, text: list[int], side: int = 224) -> dict[str, Any]:
    """A prompt of an image and token ids."""
    from PIL import Image

    around = (BEGIN_VISION, END_VISION) if "Qwen" in type(engine.outer).__name__ else ()
    ids = [*around[:1], IMAGE, *around[1:]]
    pixels = bytes(i * 37 % 256 for i in range(3 * side * side))
    image = Image.frombytes("RGB", (side, side), pixels)
    return {"prompt_token_ids": ids + text, "multi_modal_data": {"image": image}}


def ask(engine: Engine, prompts: list[Any], fields: list[Any], max_tokens: int = 12) -> list[Any]:
    """Answers to one batch; the prefix cache is empty afterwards."""
    from vllm import SamplingParams

    options = dict(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    each = [
        SamplingParams(**options, extra_args=None if field is None else {"blend": field})
        for field in fields
    ]
    tokens = [{"prompt_token_ids": ids} if isinstance(ids, list) else ids for ids in prompts]
    found: list[Any] = engine.llm.generate(tokens, each, use_tqdm=False)
    drain(engine)
    scheduler(engine).reset_prefix_cache()
    return found


@pytest.fixture(scope="module", params=rows("idefics3", "mistral3", "qwen2_5_vl", "qwen3_vl"))
def server(request: pytest.FixtureRequest) -> Iterator[Engine]:
    settings = {"vllm_blend": {"ram_gb": 0.05, "stand_in": "", "auto": True, "harvest": False}}
    options = dict(enable_prefix_caching=True, additional_config=settings)
    with make_engine(folder(request.param), **options) as engine:
        drain(engine)
        yield engine


@pytest.mark.covers("prompts with images are left to vLLM", backend="CPU_ATTN", family="{server}")
def test_a_prompt_with_an_image_is_vllms_own(server: Engine) -> None:
    """Nothing of it is reused, kept or learned, and its report says why."""
    text = server.ids(300, 21)
    chunks = scheduler(server).blend_chunks
    before = len(chunks)
    (plain,) = ask(server, [with_image(server, text)], ["off"])
    for field in (None, REPORT, {"spans": [[100, 200]]} | REPORT):
        first, second = ask(server, [with_image(server, text)] * 2, [field] * 2)
        assert answer(first) == answer(second) == answer(plain)
        if field is not None:
            assert report(first)["why_not"].startswith("it has images, audio or video")
            assert report(first)["reused_tokens"] == 0
    assert len(chunks) == before
    # nor is its text learned: a prompt of text that has it is the first to do so
    (other,) = ask(server, [server.ids(20, 22) + text[20:250] + [11]], [REPORT])
    assert (report(other)["reused_tokens"], report(other)["missed_chunks"]) == (0, 0)
    assert len(chunks) == before


@pytest.mark.covers("images and blended prompts in one batch", backend="CPU_ATTN", family="{server}")
def test_images_and_blended_prompts_in_one_batch(
    server: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share steps only once the image's prefill has ended: its answer then stands at other
    positions than its tokens do (M-RoPE)."""
    prompt, spans = prompt_of(server, [1, 2, 3])
    field = {"spans": spans, "recomp_ratio": 0.1} | REPORT
    image = with_image(server, server.ids(30, 23))
    ask(server, [prompt], [field])
    (alone,) = ask(server, [prompt], [field])
    (full,) = ask(server, [prompt], ["off"])
    assert report(alone)["reused_tokens"] == 300 and answer(alone) != answer(full)
    (seen,) = ask(server, [image], [None])
    steps = []
    stock = step_requests.plan_step

    def planned(blending: Any, prefills: Any, batch: Any) -> Any:
        step = stock(blending, prefills, batch)
        if step is not None and step.blended:
            steps.append((len(batch.req_ids), list(batch.with_media)))
        return step

    monkeypatch.setattr(step_requests, "plan_step", planned)
    for order in ([image, prompt], [prompt, image], [image, prompt, image, prompt]):
        fields = [field if one is prompt else None for one in order]
        for one, output in zip(order, ask(server, order, fields), strict=True):
            expected = alone if one is prompt else seen
            assert answer(output) == answer(expected)
            assert one is image or report(output)["reused_tokens"] == 300
    assert not any(media for _, media in steps)
    assert max(count for count, _ in steps) > 1  # blended beside an image's answer


@pytest.mark.parametrize("name", rows("idefics3", "qwen3_vl"))
def test_in_a_script(name: str) -> None:
    with make_engine(folder(name)) as engine:
        chunk = engine.ids(60, 24)
        (kv,) = collect(engine, [chunk])
        plan = BlendPlan((ChunkSpan(0, kv),), BlendSettings(policy="random"))
        with pytest.raises(ValueError, match="cannot be blended: it has images, audio or video"):
            ask_with(engine, [with_image(engine, engine.ids(80, 26))], [plan])
        # another one: vLLM's front end believes that the engine has the pixels of the one above
        prompt, image = chunk + engine.ids(10, 25), with_image(engine, engine.ids(80, 26), side=112)
        with pytest.raises(RuntimeError, match="run it in another batch than prompts that blend"):
            ask_with(engine, [{"prompt_token_ids": prompt}, image], [plan, None])


def ask_with(engine: Engine, prompts: list[Any], plans: list[Any]) -> None:
    from engines import greedy

    from vllm_blend.compat.engine_access import abort_all

    try:
        engine.llm.generate(prompts, greedy(plans, 4), use_tqdm=False)
    finally:
        abort_all(engine.llm)
