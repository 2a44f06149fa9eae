"""An engine that is to end: its backlog goes, what it wrote stays."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from asking import drain, outputs, prompt_of, scheduler
from engines import make_engine
from servers import free_port
from serving import NAME, command_of, connect, disk, reported, running, serving, wait_for, xargs

from vllm_blend.store.disk import SUFFIX

NUM_CHUNKS = 60


def test_an_engine_that_ends_computes_no_chunk_that_nobody_waits_for(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"vllm_blend": {"ram_gb": 0.05, "stand_in": "", "harvest": False}}
    with make_engine(tiny("llama"), enable_prefix_caching=True, additional_config=settings) as engine:
        drain(engine)
        state = scheduler(engine)
        prompt, spans = prompt_of(engine, list(range(1, 9)))
        outputs(engine, [prompt], [{"spans": spans}], max_tokens=1)
        background = state.blend_internal.background
        monkeypatch.setattr(background, "window", 40)  # less than a chunk
        while not background.num_running:
            engine.llm.llm_engine.step()
        assert state.has_requests() and len(background) > 5
        computed = background.num_computed
        state.stop_background()
        assert len(background) == 0
        drain(engine)  # tells the model's process of those that ended
        outputs(engine, [prompt], [{"spans": spans}])  # that drains misses its chunks
        drain(engine)
        assert (background.num_computed, background.num_running) == (computed, 0)


def ids(seed: int, size: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(1000, 40_000) for _ in range(size)]


@pytest.mark.slow
def test_a_server_with_a_backlog_ends_and_finds_what_it_wrote(smollm2: Path, tmp_path: Path) -> None:
    chunks = [ids(seed, 240) for seed in range(NUM_CHUNKS)]
    field = {"report": True}

    def ask(url: str, some: list[list[int]]) -> dict[str, Any]:
        prompt = ids(998, 5)
        spans = []
        for chunk in some:
            spans.append([len(prompt), len(prompt) + len(chunk)])
            prompt += chunk
        extra = xargs(field | {"spans": spans})
        answer = connect(url).completions.create(
            model=NAME, prompt=prompt + ids(999, 5), max_tokens=1, temperature=0, extra_body=extra
        )
        return reported(answer)

    port, log = free_port(), tmp_path / "ended.txt"
    command = command_of(
        smollm2, port, disk(tmp_path), ["--shutdown-timeout", "40"], stand_in="", harvest=False
    )
    url = f"http://127.0.0.1:{port}"
    with running(command, log) as server:
        wait_for(f"{url}/health", server, log)
        for at in range(0, NUM_CHUNKS, 10):
            told = ask(url, chunks[at : at + 10])
        while not (told := ask(url, [chunks[0]]))["reused_tokens"]:
            httpx.post(f"{url}/reset_prefix_cache", timeout=30)
            time.sleep(0.2)
        assert told["waiting_chunks"] > NUM_CHUNKS // 2
        computed = told["computed_chunks"]
        start = time.monotonic()
        server.terminate()
        server.wait(60)
    print(f"ended after {time.monotonic() - start:.1f} s, {told['waiting_chunks']} chunks waited")
    assert "force killing" not in log.read_text()
    written = list((tmp_path / "chunks").rglob("*" + SUFFIX))
    assert computed <= len(written) <= computed + 2, "what was computed is written, and no more"
    with serving(smollm2, tmp_path, disk(tmp_path), stand_in="", harvest=False) as url:
        assert ask(url, [chunks[0]])["reused_tokens"] == 240
