"""The names of CacheBlend's own code (arXiv 2405.16444) on vLLM's inner model, and what they do here.

    status               of a layer in a step: -1 decode, 0 full prefill, 1 check, 2 after check
    old_kvs              ``[[K, V], ...]`` of the chunks, one a layer; K before RoPE. Not changed
    cache_fuse_metadata  the flags and results below; each layer's attention sees them with its rows
    hack_kv              ``self_attn.hack_kv``, ``[K, V]``: what a request left with ``collect``
    imp_indices          the rows that were recomputed: highest KV deviation (HKVD), and the question

The flags are set around ``llm.generate``:

    model = blend_model(llm)
    model.cache_fuse_metadata["collect"] = True       # then every layer has self_attn.hack_kv
    model.old_kvs = [[K, V], ...]                     # one a layer, K before RoPE
    model.cache_fuse_metadata["check"] = True
    model.cache_fuse_metadata["suffix_len"] = len(question_ids)

The flags are read when a request is added, and become that request's plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from vllm_blend.core.kv import KVShape, StoredKV
from vllm_blend.core.plans import BlendPlan, ChunkSpan, CollectPlan
from vllm_blend.core.settings import BlendSettings, check_layer_list, check_ratio, check_ratio_list


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; allowed: True, False")
    return value


def _suffix_len(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; expected the number of question tokens, at least 1")
    return value


def _mask(name: str, value: Any) -> str:
    return BlendSettings(mask=value).mask


def _policy(name: str, value: Any) -> str:
    return BlendSettings(policy=value).policy


SETTINGS: dict[str, tuple[Any, Callable[[str, Any], Any]]] = {
    "check": (False, _flag),
    "collect": (False, _flag),
    "check_layers": ([1], lambda name, value: list(check_layer_list(value))),
    "recomp_ratio": (0.16, check_ratio),
    "recomp_ratios": (
        None,
        lambda name, value: None if value is None else list(check_ratio_list(value)),
    ),
    "suffix_len": (None, _suffix_len),
    "mask": ("exact", _mask),
    "policy": ("hkvd", _policy),
}

RESULTS = (
    "imp_indices",
    "org_pos",
    "org_seq_len",
    "attn_bias",
    "kv_cache_dtype",
    "original_slot_mapping",
    "our_slot_mapping",
    "fake_q",
)


class CacheFuseMetadata(MutableMapping[str, Any]):
    """``model.cache_fuse_metadata``: the paper's dictionary, with its keys checked.

    Settings:
        check: blend the requests added while it is True, with ``model.old_kvs``.
        collect: keep the KV of requests added while it is True, at each ``self_attn.hack_kv``.
        check_layers, recomp_ratio, recomp_ratios, mask, policy: see ``BlendSettings``.
        suffix_len: tokens of the question, at the prompt's end: never reused.

    Results of the last step that chose rows (not to be set):
        imp_indices: prompt positions that were recomputed, the question's included, ``[num_kept]``.
        org_pos: positions of all rows of the step, ``[org_seq_len]``.
        org_seq_len: their number.
        original_slot_mapping, our_slot_mapping: paged-cache slots of all and of the kept rows.
        attn_bias: the mask: the prompt position of the last key that each row of ``imp_indices`` sees,
            ``[num_kept]``. The paper's code has an object of xformers here; rows that stand apart have
            a mask of their own, which is this in every backend.
        kv_cache_dtype: the paged cache's.
        fake_q: the paper's code filled it with random numbers to rotate K; unused here, always None.

    Raises:
        KeyError: on an unknown key, naming it and the known ones.
        ValueError: on a value that is not allowed, naming the key.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {name: default for name, (default, _) in SETTINGS.items()}
        self._values |= dict.fromkeys(RESULTS)

    def __getitem__(self, key: str) -> Any:
        self._check_key(key)
        return self._values[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._check_key(key)
        if key in SETTINGS:
            value = SETTINGS[key][1](key, value)
        self._values[key] = value

    def __delitem__(self, key: str) -> None:
        raise KeyError(f"cache_fuse_metadata[{key!r}] cannot be deleted; set it instead")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"CacheFuseMetadata({self._values!r})"

    def _check_key(self, key: str) -> None:
        if key not in self._values:
            raise KeyError(f"unknown cache_fuse_metadata key {key!r}; known: {', '.join(self._values)}")

    def settings(self) -> BlendSettings:
        """The settings that apply to a request added now."""
        return BlendSettings(
            check_layers=tuple(self["check_layers"]),
            recomp_ratio=self["recomp_ratio"],
            recomp_ratios=self["recomp_ratios"],
            mask=self["mask"],
            policy=self["policy"],
        )

    def record(self, results: Mapping[str, Any]) -> None:
        """Fills the results; those of a step are ``model/active_rows.py``'s ``results``."""
        self._values |= results


def flagged_plan(
    flags: CacheFuseMetadata, old_kvs: Any, num_prompt_tokens: int, shape: KVShape
) -> BlendPlan | CollectPlan | None:
    """The plan that the model's flags make of a request, or None.

    Raises:
        ValueError: names the flag or ``old_kvs``, what it is and what is allowed.
    """
    if flags["check"] and flags["collect"]:
        raise ValueError("check and collect are both True; a request either blends or is collected")
    if flags["collect"]:
        return CollectPlan(on_model=True)
    if not flags["check"]:
        return None
    suffix_len = flags["suffix_len"]
    if suffix_len is None:
        raise ValueError(
            "check is True, but suffix_len is not set; set it to the number of question tokens"
        )
    if suffix_len >= num_prompt_tokens:
        raise ValueError(
            f"suffix_len is {suffix_len}, but the prompt has {num_prompt_tokens} tokens; allowed: "
            f"1 to {num_prompt_tokens - 1}"
        )
    kv = stored_kv(old_kvs, num_prompt_tokens, suffix_len, shape)
    return BlendPlan((ChunkSpan(0, kv),), flags.settings())


def stored_kv(old_kvs: Any, num_prompt_tokens: int, suffix_len: int, shape: KVShape) -> StoredKV:
    """``old_kvs`` as the KV of the prompt without its suffix; nothing is copied.

    It may cover the suffix too, as in the paper's scripts; those rows are not used.
    """
    if old_kvs is None:
        raise ValueError("check is True, but old_kvs is None; set it to [[K, V], ...], one a layer")
    try:
        pairs = [tuple(layer) for layer in old_kvs]
    except TypeError:
        raise ValueError(
            f"old_kvs is {type(old_kvs).__name__}; expected [[K, V], ...], one a layer"
        ) from None
    num_chunk_tokens = num_prompt_tokens - suffix_len
    first = pairs[0][0] if pairs and pairs[0] else None
    covered = len(first) if isinstance(first, torch.Tensor) and first.ndim else num_chunk_tokens
    whole = covered == num_prompt_tokens
    if covered not in (num_chunk_tokens, num_prompt_tokens):
        raise ValueError(
            f"old_kvs covers {covered} tokens, the prompt has {num_prompt_tokens}, {num_chunk_tokens} "
            "of them before its suffix. Give token ids, not decoded text: text that was decoded and "
            "encoded again may be other tokens"
        )
    StoredKV(tuple(pairs)).check(shape, num_prompt_tokens if whole else num_chunk_tokens)
    return StoredKV(tuple((k[:num_chunk_tokens], v[:num_chunk_tokens]) for k, v in pairs))
