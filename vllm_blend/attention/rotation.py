"""How a layer's K depends on its position: read off the model's own rotary module, by running it.

A rotary module turns pairs of dimensions of a head by angles that grow with the position. Run on a
head of ones and zeros it gives back its cosines and sines, whatever class it is and whatever its
scaling (partial, interleaved, YaRN, llama3, LongRoPE). With that table K is brought to any position,
and back to none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, ``[num_tokens, 1, rotary_dim / 2]`` each."""
Turn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Rotates heads ``[num_tokens, head_size]`` to their positions ``[num_tokens]``; returns them."""


@dataclass(frozen=True, eq=False)
class Rotation:
    """A layer's rotation.

    Attributes:
        table: cosines, then sines of each position, ``[max_position, rotary_dim]``, as the module
            computes with them; of a layer without RoPE ``[max_position, 2]``, ones and zeros.
        is_neox_style: pairs are ``(i, i + rotary_dim / 2)``; else ``(2i, 2i + 1)``.
        is_none: K does not depend on its position.
    """

    table: torch.Tensor
    is_neox_style: bool = True
    is_none: bool = False

    @classmethod
    def none(cls, max_position: int, dtype: torch.dtype, device: torch.device) -> Rotation:
        """Of a layer without RoPE."""
        table = torch.zeros(max_position, 2, dtype=dtype, device=device)
        table[:, 0] = 1
        return cls(table, is_none=True)

    def rotate(self, k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """K at ``positions``, rounded once; a new tensor.

        Args:
            k: before RoPE, ``[num_tokens, num_kv_heads, head_size]``.
            positions: ``[num_tokens]``.
        """
        return k.clone() if self.is_none else self._turned(k, *self._angles(positions))

    def undo(self, k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """K before RoPE, of K at ``positions``: the inverse of ``rotate``, but for rounding."""
        return self.undo_by(k, self.back(positions))

    def undo_by(self, k: torch.Tensor, back: Angles) -> torch.Tensor:
        """``undo``, by angles that ``back`` gave for K's positions."""
        return k.clone() if self.is_none else self._turned(k, *back)

    def inverse(self, positions: torch.Tensor) -> torch.Tensor:
        """The table of the rotation that undoes this one at ``positions``: ``[num_tokens, rotary_dim]``
        float32, cosines, then sines."""
        return torch.cat(self.back(positions), dim=-1).squeeze(1).float()

    def back(self, positions: torch.Tensor) -> Angles:
        """What turns K at ``positions`` back, in fp32, which takes a CPU less time than fp64. Scaled
        cosines stay in fp64: in fp32 their inverse is rounded the same way at every position."""
        if self.is_none:
            ones = torch.ones(len(positions), 1, 1, device=positions.device)
            return ones, ones - 1
        cos, sin = self._angles(positions)
        square = cos * cos + sin * sin  # not 1 where cosines are scaled (YaRN) or rounded
        cos, sin = cos / square, -sin / square
        if cos.dtype == torch.float64 and not self._is_scaled:
            cos, sin = cos.float(), sin.float()
        return cos, sin

    @cached_property
    def _is_scaled(self) -> bool:
        """Of YaRN and LongRoPE, which make K longer."""
        cos, sin = self.table[:1].to(torch.float64).chunk(2, dim=-1)
        return bool(((cos * cos + sin * sin - 1).abs() > 1e-3).any())

    def _angles(self, positions: torch.Tensor) -> Angles:
        wide = _wide(self.table.dtype)
        angles = self.table[positions.to(self.table.device)].to(wide)[:, None]
        cos, sin = angles.chunk(2, dim=-1)
        return cos, sin

    def _turned(self, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rotary_dim = self.table.shape[1]
        wide, rest = k[..., :rotary_dim].to(cos.dtype), k[..., rotary_dim:]
        turned = torch.empty_like(wide)
        (a, b), (x, y) = self._halves(wide), self._halves(turned)
        torch.mul(a, cos, out=x).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=y).addcmul_(a, sin)
        found = turned.to(k.dtype)
        return torch.cat([found, rest], dim=-1) if rest.shape[-1] else found

    def _halves(self, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The first and the second of each pair."""
        if self.is_neox_style:
            first, second = heads.chunk(2, dim=-1)
            return first, second
        return heads[..., ::2], heads[..., 1::2]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What a rotation is computed in, so that it rounds once."""
    return torch.float64 if dtype == torch.float32 else torch.float32


def rotations_in(
    owner: torch.nn.Module | None,
    model: torch.nn.Module,
    head_size: int,
    max_position: int,
    like: torch.Tensor,
    known: dict[int, list[Rotation]],
) -> Iterator[Rotation]:
    """Rotations that a layer's K may have, the likeliest first.

    Args:
        owner: the module that holds the layer's attention, where there is one.
        model: all of it; its other rotary modules come last.
        max_position: of a prompt.
        like: of the type and device that K has.
        known: what was read off a module, by its id; filled here.
    """
    near = [] if owner is None else list(owner.modules())
    for module in dict.fromkeys([*near, *model.modules()]):
        if not _may_rotate(module):
            continue
        if id(module) not in known:
            found = (read(turn, head_size, max_position, like) for turn in _turns(module))
            known[id(module)] = [rotation for rotation in found if rotation is not None]
        yield from known[id(module)]


def read(turn: Turn, head_size: int, max_position: int, like: torch.Tensor) -> Rotation | None:
    """The rotation that ``turn`` makes, or None if it is none over pairs of neighbours or halves.

    Args:
        turn: rotates heads of ``head_size``.
        like: of the type and device to run it with.
    """

    def ask(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # ops take both by their addresses
        return turn(x.to(like.dtype).contiguous().clone(), positions.contiguous())

    def at(*positions: int) -> torch.Tensor:
        return torch.tensor(positions, device=like.device)

    max_position = min(max_position, _num_positions(turn, max_position))
    try:
        # what each dimension becomes, at positions near and far
        eye = torch.eye(head_size, device=like.device)
        near = {position for position in (1, 2, 3, 7, 19) if position < max_position}
        far = [ask(eye, at(p).expand(head_size)) for p in (*near, max_position - 1)]
    except Exception:  # not a rotary module after all, or one of other heads
        return None
    moved = torch.stack(far).float().abs().amax(0)
    touched = (moved - eye).abs().amax(1) > 0
    rotary_dim = int(touched.nonzero().max()) + 1 if bool(touched.any()) else 0
    if not rotary_dim:
        return None
    first, second = _pairs(rotary_dim, True)
    neox = rotary_dim % 2 == 0 and bool((moved[first, second] > 0).all())
    if not neox:
        rotary_dim += rotary_dim % 2
        first, second = _pairs(rotary_dim, False)
        if rotary_dim > head_size or not bool((moved[first, second] > 0).all()):
            return None
    one = torch.zeros(1, head_size, device=like.device)
    one[:, first] = 1
    positions = torch.arange(max_position, device=like.device)
    seen = ask(one.expand(max_position, -1), positions)
    rotation = Rotation(torch.cat([seen[:, first], seen[:, second]], dim=1).contiguous(), neox)
    # does it say what the module does?
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(64, head_size, generator=generator).to(like)
    places = torch.randint(max_position, (64,), generator=generator).to(like.device)
    expected = ask(heads, places).float()
    error = (rotation.rotate(heads[:, None], places)[:, 0].float() - expected).norm() / expected.norm()
    return rotation if float(error) < 0.02 else None


def _pairs(rotary_dim: int, neox: bool) -> tuple[torch.Tensor, torch.Tensor]:
    dims = torch.arange(rotary_dim)
    if neox:
        return dims[: rotary_dim // 2], dims[rotary_dim // 2 :]
    return dims[::2], dims[1::2]


def _may_rotate(module: torch.nn.Module) -> bool:
    """By name, or by what rotary modules keep."""
    name = type(module).__name__.lower()
    return "rotary" in name or "rope" in name or hasattr(module, "cos_sin_cache")


def _num_positions(turn: Turn, most: int) -> int:
    """How many positions a module knows: vLLM's read past the end of their table without a word."""
    module = getattr(turn, "module", None)
    table = getattr(module, "cos_sin_cache", None)
    return most if table is None else len(table)


@dataclass(frozen=True)
class ByHeads:
    """vLLM's modules: Q and K in, Q and K out."""

    module: Any

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        turned: torch.Tensor = self.module(positions, x, x.clone())[0]
        return turned.view_as(x)


@dataclass(frozen=True)
class ByAngles:
    """transformers' modules: cosines and sines out, ``[1, num_tokens, rotary_dim]``. What is a pair,
    and which way it turns, is said elsewhere in the model."""

    module: Any
    neox: bool
    sign: int
    kind: dict[str, str]

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = (part[0].float() for part in self.module(x[None], positions[None], **self.kind))
        half = cos.shape[-1] // 2
        halves = torch.equal(cos[:, :half], cos[:, half:])
        take = slice(half) if halves else slice(None, None, 2)
        table = torch.cat([cos[:, take], self.sign * sin[:, take]], dim=1)
        places = torch.arange(len(x), device=x.device)
        return Rotation(table, self.neox).rotate(x[:, None].float(), places)[:, 0]


def _turns(module: Any) -> Iterator[Turn]:
    """The ways that a rotary module may turn K."""
    # the wrong way may change the module: vLLM's casts its table to the type of what it gets
    takes = getattr(module, "forward_native", module.forward)  # vLLM's ops take anything at their door
    names = list(inspect.signature(takes).parameters)
    if names[:2] == ["positions", "query"]:
        yield ByHeads(module)
    elif names[1:2] == ["position_ids"]:
        config = getattr(module, "config", None)
        layer_types = tuple(dict.fromkeys(getattr(config, "layer_types", None) or ()))
        kinds = [{"layer_type": t} for t in layer_types] if "layer_type" in names else [{}]
        for kind, sign, neox in product(kinds, (1, -1), (True, False)):
            types = getattr(module, "rope_type", "")
            name = types.get(kind["layer_type"], "") if isinstance(types, dict) else types
            if name not in ("dynamic", "longrope"):  # whose angles depend on how long a batch is
                yield ByAngles(module, neox, sign, kind)
