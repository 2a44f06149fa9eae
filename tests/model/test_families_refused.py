"""Families that cannot blend are refused, each with its reason; no other engine is there meanwhile."""

from __future__ import annotations

import re

import pytest
from engines import make_engine
from families import FAMILIES, family_folder

CANNOT = [name for name, row in FAMILIES.items() if row.refused]
REFUSALS = ("opt", "bloom", "deepseek_v2", "mamba", "jamba", "hunyuan")


@pytest.mark.covers("rows chosen before the step", backend="CPU_ATTN", family="{family}", refused=True)
@pytest.mark.parametrize(
    "family", [n if n in REFUSALS else pytest.param(n, marks=pytest.mark.slow) for n in CANNOT]
)
def test_what_cannot_blend_is_refused_with_the_reason(family: str) -> None:
    row = FAMILIES[family]
    with pytest.raises(RuntimeError) as error, make_engine(family_folder(family), **row.engine):
        pass
    assert re.search(row.refused, str(error.value)), error.value
