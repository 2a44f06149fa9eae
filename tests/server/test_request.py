"""The ``blend`` field: every input is taken as meant, or refused with a ValueError."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_blend.core.settings import BlendSettings
from vllm_blend.server.config import CLIENT_FIELDS, ClientLimits, ServerSettings
from vllm_blend.server.request import BlendRequest, pieces

DEFAULTS = BlendRequest(spans=((5, 9),), settings=BlendSettings(recomp_ratio=0.25))


def parse(value: Any) -> BlendRequest:
    return BlendRequest.parse(value, DEFAULTS)


def test_shorthands() -> None:
    assert parse(None) == DEFAULTS
    assert parse("off").off
    assert parse("auto").auto
    assert parse("auto").spans == DEFAULTS.spans
    assert parse("on") == parse({})
    assert [parse(value).parts for value in (None, "off", "auto", "on")] == [False, False, True, True]
    assert not parse({"spans": [[0, 4]]}).parts  # token ids that the client has: nothing is cut


def test_an_object_and_its_json_are_the_same_request() -> None:
    value = {
        "spans": [[0, 4], [4, 9]],
        "auto": True,
        "tenant": "a",
        "report": True,
        "keep": True,
        "recomp_ratios": [0.5, 0.1],
        "check_layers": [1, 3],
    }
    blend_request = parse(value)
    assert parse(json.dumps(value)) == blend_request
    assert blend_request.spans == ((0, 4), (4, 9))
    assert (blend_request.auto, blend_request.tenant, blend_request.report) == (True, "a", True)
    assert blend_request.keep and not parse({}).keep
    assert blend_request.settings.recomp_ratios == (0.5, 0.1)
    assert parse({}) == replace(DEFAULTS, parts=True)


@pytest.mark.parametrize("settings", [BlendSettings(), BlendSettings((1, 2), 0.5, (0.5, 0.5))])
def test_the_wire_form_survives_a_round_trip(settings: BlendSettings) -> None:
    blend_request = BlendRequest(((1, 3), (3, 7)), True, settings, tenant="t", report=True, keep=True)
    wire = json.loads(json.dumps(blend_request.to_wire()))  # msgpack, too, has lists for tuples
    assert BlendRequest.from_wire(wire) == blend_request


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("soon", "blend is"),
        ("{", "blend is"),
        ("[1]", "blend is"),
        (3, "blend is 3"),
        ({"ratio": 1}, "unknown key 'ratio'"),
        ({"spans": []}, "spans is empty"),
        ({"spans": "0-3"}, "spans is '0-3'"),
        ({"spans": [[1]]}, r"spans\[0\] is \[1\]"),
        ({"spans": [[0, 2], [1, True]]}, r"spans\[1\]"),
        ({"spans": [[0, 2.0]]}, r"spans\[0\]"),
        ({"auto": 1}, "auto is 1"),
        ({"tenant": 7}, "tenant is 7"),
        ({"report": None}, "report is None"),
        ({"keep": 1}, "keep is 1; allowed: true, false"),
        ({"recomp_ratio": 2}, "recomp_ratio is 2"),
        ({"check_layers": [0]}, "check_layers is"),
        ({"mask": "none"}, "mask is 'none'"),
        ({"mask": {}}, "mask is {}"),
        ({"policy": []}, r"policy is \[\]"),
        ({"policy": "*".join(["random"] * 1500)}, "1500 factors; allowed: 3 at most"),
        (
            {"seed": 2**70},
            "seed is 1180591620717411303424; expected a whole number from 0 to 4294967295",
        ),
        ({"seed": -1}, "seed is -1"),
        ({"recomp_ratio": 10**400}, "recomp_ratio is a number of 1329 bits; allowed: 0 to 1"),
        ({"recomp_ratio": -(10**4000)}, "recomp_ratio is a number of 13288 bits"),
        ({"check_layers": list(range(1, 30))}, "check_layers has 29 layers; allowed: 8 at most"),
        ({"tenant": "a\ud800"}, r"tenant is 'a\\ud800'; expected a text that UTF-8 can hold"),
        ({"separator": 7}, "separator is 7"),
        ({"separator": "t" * 300}, "separator has 300 characters; allowed: 256 at most"),
        ({"tenant": "t" * 300}, "tenant has 300 characters; allowed: 256 at most"),
        ({"spans": [[i, i + 1] for i in range(2000)]}, "spans has 2000 entries; allowed: 1024"),
    ],
)
def test_bad_values_are_refused_by_name(value: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse(value)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (
            {"tenant": "b"},
            "key .tenant., which this server.s client_fields do not list; allowed: auto",
        ),
        ({"mask": "exact"}, "key 'mask'"),
        ({"check_layers": [2]}, "key 'check_layers'"),
        ({"seed": 1, "recomp_ratio": 0.3}, "key 'seed'"),
        ({"nonsense": 1, "spans": [[0, 4]]}, "unknown key 'nonsense'; allowed: auto, keep, off, "),
        ({"recomp_ratio": 0.01}, "recomp_ratio is 0.01; this server allows 0.05 to 0.5"),
        ({"recomp_ratio": 1}, "recomp_ratio is 1.0; this server allows 0.05 to 0.5"),
    ],
)
def test_clients_set_what_the_operator_lists(value: Any, named: str) -> None:
    limits = ServerSettings.from_mapping({"client_ratios": [0.05, 0.5]}).client_limits
    with pytest.raises(ValueError, match=named):
        BlendRequest.parse(value, DEFAULTS, limits)
    assert BlendRequest.parse({"recomp_ratio": 0.05}, DEFAULTS, limits).settings.recomp_ratio == 0.05
    wide = ServerSettings.from_mapping({"client_fields": list(CLIENT_FIELDS)}).client_limits
    assert BlendRequest.parse({"tenant": "b"}, DEFAULTS, wide).tenant == "b"


def test_ratios_of_check_layers_have_the_same_bounds() -> None:
    limits = ClientLimits(ratios=(0.1, 0.5))
    value = {"check_layers": [1, 2], "recomp_ratios": [0.5, 0.05]}
    with pytest.raises(ValueError, match="recomp_ratios is 0.05; this server allows 0.1 to 0.5"):
        BlendRequest.parse(value, DEFAULTS, limits)
    # the operator's own default is not the client's choice
    low = replace(DEFAULTS, settings=BlendSettings(recomp_ratio=0.01))
    assert BlendRequest.parse({"report": True}, low, limits).settings.recomp_ratio == 0.01


@pytest.mark.parametrize("value", ["off", "auto"])
def test_shorthands_are_listed_too(value: str) -> None:
    with pytest.raises(ValueError, match=f"key '{value}', .* allowed: report"):
        BlendRequest.parse(value, DEFAULTS, ClientLimits(("report",)))
    assert BlendRequest.parse("on", DEFAULTS, ClientLimits(())).parts


numbers = st.integers() | st.integers(-(2**4000), 2**4000) | st.floats()
texts = st.text(max_size=8) | st.text(st.characters(categories=("Cs", "Ll")), max_size=3)
plain = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from(
    [
        "spans",
        "auto",
        "separator",
        "tenant",
        "report",
        "recomp_ratio",
        "recomp_ratios",
        "check_layers",
        "mask",
        "policy",
        "seed",
    ]
)
spans = st.lists(st.lists(st.integers(-3, 40), min_size=1, max_size=3), max_size=4)


@given(plain | st.dictionaries(keys, plain | spans, max_size=3), st.booleans(), st.integers(1, 40))
def test_any_value_is_a_request_that_fits_or_a_value_error(
    value: Any, as_json: bool, num_tokens: int
) -> None:
    try:
        blend_request = parse(json.dumps(value) if as_json else value)
        blend_request.check(num_tokens, num_layers=5)
    except ValueError as error:
        assert 0 < len(str(error)) < 600
        return
    msgspec.msgpack.encode(blend_request.to_wire())  # as vLLM sends it to the engine
    ends = [end for span in blend_request.spans for end in span]
    assert blend_request.off or value is None or (ends == sorted(ends) and ends[-1] < num_tokens)
    assert all(start < end for start, end in blend_request.spans)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"ratio": 1}, "unknown key 'ratio'"),
        ({"auto": "yes"}, "auto is 'yes'"),
        ({"ram_gb": -1}, "ram_gb is -1"),
        ({"min_chunk_tokens": 0}, "min_chunk_tokens is 0"),
        ({"max_chunk_tokens": 63}, "max_chunk_tokens is 63; expected a whole number from 64"),
        ({"max_chunk_tokens": 99, "min_chunk_tokens": 100}, "a whole number from 100"),
        ({"separator": 5}, "separator is 5"),
        ({"head": 5}, "head is 5"),
        ({"stand_in": 5}, "stand_in is 5"),
        ({"client_fields": "spans"}, "client_fields is 'spans'; expected a list"),
        ({"client_fields": ["spans", "all"]}, "client_fields has 'all'; allowed: auto, check_layers"),
        ({"client_fields": [["a"]]}, r"client_fields has \['a'\]"),
        ({"client_ratios": [0.5, 0.1]}, "client_ratios is"),
        ({"client_ratios": [0, 7]}, "client_ratios is 7"),
        ({"client_ratios": 0.5}, "client_ratios is 0.5"),
        ({"report_sizes": 1}, "report_sizes is 1"),
        ({"system": ["x"]}, "system is \\['x'\\]; expected a text or null"),
        ({"recomp_ratio": 7}, "recomp_ratio is 7"),
    ],
)
def test_bad_server_settings_are_refused_by_name(value: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ServerSettings.from_mapping(value)


def test_server_settings_hold_the_requests_defaults() -> None:
    settings = ServerSettings.from_mapping({"auto": True, "recomp_ratio": 0.3, "check_layers": [2]})
    assert settings.auto
    assert (settings.blend.recomp_ratio, settings.blend.check_layers) == (0.3, (2,))


@pytest.mark.parametrize(
    ("values", "policy", "ratio"),
    [
        ({}, "ahead*static", 0.08),
        ({"stand_in": ""}, "ahead*static", 0.16),
        ({"stand_in": "A passage."}, "ahead*static", 0.08),
        ({"stand_in": "A passage.", "policy": "hkvd"}, "hkvd", 0.08),
        ({"stand_in": "", "recomp_ratio": 0.3}, "ahead*static", 0.3),
    ],
)
def test_a_stand_in_changes_the_defaults_alone(
    values: dict[str, Any], policy: str, ratio: float
) -> None:
    blend = ServerSettings.from_mapping(values).blend
    assert (blend.policy, blend.recomp_ratio) == (policy, ratio)


@given(st.integers(0, 100), st.integers(1, 1000), st.integers(64, 500))
def test_a_long_chunk_is_cut_into_even_pieces(start: int, length: int, most: int) -> None:
    found = pieces(start, start + length, most)
    sizes = [end - first for first, end in found]
    assert [found[0][0], found[-1][1]] == [start, start + length]
    assert all(end == first for (_, end), (first, _) in pairwise(found))
    assert max(sizes) <= most and max(sizes) - min(sizes) <= 1
    assert len(found) == -(-length // most)


def test_host_memory_for_what_a_gpu_computes() -> None:
    """Without a store all that is kept; with one a staging area for two chunks, or a tenth."""
    kept = ServerSettings.from_mapping({"ram_gb": 2})
    assert kept.collect_bytes(1000) == 2.25 * 10**9
    for host_gb, expected in ((100, 2 * 8192 * 1000), (0.01, 10**6)):
        store = ServerSettings.from_mapping({"store": {"host_gb": host_gb}})
        assert store.collect_bytes(1000) == expected
