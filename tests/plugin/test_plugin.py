"""vLLM's entry point: light, repeatable, harmless where nothing blends, loud where it cannot."""

from __future__ import annotations

import json
import re
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import Engine
from processes import needs_compiler, python

import vllm_blend
from vllm_blend import plugin
from vllm_blend.compat import support
from vllm_blend.compat import version as compat_version
from vllm_blend.compat.engine_access import model_of


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, vllm_blend, vllm_blend.plugin, vllm_blend.api.embedded;"
        "print([m for m in ('torch', 'transformers', 'vllm', 'numpy') if m in sys.modules])"
    )
    assert python(code).strip() == "[]"


WITHOUT_TRITON = """
import sys; sys.modules["triton"] = None; sys.path.insert(0, sys.argv[2])
from pathlib import Path
from asking import outputs, prompt_of, report
from engines import make_engine
settings = {"vllm_blend": {"ram_gb": 0.05}}
with make_engine(Path(sys.argv[1]), additional_config=settings) as engine:
    prompt, spans = prompt_of(engine, [1, 2, 3])
    outputs(engine, [prompt], [{"spans": spans}])
    for policy in ("hkvd", "ahead*static"):
        (found,) = outputs(engine, [prompt], [{"spans": spans, "policy": policy, "report": True}])
        print(report(found)["reused_tokens"])
"""


def test_a_cpu_needs_no_triton(tiny: Any) -> None:
    helpers = str(Path(__file__).parents[1] / "helpers")
    assert python(WITHOUT_TRITON, str(tiny("llama")), helpers).splitlines()[-2:] == ["300", "300"]


HOOKS = """
import sys
from vllm_blend import plugin
version = sys.argv[1]
if version:
    from vllm_blend.compat import version as compat_version
    compat_version.vllm_version = lambda: version
plugin.register(); plugin.register()
code = [m for m in ("vllm.model_executor.models.llama", "vllm_blend.plugin.attach") if m in sys.modules]
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.engine.input_processor import InputProcessor
found = []
for hook in (type(ModelRegistry).resolve_model_cls, InputProcessor.process_inputs):
    wrappers = 0
    while hasattr(hook, "__wrapped__"):
        hook, wrappers = hook.__wrapped__, wrappers + 1
    found.append(wrappers)
print(code, found)
"""


def test_registering_imports_no_model_code_and_repeats() -> None:
    assert python(HOOKS, "").splitlines()[-1] == "[] [1, 1]"


def test_another_version_has_no_hook() -> None:
    assert python(HOOKS, "0.34.0").splitlines()[-1] == "[] [0, 0]"


MISFIT = """
import logging, sys
from vllm_blend.compat import fit
from vllm_blend.compat.members import Member
fit.members = lambda: [Member("v1.request", *sys.argv[1:])]
said = []
logging.getLogger("vllm.vllm_blend").addFilter(lambda record: said.append(record.getMessage()))
from vllm_blend import plugin
plugin.register()
from vllm.model_executor.models.registry import ModelRegistry
from vllm.renderers.registry import RENDERER_REGISTRY
from vllm.v1.engine.core import EngineCore
hooks = type(ModelRegistry).resolve_model_cls, EngineCore.wake_up
print(said[0])
print([hasattr(hook, "__wrapped__") for hook in hooks], RENDERER_REGISTRY.renderers["hf"][0], len(said))
"""


@pytest.mark.parametrize(
    ("member", "sentence"),
    [
        (["Request.planted"], "vllm.v1.request.Request.planted is missing"),
        (
            ["Request.update_block_hashes", "self, planted"],
            "vllm.v1.request.Request.update_block_hashes takes (self); expected (self, planted)",
        ),
    ],
)
def test_a_vllm_with_other_members_has_no_hook(member: list[str], sentence: str) -> None:
    said, hooks = python(MISFIT, *member).splitlines()[-2:]
    assert sentence in said and "is not as this vllm_blend knows it" in said
    assert said.endswith("Blending is off.")
    assert hooks == "[False, False] vllm.renderers.hf 1"


def test_entry_point_is_installed() -> None:
    from importlib.metadata import entry_points

    (entry,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "vllm_blend"]
    assert entry.load() is plugin.register


def test_names_of_the_package() -> None:
    for name in vllm_blend.__all__:
        assert getattr(vllm_blend, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        vllm_blend.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        (None, "vLLM is not installed"),
        ("0.34.0", "vLLM 0.34.0 is installed, but"),
        ("0.33.0", "KVCacheManager.get_computed_blocks takes (self, request); expected"),
        ("0.32.5", ""),
    ],
)
def test_other_versions_are_left_alone_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str | None,
    sentence: str,
) -> None:
    monkeypatch.setattr(compat_version, "vllm_version", lambda: version)
    installed: list[bool] = []
    monkeypatch.setattr("vllm_blend.plugin.hooks.install_front_hooks", lambda: installed.append(True))
    monkeypatch.setattr(
        "logging.Logger.warning", lambda self, text, *args: caplog.records.append(text % args)
    )
    plugin.register()
    if sentence:
        assert not installed
        assert any(sentence in str(record) for record in caplog.records)
        assert sentence in compat_version.why_not_patched("LlamaForCausalLM")
    else:
        assert installed


def test_a_model_that_was_not_patched_says_why() -> None:
    reason = compat_version.why_not_patched("LlamaForCausalLM")
    assert reason.startswith("LlamaForCausalLM has no blend path: vLLM has not loaded the plugin")


# --- the class that a model is built of ----------------------------------------------------------


def nothing(blending: Any, config: Any) -> None:
    """To be done once a model is attached."""


class Stock(torch.nn.Module):
    """One of vLLM's."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.told = vllm_config, prefix

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


class OldStock(torch.nn.Module):
    """Built as vLLM no longer builds its models."""

    def __init__(self, config: Any) -> None:
        super().__init__()


def test_a_model_is_built_as_a_subclass_of_its_class() -> None:
    from vllm_blend.plugin.attach import BlendModel, blendable

    found = blendable(Stock, nothing)
    assert found.__name__ == "BlendStock" and issubclass(found, Stock) and issubclass(found, BlendModel)
    assert (found.__module__, found.__qualname__) == (Stock.__module__, Stock.__qualname__)
    assert blendable(Stock, nothing) is found  # the same each time, and not twice
    assert blendable(found, nothing) is found
    assert blendable(OldStock, nothing) is OldStock


def test_a_part_of_another_model_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM builds with a prefix; what it builds without one is attached to the engine."""
    from vllm_blend.plugin import attach

    attached: list[Any] = []
    monkeypatch.setattr(attach, "attach", lambda model, config, then: attached.append((model, config)))
    found = attach.blendable(Stock, nothing)
    part = found(vllm_config="config", prefix="language_model")
    assert part.told == ("config", "language_model") and not attached
    assert part(3, x=4) == ((3,), {"x": 4})
    whole = found(vllm_config="config")
    assert attached == [(whole, "config")]


def test_a_step_without_a_plan_is_vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with a plan goes to the engine's ``Blending``, with the model's own forward."""
    from vllm_blend.plugin import attach

    monkeypatch.setattr(attach, "attach", lambda *args: None)
    model = attach.blendable(Stock, nothing)(vllm_config="config")
    calls: list[Any] = []
    monkeypatch.setattr(model.blending, "forward", lambda stock, *a, **k: calls.append((stock, a, k)))
    assert model(1, positions=2) == ((1,), {"positions": 2})
    assert not calls
    model.blending.step = object()
    model(1, positions=2)
    ((stock, args, kwargs),) = calls
    assert (args, kwargs) == ((1,), {"positions": 2})
    assert stock(5) == ((5,), {})


def test_the_registry_gives_that_class_for_every_architecture(tiny: Any) -> None:
    """Asked in a process of its own: this one's registry may have been asked before."""
    code = """
import sys
from vllm import EngineArgs
from vllm.model_executor.models.registry import ModelRegistry
config = EngineArgs(sys.argv[1], skip_tokenizer_init=True).create_engine_config().model_config
for names in (["LlamaForCausalLM"], ["GPT2LMHeadModel"], ["Gemma3ForCausalLM"]):
    found, architecture = ModelRegistry.resolve_model_cls(names, model_config=config)
    print(found.__name__, architecture, [c.__name__ for c in found.__mro__[1:3]])
"""
    lines = python(code, str(tiny("llama"))).splitlines()[-3:]
    for line, name in zip(lines, ("Llama", "GPT2LMHead", "Gemma3"), strict=True):
        stock = "GPT2LMHeadModel" if name == "GPT2LMHead" else f"{name}ForCausalLM"
        assert line == f"Blend{stock} {stock} ['BlendModel', '{stock}']"


# --- attention that cannot blend -----------------------------------------------------------------


def layers_of(**changes: Any) -> dict[str, Any]:
    """Two attention layers of vLLM's, the second with ``changes``."""
    from vllm.model_executor.layers.attention import Attention

    found = {}
    good: dict[str, Any] = dict(
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
        impl=SimpleNamespace(alibi_slopes=None),
        num_kv_heads=2,
        head_size=64,
        head_size_v=64,
    )
    for name, values in (("a", good), ("b", good | changes)):
        layer = found[name] = object.__new__(Attention)
        torch.nn.Module.__init__(layer)
        for key, value in values.items():
            object.__setattr__(layer, key, value)
    return found


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, None),
        ({"attn_type": "encoder_only"}, r"attention of type encoder_only \(layer b\)"),
        ({"kv_sharing_target_layer_name": "a"}, r"layers that share another's KV cache \(layer b\)"),
        ({"impl": SimpleNamespace(alibi_slopes=[0.5])}, r"ALiBi \(layer b\)"),
        ({"impl": SimpleNamespace()}, None),
        ({"head_size_v": 32}, r"different head sizes of K and V \(layer b\)"),
        ({"num_kv_heads": 4}, "layers with different KV heads or head sizes"),
        ({"head_size": 32, "head_size_v": 32}, "layers with different KV heads or head sizes"),
    ],
)
def test_attention_that_cannot_blend_is_named(changes: dict[str, Any], sentence: str | None) -> None:
    reason = support.why_attention_unsupported(layers_of(**changes))
    if sentence is None:
        assert reason is None
    else:
        assert reason is not None and re.search(f"^blending does not support {sentence}", reason)


def test_layers_of_other_kinds_are_named() -> None:
    from vllm.model_executor.layers.attention import Attention

    class OfImages(Attention):
        pass

    assert support.why_attention_unsupported({}) == (
        "blending needs attention over a paged cache; this model has none"
    )
    layers = layers_of() | {"c": object.__new__(OfImages)}
    reason = support.why_attention_unsupported(layers)
    assert reason == (
        "blending does not support OfImages (layer c): its cache is not K and V of tokens"
    )


def test_the_paper_scripts_chain_reaches_the_model(llama: Engine) -> None:
    chain = llama.llm.llm_engine.model_executor.driver_worker.model_runner.model.model
    assert chain is vllm_blend.blend_model(llama.llm)
    assert chain.cache_fuse_metadata["check_layers"] == [1]
    assert chain.cache_fuse_metadata["recomp_ratio"] == 0.16
    assert set(chain.cache_fuse_metadata) >= {
        *("check", "collect", "check_layers", "recomp_ratio", "recomp_ratios", "suffix_len"),
        *("imp_indices", "org_pos", "org_seq_len", "attn_bias", "kv_cache_dtype"),
        *("original_slot_mapping", "our_slot_mapping", "fake_q"),
    }
    assert chain.old_kvs is None
    assert not chain.cache_fuse_metadata["check"]


def test_a_configuration_that_is_made_again_is_of_the_same_engine(llama: Engine) -> None:
    """vLLM does so at the end of a server's start, and copies it for a drafter."""
    config = llama.llm.llm_engine.vllm_config
    model, name = model_of(config), config.instance_id
    assert model.inner is llama.model
    config.__post_init__()
    assert config.instance_id != name
    assert model_of(config) is model_of(copy(config)) is model
    chunks, question = [llama.ids(40, 1), llama.ids(30, 2)], llama.ids(6, 3)
    with llama.blending(llama.stored(chunks), 6, recomp_ratio=0.5):
        llama.run(sum(chunks, []) + question)
    assert llama.model.cache_fuse_metadata["imp_indices"] is not None


def test_results_of_a_step(llama: Engine) -> None:
    chunks, question = [llama.ids(40, 1), llama.ids(30, 2)], llama.ids(6, 3)
    old_kvs = llama.stored(chunks)
    with llama.blending(old_kvs, 6, recomp_ratio=0.5):
        llama.generate([sum(chunks, []) + question])
    flags = llama.flags
    assert flags["org_seq_len"] == 76
    assert flags["org_pos"].tolist() == list(range(76))
    kept = flags["imp_indices"]
    assert kept.tolist()[-6:] == list(range(70, 76))
    assert torch.equal(flags["our_slot_mapping"], flags["original_slot_mapping"][kept])
    assert len(set(flags["original_slot_mapping"].tolist())) == 76
    assert flags["kv_cache_dtype"] == "auto"
    assert torch.equal(flags["attn_bias"], kept)  # each row sees the keys up to its own place
    assert flags["fake_q"] is None
    with llama.blending(old_kvs, 6, recomp_ratio=0.5, mask="bottom_right"):
        llama.generate([sum(chunks, []) + question])
    count = len(flags["imp_indices"])
    assert flags["attn_bias"].tolist() == list(range(76 - count, 76))


STOCK = """
import json, sys
from vllm import LLM, SamplingParams
options = json.loads(sys.argv[2])
llm = LLM(sys.argv[1], dtype="float32", max_model_len=1024, skip_tokenizer_init=True, **options)
sizes = ((3, 200), (7, 90), (5, 9))
prompts = [{"prompt_token_ids": [(i * j) % 300 + 10 for i in range(1, n)]} for j, n in sizes]
found = []
for drawn in ({"temperature": 0}, {"temperature": 1, "seed": 5}):
    params = SamplingParams(max_tokens=12, logprobs=5, ignore_eos=True, detokenize=False, **drawn)
    for output in llm.generate(prompts, params, use_tqdm=False):
        answer = output.outputs[0]
        table = [{t: lp.logprob for t, lp in step.items()} for step in answer.logprobs]
        found.append([list(answer.token_ids), table])
runner = llm.llm_engine.model_executor.driver_worker.model_runner
print(json.dumps([type(runner.model).__name__, found]))
"""


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"enforce_eager": True}),
        pytest.param("qwen3", {}, marks=[needs_compiler, pytest.mark.slow]),
    ],
    ids=["eager", "compiled"],
)
def test_without_blending_outputs_are_bit_equal_to_stock(
    tiny: Any, tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    results = {}
    for plugins in ("vllm_blend", "none"):
        cache = {"VLLM_CACHE_ROOT": str(tmp_path / plugins)}  # each compiles for itself
        output = python(STOCK, str(tiny(family)), json.dumps(options), VLLM_PLUGINS=plugins, **cache)
        results[plugins] = json.loads(output.splitlines()[-1])
    assert results["vllm_blend"][0].startswith("Blend")
    assert not results["none"][0].startswith("Blend")
    assert results["vllm_blend"][1] == results["none"][1]


COMPILED = """
import sys; sys.path.insert(0, sys.argv[2])
from pathlib import Path
from engines import make_engine, relative_error
with make_engine(Path(sys.argv[1]), enforce_eager=False) as engine:
    chunks, question = [engine.ids(60, 1), engine.ids(50, 2)], engine.ids(7, 3)
    prompt = sum(chunks, []) + question
    tokens, logits = engine.run(prompt)
    exact, same, errors = engine.collect(prompt), [], []
    for policy in ("hkvd", "random", "ahead"):  # in the layer loop; then on the compiled forward
        with engine.blending(exact, 7, recomp_ratio=0.16, policy=policy):
            blended, blended_logits = engine.run(prompt)
        same.append(blended == tokens)
        errors.append(relative_error(blended_logits, logits))
    again, _ = engine.run(prompt)
    assert engine.model.compiled or engine.model.aot_compiled_fn, "stock steps were not compiled"
    print(same, max(errors) < 1e-4, again == tokens)
"""


@needs_compiler
@pytest.mark.slow
def test_blending_beside_compiled_steps(tiny: Any) -> None:
    output = python(COMPILED, str(tiny("qwen3")), str(Path(__file__).parents[1] / "helpers"))
    assert output.splitlines()[-1] == "[True, True, True] True True"


REFUSED = """
import json, sys
from vllm import LLM, SamplingParams
from vllm_blend import blend_model
options = json.loads(sys.argv[2])
llm = LLM(sys.argv[1], dtype="float32", max_model_len=512, skip_tokenizer_init=True, **options)
params = SamplingParams(max_tokens=3, detokenize=False, ignore_eos=True)
output = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
try:
    blend_model(llm)
except RuntimeError as error:
    print(json.dumps([len(output[0].outputs[0].token_ids), str(error)]))
"""


REFUSED_OPTIONS = {"hf_overrides": {"ada_rms_norm_t_cond": True}, "enforce_eager": True}


@pytest.mark.parametrize(
    ("options", "environment", "sentence"),
    [
        (REFUSED_OPTIONS, {}, "blending does not support ada_rms_norm_t_cond"),
        ({"enforce_eager": True}, {"VLLM_PLUGINS": "none"}, "has not loaded the plugin vllm_blend"),
        (
            {"enforce_eager": True},
            {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
            "set VLLM_ENABLE_V1_MULTIPROCESSING=0",
        ),
    ],
    ids=["refused", "not loaded", "other process"],
)
def test_an_engine_that_cannot_blend_serves_and_says_why(
    tiny: Any, options: dict[str, Any], environment: dict[str, str], sentence: str
) -> None:
    output = python(REFUSED, str(tiny("llama")), json.dumps(options), **environment)
    (line,) = [line for line in output.splitlines() if line.startswith("[3, ")]
    error = json.loads(line)[1]
    assert sentence in error


def test_asking_for_blending_where_it_cannot_be_stops_the_start(tiny: Any) -> None:
    code = REFUSED.replace("llm = LLM(", "llm = LLM(additional_config={'vllm_blend': {}}, model=")
    with pytest.raises(
        AssertionError, match="additional_config asks for vllm_blend, but blending does"
    ):
        python(code, str(tiny("llama")), json.dumps(REFUSED_OPTIONS))


@pytest.mark.parametrize(
    ("variable", "value", "backend", "sentence"),
    [
        pytest.param(
            *("VLLM_USE_RUST_FRONTEND", "1", "uni", "vLLM's Rust front end"),
            marks=pytest.mark.covers("vLLM's Rust front end", refused=True),
        ),
        pytest.param(
            *("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0", "ray", "vLLM's legacy Ray executor"),
            marks=pytest.mark.covers("vLLM's legacy Ray executor", refused=True),
        ),
        ("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "1", "ray", None),
        ("VLLM_USE_RUST_FRONTEND", "0", "uni", None),
    ],
)
def test_what_goes_past_the_hooks_is_refused(
    tiny: Any,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    backend: str,
    sentence: str | None,
) -> None:
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs

    envs.disable_envs_cache()  # an engine of this process has turned it on
    config = EngineArgs(model=str(tiny("llama")), skip_tokenizer_init=True).create_engine_config()
    config.parallel_config.distributed_executor_backend = backend
    monkeypatch.setenv(variable, value)
    reason = support.why_unsupported(config)
    if sentence is None:
        assert reason is None
    else:
        assert reason is not None and reason.startswith(f"blending does not support {sentence}")
