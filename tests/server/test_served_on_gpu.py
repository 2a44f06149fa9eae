"""A server in processes of its own, as a GPU runs it: what one request has computed the next reuses."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from servers import free_port
from serving import connect, reported, running, wait_for, xargs

TOKENS, CHUNKS = 1000, 9
MEMORIES = {"ram": {"ram_gb": 0.5}, "store": {"store": {"host_gb": 0.6}}}
ENGINES = [
    pytest.param("cpu", True, marks=pytest.mark.slow),
    *(pytest.param("cuda", eager, marks=pytest.mark.gpu) for eager in (True, False)),
]


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(("device", "eager"), ENGINES)
def test_an_answer_of_one_token_leaves_its_chunks(
    device: str, memory: str, eager: bool, smollm2: Path, tmp_path: Path
) -> None:
    """Long prompts, computed in one step each, after which the engine has nothing to do."""
    port, log = free_port(), tmp_path / "log.txt"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm2)]
    command += ["--port", str(port), "--host", "127.0.0.1", "--max-num-batched-tokens", "16384"]
    command += ["--hf-overrides", '{"max_position_embeddings": 16384}', "--max-model-len", "16384"]
    if device == "cuda":
        command += ["--dtype", "bfloat16", "--gpu-memory-utilization", "0.3"]
    command += ["--enforce-eager"] * eager
    command += ["--additional-config", json.dumps({"vllm_blend": MEMORIES[memory]})]
    choose = random.Random(0)
    chunks = [[choose.randrange(10, 1200) for _ in range(TOKENS)] for _ in range(CHUNKS)]

    with running(command, log) as server:
        wait_for(f"http://127.0.0.1:{port}/health", server, log)
        client = connect(f"http://127.0.0.1:{port}")

        def ask(order: list[list[int]]) -> int:
            spans = [[10 + at * TOKENS, 10 + (at + 1) * TOKENS] for at in range(CHUNKS)]
            answer = client.completions.create(
                model=str(smollm2),
                prompt=[*range(20, 30), *sum(order, []), 7],
                max_tokens=1,
                extra_body=xargs({"report": True, "spans": spans}),
            )
            return int(reported(answer)["reused_tokens"])

        assert ask(chunks) == 0
        assert ask(chunks[::-1]) == CHUNKS * TOKENS, log.read_text()[-5000:]
