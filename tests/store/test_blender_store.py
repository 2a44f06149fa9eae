"""The friendly door over a store: a chunk that one process computed is reused by another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import Engine
from servers import RedisServer

from vllm_blend import Blender
from vllm_blend.core.settings import PAPER
from vllm_blend.store import ChunkStore, DiskTier

TEXTS = [
    "Tolmere is a harbour town. Its bakery was founded by Ada Quill in 1911.",
    "The museum of Tolmere shows boats, nets and a clock that runs backwards.",
]
QUESTION = "Who founded the bakery?"
HOST_BYTES = 64 << 20

SECOND = """
import json, sys
from pathlib import Path
from engines import make_engine
from test_blender_store import QUESTION, TEXTS, HOST_BYTES, answer, count_runs
from vllm_blend import Blender
from vllm_blend.core.settings import PAPER
from vllm_blend.store import ChunkStore, DiskTier
from vllm_blend.store.redis_tier import RedisTier

model, folder, url = sys.argv[1:]
with make_engine(Path(model)) as engine:
    for tier in (DiskTier(folder, 1 << 30), RedisTier(url, 1 << 30)):
        for salt in ("", "another tenant"):
            with ChunkStore([tier], host_bytes=HOST_BYTES) as store:
                blender = Blender(engine.llm, PAPER, store=store, salt=salt, stand_in="")
                runs = count_runs(blender)
                tokens = answer(blender)
                name = tier.name
                print(json.dumps([name, salt, store.stats().get(f"hits.{name}", 0), sum(runs), tokens]))
            tier = type(tier)(folder if name == "disk" else url, 1 << 30)
"""


def answer(blender: Blender) -> list[int]:
    from vllm import SamplingParams

    prompt = blender.prompt(blender.chunks(TEXTS), QUESTION)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return list(blender.generate(prompt, params).outputs[0].token_ids)


def count_runs(blender: Blender) -> list[int]:
    """Grows by the number of chunks, each time some are computed."""
    runs: list[int] = []
    collect = blender.collector.collect
    blender.collector.collect = lambda chunks, *a, **kw: (
        runs.append(len(chunks)) or collect(chunks, *a, **kw)
    )  # type: ignore
    return runs


def test_a_chunk_is_computed_once_and_kept_in_the_store(smollm2_engine: Engine, tmp_path: Path) -> None:
    with ChunkStore([DiskTier(tmp_path, 1 << 30)], host_bytes=HOST_BYTES) as store:
        blender = Blender(smollm2_engine.llm, PAPER, store=store, stand_in="")
        runs = count_runs(blender)
        expected = answer(Blender(smollm2_engine.llm, PAPER, stand_in=""))
        assert answer(blender) == expected
        assert store.flush()
        assert not blender._chunks  # nobody holds them, so nor does the blender
        chunk = blender.chunk(TEXTS[0])
        assert blender.chunk(TEXTS[0]) is chunk
        assert sum(runs) == 2
        assert answer(blender) == expected  # from host memory
        for text in TEXTS:
            chunk = blender.chunk(text)
            store.discard(blender.key(chunk.token_ids, chunk.context))
        del chunk
        assert answer(blender) == expected  # from disk
        assert sum(runs) == 2
        stats = store.stats()
        assert stats["hits.disk"] == 2
        assert stats["misses.absent"] == 2
        for context in ({"system": "Be brief."}, {"head": "Be brief."}):
            for expected_runs in (1, 0):  # another context is another chunk, the same the same
                other = Blender(smollm2_engine.llm, PAPER, store=store, stand_in="", **context)  # type: ignore
                runs = count_runs(other)
                other.chunk(TEXTS[0])
                assert sum(runs) == expected_runs
                del other


@pytest.mark.slow
def test_two_processes_share_chunks_by_disk_and_by_redis(
    smollm2_engine: Engine, smollm2: Path, tmp_path: Path, redis_server: RedisServer
) -> None:
    pytest.importorskip("redis")
    from vllm_blend.store.redis_tier import RedisTier

    tiers: list[Any] = [DiskTier(tmp_path / "kv", 1 << 30), RedisTier(redis_server.url, 1 << 30)]
    with ChunkStore(tiers, host_bytes=HOST_BYTES) as store:
        expected = answer(Blender(smollm2_engine.llm, PAPER, store=store, stand_in=""))
        assert store.flush()
    environment = os.environ | {
        "PYTHONPATH": f"{Path(__file__).parents[1]}/helpers:{Path(__file__).parent}"
    }
    command = [sys.executable, "-c", SECOND, str(smollm2), str(tmp_path / "kv"), redis_server.url]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert lines == [
        ["disk", "", 2, 0, expected],
        ["disk", "another tenant", 0, 2, expected],
        ["redis", "", 2, 0, expected],
        ["redis", "another tenant", 0, 2, expected],
    ], done.stderr[-3000:]
