"""One rank of an in-process engine: ``torchrun tests/tensor_parallel_rank.py MODEL OUT OPTIONS``, or
alone. ``OPTIONS`` are the ``LLM``'s, in JSON.

Writes what the engine answers, and which tokens it recomputes, to ``OUT`` followed by the rank.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))
POLICIES = ("hkvd", "hkvd_kv", "random", "query*hkvd", "ahead", "static", "ahead*hkvd")
NUM_CHUNKS, CHUNK = 4, 60


def main(model: Path, out: Path, options: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    from vllm_blend import Blender, BlendSettings, blend_model
    from vllm_blend.api.load_control import PacedBlender
    from vllm_blend.model.graphs import RowGraphs
    from vllm_blend.store import ChunkStore, DiskTier

    llm = LLM(
        str(model),
        max_model_len=1024,
        enable_prefix_caching=False,
        disable_log_stats=True,
        tensor_parallel_size=NUM_RANKS,
        **({"distributed_executor_backend": "external_launcher"} if NUM_RANKS > 1 else {}),
        **options,
    )
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5, detokenize=False)

    def tokens(number: int, count: int) -> list[int]:
        return [10 + (number * 7919 + at * 104729) % 300 for at in range(count)]

    texts = [tokens(number, CHUNK) for number in range(NUM_CHUNKS)]
    question = tokens(99, 9)
    found: dict[str, Any] = {}
    prepared, replayed = RowGraphs.prepared, []

    def remember(*args: Any) -> Any:
        replayed.append(prepared(*args))
        return replayed[-1]

    RowGraphs.prepared = remember

    def answer(blender: Blender, name: str, settings: BlendSettings | None) -> None:
        prompt = blender.prompt(blender.chunks(texts), question)
        output = blender.generate(prompt, params, settings=settings, blend=settings is not None)
        (completion,) = output.outputs
        kept = blender.model.cache_fuse_metadata["imp_indices"] if settings is not None else None
        found[name] = {
            "token_ids": list(completion.token_ids),
            "logprobs": [
                {token: one.logprob for token, one in place.items()} for place in completion.logprobs
            ],
            "kept": None if kept is None else kept.tolist(),
        }

    folder = out.parent / f"chunks-{NUM_RANKS}"
    has_loop = blend_model(llm).blending.loop is not None  # else no layer can be looked at
    policies = [one for one in POLICIES if has_loop or "hkvd" not in one]
    settings = BlendSettings(policy=policies[0], recomp_ratio=0.2)
    with ChunkStore([DiskTier(folder, budget_bytes=10**9)], host_bytes=10**8) as store:
        blender = Blender(llm, settings, stand_in="", store=store, scored=True)
        answer(blender, "full", None)
        answer(blender, "all", replace(settings, recomp_ratio=1.0))
        for policy in policies:
            answer(blender, policy, replace(settings, policy=policy))
        store.flush()
        if RANK == 1:  # one rank has lost its part of a chunk
            digest = blender.key(blender.token_ids(texts)[0]).digest
            next(folder.rglob(f"{digest.hex()}*")).unlink()
    with ChunkStore([DiskTier(folder, budget_bytes=10**9)], host_bytes=10**8) as store:
        blender = Blender(llm, settings, stand_in="", store=store, scored=True)
        answer(blender, "again", settings)
        store.flush()
        found["stats"] = store.stats()
        if NUM_RANKS > 1:
            try:
                PacedBlender(blender)
            except ValueError as error:
                found["paced"] = str(error)
        found["scores"] = [chunk.kv.scores.tolist() for chunk in blender.chunks(texts)]
    parameters = llm.llm_engine.model_executor.driver_worker.model_runner.model.named_parameters()
    found["experts"] = [len(one) for name, one in parameters if name.endswith("w13_weight")]
    found["replayed"] = any(run is not None for run in replayed)
    Path(f"{out}{RANK}").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
