"""Two tensor-parallel ranks, in process and behind a server: as one rank, and never apart."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import tiny_model
from families import Family, row_folder
from serving import (
    chat,
    connect,
    disk,
    reported,
    reset_prefix_cache,
    sample,
    serving,
    text_of,
    warm,
    xargs,
)

pytestmark = pytest.mark.slow

RANK = Path(__file__).parents[1] / "helpers" / "tensor_parallel_rank.py"
LARGE = dict(
    vocab_size=49152,
    max_position_embeddings=4096,
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=8,
    head_dim=64,
)
ON_GPU: dict[str, Any] = dict(kv_cache_memory_bytes=1 << 30, gpu_memory_utilization=0.1)
NAMES = (
    *("full", "all", "hkvd", "hkvd_kv", "random", "query*hkvd", "ahead", "static", "ahead*hkvd"),
    "again",
)
BEFORE_LAYER_0 = tuple(name for name in NAMES if "hkvd" not in name)
"""Of a model whose layers no policy can look at."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with two KV heads, and SmolLM2's tokenizer."""
    folder = tiny_model("llama", tmp_path_factory.mktemp("model"), **LARGE)
    for path in smollm2.glob("*token*"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def steady_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with narrower weights: it does not amplify rounding."""
    folder = tiny_model("llama", tmp_path_factory.mktemp("steady"), **LARGE, initializer_range=0.08)
    for path in model.glob("*token*"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def experts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of eight experts with two KV heads, and SmolLM2's tokenizer."""
    values = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128)
    row = Family("Qwen3MoeConfig", LARGE | values | dict(initializer_range=0.15))
    folder = tmp_path_factory.mktemp("experts")
    shutil.copytree(row_folder("experts", row), folder, dirs_exist_ok=True)
    for path in model.glob("*token*"):
        shutil.copy(path, folder)
    return folder


def run(model: Path, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """What one rank alone writes, then what two do."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    for launcher, name in (((), "one"), (TORCHRUN, "two")):
        command = [sys.executable, *launcher, str(RANK), str(model), str(folder / name)]
        command.append(json.dumps(options))
        log = folder / f"{name}.log"
        with log.open("w") as out:
            done = subprocess.run(command, env=environment, stdout=out, stderr=out, timeout=600)
        assert done.returncode == 0, log.read_text()[-12000:]
    return [json.loads((folder / name).read_text()) for name in ("one0", "two0", "two1")]


def compare(answers: list[dict[str, Any]], names: Sequence[str] = NAMES) -> None:
    """Two ranks answer as one."""
    one, *two = answers
    for name, rank in product(names, two):
        assert rank[name]["token_ids"] == one[name]["token_ids"], name
        assert rank[name]["kept"] == one[name]["kept"], name  # "full" has none
        for place, expected in zip(rank[name]["logprobs"], one[name]["logprobs"], strict=True):
            for token, logprob in expected.items():
                assert place[token] == pytest.approx(logprob, abs=1e-3), (name, token)
    for rank in two:
        for scores, expected in zip(rank["scores"], one["scores"], strict=True):
            assert scores == pytest.approx(expected, rel=1e-3)
    assert two[0]["scores"] == two[1]["scores"]  # each of its heads, and all of their sum


@pytest.fixture(scope="module")
def answers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(model, tmp_path_factory.mktemp("answers"), dtype="float32", enforce_eager=True)


@pytest.mark.covers("tensor parallelism", backend="CPU_ATTN", family="llama")
def test_two_ranks_answer_as_one(answers: list[dict[str, Any]]) -> None:
    compare(answers)


@pytest.mark.covers("tensor parallelism", backend="XFORMERS", family="llama")
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_answer_as_one(model: Path, tmp_path: Path) -> None:
    answers = run(model, tmp_path, dtype="float32", attention_backend="XFORMERS", **ON_GPU)
    compare(answers)
    assert answers[1]["replayed"] == answers[2]["replayed"]


@pytest.mark.covers("tensor parallelism", backend="FLASH_ATTN", family="llama")
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_choose_the_same(steady_model: Path, tmp_path: Path) -> None:
    """In bf16, where one rank may choose others."""
    _, first, second = run(steady_model, tmp_path, dtype="bfloat16", **ON_GPU)
    for name in NAMES:
        assert first[name] == second[name], name
    assert first["all"]["token_ids"][0] == first["full"]["token_ids"][0]
    assert first["replayed"] and second["replayed"]


@pytest.mark.covers("expert parallelism", backend="{backend}", family="qwen3_moe")
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", ["XFORMERS", "FLASH_ATTN"])
def test_two_gpus_with_half_of_the_experts_each(
    experts: Path, tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32 they answer as one; in bf16, where one may choose others, they choose the same."""
    exact = backend == "XFORMERS"
    if exact:  # else vLLM's experts multiply fp32 in TF32
        monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    options: dict[str, Any] = dict(enable_expert_parallel=True, enforce_eager=True) | ON_GPU
    dtype = "float32" if exact else "bfloat16"
    answers = run(experts, tmp_path, dtype=dtype, attention_backend=backend, **options)
    assert [{*rank["experts"]} for rank in answers] == [{8}, {4}, {4}]
    if exact:
        compare(answers, BEFORE_LAYER_0)
        return
    _, first, second = answers
    for name in BEFORE_LAYER_0:
        assert first[name] == second[name], name


def test_ranks_do_not_measure_for_themselves(answers: list[dict[str, Any]]) -> None:
    for rank in answers[1:]:
        assert "tensor_parallel_size is 2; allowed: 1" in rank["paced"]


def test_what_the_ranks_are_compared_by_differs(answers: list[dict[str, Any]]) -> None:
    """Else they could not but agree."""
    one = answers[0]
    kept = [tuple(one[name]["kept"]) for name in ("all", "hkvd", "random", "ahead", "static")]
    assert len(set(kept)) == len(kept)
    assert one["all"]["logprobs"] != one["hkvd"]["logprobs"]
    assert one["all"]["token_ids"] == one["full"]["token_ids"]


def test_a_chunk_of_which_a_rank_lost_its_part_is_computed_again(answers: list[dict[str, Any]]) -> None:
    one, first, second = [found["stats"] for found in answers]
    assert one["hits.disk"] == first["hits.disk"] == 4
    assert (second["hits.disk"], second["misses.absent"], second["writes.disk"]) == (3, 1, 1)
    assert first["writes.disk"] == 1  # of the same computation
    assert answers[1]["again"] == answers[1]["hkvd"]


def test_a_server_with_two_ranks(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # a rank wants a NUMA node of its own
    tiers = {"host_gb": 0.0044} | disk(tmp_path)  # 770 tokens: one sample
    arguments = ("--tensor-parallel-size", "2")
    # chunks of the first request's own prefill would be its own full prefill
    with serving(model, tmp_path, tiers, arguments, recomp_ratio=0.2, harvest=False) as url:
        client, records = connect(url), tmp_path / "chunks"

        def ask(**field: Any) -> tuple[str, dict[str, Any]]:
            reset_prefix_cache(url)  # exact blocks of a full prefill go before chunks
            answer = chat(client, *sample(1), **xargs(field | {"report": True}))
            return text_of(answer), reported(answer)

        warm(client, *sample(1))
        first, told = ask()
        assert (told["loaded_chunks"], told["missed_chunks"]) == (0, 0)
        broadcast_rank0 = sorted(records.rglob("*.safetensors"))
        assert len(broadcast_rank0) == 2 * 3  # a part of each chunk from each rank
        full = text_of(chat(client, *sample(1), **xargs("off")))
        assert ask(recomp_ratio=1.0)[0] == full != first

        warm(client, *sample(2))
        again, told = ask()
        assert (told["loaded_chunks"], told["missed_chunks"]) == (3, 0)
        assert again == first

        warm(client, *sample(2))
        broadcast_rank0[0].unlink()  # of one of the ranks
        _, told = ask()
        assert (told["loaded_chunks"], told["missed_chunks"]) == (2, 1)
        warm(client, *sample(1))
        assert ask()[0] == first
