"""Tiny random models of every family, and a handle on an engine that the tests share."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_blend.core.kv import StoredKV
from vllm_blend.core.plans import BlendPlan, ChunkSpan, CollectPlan
from vllm_blend.core.settings import BlendSettings

VOCAB = 320
COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=96,
    intermediate_size=160,
    num_hidden_layers=5,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    initializer_range=0.25,  # wide enough that attention looks far, and V depends on context
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=256,
)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", dict(head_dim=32)),
    "llama3_rope": ("LlamaConfig", dict(head_dim=32, rope_parameters=LLAMA3_ROPE)),
    "mistral": ("MistralConfig", dict(head_dim=32, sliding_window=None)),
    "mistral_window": ("MistralConfig", dict(head_dim=32, sliding_window=56)),
    "qwen2": ("Qwen2Config", dict(hidden_size=192)),
    "qwen3": ("Qwen3Config", dict(head_dim=64)),
}


def tiny_model(family: str, folder: Path, **settings: Any) -> Path:
    """Writes a random fp32 model of ``family``, biases and norms included, into ``folder``."""
    import transformers

    name, special = FAMILIES[family]
    torch.manual_seed(len(family))
    config = getattr(transformers, name)(**(COMMON | special | settings))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in parameter_name:
                parameter.normal_(1, 0.2)
    model.save_pretrained(folder)
    return folder


@dataclass
class Engine:
    """An in-process engine, with what the tests ask of it."""

    llm: Any
    folder: Path
    model: Any = field(init=False)

    def __post_init__(self) -> None:
        from vllm_blend import blend_model

        self.model = blend_model(self.llm)

    @property
    def flags(self) -> Any:
        return self.model.cache_fuse_metadata

    @property
    def runner(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.model_runner

    @property
    def outer(self) -> Any:
        return self.runner.model

    def ids(self, count: int, seed: int) -> list[int]:
        """Random token ids, special ones left out."""
        generator = torch.Generator().manual_seed(seed)
        vocab = self.llm.model_config.get_vocab_size()
        return torch.randint(10, vocab, (count,), generator=generator).tolist()

    def generate(
        self, prompts: Sequence[list[int]], max_tokens: int = 1, cache_salt: str = "tests"
    ) -> list[list[int]]:
        """Greedy token ids of each prompt."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        tokens = [{"prompt_token_ids": ids, "cache_salt": cache_salt} for ids in prompts]
        outputs = self.llm.generate(tokens, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def run(
        self, ids: list[int], max_tokens: int = 16, cache_salt: str = "tests"
    ) -> tuple[list[int], torch.Tensor]:
        """Greedy token ids, and the logits they came from, ``[max_tokens, vocab_size]``."""
        with self.watched() as logits:
            (tokens,) = self.generate([ids], max_tokens, cache_salt)
        return tokens, torch.cat(logits)

    @contextmanager
    def watched(self) -> Iterator[list[torch.Tensor]]:
        """Gets the logits of each step meanwhile, ``[num_samples, vocab_size]``."""
        logits: list[torch.Tensor] = []
        stock = self.outer.compute_logits

        def compute_logits(*args: Any) -> torch.Tensor:
            logits.append(stock(*args).clone())
            return logits[-1]

        self.outer.compute_logits = compute_logits
        try:
            yield logits
        finally:
            del self.outer.compute_logits

    def collect(self, ids: list[int]) -> list[list[torch.Tensor]]:
        """``[K, V]`` of each layer, by the flags, as the paper's scripts do it."""
        self.flags["collect"] = True
        try:
            self.generate([ids])
        finally:
            self.flags["collect"] = False
        return [layer.self_attn.hack_kv for layer in self.model.layers]

    @contextmanager
    def blending(self, old_kvs: Any, suffix_len: int | None, **flags: Any) -> Iterator[None]:
        """``check`` is True while it lasts; other flags go back to what they were."""
        before = {name: self.flags[name] for name in flags}
        self.model.old_kvs = old_kvs
        for name, value in flags.items():
            self.flags[name] = value
        self.flags["suffix_len"] = suffix_len
        self.flags["check"] = True
        try:
            yield
        finally:
            self.flags["check"] = False
            self.flags["suffix_len"] = None
            self.model.old_kvs = None
            for name, value in before.items():
                self.flags[name] = value

    def stored(self, chunks: Sequence[list[int]]) -> list[list[torch.Tensor]]:
        """Each chunk collected alone, joined in order: what the paper's scripts put in ``old_kvs``."""
        parts = [self.collect(chunk) for chunk in chunks]
        return [
            [torch.cat([part[layer][kind] for part in parts]) for kind in (0, 1)]
            for layer in range(len(self.model.layers))
        ]


@dataclass
class SeveralRanks(Engine):
    """An engine whose workers are processes of their own."""

    def __post_init__(self) -> None:
        pass

    def ids(self, count: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(10, VOCAB, (count,), generator=generator).tolist()

    def tell(self, method: str, *args: Any) -> list[Any]:
        """What each rank answers to a call of its worker's method."""
        found: list[Any] = self.llm.collective_rpc(method, args=args)
        return found


def collect(engine: Engine, chunks: list[list[int]]) -> list[StoredKV]:
    """Chunks collected alone, in one batch, through their requests."""
    plans = [CollectPlan() for _ in chunks]
    run(engine, chunks, plans, max_tokens=1)
    return [StoredKV(tuple(plan.kv)) for plan in plans]


def run(
    engine: Engine, prompts: list[list[int]], plans: list[Any], max_tokens: int = 8
) -> list[list[int]]:
    """Greedy tokens of prompts that run as one batch, each with its plan or None."""
    outputs = engine.llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts], greedy(plans, max_tokens), use_tqdm=False
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def greedy(plans: Sequence[Any], max_tokens: int) -> list[Any]:
    """vLLM's ``SamplingParams`` of requests, each with its plan or None."""
    from vllm import SamplingParams

    return [
        SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=None if plan is None else {"blend": plan},
        )
        for plan in plans
    ]


def plan_for(
    engine: Engine, chunks: list[list[int]], gap: list[int], question: list[int], **settings: Any
) -> tuple[list[int], BlendPlan]:
    """A prompt with ``gap`` before each chunk, and its plan: the paper's, but for ``settings``."""
    prompt: list[int] = []
    spans = []
    for chunk, kv in zip(chunks, collect(engine, chunks), strict=True):
        prompt += gap
        spans.append(ChunkSpan(len(prompt), kv, tuple(chunk)))
        prompt += chunk
    chosen = dict(policy="hkvd", recomp_ratio=0.16) | settings
    return prompt + question, BlendPlan(tuple(spans), BlendSettings(**chosen))


@contextmanager
def make_engine(folder: Path, **options: Any) -> Iterator[Engine]:
    """An fp32 in-process engine; gone when it ends."""
    with make_llm(folder, **options) as llm:
        yield Engine(llm, folder)


@contextmanager
def make_llm(folder: Path, **options: Any) -> Iterator[Any]:
    """Its ``LLM``."""
    from vllm import LLM

    settings: dict[str, Any] = dict(
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        skip_tokenizer_init=not (folder / "tokenizer.json").exists(),
        disable_log_stats=True,
    )
    if torch.cuda.is_available():
        settings |= dict(kv_cache_memory_bytes=1 << 30)  # not what other tests' engines leave
    config = options.get("additional_config", {})
    if "vllm_blend" in config and "store" not in config["vllm_blend"]:
        # reserved at once, which takes seconds by default
        server = {"ram_gb": 0.2} | config["vllm_blend"]
        options["additional_config"] = config | {"vllm_blend": server}
    with transformers_untouched(), inspected_here():
        llm = None
        try:
            with garbage_left():
                llm = LLM(model=str(folder), **(settings | options))
            yield llm
        finally:
            shut_down(llm)
            del llm
            gc.collect()


@contextmanager
def inspected_here() -> Iterator[None]:
    """vLLM looks at a model's class in a process of its own, lest CUDA be initialized: nine seconds for
    each architecture that it has not seen on this machine. Without a GPU it may look in this one."""
    from vllm.model_executor.models import registry

    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        yield


@contextmanager
def garbage_left() -> Iterator[None]:
    """From an engine's start to its end vLLM collects garbage nine times, each of which takes a third
    of a second or more. Without a GPU, whose memory is measured, its tests do so once."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(gc, "collect", lambda generation=2: 0)
        yield


@contextmanager
def transformers_untouched() -> Iterator[None]:
    """vLLM's Transformers backend replaces methods of transformers' classes; puts them back."""
    from vllm.model_executor.models.transformers.base import Base

    stock = Base._decorate_cls_for_torch_compile
    before: dict[type, tuple[tuple[type, ...], dict[str, Any]]] = {}

    def decorate(self: Any, cls: Any, *args: Any, **more: Any) -> None:
        before.setdefault(cls, (cls.__bases__, dict(vars(cls))))
        stock(self, cls, *args, **more)

    Base._decorate_cls_for_torch_compile = decorate
    try:
        yield
    finally:
        Base._decorate_cls_for_torch_compile = stock
        for cls, (bases, members) in before.items():
            cls.__bases__ = bases
            for name in set(vars(cls)) - set(members):
                delattr(cls, name)
            for name in members.keys() & {"__init__", "__call__"}:
                setattr(cls, name, members[name])


def shut_down(llm: Any) -> None:
    """So that the next engine of this process finds nothing of this one."""
    from vllm.distributed import cleanup_dist_env_and_memory

    with garbage_left():
        if llm is not None:  # it may not have started
            llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """``|result - expected| / |expected|``, NaN counted as infinite."""
    error = float((result.double() - expected.double()).norm() / expected.double().norm())
    return error if error == error else float("inf")
