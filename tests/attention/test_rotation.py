"""Rotations: there and back, and read off modules that rotate, or do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import LLAMA3_ROPE, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_blend.attention.rotation import Rotation, read, rotations_in
from vllm_blend.ops.shift_scatter import rotate_oracle

LONGEST = 96
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=24)
LIKE = {dtype: torch.empty(0, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
dtypes = st.sampled_from(list(CLOSE))


def table_of(rotary_dim: int, base: float, scale: float) -> torch.Tensor:
    """Cosines and sines, ``[LONGEST, rotary_dim]``, scaled as YaRN scales them."""
    frequencies = base ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(LONGEST)[:, None] * frequencies
    return scale * torch.cat([angles.cos(), angles.sin()], dim=1)


def slow_rotate(
    x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, neox: bool
) -> torch.Tensor:
    """``x``, ``[num_tokens, num_heads, head_size]``, number by number, in fp64."""
    out, half = x.double().clone(), table.shape[1] // 2
    for token, position in enumerate(positions.tolist()):
        for pair in range(half):
            one, two = (pair, pair + half) if neox else (2 * pair, 2 * pair + 1)
            turn = complex(table[position, pair], table[position, pair + half])
            for head in range(x.shape[1]):
                z = complex(x[token, head, one], x[token, head, two]) * turn
                out[token, head, one], out[token, head, two] = z.real, z.imag
    return out


@st.composite
def rotations(draw: st.DrawFn) -> tuple[Rotation, int]:
    """Of random angles, partial and scaled ones too, and a head size."""
    pairs, rest = draw(st.integers(1, 6)), draw(st.integers(0, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    angles = torch.rand(LONGEST, pairs, generator=generator) * math.tau
    scale = draw(st.floats(0.25, 4))
    if draw(st.booleans()):  # another one for each position
        scale = scale * (0.5 + torch.rand(LONGEST, 1, generator=generator))
    table = scale * torch.cat([angles.cos(), angles.sin()], dim=1)
    return Rotation(table.to(draw(dtypes)), draw(st.booleans())), 2 * pairs + rest


@settings(deadline=None)
@given(rotations(), st.integers(1, 9), st.integers(1, 3), st.integers(0, 999), dtypes)
def test_undo_is_the_inverse_of_rotate(
    made: tuple[Rotation, int], count: int, num_heads: int, seed: int, dtype: torch.dtype
) -> None:
    rotation, head_size = made
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(count, num_heads, head_size, generator=generator).to(dtype)
    positions = torch.randint(LONGEST, (count,), generator=generator)
    before = k.clone()
    turned = rotation.rotate(k, positions)
    assert turned.dtype == k.dtype and turned.shape == k.shape
    assert relative_error(rotation.undo(turned, positions), k) < CLOSE[dtype]
    assert relative_error(rotation.rotate(rotation.undo(k, positions), positions), k) < CLOSE[dtype]
    assert torch.equal(k, before)
    rest = slice(rotation.table.shape[1], None)
    assert torch.equal(turned[..., rest], k[..., rest])
    table = rotation.inverse(positions)  # as a kernel gets it
    undone = rotate_oracle(turned, torch.arange(count), table, rotation.is_neox_style)
    assert relative_error(undone, k) < CLOSE[dtype]


@pytest.mark.parametrize("scale", [1, 1.19, 1.1, 0.7])
def test_undo_makes_no_key_longer(scale: float) -> None:
    """Rounding goes both ways, where cosines are scaled and hardly move (LongRoPE), too."""
    angles = torch.arange(LONGEST)[:, None] * 1e-6
    rotation = Rotation(scale * torch.cat([angles.cos(), angles.sin()], dim=1))
    k = torch.randn(LONGEST, 200, 2, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(LONGEST)
    found = rotation.undo(rotation.rotate(k, positions), positions)
    assert abs(float(found.double().norm() / k.double().norm()) - 1) < 3e-9


@settings(deadline=None, max_examples=40)
@given(rotations(), st.integers(1, 4), st.integers(0, 999))
def test_rotate_turns_each_pair(made: tuple[Rotation, int], count: int, seed: int) -> None:
    rotation, head_size = made
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(count, 2, head_size, generator=generator)
    positions = torch.randint(LONGEST, (count,), generator=generator)
    expected = slow_rotate(k, positions, rotation.table, rotation.is_neox_style)
    assert relative_error(rotation.rotate(k, positions), expected) < 1e-5


def test_none_leaves_k_as_it_is() -> None:
    rotation = Rotation.none(LONGEST, torch.float32, torch.device("cpu"))
    assert rotation.is_none
    k, positions = torch.randn(5, 2, 8), torch.arange(40, 45)
    for turned in (rotation.rotate(k, positions), rotation.undo(k, positions)):
        assert torch.equal(turned, k) and turned.data_ptr() != k.data_ptr()
    # kernels read the table whatever it says: it must turn nothing
    assert torch.equal(rotate_oracle(k, torch.arange(5), rotation.inverse(positions), True), k)
    same = Rotation(rotation.table)
    assert torch.equal(same.rotate(k, positions), k)


# --- read off what rotates -----------------------------------------------------------------------


def turn_of(table: torch.Tensor, neox: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    rotation = Rotation(table, neox)
    return lambda x, positions: rotation.rotate(x[:, None], positions)[:, 0]


@settings(deadline=None)
@given(
    pairs=st.integers(1, 16),
    rest=st.integers(0, 9),
    base=st.floats(50, 1e6),
    scale=st.floats(0.3, 3),
    neox=st.booleans(),
    dtype=dtypes,
)
def test_any_rotation_is_read(
    pairs: int, rest: int, base: float, scale: float, neox: bool, dtype: torch.dtype
) -> None:
    table = table_of(2 * pairs, base, scale).to(dtype)
    found = read(turn_of(table, neox), 2 * pairs + rest, LONGEST, LIKE[dtype])
    assert found is not None and not found.is_none
    assert found.is_neox_style == neox or pairs == 1  # then they are the same
    assert found.table.dtype == dtype
    assert torch.equal(found.table, table)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 12), st.integers(0, 999), dtypes)
def test_what_mixes_dimensions_is_no_rotation(half: int, seed: int, dtype: torch.dtype) -> None:
    """A random matrix at each position; of two dimensions too."""
    size = 2 * half
    generator = torch.Generator().manual_seed(seed)
    matrices = torch.randn(LONGEST, size, size, generator=generator)

    def turn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.einsum("nd,nde->ne", x.float(), matrices[positions]).to(x.dtype)

    assert read(turn, size, LONGEST, LIKE[dtype]) is None


def _raise(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("other heads")


def _by_neighbours(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Pairs that mirror each other: ``(i, head_size - 1 - i)``."""
    half = x.shape[1] // 2
    both = torch.cat([x[:, :half], x[:, half:].flip(1)], dim=1)
    turned = turn_of(table_of(x.shape[1], 1e4, 1), True)(both, positions)
    return torch.cat([turned[:, :half], turned[:, half:].flip(1)], dim=1)


def _of_later_dimensions(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """All but the first four, as some models have it."""
    return torch.cat(
        [x[:, :4], turn_of(table_of(x.shape[1] - 4, 1e4, 1), True)(x[:, 4:], positions)], dim=1
    )


NO_ROTATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "nothing": lambda x, positions: x,
    "a sum": lambda x, positions: x + positions[:, None].to(x) / 8,
    "a factor": lambda x, positions: x * (1 + positions[:, None].to(x)),
    "not linear": lambda x, positions: turn_of(table_of(16, 1e4, 1), True)(x, positions).tanh(),
    "other pairs": _by_neighbours,
    "dimensions behind others": _of_later_dimensions,
    "of the batch": lambda x, positions: x.cumsum(0),
    "an error": _raise,
}


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("turn", NO_ROTATIONS.values(), ids=NO_ROTATIONS)
def test_what_is_no_rotation_is_not_read(
    turn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    assert read(turn, 16, LONGEST, LIKE[dtype]) is None


# --- of modules ----------------------------------------------------------------------------------


class RotaryOfHeads(torch.nn.Module):
    """Called as vLLM's are: Q and K in, flat, Q and K out."""

    def __init__(self, table: torch.Tensor, neox: bool) -> None:
        super().__init__()
        self.turn, self.calls = turn_of(table, neox), 0

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> Any:
        self.calls += 1
        return self.turn(query, positions), None if key is None else self.turn(key, positions)


class RotaryOfAngles(torch.nn.Module):
    """Called as transformers' are: cosines and sines out, ``[1, num_tokens, rotary_dim]``."""

    def __init__(self, table: torch.Tensor, repeated: bool) -> None:
        super().__init__()
        self.table, self.repeated = table, repeated

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        parts = self.table[position_ids].chunk(2, dim=-1)
        if self.repeated:  # for pairs of neighbours
            return tuple(part.repeat_interleave(2, dim=-1) for part in parts)
        return tuple(torch.cat([part, part], dim=-1) for part in parts)


class RotaryOfKinds(RotaryOfAngles):
    """One module for layers of several kinds."""

    def __init__(self, tables: dict[str, torch.Tensor]) -> None:
        super().__init__(next(iter(tables.values())), repeated=False)
        self.tables, self.config = tables, SimpleNamespace(layer_types=[*tables, *tables])

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str) -> Any:
        self.table = self.tables[layer_type]
        return super().forward(x, position_ids)


class Holder(torch.nn.Module):
    """A part of a model."""

    def __init__(self, **parts: torch.nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def found_in(
    owner: torch.nn.Module | None, model: torch.nn.Module, head_size: int, known: Any = None
) -> list[Rotation]:
    known = {} if known is None else known
    return list(rotations_in(owner, model, head_size, LONGEST, LIKE[torch.float32], known))


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("kind", ["heads", "halves", "repeated"])
def test_modules_are_run_the_way_they_take(kind: str, neox: bool) -> None:
    """What a pair is, and which way it turns, does not show in the angles: then all are offered."""
    table = table_of(12, 1e4, 1.3)
    module = (
        RotaryOfHeads(table, neox) if kind == "heads" else RotaryOfAngles(table, kind == "repeated")
    )
    found = found_in(None, Holder(rotary=module), 20)
    back = torch.cat([table[:, :6], -table[:, 6:]], dim=1)
    for expected in [table] if kind == "heads" else [table, back]:
        alike = [r for r in found if r.is_neox_style == neox and torch.allclose(r.table, expected)]
        assert len(alike) == 1
    assert len(found) == (1 if kind == "heads" else 4)
    (first, *_) = found
    assert torch.allclose(first.table, table)  # most models turn this way


def test_of_kinds_of_layers_each_is_offered() -> None:
    tables = {"sliding": table_of(8, 1e4, 1), "full": table_of(8, 1e6, 1)}
    found = found_in(None, Holder(rotary=RotaryOfKinds(tables)), 8)
    for table in tables.values():
        alike = [r for r in found if torch.equal(r.table, table)]
        assert [r.is_neox_style for r in alike] == [True, False]
    assert len(found) == 8


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_angles_that_depend_on_how_long_a_batch_is_are_not_offered(kind: str) -> None:
    module = RotaryOfAngles(table_of(8, 1e4, 1), repeated=False)
    module.rope_type = kind  # type: ignore[assignment]
    assert found_in(None, Holder(rotary=module), 8) == []
    tables = {"sliding": table_of(8, 1e4, 1), "full": table_of(8, 1e6, 1)}
    of_kinds = RotaryOfKinds(tables)
    of_kinds.rope_type = {"sliding": "default", "full": kind}  # type: ignore[assignment]
    found = found_in(None, Holder(rotary=of_kinds), 8)
    assert any(torch.equal(r.table, tables["sliding"]) for r in found)
    assert not any(torch.equal(r.table, tables["full"]) for r in found)


def test_of_a_module_that_knows_fewer_positions_those_are_read() -> None:
    """It may read past their end without a word."""
    table = table_of(8, 1e4, 1)

    class RotaryOfFewPositions(RotaryOfHeads):
        def forward(
            self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
        ) -> Any:
            assert int(positions.max()) < 40
            return super().forward(positions, query, key)

    module = RotaryOfFewPositions(table, True)
    module.cos_sin_cache = table[:40]
    (found,) = found_in(None, Holder(rotary=module), 8)
    assert torch.equal(found.table, table[:40])


def test_the_layers_own_module_comes_first_and_each_is_read_once() -> None:
    tables = [table_of(8, base, 1) for base in (1e3, 1e4, 1e5)]
    modules = [RotaryOfHeads(table, True) for table in tables]
    layers = [Holder(rotary=modules[index]) for index in (0, 1)]
    model = Holder(one=layers[0], two=layers[1], shared=modules[2], norm=torch.nn.LayerNorm(8))
    known: dict[int, list[Rotation]] = {}

    def offered(owner: torch.nn.Module | None) -> list[int]:
        found = [r.table for r in found_in(owner, model, 8, known)]
        return [next(i for i, t in enumerate(tables) if torch.equal(t, table)) for table in found]

    assert offered(layers[1]) == [1, 0, 2]
    calls = [module.calls for module in modules]
    assert offered(layers[0]) == [0, 1, 2] and offered(None) == [0, 1, 2]
    assert [module.calls for module in modules] == calls


def test_modules_that_rotate_something_else_are_no_candidates() -> None:
    """Of larger heads; of another shape; of another signature; and one that only has the name."""

    class RotaryOfFew(RotaryOfHeads):
        def forward(
            self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
        ) -> Any:
            return query[:, :4], key

    class RotaryOfImages(torch.nn.Module):
        def forward(self, grid: torch.Tensor) -> torch.Tensor:
            raise AssertionError

    class RopeIndex(torch.nn.Module):
        pass

    table = table_of(32, 1e4, 1)
    larger, few = RotaryOfHeads(table, True), RotaryOfFew(table, True)
    other = Holder(
        larger=larger,
        angles=RotaryOfAngles(table, repeated=False),
        few=few,
        images=RotaryOfImages(),
        index=RopeIndex(),
    )
    assert found_in(other, other, 8) == []
    assert larger.calls


@pytest.mark.parametrize("rope", [None, LLAMA3_ROPE, YARN], ids=["plain", "llama3", "yarn"])
def test_a_module_of_transformers(rope: dict[str, Any] | None) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(head_dim=32, max_position_embeddings=LONGEST, rope_parameters=rope)
    module = LlamaRotaryEmbedding(config)
    first, *_ = found_in(None, Holder(rotary=module), 32)
    k, positions = torch.randn(30, 2, 32), torch.arange(50, 80)
    cos, sin = module(k, positions[None])
    expected, _ = apply_rotary_pos_emb(k.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    assert relative_error(first.rotate(k, positions), expected[0].transpose(0, 1)) < 1e-5
    assert relative_error(first.undo(first.rotate(k, positions), positions), k) < 1e-5


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("part", [1.0, 0.5])
@pytest.mark.parametrize("rope", [{}, LLAMA3_ROPE, YARN], ids=["plain", "llama3", "yarn"])
def test_a_module_of_vllm(rope: dict[str, Any], part: float, neox: bool) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    parameters = dict(rope_theta=10000.0, partial_rotary_factor=part) | rope
    with set_current_vllm_config(VllmConfig()):
        module = get_rope(
            64, LONGEST, is_neox_style=neox, rope_parameters=parameters, dtype=torch.float32
        )
    (found,) = found_in(None, Holder(rotary=module), 64)
    assert found.is_neox_style == neox and found.table.shape == (LONGEST, int(64 * part))
    k, positions = torch.randn(30, 2, 64), torch.arange(50, 80)
    expected, _ = module.forward_native(positions, k.flatten(1).clone(), k.flatten(1).clone())
    assert relative_error(found.rotate(k, positions), expected.view_as(k)) < 1e-5
