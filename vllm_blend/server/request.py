"""A request's ``blend`` field: what clients may send, and its validated form.

In ``SamplingParams.extra_args`` (OpenAI API: ``vllm_xargs``) under ``"blend"``: ``"auto"``, ``"off"``,
or an object (in ``vllm_xargs`` as a JSON text, since vLLM takes no objects there):

    {"spans": [[12, 140], [140, 300]],    chunks, as [start, end) of the prompt's token ids
     "auto": true,                        also reuse known chunks wherever they stand
     "recomp_ratio": 0.16, ...            any of BlendSettings; the ratio may be "auto"
     "tenant": "a",                       chunks are shared within a tenant only
     "report": true}                      what was reused, in the response's kv_transfer_params
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

from vllm_blend.core.plans import check_spans
from vllm_blend.core.settings import BlendSettings, short
from vllm_blend.server.config import split_ratio
from vllm_blend.store.controller import FLOOR

SPANS_KEY = "blend_spans"
"""The key of a rendered prompt that holds its marked chunks' spans."""
REPORT_KEY = "blend"
"""The key of an output's ``kv_transfer_params`` that holds what was reused."""

MAX_SPANS, MAX_NAME = 1024, 256
"""Of a request: its chunks, and the characters of its tenant."""

Span = tuple[int, int]


@dataclass(frozen=True)
class BlendRequest:
    """What one request asks for.

    Attributes:
        spans: chunks, ``[start, end)`` as token positions of the prompt.
        auto: also reuse known chunks found in the prompt.
        settings: which tokens are recomputed.
        paced: what is loaded, and the ratio, are decided by how long loads and prefills take.
        floor: the least ratio then.
        tenant: chunks are looked up and kept under this name.
        report: tell in the response what was reused.
        off: compute everything.
    """

    spans: tuple[Span, ...] = ()
    auto: bool = False
    settings: BlendSettings = field(default_factory=BlendSettings)
    paced: bool = False
    floor: float = FLOOR
    tenant: str = ""
    report: bool = False
    off: bool = False

    @classmethod
    def parse(cls, value: Any, defaults: BlendRequest) -> BlendRequest:
        """The request that a client's ``blend`` field asks for.

        Args:
            value: the field, or None where there is none.
            defaults: what holds for keys that are not there.

        Raises:
            ValueError: names the key, its value and what is allowed.
        """
        if value is None:
            return defaults
        if value == "off":
            return replace(defaults, off=True)
        if value == "auto":
            return replace(defaults, auto=True)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"blend is {short(value)}; allowed: 'auto', 'off', or an object as JSON ({error})"
                ) from None
        if not isinstance(value, Mapping):
            raise ValueError(f"blend is {short(value)}; allowed: 'auto', 'off', or an object")
        own = {"spans", "auto", "tenant", "report"}
        theirs = {f.name for f in fields(BlendSettings)}
        if unknown := sorted(str(key) for key in set(value) - own - theirs):
            raise ValueError(
                f"blend has an unknown key {short(unknown[0])}; allowed: "
                f"{', '.join(sorted(own | theirs))}"
            )
        settings, paced = split_ratio({k: v for k, v in value.items() if k in theirs}, defaults.floor)
        return cls(
            spans=parse_spans(value["spans"]) if "spans" in value else defaults.spans,
            auto=_flag("auto", value.get("auto", defaults.auto)),
            settings=replace(defaults.settings, **settings),
            paced=paced or (defaults.paced and not {"recomp_ratio", "recomp_ratios"} & value.keys()),
            floor=defaults.floor,
            tenant=_text("tenant", value.get("tenant", defaults.tenant)),
            report=_flag("report", value.get("report", defaults.report)),
        )

    def check(self, num_prompt_tokens: int, num_layers: int) -> None:
        """Raises ValueError if this does not fit the prompt or the model."""
        self.settings.check_num_layers(num_layers)
        if self.spans:
            check_spans(self.spans, num_prompt_tokens)

    def split(self, max_tokens: int) -> BlendRequest:
        """The same with chunks of ``max_tokens`` at most."""
        return replace(self, spans=tuple(p for span in self.spans for p in pieces(*span, max_tokens)))

    def to_wire(self) -> dict[str, Any]:
        """Plain values, for the way to the engine."""
        return asdict(self)

    @classmethod
    def from_wire(cls, values: dict[str, Any]) -> BlendRequest:
        spans = tuple((int(start), int(end)) for start, end in values["spans"])
        settings = BlendSettings.from_mapping(values["settings"])
        return cls(**(values | {"spans": spans, "settings": settings}))


def pieces(start: int, end: int, max_tokens: int) -> list[Span]:
    """``[start, end)`` in as few pieces as can be, of about the same length."""
    count = -(-(end - start) // max_tokens)
    cuts = [start + (end - start) * at // count for at in range(count + 1)]
    return list(pairwise(cuts))


def parse_spans(value: Any) -> tuple[Span, ...]:
    """``value`` as pairs of token positions, or ValueError."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise ValueError(f"spans is {short(value)}; expected a list of [start, end]")
    if len(value) > MAX_SPANS:
        raise ValueError(f"spans has {len(value)} entries; allowed: {MAX_SPANS} at most")
    spans = []
    for index, span in enumerate(value):
        pair = list(span) if isinstance(span, Sequence) and not isinstance(span, str | bytes) else []
        if len(pair) != 2 or any(type(end) is not int for end in pair):
            raise ValueError(
                f"spans[{index}] is {short(span)}; expected [start, end], two token positions"
            )
        spans.append((pair[0], pair[1]))
    if not spans:
        raise ValueError("spans is empty; leave it out, or name at least one chunk")
    return tuple(spans)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {short(value)}; allowed: true, false")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {short(value)}; expected a text")
    if len(value) > MAX_NAME:
        raise ValueError(f"{name} has {len(value)} characters; allowed: {MAX_NAME} at most")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} is {value!a}; expected a text that UTF-8 can hold") from None
    return value
