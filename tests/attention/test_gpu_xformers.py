"""XFORMERS on a GPU: its kernels against dense attention, both model runners, a spawned engine.

The identities are test_gpu.py's, with SmolLM2, and test_xformers_engine.py's, with tiny models in fp32.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import make_engine, relative_error
from paged_step import STEPS, Step
from processes import python

from vllm_blend.attention.xformers import XFormersImpl
from vllm_blend.attention.xformers_parts import Way
from vllm_blend.core.plans import BlendPlan
from vllm_blend.core.settings import BlendSettings
from vllm_blend.core.step import BlendStep, StepRequest

pytestmark = pytest.mark.gpu
pytest.importorskip("xformers", reason="xformers is not installed")

HERE = str(Path(__file__).parents[1] / "helpers")
LARGER = {
    "long prompts": ([300, 989], [300, 989]),
    "long tails": ([99, 1, 257, 500], [1500, 700, 1024, 500]),
}
ALLOWED = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative errors. xformers computes fp32 as three TF32 products; 16-bit outputs are rounded to 11 and
8 bits, and so are the weights before they meet V."""


# --- the kernels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 13])
@pytest.mark.parametrize("heads", [(4, 4, 64), (9, 3, 64), (32, 8, 128), (4, 1, 80), (2, 1, 256)])
@pytest.mark.parametrize("lens", (STEPS | LARGER).values(), ids=STEPS | LARGER)
@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
def test_a_step_attends_as_dense_attention_does(
    dtype: torch.dtype, lens: tuple[list[int], list[int]], heads: tuple[int, int, int], window: int
) -> None:
    step = Step(*lens, heads[:2], heads[2], dtype, "cuda")
    metadata = step.build()
    rows = torch.arange(metadata.num_actual_tokens)
    output = step.attend(step.impl(window), metadata).cpu()
    expected = step.expected(rows, step.last(), window, torch.float64)
    assert relative_error(output[: -step.PADDING], expected) < ALLOWED[dtype]
    assert bool((output[-step.PADDING :] == 7).all())


@pytest.mark.parametrize("window", [0, 13])
@pytest.mark.parametrize("count", [5, 20, 200])
@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
def test_kept_rows_under_the_papers_mask(dtype: torch.dtype, count: int, window: int) -> None:
    step = Step([1, 400, 2], [33, 400, 64], (8, 2), 64, dtype, "cuda")
    blend = BlendPlan((), BlendSettings(mask="bottom_right"))
    request = StepRequest(blend, 1, 0, 400, torch.device("cuda"))
    kept = torch.randperm(399)[: count - 1].sort().values
    rows = torch.cat([torch.tensor([0]), kept + 1, torch.tensor([400, 401, 402])])
    blended = BlendStep([request], 403, "auto")
    metadata = XFormersImpl.metadata(None, step.build(), blended, rows.cuda())
    assert [span.way for span in metadata.spans] == [Way.PAGED, Way.BOTTOM_RIGHT, Way.PAGED]
    last = step.last()[rows]
    last[1 : count + 1] = torch.arange(400 - count, 400)
    output = step.attend(step.impl(window), metadata, rows.cuda()).cpu()
    expected = step.expected(rows, last, window, torch.float64)
    assert relative_error(output, expected) < ALLOWED[dtype]


@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
def test_vllms_own_op_writes_the_cache(dtype: torch.dtype) -> None:
    step = Step(*STEPS["fresh"], (8, 2), 64, dtype, "cuda")
    cache = torch.full_like(step.kv_cache, 1e4)  # what the step has where it holds no key
    one = torch.ones(1, device="cuda")
    layer = SimpleNamespace(_k_scale=one, _v_scale=one)
    slots = step.common.slot_mapping
    step.impl(0).do_kv_cache_update(layer, step.key, step.value, cache, slots)
    assert torch.equal(cache, step.kv_cache)


# --- engines -------------------------------------------------------------------------------------


def test_bf16_is_as_near_to_fp32_as_with_flash_attn(smollm2: Path) -> None:
    def logits(dtype: str, backend: str) -> torch.Tensor:
        options = dict(attention_backend=backend, gpu_memory_utilization=0.15)
        with make_engine(smollm2, dtype=dtype, **options) as engine:
            prompt = engine.llm.get_tokenizer().encode("Bread needs flour, water and time. " * 30)
            return engine.run(prompt, max_tokens=1)[1].float().cpu()

    exact = logits("float32", "XFORMERS")
    errors = [relative_error(logits("bfloat16", b), exact) for b in ("XFORMERS", "FLASH_ATTN")]
    print("from fp32:", *errors)
    assert errors[0] < 2 * errors[1]


# --- runners and processes -----------------------------------------------------------------------

IN_PROCESS = """
import sys; sys.path.insert(0, sys.argv[2])
from pathlib import Path
from engines import make_engine, plan_for, relative_error, run
options = dict(attention_backend="XFORMERS", gpu_memory_utilization=0.15, enforce_eager=False)
with make_engine(Path(sys.argv[1]), **options) as engine:
    ids, prompt = engine.ids, engine.ids(150, 1)
    tokens, full = engine.run(prompt)
    with engine.blending(engine.collect(prompt), 7, recomp_ratio=0.16):
        blended, logits = engine.run(prompt)
    blend = plan_for(engine, [ids(70, 1)], ids(3, 3), ids(9, 4))
    work = [blend, (ids(120, 5), None), (ids(3, 6), None)]
    alone = [run(engine, [p], [plan])[0] for p, plan in work]
    same = run(engine, [p for p, _ in work], [plan for _, plan in work]) == alone
    runner = engine.llm.llm_engine.model_executor.driver_worker.model_runner
    backend = engine.model.layers[0].self_attn.attn.attn_backend.get_name()
    near = relative_error(logits, full) < 1e-4
    print(type(runner).__module__, backend, blended == tokens, near, same)
"""


@pytest.mark.parametrize(
    ("version", "module"),
    [("0", "vllm.v1.worker.gpu_model_runner"), ("1", "vllm.v1.worker.gpu.model_runner")],
    ids=["V1", "V2"],
)
def test_both_model_runners(tiny: Any, version: str, module: str) -> None:
    output = python(IN_PROCESS, str(tiny("llama")), HERE, VLLM_USE_V2_MODEL_RUNNER=version)
    assert f"{module} XFORMERS True True True" in output.splitlines()


SPAWNED = """
import sys
from vllm import LLM, SamplingParams
def name(model):
    return model.model.layers[0].self_attn.attn.attn_backend.get_name()
if __name__ == "__main__":
    llm = LLM(sys.argv[1], dtype="float32", max_model_len=512, skip_tokenizer_init=True,
              gpu_memory_utilization=0.15, attention_backend="XFORMERS")
    params = SamplingParams(max_tokens=3, detokenize=False, ignore_eos=True)
    output = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    print(llm.apply_model(name), len(output[0].outputs[0].token_ids))
"""


def test_a_spawned_engine_runs_on_it(tiny: Any) -> None:
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for apply_model
    }
    assert "['XFORMERS'] 3" in python(SPAWNED, str(tiny("llama")), **environment).splitlines()


def test_it_refuses_at_start_with_the_reason(tiny: Any) -> None:
    code = IN_PROCESS.replace("enforce_eager=False", "enforce_eager=True, kv_cache_dtype='fp8'")
    with pytest.raises(AssertionError, match="kv_cache_dtype is fp8; XFORMERS takes the model's own"):
        python(code, str(tiny("llama")), HERE)
