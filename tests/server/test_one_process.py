"""A server whose engine and model share a process, as on one GPU: what one request has computed the
next reuses. (On a CPU vLLM gives the model a process of its own, but where it is told not to.)"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from servers import free_port
from serving import connect, reported, running, wait_for, xargs

TOKENS, CHUNKS = 300, 4
MEMORIES = {"ram": {"ram_gb": 0.2}, "store": {"store": {"host_gb": 0.3}}}
ENGINES = [
    pytest.param("cpu", True, marks=pytest.mark.slow),
    *(pytest.param("cuda", eager, marks=pytest.mark.gpu) for eager in (True, False)),
]


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(("device", "eager"), ENGINES)
def test_an_answer_of_one_token_leaves_its_chunks(
    device: str, memory: str, eager: bool, smollm2: Path, tmp_path: Path
) -> None:
    """A prompt that is computed in one step, after which the engine has nothing to do."""
    port, log = free_port(), tmp_path / "log.txt"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm2)]
    command += ["--port", str(port), "--host", "127.0.0.1", "--max-model-len", "2048"]
    if device == "cuda":
        command += ["--dtype", "bfloat16", "--gpu-memory-utilization", "0.3"]
    command += ["--enforce-eager"] * eager
    command += ["--distributed-executor-backend", "uni"]
    command += ["--additional-config", json.dumps({"vllm_blend": MEMORIES[memory]})]
    choose = random.Random(0)
    chunks = [[choose.randrange(10, 1200) for _ in range(TOKENS)] for _ in range(CHUNKS)]

    # vLLM for a CPU looks for "1", and takes another executor then
    with running(command, log, VLLM_ENABLE_V1_MULTIPROCESSING="01") as server:
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

        assert "EngineCore" in log.read_text() and "Worker" not in log.read_text()
        assert ask(chunks) == 0
        assert ask(chunks[::-1]) == CHUNKS * TOKENS, log.read_text()[-5000:]
