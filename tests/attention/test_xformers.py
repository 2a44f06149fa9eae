"""The backend XFORMERS where there is no GPU: its name, what it refuses, and how it splits a step.

xformers' kernel is replaced by dense attention here; the masks it would get are compared with dense
ones where xformers is installed. The kernel itself is test_gpu_xformers.py's; engines are
test_xformers_engine.py's.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from paged_step import STEPS, Step, blocks_of, replace_kernel
from processes import python
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType

from vllm_blend.attention import blend_impl, xformers, xformers_parts
from vllm_blend.attention.xformers import XFormersBackend, XFormersImpl, XFormersMetadataBuilder
from vllm_blend.attention.xformers_parts import Way, split, split_kept
from vllm_blend.core.plans import BlendPlan
from vllm_blend.core.settings import BlendSettings
from vllm_blend.core.step import StepRequest
from vllm_blend.plugin import register

# --- its name ------------------------------------------------------------------------------------

NAMES = """
import json, sys
from vllm_blend.plugin import register
register(); register()
heavy = [m for m in sys.modules if m.split(".")[0] == "xformers" or "vllm_blend.attention" in m]
from vllm.v1.attention.backends.registry import AttentionBackendEnum as names
class_ = names["XFORMERS"].get_class()
known = [names["XFORMERS"] is names["CUSTOM"], len(set(names)) == len(names)]
print(json.dumps([heavy, known, class_.full_cls_name(), class_.get_name()]))
"""


def test_registering_imports_no_backend_and_repeats() -> None:
    heavy, known, where, name = json.loads(python(NAMES).splitlines()[-1])
    assert heavy == []
    assert known == [True, True]
    assert where == ["vllm_blend.attention.xformers", "XFormersBackend"]
    assert name == "XFORMERS"
    assert blend_impl("XFORMERS") is XFormersImpl


OTHER = """
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
register_backend(AttentionBackendEnum.CUSTOM, "another.plugin.Backend")
from vllm_blend.plugin import register
register()
print(AttentionBackendEnum.CUSTOM.get_path(), "XFORMERS" in AttentionBackendEnum.__members__)
"""


def test_another_plugins_backend_is_left_alone() -> None:
    assert python(OTHER).splitlines()[-1] == "another.plugin.Backend False"


@pytest.mark.parametrize("name", ["XFORMERS", "xformers", "CUSTOM"])
def test_names_in_python_and_on_the_command_line(tiny: Any, name: str) -> None:
    from vllm import EngineArgs
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    model = str(tiny("llama"))
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    options = ["--model", model, "--skip-tokenizer-init"]
    for arguments in (["--attention-backend", name], ["--attention-config.backend", name]):
        engine = AsyncEngineArgs.from_cli_args(parser.parse_args(options + arguments))
        config = engine.create_engine_config()
        assert config.attention_config.backend is AttentionBackendEnum.CUSTOM
    engine = EngineArgs(model, skip_tokenizer_init=True, attention_backend=name)
    assert engine.create_engine_config().attention_config.backend is AttentionBackendEnum.CUSTOM


def test_the_choice_reaches_a_process_without_plugins() -> None:
    from vllm.config import AttentionConfig

    register()
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).backend.name)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(AttentionConfig(backend="XFORMERS")),
        capture_output=True,
        timeout=300,
    )
    assert found.stdout.decode().split()[-1:] == ["CUSTOM"], found.stderr.decode()[-2000:]


SPAWNED = """
import sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], dtype="float32", max_model_len=512, skip_tokenizer_init=True,
              enforce_eager=True, attention_backend="XFORMERS")
    chosen = llm.llm_engine.vllm_config.attention_config.backend
    params = SamplingParams(max_tokens=3, detokenize=False, ignore_eos=True)
    output = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    print(chosen.name, len(output[0].outputs[0].token_ids))
"""


@pytest.mark.slow
def test_an_engine_in_a_spawned_process_starts_with_it(tiny: Any) -> None:
    # on a CPU vLLM then takes CPU_ATTN; the name still goes the way to the engine's process
    method = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    assert "CUSTOM 3" in python(SPAWNED, str(tiny("llama")), **method).splitlines()


# --- what it refuses -----------------------------------------------------------------------------

GOOD: dict[str, Any] = dict(
    head_size=64,
    dtype=torch.bfloat16,
    kv_cache_dtype="auto",
    block_size=16,
    use_mla=False,
    has_sink=False,
    use_sparse=False,
    use_mm_prefix=False,
    use_per_head_quant_scales=False,
    device_capability=DeviceCapability(9, 0),
    attn_type=AttentionType.DECODER,
)


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xformers, "why_unusable", lambda: None)


@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"dtype": torch.float32},
        {"dtype": torch.float16, "kv_cache_dtype": "float16", "head_size": 256},
        {"has_sliding_window": True},
        {"device_capability": DeviceCapability(10, 0)},
    ],
)
def test_what_it_takes(usable: None, choice: dict[str, Any]) -> None:
    assert XFormersBackend.validate_configuration(**GOOD | choice) == []


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"head_size": 300}, "head_size is 300; XFORMERS takes multiples of 8 up to 256"),
        ({"head_size": 100}, "head_size is 100; XFORMERS takes multiples of 8 up to 256"),
        ({"dtype": torch.float64}, "dtype not supported"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is fp8; XFORMERS takes the model's own"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype is float16; XFORMERS takes the model's own"),
        ({"block_size": 8}, "block_size not supported"),
        ({"has_sink": True}, "attention sinks not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attention type"),
        ({"attn_type": AttentionType.ENCODER_DECODER}, "attention type"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"use_batch_invariant": True}, "batch invariance not supported"),
        ({"use_dcp": True}, "DCP not supported"),
        ({"use_adaptive_verification": True}, "device-cpu query lens mismatch"),
        ({"device_capability": DeviceCapability(7, 5)}, "compute capability not supported"),
        (
            {"device_capability": DeviceCapability(10, 0), "dtype": torch.float32},
            "xformers computes float32 on compute capability 8.0 to 9.0 only",
        ),
    ],
)
def test_what_it_refuses(usable: None, choice: dict[str, Any], reason: str) -> None:
    reasons = XFormersBackend.validate_configuration(**GOOD | choice)
    assert any(reason in found for found in reasons), reasons


def test_without_an_nvidia_gpu_or_xformers_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert XFormersBackend.validate_configuration(**GOOD) == ["XFORMERS needs an NVIDIA GPU"]
    monkeypatch.setattr(xformers, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setattr(xformers, "find_spec", lambda name: None)
    (reason,) = XFormersBackend.validate_configuration(**GOOD)
    assert reason == "xformers is not installed: pip install xformers"
    monkeypatch.setattr(xformers, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "xformers", None)
    assert "xformers cannot be imported" in XFormersBackend.validate_configuration(**GOOD)[0]
    broken = ModuleType("xformers")
    broken.__dict__["_cpp_lib"] = SimpleNamespace(_built_with_cuda=False)
    monkeypatch.setitem(sys.modules, "xformers", broken)
    monkeypatch.setitem(sys.modules, "xformers.ops", ModuleType("xformers.ops"))
    reason = XFormersBackend.validate_configuration(**GOOD)[0]
    assert "pip install nvidia-cuda-runtime-cu12" in reason


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ({"alibi_slopes": [0.5] * 4}, "ALiBi"),
        ({"logits_soft_cap": 30.0}, "a soft cap of logits"),
        ({"kv_sharing_target_layer_name": "layers.0"}, "layers that share the KV cache"),
        ({"attn_type": AttentionType.ENCODER}, "attention type"),
        pytest.param(
            {"kv_cache_dtype": "fp8_e4m3"},
            "kv_cache_dtype fp8_e4m3",
            marks=pytest.mark.covers("KV cache in fp8 (e4m3)", backend="XFORMERS", refused=True),
        ),
    ],
)
def test_what_a_layer_refuses(option: dict[str, Any], name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"XFORMERS does not support {name}"):
        XFormersImpl(4, 64, 0.125, 2, **option)


# --- how it splits a step ------------------------------------------------------------------------


def test_spans_of_a_mixed_step() -> None:
    spans = split(
        query_lens=[1, 1, 4, 30, 20, 50, 9, 1, 0],
        seq_lens=[80, 17, 60, 90, 21, 50, 9, 1, 0],
    )
    assert [(s.way, s.requests, s.rows) for s in spans] == [
        (Way.PAGED, slice(0, 3), slice(0, 6)),
        (Way.GATHERED, slice(3, 5), slice(6, 56)),
        (Way.FRESH, slice(5, 8), slice(56, 116)),
    ]
    assert spans[1].query_lens == (30, 20) and spans[1].seq_lens == (90, 21)


def test_speculated_rows_are_paged_however_many() -> None:
    assert split([40], [90], short=40)[0].way is Way.PAGED
    assert split([40], [40], short=40)[0].way is Way.FRESH


def test_gathered_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xformers_parts, "MAX_KEYS", 100)
    spans = split([20] * 4, [60, 40, 130, 30])
    assert [span.requests for span in spans] == [slice(0, 2), slice(2, 3), slice(3, 4)]
    assert [span.rows for span in spans] == [slice(0, 40), slice(40, 60), slice(60, 80)]


def test_kept_rows_with_the_papers_mask_are_spans_of_their_own() -> None:
    spans = split_kept([0, 5, 5, 12, 20], {2: 70, 3: 90})
    assert [(s.way, s.requests, s.rows) for s in spans] == [
        (Way.PAGED, slice(0, 2), slice(0, 5)),
        (Way.BOTTOM_RIGHT, slice(2, 3), slice(5, 12)),
        (Way.BOTTOM_RIGHT, slice(3, 4), slice(12, 20)),
    ]
    assert spans[2].seq_lens == (90,)


# --- attention over a step, the kernel replaced --------------------------------------------------


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_kernel(monkeypatch)


@pytest.mark.parametrize("window", [0, 13])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("lens", STEPS.values(), ids=STEPS)
def test_a_step_attends_as_dense_attention_does(
    dense: None, lens: tuple[list[int], list[int]], heads: tuple[int, int], window: int
) -> None:
    step = Step(*lens, heads)
    metadata = step.build()
    rows = torch.arange(metadata.num_actual_tokens)
    output = step.attend(step.impl(window), metadata)
    torch.testing.assert_close(output[: -step.PADDING], step.expected(rows, step.last(), window))
    assert bool((output[-step.PADDING :] == 7).all())  # padding is not touched


def test_layers_with_other_windows_share_a_step(dense: None) -> None:
    step = Step(*STEPS["mixed"], (4, 2))
    metadata = step.build()
    rows = torch.arange(metadata.num_actual_tokens)
    for window in (0, 13, 0):
        output = step.attend(step.impl(window), metadata)
        torch.testing.assert_close(output[: -step.PADDING], step.expected(rows, step.last(), window))


@pytest.mark.parametrize("window", [0, 13])
@pytest.mark.parametrize("mask", ["exact", "bottom_right"])
def test_kept_rows_see_exactly_their_keys_or_those_of_the_papers_mask(
    dense: None, mask: str, window: int
) -> None:
    query_lens, seq_lens = [1, 40, 30, 2], [33, 40, 75, 64]
    step = Step(query_lens, seq_lens, (4, 2))
    stock = step.build()
    settings = BlendSettings(mask=mask)
    device = torch.device("cpu")
    requests = [
        StepRequest(BlendPlan((), settings), 1, 0, 40, device),
        StepRequest(BlendPlan((), BlendSettings()), 41, 45, 30, device),
    ]
    rows = torch.tensor([0, 3, 4, 9, 30, 39, 40, 41, 50, 69, 70, 71, 72])
    metadata = XFormersImpl.metadata(None, stock, step.places(requests, rows))
    last = step.last()[rows]
    if mask == "bottom_right":
        last[1:7] = torch.arange(34, 40)
    output = step.attend(step.impl(window), metadata, rows)
    torch.testing.assert_close(output, step.expected(rows, last, window))
    assert torch.equal(metadata.slot_mapping, step.common.slot_mapping[rows])
    ways = [span.way for span in metadata.spans]
    assert ways == ([Way.PAGED, Way.BOTTOM_RIGHT, Way.PAGED] if mask != "exact" else [Way.PAGED])


def test_graphs_are_left_to_what_lies_between_attentions() -> None:
    support = XFormersMetadataBuilder.get_cudagraph_support(None, None)
    assert support is AttentionCGSupport.NEVER


def test_vllms_memory_measurement_sees_what_may_be_gathered() -> None:
    sizes: list[tuple[int, ...]] = []
    key = SimpleNamespace(new_empty=lambda *size: sizes.append(size))
    output = torch.ones(2, 4, 16)
    step = Step([1], [1], (4, 2))
    step.impl(0).forward(None, output, key, key, torch.tensor([]), None, output)
    assert sizes == [(xformers.MAX_KEYS, 2, 32)]
    assert not output.any()


# --- the masks that xformers gets ----------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 5])
def test_masks(window: int) -> None:
    pytest.importorskip("xformers.ops", reason="xformers is not installed")
    device = torch.device("cpu")
    query_lens, key_lens = [4, 9, 1], [11, 9, 6]
    shape = (sum(query_lens), sum(key_lens))
    seen = xformers_parts.gathered_mask(query_lens, key_lens, window, device).materialize(shape)
    assert torch.equal(seen == 0, blocks_of(query_lens, key_lens, window))
    fresh = xformers_parts.fresh_mask(query_lens, window, device)
    seen = fresh.materialize((shape[0], shape[0]))
    assert torch.equal(seen == 0, blocks_of(query_lens, query_lens, window))
    seen = xformers_parts.bottom_right_mask(window).materialize((4, 11))
    assert torch.equal(seen == 0, blocks_of([4], [11], window))
