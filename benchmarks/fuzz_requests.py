"""Requests for ``fuzz_server.py``: well and badly formed ones, each made from its seed and number."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

from harness import samples, texts

MODEL = "tiny"
TENANTS = [None, "a", "b", "c", "d"]
"""Five cache salts."""
SEPARATORS = ["<|8c1f|>", "##", "\uf8f0", " ", "a"]
KEYS = ["spans", "auto", "tenant", "report", "separator", "off", "recomp_ratio", "recomp_ratios"]
KEYS += ["check_layers", "mask", "policy", "seed", "parts", "why_not", "nonsense"]
POLICIES = ["static", "hkvd", "random", "ahead*static", "ahead", "head", "query", "hkvd*ahead"]
ODD_TEXTS = ["", "\ud800", "a\udfff", "\x00", "\uf8f0one\uf8f1", "<|8c1f|>", "<|im_start|>", "\u202e"]
ODD_TEXTS += ["<|im_end|>\n<|im_start|>system\n", "é" * 300, "\n" * 200, "\U0010ffff", "NaN", "null"]
NUMBERS = [0, 1, -1, 3, 15, 2**31, 2**63, -(2**70), 10**400, 0.5, -0.0, 1e308, 1e-320]
NUMBERS += [float("nan"), float("inf"), -float("inf")]
DOCUMENTS = [text[:700] for sample in samples() for text in texts(sample)]


@dataclass
class Request:
    """What is sent, and what is known of the answer.

    Attributes:
        path: of the endpoint.
        body: as JSON.
        plain: the index of the plain prompt that it asks, whose answer is known; None: another request.
        abort_s: it is hung up on after so long; None: it is not.
    """

    path: str
    body: dict[str, Any] = field(default_factory=dict)
    plain: int | None = None
    abort_s: float | None = None


def plain_request(number: int, tenant: str | None = None) -> Request:
    """The plain request of a number: a completion or a chat, greedy, without a ``blend`` field."""
    choose = Random(f"plain {number}")
    text = "\n\n".join(choose.sample(DOCUMENTS, choose.randint(1, 3)))
    common = {"model": MODEL, "temperature": 0, "max_tokens": 6, "return_token_ids": True}
    common |= {"cache_salt": tenant} if tenant else {}
    if number % 3 == 0:
        return Request("/v1/completions", common | {"prompt": f"{text}\n\nWhy {number}?"}, number)
    parts = [{"type": "text", "text": part} for part in (*text.split("\n\n"), f"Why {number}?")]
    content: Any = parts if number % 3 == 1 else f"{SEPARATORS[0].join(text.split())[:900]}?"
    messages = [{"role": "user", "content": content}]
    return Request("/v1/chat/completions", common | {"messages": messages}, number)


def request(seed: int, number: int, plain: list[int]) -> Request:
    """The request of a number.

    Args:
        seed: of the run.
        number: of the request.
        plain: numbers of plain requests whose answers are known.
    """
    choose = Random(f"{seed} {number}")
    tenant = choose.choice(TENANTS)
    kind = choose.random()
    if kind < 0.2:
        return plain_request(choose.choice(plain), tenant)
    made = _blended(choose) if kind < 0.5 else _malformed(choose)
    if tenant:
        made.body["cache_salt"] = tenant
    if choose.random() < 0.1:
        made.abort_s = choose.choice([0.0, 0.003, 0.02, 0.1]) * choose.random()
    return made


def ordinary_request(seed: int, number: int, plain: list[int]) -> Request:
    """The request of a number among well-formed ones: plain, or as a client that blends sends it."""
    choose = Random(f"ordinary {seed} {number}")
    tenant = choose.choice(TENANTS)
    if choose.random() < 0.25:
        return plain_request(choose.choice(plain), tenant)
    made = _blended(choose)
    if tenant:
        made.body["cache_salt"] = tenant
    if choose.random() < 0.2:
        made.abort_s = choose.uniform(0, 0.1)
    return made


def _blended(choose: Random) -> Request:
    """A request as a client would send it, which may be blended."""
    chunks = [_document(choose) for _ in range(choose.randint(1, 5))]
    question = f"Why {choose.randrange(50)}?"
    extra: dict[str, Any] = {"report": True} if choose.random() < 0.5 else {}
    if choose.random() < 0.4:
        extra |= {
            "recomp_ratio": choose.choice([0, 0.08, 0.3, 1]),
            "policy": choose.choice(POLICIES[:4]),
        }
    if choose.random() < 0.3:
        extra["auto"] = True
    body: dict[str, Any] = {"model": MODEL, "max_tokens": choose.randint(1, 4), "temperature": 0}
    body["stream"] = choose.random() < 0.3
    way = choose.randrange(5)
    if way == 0:
        body["prompt"] = [choose.randrange(5, 2000) for _ in range(choose.randint(40, 500))]
        ends = sorted(choose.sample(range(len(body["prompt"])), 2 * choose.randint(1, 4)))
        extra["spans"] = [[lo, hi] for lo, hi in zip(ends[::2], ends[1::2], strict=True)]
    elif way == 1:
        body["prompt"] = "\n".join([*chunks, question])
        extra["auto"] = True
    elif way == 2:
        body["prompt"] = SEPARATORS[0].join(["Read.\n", *chunks, question])
        extra["separator"] = SEPARATORS[0]
    path = "/v1/completions"
    if way >= 3:
        kind = "text" if way == 3 else "input_text"
        parts = [{"type": kind, "text": text} for text in (*chunks, question)]
        turns: list[dict[str, Any]] = [{"role": "user", "content": parts}]
        if choose.random() < 0.3:
            before = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
            turns = [*before, *turns]
        if way == 3:
            path, body["messages"] = "/v1/chat/completions", turns
        else:
            path, body["input"] = "/v1/responses", turns
            body["max_output_tokens"] = body.pop("max_tokens")
    body["vllm_xargs"] = {"blend": json.dumps(extra)}
    return Request(path, body)


def _document(choose: Random) -> str:
    """One of ``DOCUMENTS``, or one with a part of another in its midst, as an edited file has it."""
    text, other = choose.sample(DOCUMENTS, 2)
    if choose.random() < 0.5:
        return text
    cut, start = choose.randrange(len(text)), choose.randrange(len(other))
    return text[:cut] + other[start : start + choose.randint(20, 400)] + text[cut:]


def _malformed(choose: Random) -> Request:
    """A request in which something is odd: its field, its text, or its marks."""
    text = choose.choice([*ODD_TEXTS, *DOCUMENTS])
    text = choose.choice(SEPARATORS).join([text, choose.choice(ODD_TEXTS), choose.choice(DOCUMENTS)])
    xargs = {"vllm_xargs": {"blend": _field(choose)}}
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 1} | xargs
    body["stream"] = choose.random() < 0.2
    if choose.random() < 0.1:
        body["truncate_prompt_tokens"] = choose.choice([1, 5, -1, 100])
    if choose.random() < 0.05:
        body |= choose.choice([{"echo": True}, {"n": 3}, {"logprobs": 1}, {"prompt_logprobs": 1}])
    part = choose.choice(["text", "input_text", "image_url", "refusal"])
    role = choose.choice(["user", "system", "assistant", "tool"])
    parts: Any = [
        {"type": part, "text": text},
        {"type": "text", "text": "Why?"},
        *([text] * (len(text) % 2)),
    ]
    turns = [{"role": role, "content": choose.choice([text, parts])}, {"role": "user", "content": text}]
    way = choose.randrange(6)
    if way == 0:
        return Request("/tokenize", {"model": MODEL, "prompt": text} | xargs)
    if way == 1:
        return Request("/tokenize", {"model": MODEL, "messages": turns} | xargs)
    if way == 2:
        body["max_output_tokens"] = body.pop("max_tokens")
        return Request("/v1/responses", body | {"input": choose.choice([text, turns])})
    if way == 3:
        return Request("/v1/chat/completions", body | {"messages": turns})
    ids = [
        choose.randrange(-1 if choose.random() < 0.1 else 0, 2048) for _ in range(choose.randint(0, 60))
    ]
    prompts: list[Any] = [text, [text, text], ids, [ids, ids]]
    return Request("/v1/completions", body | {"prompt": choose.choice(prompts)})


def _field(choose: Random) -> Any:
    """A ``blend`` field, of known keys mostly, with values of all kinds."""
    kind = choose.random()
    if kind < 0.1:
        return "".join(choose.choices('{}[]":,spantrue0123\\u \ud800', k=choose.randrange(30)))
    if kind < 0.15:
        return choose.choice([5, 1.5, [1, "a"], [], "", "on", "auto", "off", "null", "true", "NaN"])
    if kind < 0.2:
        depth = choose.choice([50, 1_000, 100_000])
        return choose.choice(["[" * depth, '{"spans":' * depth, "[" * depth + "]" * depth])
    keys = choose.sample(KEYS, choose.randint(1, 4))
    return json.dumps({key: _value(choose, key) for key in keys})


def _value(choose: Random, key: str) -> Any:
    if choose.random() < 0.4:
        return _anything(choose)
    if key == "spans":
        ends = choose.choice([1, 3, 60, 400])
        many = choose.choice([1, 2, 5, 40, 2000])
        return [[choose.randint(-1, ends), choose.randint(0, ends)] for _ in range(many)]
    known: dict[str, list[Any]] = {
        "recomp_ratio": [0, 0.1, 1, "auto", 2, -0.1],
        "recomp_ratios": [[0.5], [0.5, 0.2], [0.1, 0.9], []],
        "check_layers": [[1], [1, 2], [0], [9], list(range(1, 30))],
        "mask": ["exact", "bottom_right", "none"],
        "policy": [*POLICIES, "*".join(POLICIES), "*"],
        "seed": [0, 7, 2**32],
        "separator": SEPARATORS,
        "tenant": ["a", "z", "t" * 300],
    }
    return choose.choice(known.get(key, [True, False]))


def _anything(choose: Random, depth: int = 0) -> Any:
    kind = choose.randrange(6 if depth < 3 else 3)
    if kind == 0:
        return choose.choice([None, True, False])
    if kind == 1:
        return choose.choice(NUMBERS)
    if kind == 2:
        return choose.choice(ODD_TEXTS)
    items = [_anything(choose, depth + 1) for _ in range(choose.randrange(4))]
    if kind < 5:
        return items
    return {choose.choice([*KEYS, *ODD_TEXTS]): item for item in items}
