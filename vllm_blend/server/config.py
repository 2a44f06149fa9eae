"""How a server blends: ``--additional-config '{"vllm_blend": {...}}'``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm_blend.core.settings import NO_STAND_IN, BlendSettings, check_ratio, short
from vllm_blend.store.controller import FLOOR

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CONFIG_KEY = "vllm_blend"
"""The key of vLLM's ``additional_config``."""
NO_STORE = "recomp_ratio is 'auto', and the server has no store to load from; allowed: 0 to 1"
EXAMPLE = '{"host_gb": 16, "disk": {"folder": "/var/cache/chunks", "budget_gb": 200}}'
SETTINGS_FIELDS = tuple(f.name for f in fields(BlendSettings))
CLIENT_FIELDS = ("auto", "keep", "off", "report", "separator", "spans", "tenant", *SETTINGS_FIELDS)
"""What a request's ``blend`` field may hold."""
SAFE_FIELDS = ("auto", "keep", "off", "policy", "recomp_ratio", "report", "separator", "spans")
"""Those that a client may set by default: they change its own answers and times alone."""


@dataclass(frozen=True)
class ClientLimits:
    """What clients may set.

    Args:
        allowed: keys of a request's ``blend`` field, of ``CLIENT_FIELDS``.
        ratios: the least and the greatest ratio that a client may choose.

    Raises:
        ValueError: names the key, its value and what is allowed.
    """

    allowed: Sequence[str] = CLIENT_FIELDS
    ratios: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        if isinstance(self.allowed, str) or not isinstance(self.allowed, Sequence):
            raise ValueError(f"client_fields is {short(self.allowed)}; expected a list of names")
        if unknown := [key for key in self.allowed if key not in CLIENT_FIELDS]:
            raise ValueError(
                f"client_fields has {short(unknown[0])}; allowed: {', '.join(sorted(CLIENT_FIELDS))}"
            )
        pair = self.ratios
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise ValueError(f"client_ratios is {short(pair)}; expected [least, greatest]")
        low, high = (check_ratio("client_ratios", ratio) for ratio in pair)
        if low > high:
            raise ValueError(f"client_ratios is {short(pair)}; expected [least, greatest]")
        object.__setattr__(self, "allowed", tuple(self.allowed))
        object.__setattr__(self, "ratios", (low, high))

    def check_keys(self, keys: Iterable[Any]) -> None:
        """Raises ValueError, which names the first of ``keys`` that a client may not set."""
        wrong = sorted(str(key) for key in set(keys) - set(self.allowed))
        if not wrong:
            return
        what = (
            f"key {wrong[0]!r}, which this server's client_fields do not list"
            if wrong[0] in CLIENT_FIELDS
            else f"an unknown key {short(wrong[0])}"
        )
        raise ValueError(f"blend has {what}; allowed: {', '.join(sorted(self.allowed)) or 'none'}")

    def check_ratios(self, settings: BlendSettings, given: Iterable[str]) -> None:
        """Raises ValueError if one of the ratios that were ``given`` is out of bounds."""
        low, high = self.ratios
        chosen = {
            "recomp_ratio": (settings.recomp_ratio,),
            "recomp_ratios": settings.recomp_ratios or (),
        }
        for name in sorted(set(given) & chosen.keys()):
            for ratio in chosen[name]:
                if not low <= ratio <= high:
                    raise ValueError(f"{name} is {ratio}; this server allows {low} to {high}")


ANY_CLIENT = ClientLimits()
"""No limits but each key's own."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server, by JSON; ``BlendSettings``'s keys (``recomp_ratio`` and the rest) stand
    beside these and are the default of every request. With a store, ``recomp_ratio`` may be ``"auto"``
    (``paced``): then it is decided for each request which chunks to load and how much to recompute.

    Args:
        auto: reuse known chunks in every prompt, wherever they stand, without a word of the client.
        parts: the text parts of every chat message but its last mark chunks. False: those of requests
            with a ``blend`` field alone.
        separator: a text that marks chunks in the texts of all requests: head, chunks and question
            lie between separators, which are not part of the prompt. Whoever can put it into a text
            marks chunks. Empty: none, but what a request's ``blend`` field names for its own texts.
        client_fields: keys of a request's ``blend`` field that clients may set; others are refused.
        client_ratios: the least and the greatest ratio that a client may choose.
        report_sizes: a client's report also tells what the server keeps and computes for all.
        system: the system message that most requests have; chunks are computed after it. None: the
            chat template's default.
        head: a text that most prompts begin with (in a chat: the user's turn); likewise. Empty: none.
        stand_in: a text of the kind that chunks are of, some 500 tokens, such as a few passages of the
            corpus, as they would stand in a prompt: all chunks but a prompt's first are computed after
            it too, since others will stand before them. None: a text of our own, which brings less.
            Empty: nothing; then more tokens are recomputed by default (``NO_STAND_IN``).
        harvest: a chunk's KV is kept from the first prefill that computes it, after whatever stands
            before it there: it is reused from the second request on. False: a chunk is computed by
            itself, after ``head`` and ``stand_in``, when the engine has time; its KV depends on
            nothing else then.
        chat_template: as vLLM's ``--chat-template``: a Jinja text, or the path of one; chunks are
            computed after what it begins with. None: vLLM's, else the tokenizer's.
        chat_template_kwargs: variables of the template that most requests have. None: vLLM's
            ``--default-chat-template-kwargs``.
        min_chunk_tokens: shorter chunks are computed afresh, also those that a request names.
        max_chunk_tokens: longer chunks are cut into pieces that are chunks of their own. One is
            computed, kept and loaded as a whole.
        ram_gb: memory for chunks' KV, in units of 10**9 bytes, as all sizes of this package. An
            eighth more is reserved from the start, so that chunks of any size find room in one piece.
        store: a store's values (``store/config.py``), instead of ``ram_gb``: chunks lie in its memory,
            are written to its other tiers later, and are found there again.
        step_rows: rows that a step computes at most; a blended prompt's reused tokens do not count, so
            that several share a step where ``--max-num-batched-tokens`` leaves them room. None: as many
            as that.
        quality_floor: the least ratio where ``recomp_ratio`` is ``"auto"``: below it this model's
            answers suffer.
        background_share: share of the computed tokens that may go to chunks that were missed, while
            requests are waiting or running; an idle engine computes them at once.
        log_requests: one INFO line a request: what was blended, or why not.
        kv_block_connectors: class names of vLLM's KV connectors that move a request's own blocks to
            another engine, beside those that say so (NIXL, Mooncake). Any other is never given the
            blocks of a blended request: it might hand them out for the same tokens.
        page: serve a page at ``/blend`` to try blending on: documents, a question, and the answers with
            and without. Whoever reaches the server sees it; it asks as any client does.
        operator_key: where the key is, ``{"env": NAME}`` or ``{"file": PATH}``, with which an operator
            may ask at ``/blend/...`` what is kept, and have it deleted, checked or computed, and switch
            blending off and on. None: there are no such routes.

    Raises:
        ValueError: names the key, its value and what is allowed.
    """

    auto: bool = False
    parts: bool = False
    separator: str = ""
    client_fields: Sequence[str] = SAFE_FIELDS
    client_ratios: tuple[float, float] = (0.0, 1.0)
    report_sizes: bool = False
    system: str | None = None
    head: str = ""
    stand_in: str | None = None
    harvest: bool = True
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    min_chunk_tokens: int = 16
    max_chunk_tokens: int = 8192
    ram_gb: float = 4.0
    store: Mapping[str, Any] | None = None
    quality_floor: float = FLOOR
    background_share: float = 0.2
    step_rows: int | None = None
    log_requests: bool = True
    kv_block_connectors: Sequence[str] = ()
    page: bool = False
    operator_key: Mapping[str, str] | None = None
    blend: BlendSettings = field(default_factory=BlendSettings)
    paced: bool = False

    def __post_init__(self) -> None:
        for name in ("auto", "parts", "report_sizes", "log_requests", "harvest", "page"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: true, false")
        for name in ("separator", "head"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected a text")
        for name in ("system", "stand_in", "chat_template"):
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected a text or null")
        if not isinstance(self.chat_template_kwargs, Mapping | None):
            raise ValueError(
                f"chat_template_kwargs is {self.chat_template_kwargs!r}; expected an object or null"
            )
        if not isinstance(self.operator_key, Mapping | None):
            kind = type(self.operator_key).__name__  # the value may be the key
            raise ValueError(f'operator_key is a {kind}; expected {{"env": NAME}} or {{"file": PATH}}')
        _check_number("min_chunk_tokens", self.min_chunk_tokens, int, 1)
        _check_number("max_chunk_tokens", self.max_chunk_tokens, int, max(64, self.min_chunk_tokens))
        _check_number("ram_gb", self.ram_gb, float, 0)
        if self.store is not None:
            if not isinstance(self.store, Mapping):
                kind = type(self.store).__name__  # the value may hold a password
                raise ValueError(f"store is a {kind}; expected an object, e.g. {EXAMPLE}")
            _check_number("host_gb of store", self.store.get("host_gb"), float, 0)
        object.__setattr__(self, "quality_floor", check_ratio("quality_floor", self.quality_floor))
        if self.step_rows is not None:
            _check_number("step_rows", self.step_rows, int, 1)
        _check_number("background_share", self.background_share, float, 0)
        _ = self.client_limits
        names = self.kv_block_connectors
        if isinstance(names, str) or not isinstance(names, Sequence):
            raise ValueError(f"kv_block_connectors is {names!r}; expected a list of class names")
        if any(not isinstance(name, str) for name in names):
            raise ValueError(f"kv_block_connectors is {names!r}; expected a list of class names")

    @cached_property
    def client_limits(self) -> ClientLimits:
        """What clients may set."""
        return ClientLimits(self.client_fields, self.client_ratios)

    @property
    def chunk_bytes(self) -> int:
        """Memory for the KV of known chunks; of a store's, a tenth is left for those on their way."""
        if self.store is None:
            return int(self.ram_gb * 1e9)
        return int(0.9 * self.store["host_gb"] * 1e9)

    def collect_bytes(self, token_bytes: int) -> int:
        """Host memory for chunks that are computed: for all that are kept, and an eighth more for
        holes between them. With a store, which has memory of its own, for two of the longest on their
        way there, a tenth of ``host_gb`` at most.

        Args:
            token_bytes: of a token's K and V in all layers.
        """
        if self.store is None:
            return self.chunk_bytes * 9 // 8
        return min(2 * self.max_chunk_tokens * token_bytes, self.chunk_bytes // 9)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> ServerSettings:
        """Settings from JSON values; an unknown key is refused by name."""
        own = {f.name for f in fields(cls)} - {"blend", "paced"}
        theirs = set(SETTINGS_FIELDS)
        if unknown := sorted(set(values) - own - theirs):
            raise ValueError(
                f"additional_config[{CONFIG_KEY!r}] has an unknown key {unknown[0]!r}; allowed: "
                f"{', '.join(sorted(own | theirs))}"
            )
        if {"store", "ram_gb"} <= set(values):
            raise ValueError("ram_gb and store are both set; store's host_gb takes the place of ram_gb")
        others = {k: v for k, v in values.items() if k in own}
        floor = cls(**others).quality_floor
        chosen: dict[str, Any] = {}
        if others.get("stand_in") == "":
            chosen = {"recomp_ratio": NO_STAND_IN.recomp_ratio}
        chosen |= {k: v for k, v in values.items() if k in theirs}
        theirs_given, paced = split_ratio(chosen, floor)
        if paced and values.get("store") is None:
            raise ValueError(NO_STORE)
        return cls(blend=BlendSettings.from_mapping(theirs_given), paced=paced, **others)

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> ServerSettings | None:
        """The settings that an engine was started with; None if it was not asked to blend."""
        config = vllm_config.additional_config
        if not isinstance(config, dict) or CONFIG_KEY not in config:
            return None
        values = config[CONFIG_KEY]
        if not isinstance(values, Mapping):
            raise ValueError(
                f"additional_config[{CONFIG_KEY!r}] is {values!r}; expected an object, e.g. {{}}"
            )
        global _latest
        if _latest is None or _latest[0] is not values:  # asked for with every request
            _latest = values, cls.from_mapping(values)
        return _latest[1]


_latest: tuple[Mapping[str, Any], ServerSettings] | None = None
"""Values that were parsed last, and what came of it; a process has one engine's."""


def split_ratio(values: Mapping[str, Any], floor: float) -> tuple[dict[str, Any], bool]:
    """Values of ``BlendSettings`` in which ``recomp_ratio`` may be ``"auto"``; and whether it was."""
    if values.get("recomp_ratio") != "auto":
        return dict(values), False
    if values.get("recomp_ratios") is not None:
        raise ValueError("recomp_ratio is 'auto' and recomp_ratios is set; what is chosen is one ratio")
    return dict(values) | {"recomp_ratio": floor, "recomp_ratios": None}, True


def _check_number(name: str, value: Any, kind: type, low: int) -> None:
    allowed = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed) or not value >= low:
        noun = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name} is {value!r}; expected {noun} from {low}")
