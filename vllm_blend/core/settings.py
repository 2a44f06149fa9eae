"""How a request is blended: one frozen, validated settings object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

MASKS = ("exact", "bottom_right")
POLICIES = {
    "static": "K and V that move most between two contexts, by scores kept with the chunk",
    "ahead": "highest attention from the question, in a pass of its own before the rows are chosen",
    "heads": "the first tokens of each chunk (LegoLink)",
    "random": "at random, by `seed`",
    "hkvd": "highest deviation of V at the check layer (the paper's)",
    "hkvd_k": "highest deviation of K at the check layer",
    "hkvd_kv": "highest deviation of both at the check layer",
    "query": "highest attention from the question at the check layer",
}
"""What ``BlendSettings.policy`` is made of; the classes are in ``model/select/policies.py``."""

EARLY = frozenset({"static", "ahead", "heads", "random"})
"""Policies that choose rows before layer 0: the model's own forward runs on those rows alone. The
others look at a check layer, which only the layer loop of ``model/loop.py`` reaches."""

PLANNED = EARLY - {"ahead"}
"""Those of them that need nothing but a plan: no layer is run to choose."""

LOOP_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures whose layers that loop knows how to call."""


MAX_SEED, MAX_FACTORS, MAX_CHECK_LAYERS = 2**32 - 1, 3, 8
"""Bounds of what a request may ask for, since each factor and each check layer costs time."""


@dataclass(frozen=True)
class BlendSettings:
    """Which tokens of the reused chunks are recomputed, and where that is decided.

    By default 8% are recomputed: those whose K and V move most between two contexts, as far as the
    question attends to them. The CacheBlend paper (arXiv 2405.16444, section 4) chooses at layer 1, by
    how far fresh V lies from the stored one, and recomputes 16%: ``PAPER``.

    Args:
        check_layers: layers (ascending, from 1) at which rows are chosen. Layer 0 cannot be one:
            its K and V do not depend on the other tokens.
        recomp_ratio: share of the chunk tokens that is recomputed, in [0, 1].
        recomp_ratios: a ratio for each check layer, not rising; overrides ``recomp_ratio``.
            Several check layers shrink the set step by step (the paper's gradual filtering).
        mask: ``"exact"``: a query sees the keys at positions <= its own. ``"bottom_right"``: the
            mask of the paper's published code, for comparison only; it lets queries see later keys.
        policy: how tokens are chosen: a name in ``POLICIES``, or a product ``a*b`` of their scores.
            Where ``ahead`` does not pay (``for_rows``), the rest of the product chooses twice as many
            tokens, up to half of them; all of it does where the question points nowhere, as a request
            for a summary. Those that look at chunk heads need a span for each chunk.
        seed: for ``"random"``, up to ``MAX_SEED``.

    Raises:
        ValueError: names the argument, its value and what is allowed.
    """

    check_layers: tuple[int, ...] = (1,)
    recomp_ratio: float = 0.08
    recomp_ratios: tuple[float, ...] | None = None
    mask: str = "exact"
    policy: str = "ahead*static"
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "check_layers", check_layer_list(self.check_layers))
        object.__setattr__(self, "recomp_ratio", check_ratio("recomp_ratio", self.recomp_ratio))
        if self.recomp_ratios is not None:
            ratios = check_ratio_list(self.recomp_ratios)
            if len(ratios) != len(self.check_layers):
                raise ValueError(
                    f"recomp_ratios has {len(ratios)} values for {len(self.check_layers)} "
                    "check_layers; give one ratio a check layer"
                )
            object.__setattr__(self, "recomp_ratios", ratios)
        if self.mask not in MASKS:
            raise ValueError(f"mask is {short(self.mask)}; allowed: {', '.join(MASKS)}")
        policy_factors(self.policy)
        if type(self.seed) is not int or not 0 <= self.seed <= MAX_SEED:
            raise ValueError(
                f"seed is {short(self.seed)}; expected a whole number from 0 to {MAX_SEED}"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> BlendSettings:
        """Settings from plain values, e.g. JSON; an unknown key is refused by name."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(
                f"unknown blend setting {unknown[0]!r}; allowed: {', '.join(sorted(known))}"
            )
        return cls(**values)

    def ratio_at(self, layer: int) -> float:
        """The share of chunk tokens that goes on from check layer ``layer``."""
        if self.recomp_ratios is None:
            return self.recomp_ratio
        return self.recomp_ratios[self.check_layers.index(layer)]

    @property
    def last_ratio(self) -> float:
        """The share of chunk tokens that is recomputed in the end."""
        return self.recomp_ratio if self.recomp_ratios is None else self.recomp_ratios[-1]

    @cached_property
    def policies(self) -> frozenset[str]:
        """The names that ``policy`` is made of."""
        return frozenset(policy_factors(self.policy))

    @property
    def asks(self) -> bool:
        """Whether the question is asked, in a pass of its own."""
        return "ahead" in self.policies

    def for_rows(self, num_own: int, num_reused: int, has_question: bool = True) -> BlendSettings:
        """These, where the question is to be asked among so many rows of a window; else without it.

        Args:
            num_own: rows that no stored KV stands for, which its pass computes once more.
            num_reused: the others.
            has_question: the question is among them.
        """
        pays = has_question and num_own <= ASKED_SHARE * num_reused
        return self.unasked if self.asks and not pays else self

    @cached_property
    def unasked(self) -> BlendSettings:
        """The same without asking the question: by the other factors of the product, or ``"static"``
        where there are none, and twice as many tokens (``doubled``), which costs about as much quality
        (docs/quality.md)."""
        factors = [name for name in policy_factors(self.policy) if name != "ahead"]
        ratios = self.recomp_ratios
        return replace(
            self,
            policy="*".join(factors) or "static",
            recomp_ratio=doubled(self.recomp_ratio),
            recomp_ratios=None if ratios is None else tuple(doubled(ratio) for ratio in ratios),
        )

    @cached_property
    def early(self) -> bool:
        """Whether rows are chosen before layer 0."""
        return self.policies <= EARLY

    def check_architecture(self, architectures: Iterable[str]) -> None:
        """Raises ValueError if the policy needs a layer loop that a model of these has not."""
        if self.early or set(architectures) & set(LOOP_ARCHITECTURES):
            return
        raise ValueError(
            f"policy is {self.policy!r}, which looks at a check layer; {', '.join(architectures)} can "
            f"choose rows before layer 0 only, so allowed: {', '.join(sorted(EARLY))}, and products of "
            "them"
        )

    def check_num_layers(self, num_layers: int) -> None:
        """Raises ValueError if a check layer is not a layer of the model."""
        if self.check_layers[-1] >= num_layers:
            raise ValueError(
                f"check_layers is {short(list(self.check_layers))}, but the model has {num_layers} "
                f"layers; allowed: 1 to {num_layers - 1}"
            )


def policy_factors(policy: Any) -> list[str]:
    """The policies whose product ``policy`` is: ``"ahead*hkvd"`` is ``["ahead", "hkvd"]``; or
    ValueError."""
    names = policy.split("*") if isinstance(policy, str) else [""]
    if any(name not in POLICIES for name in names):
        raise ValueError(
            f"policy is {short(policy)}; allowed: {', '.join(POLICIES)}, and products a*b of them"
        )
    if len(names) > MAX_FACTORS:
        raise ValueError(
            f"policy is {short(policy)}, {len(names)} factors; allowed: {MAX_FACTORS} at most"
        )
    if "heads" in names and len(names) > 1:
        raise ValueError(
            f"policy is {short(policy)}; heads is an order without scores, so it is no factor"
        )
    return names


def check_ratio(name: str, value: Any) -> float:
    """``value`` as a float in [0, 1], or ValueError naming ``name``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ValueError(f"{name} is {short(value)}; expected a number from 0 to 1")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {short(value)}; allowed: 0 to 1")
    return float(value)


def check_ratio_list(values: Any) -> tuple[float, ...]:
    """``values`` as a non-rising tuple of ratios, or ValueError."""
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        raise ValueError(f"recomp_ratios is {short(values)}; expected a list of numbers from 0 to 1")
    ratios = tuple(check_ratio(f"recomp_ratios[{i}]", ratio) for i, ratio in enumerate(values))
    if any(later > earlier for earlier, later in zip(ratios, ratios[1:], strict=False)):
        raise ValueError(
            f"recomp_ratios is {short(list(ratios))}; a row that was dropped cannot come back, so the "
            "ratios must not rise"
        )
    return ratios


def check_layer_list(values: Any) -> tuple[int, ...]:
    """``values`` as an ascending tuple of layer indices from 1, or ValueError."""
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        raise ValueError(f"check_layers is {short(values)}; expected a list of layer indices")
    layers = tuple(values)
    if not layers:
        raise ValueError("check_layers is empty; give at least one layer, e.g. [1]")
    if len(layers) > MAX_CHECK_LAYERS:
        raise ValueError(f"check_layers has {len(layers)} layers; allowed: {MAX_CHECK_LAYERS} at most")
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise ValueError(
                f"check_layers is {short(list(layers))}; {short(layer)} is not a layer index"
            )
        if layer < 1:
            raise ValueError(
                f"check_layers is {short(list(layers))}; layer 0 has the same K and V in any context, "
                "so the first layer that can choose is 1"
            )
    if any(later <= earlier for earlier, later in zip(layers, layers[1:], strict=False)):
        raise ValueError(f"check_layers is {short(list(layers))}; the layers must ascend")
    return layers


def short(value: Any) -> str:
    """``value`` for an error message, cut where it is long; an int of any size has one."""
    if type(value) is int and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


PAPER = BlendSettings(policy="hkvd", recomp_ratio=0.16)
"""The CacheBlend paper's choice, which ``cache_fuse_metadata`` has by default."""

NO_STAND_IN = BlendSettings(recomp_ratio=0.16)
"""The default where chunks are computed after a prompt's head alone: their KV is farther off."""


def num_kept(ratio: float, num_chunk_rows: int) -> int:
    """Rows that ``ratio`` of ``num_chunk_rows`` keeps: rounded down, all at 1.0."""
    return int(ratio * num_chunk_rows)


def doubled(ratio: float) -> float:
    """Twice as many tokens, up to half of them: a blend of all is no cheaper than full prefill. A
    ratio above a half stays."""
    return max(ratio, min(0.5, 2 * ratio))


ASKED_SHARE = 1 / 4
"""The question is asked where the rows that no chunk holds are at most this share of those that chunks
hold: its pass computes them in two thirds of the layers, and then they are computed again."""

ASKED_DEPTH = 1 / 3, 2 / 3
"""Which layers the question is asked at: those in the middle third of the model's depth
(docs/quality.md)."""


def asked_layers(num_layers: int) -> range:
    """The layers that are asked; the question's pass ends with the last of them."""
    first, end = (int(depth * num_layers) for depth in ASKED_DEPTH)
    return range(first, max(end, first + 1))
