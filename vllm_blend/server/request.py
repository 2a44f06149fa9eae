"""A request's ``blend`` field: what clients may send, and its validated form.

In ``SamplingParams.extra_args`` (OpenAI API: ``vllm_xargs``) under ``"blend"``: ``"on"``, ``"auto"``,
``"off"``, or an object (in ``vllm_xargs`` as a JSON text, since vLLM takes no objects there):

    {"spans": [[12, 140], [140, 300]],    chunks, as [start, end) of the prompt's token ids
     "separator": "<|8c1f|>",             a text that marks chunks in this request's texts
     "auto": true,                        also reuse known chunks wherever they stand
     "recomp_ratio": 0.16, ...            any of BlendSettings; the ratio may be "auto"
     "tenant": "a",                       chunks are shared within a tenant only
     "keep": true,                        its chunks are wanted, though none came back lately
     "report": true}                      what was reused, in the response's kv_transfer_params

``"on"`` is ``{}``. Which of these a client may set is the operator's choice (``ServerSettings``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from vllm_blend.core.prompt import check_spans
from vllm_blend.core.settings import BlendSettings, short
from vllm_blend.server.config import ANY_CLIENT, SETTINGS_FIELDS, ClientLimits, split_ratio
from vllm_blend.store.controller import FLOOR

SPANS_KEY = "blend_spans"
"""The key of a rendered prompt that holds its marked chunks' spans."""
WHY_NOT_KEY = "blend_why_not"
"""The key of a rendered prompt that says why marked chunks have no span."""
WITH_MEDIA = "it has images, audio or video, and prompts of text alone are blended"
"""Why a request is left to vLLM."""
APPROXIMATE = "blended"
"""A key of a finished request's ``kv_transfer_params``: the blocks that they name hold blended KV."""
REPORT_KEY = "blend"
"""The key of an output's ``kv_transfer_params`` that holds what was reused."""

ROWS_KEY = "recomputed_spans"
"""The key of a report that holds which tokens were recomputed, ``[start, end)``; of a request's first
output alone, since it may be long; the API server keeps it for the others."""

SIZES = frozenset(
    ("stored_chunks", "stored_bytes", "store_hits", "store_misses")
    + ("computed_chunks", "waiting_chunks", "evicted_chunks")
)
"""Of a report: what the server keeps and computes, for all tenants together."""
SIGN = ("reused_tokens", "recomputed_tokens")
"""Of a report: what every answer to a blended request tells."""

MAX_SPANS, MAX_NAME = 1024, 256
"""Of a request: its chunks, and the characters of its tenant and of its separator."""

FORMS = "'on', 'auto', 'off', or an object"
"""Of a ``blend`` field."""

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
        keep: its new chunks are kept, though none of its tenant's came back lately.
        off: compute everything.
        parts: the text parts of its chat messages mark chunks.
        separator: a text that marks chunks in its texts. Empty: none.
        why_not: why chunks that its text marks have no span; empty: all have.
    """

    spans: tuple[Span, ...] = ()
    auto: bool = False
    settings: BlendSettings = field(default_factory=BlendSettings)
    paced: bool = False
    floor: float = FLOOR
    tenant: str = ""
    report: bool = False
    keep: bool = False
    off: bool = False
    parts: bool = False
    separator: str = ""
    why_not: str = ""

    @classmethod
    def parse(
        cls, value: Any, defaults: BlendRequest, limits: ClientLimits = ANY_CLIENT
    ) -> BlendRequest:
        """The request that a client's ``blend`` field asks for.

        Args:
            value: the field, or None where there is none.
            defaults: what holds for keys that are not there.
            limits: what clients may set.

        Raises:
            ValueError: names the key, its value and what is allowed.
        """
        if value is None:
            return defaults
        if value in ("off", "auto"):
            limits.check_keys([value])
        if value == "off":
            return replace(defaults, off=True)
        if value == "auto":
            return replace(defaults, auto=True, parts=True)
        if value == "on":
            value = {}
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"blend is {short(value)}; allowed: {FORMS} as JSON ({error})"
                ) from None
        if not isinstance(value, Mapping):
            raise ValueError(f"blend is {short(value)}; allowed: {FORMS}")
        limits.check_keys(value)
        given = {key: item for key, item in value.items() if key in SETTINGS_FIELDS}
        chosen, paced = split_ratio(given, defaults.floor)
        settings = replace(defaults.settings, **chosen)
        if not paced:
            limits.check_ratios(settings, given)
        return cls(
            spans=parse_spans(value["spans"]) if "spans" in value else defaults.spans,
            auto=_flag("auto", value.get("auto", defaults.auto)),
            settings=settings,
            paced=paced or (defaults.paced and not {"recomp_ratio", "recomp_ratios"} & value.keys()),
            floor=defaults.floor,
            tenant=_text("tenant", value.get("tenant", defaults.tenant)),
            report=_flag("report", value.get("report", defaults.report)),
            keep=_flag("keep", value.get("keep", defaults.keep)),
            parts=defaults.parts or "spans" not in value,
            separator=_text("separator", value.get("separator", defaults.separator)),
            why_not=defaults.why_not,
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


def sign(report: Mapping[str, Any]) -> dict[str, int]:
    """What every answer tells of a request that was blended; empty: it was not."""
    return {key: report[key] for key in SIGN} if report["reused_tokens"] else {}


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
