"""``segment_scatter`` against its oracle, from KV in GPU memory, in pinned host memory, and both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from paged import paged_cache, relative_error

from vllm_blend.ops.segment_scatter import SegmentTables, segment_scatter, segment_scatter_oracle
from vllm_blend.ops.shift_scatter import rotate_oracle

pytestmark = pytest.mark.usefixtures("implementation")

MAX_POSITION = 1400
COUNTS = {1: [1], 19: [7, 12], 99: [0, 8, 50, 1, 40, 0], 989: [0, 0, 512, 19, 400, 58, 0]}


class Case:
    """Segments in a prompt with gaps between them, their KV, and caches with scattered blocks."""

    def __init__(
        self,
        device: torch.device,
        counts: Sequence[int],
        dtype: torch.dtype,
        shape: tuple[int, int, int] = (2, 64, 64),
        memory: str = "device",
        heads_first: bool = False,
        num_segments_max: int = 10,
    ) -> None:
        num_kv_heads, head_size, rotary_dim = shape
        num_rows = sum(counts) + 5 * len(counts) + 3
        num_blocks, block_size = num_rows // 16 + 4, 16
        self.segments, self.stored = [], []
        row = 3
        for i, count in enumerate(counts):
            self.segments.append((count, row + 7, row))
            row += count + i % 5
            kv = torch.randn(2, count, num_kv_heads, head_size).to(dtype)
            pinned = memory == "pinned" or (memory == "mixed" and i % 2 == 0)
            kv = kv.pin_memory() if pinned and device.type == "cuda" else kv.to(device)
            self.stored.append((kv[0], kv[1]))
        slots = torch.randperm(num_blocks * block_size, device=device)[:num_rows]
        for start in range(0, num_rows, 13):
            slots[start + 1 : start + 1 + start % 7] = -1
        angles = torch.rand(MAX_POSITION, rotary_dim // 2, device=device) * 6.3
        key_cache, value_cache = paged_cache(
            num_blocks, block_size, num_kv_heads, head_size, dtype, device, heads_first
        )
        self.tables = SegmentTables(num_segments_max, num_rows, device=device)
        self.fill()
        self.place = dict(
            slot_mapping=slots,
            cos_sin_cache=torch.cat([angles.cos(), angles.sin()], dim=1).to(dtype),
            key_cache=key_cache,
            value_cache=value_cache,
        )

    def fill(self) -> None:
        pointers = [[(k.data_ptr(), v.data_ptr()) for k, v in self.stored]]
        self.tables.fill(self.segments, pointers)

    def run(self, **other: Any) -> None:
        tables = self.tables
        segment_scatter(tables.addresses[0], tables.segments, tables.totals[0], **(self.place | other))

    def check(self, before: dict[str, torch.Tensor], is_neox_style: bool = True) -> None:
        """The caches hold what the oracle writes over what was in them before."""
        expected = before | {name: before[name].clone() for name in ("key_cache", "value_cache")}
        expected["key_cache"] = expected["key_cache"].float()
        segment_scatter_oracle(self.stored, self.segments, **expected, is_neox_style=is_neox_style)
        place = self.place
        for name in ("slot_mapping", "cos_sin_cache"):
            assert torch.equal(place[name], before[name]), f"{name} was written to"
        assert torch.equal(place["value_cache"], expected["value_cache"])
        rest = slice(place["cos_sin_cache"].shape[1], None)
        assert torch.equal(place["key_cache"][..., rest].float(), expected["key_cache"][..., rest])

        rows = [torch.arange(row, row + count) for count, _, row in self.segments]
        positions = [torch.arange(at, at + count) for count, at, _ in self.segments]
        slots = place["slot_mapping"][torch.cat(rows).to(place["slot_mapping"].device)]
        there = slots >= 0
        written = torch.zeros(place["key_cache"].shape[:2], dtype=torch.bool, device=slots.device)
        written.view(-1)[slots[there]] = True
        assert torch.equal(place["key_cache"][~written], before["key_cache"][~written])
        if not there.any():
            return
        k = torch.cat([k.to(slots.device) for k, _ in self.stored])[there]
        where = torch.cat(positions).to(slots.device)[there]
        angles = (where, place["cos_sin_cache"], is_neox_style)
        same_type = rotate_oracle(k, *angles, dtype=k.dtype)
        allowed = 2 * relative_error(same_type, rotate_oracle(k, *angles))
        got, exact = place["key_cache"][written], expected["key_cache"][written]
        assert relative_error(got, exact) <= max(allowed, 1e-6)

    def before(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.place.items()}


@pytest.mark.parametrize("num_tokens", [1, 19, 99, 989])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize(
    "shape", [(2, 64, 64), (3, 64, 32), (1, 80, 40), (8, 128, 128)], ids=lambda s: "x".join(map(str, s))
)
def test_equals_the_oracle(
    device: torch.device,
    num_tokens: int,
    dtype: torch.dtype,
    is_neox_style: bool,
    shape: tuple[int, int, int],
) -> None:
    case = Case(device, COUNTS[num_tokens], dtype, shape, heads_first=num_tokens % 2 == 0)
    before = case.before()
    case.run(is_neox_style=is_neox_style, num_programs=3)
    case.check(before, is_neox_style)


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["pinned", "mixed"])
@pytest.mark.parametrize("num_tokens", [1, 19, 99, 989])
@pytest.mark.parametrize("shape", [(8, 128, 128), (1, 80, 40)], ids=lambda s: "x".join(map(str, s)))
def test_host_memory_is_read_in_place(
    memory: str, num_tokens: int, shape: tuple[int, int, int]
) -> None:
    torch.manual_seed(0)
    case = Case(torch.device("cuda"), COUNTS[num_tokens], torch.bfloat16, shape, memory)
    before = case.before()
    case.run()
    case.check(before)


@pytest.mark.parametrize("counts", [[19, 0, 7], []])
def test_the_op_on_a_cpu(counts: list[int]) -> None:
    case = Case(torch.device("cpu"), counts, torch.float32)
    before = case.before()
    case.run()
    if counts:
        case.check(before)


@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("shape", [(2, 96, 96), (5, 80, 80), (1, 256, 64), (40, 128, 128)])
def test_other_shapes(device: torch.device, shape: tuple[int, int, int], is_neox_style: bool) -> None:
    case = Case(device, [9, 60, 2], torch.bfloat16, shape)
    before = case.before()
    case.run(is_neox_style=is_neox_style)
    case.check(before, is_neox_style)


def test_angles_of_another_type(device: torch.device) -> None:
    case = Case(device, [9, 60, 2], torch.bfloat16)
    case.place["cos_sin_cache"] = case.place["cos_sin_cache"].float()
    before = case.before()
    case.run()
    case.check(before)


@pytest.mark.parametrize("name", ["cos_sin_cache", "key_cache", "value_cache"])
def test_alignment_of_the_targets_does_not_matter(device: torch.device, name: str) -> None:
    case = Case(device, [9, 60, 2], torch.float16)
    tensor = case.place[name]
    shifted = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype, device=device)[1:]
    case.place[name] = shifted.view(tensor.shape).copy_(tensor)
    before = case.before()
    case.run()
    case.check(before)


def test_many_segments(device: torch.device) -> None:
    """More than a warp looks up at once, most of them empty."""
    case = Case(device, [3 * (i % 3 == 0) for i in range(70)], torch.float16, num_segments_max=80)
    before = case.before()
    case.run(num_programs=2)
    case.check(before)


@pytest.mark.parametrize("num_programs", [1, 8, 200])
def test_any_number_of_programs(device: torch.device, num_programs: int) -> None:
    case = Case(device, [40, 3, 0, 90], torch.float16)
    before = case.before()
    case.run(num_programs=num_programs)
    case.check(before)


@pytest.mark.parametrize("counts", [[], [0], [0, 0, 0]])
def test_nothing_is_written_without_tokens(device: torch.device, counts: list[int]) -> None:
    case = Case(device, [9, 20], torch.float16)
    before = case.before()
    case.tables.fill([(count, 0, 0) for count in counts], [[(0, 0)] * len(counts)])
    case.run()
    for name, tensor in before.items():
        assert torch.equal(case.place[name], tensor)


def test_all_slots_padding_writes_nothing(device: torch.device) -> None:
    case = Case(device, [19], torch.float32)
    case.place["slot_mapping"].fill_(-1)
    before = case.before()
    case.run()
    assert torch.equal(case.place["key_cache"], before["key_cache"])
    assert torch.equal(case.place["value_cache"], before["value_cache"])


def test_layers_differ_in_addresses_alone(device: torch.device) -> None:
    case = Case(device, [33, 7], torch.float16)
    layers = [case.stored, [(v, k) for k, v in case.stored]]
    tables = SegmentTables(8, case.tables.num_rows_max, num_layers=2, device=device)
    tables.fill(case.segments, [[(k.data_ptr(), v.data_ptr()) for k, v in kv] for kv in layers])
    for layer, stored in enumerate(layers):
        before = case.before()
        case.stored = stored
        segment_scatter(tables.addresses[layer], tables.segments, tables.totals[layer], **case.place)
        case.check(before)


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_contents() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda")
    case = Case(device, [50, 0, 31, 8], torch.bfloat16, (8, 128, 128), "mixed")
    case.run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run()
    for counts, memory in (([9], "pinned"), ([], "device"), ([1, 2, 60, 30, 0], "mixed")):
        other = Case(device, counts, torch.bfloat16, (8, 128, 128), memory)
        case.segments, case.stored = other.segments, other.stored
        case.fill()
        slots = case.place["slot_mapping"]
        slots.copy_(slots.roll(5))
        before = case.before()
        graph.replay()
        if counts:
            case.check(before)
        else:
            assert torch.equal(case.place["key_cache"], before["key_cache"])


def test_tables_are_checked_on_the_host() -> None:
    tables = SegmentTables(2, 100, device="cpu")
    at = [[(0, 16)]]
    with pytest.raises(ValueError, match="3 segments; the tables hold 2"):
        tables.fill([(1, 0, 0)] * 3, [at[0] * 3])
    with pytest.raises(ValueError, match=r"addresses has shape \[1, 1, 2\]; expected \[1, 2, 2\]"):
        tables.fill([(1, 0, 0)] * 2, at)
    with pytest.raises(ValueError, match="negative first_position: -1"):
        tables.fill([(1, -1, 0)], at)
    with pytest.raises(ValueError, match="segments reach row 101; slot_mapping has 100 rows"):
        tables.fill([(99, 0, 2)], at)
    with pytest.raises(ValueError, match="not a multiple of 16 bytes"):
        tables.fill([(1, 0, 0)], [[(0, 8)]])
    tables.fill([(9, 5, 0), (8, 20, 9)], [at[0] * 2])
    assert tables.totals.tolist() == [[2, 3]]
    assert tables.segments.tolist() == [[9, 5, 0, 0], [8, 20, 9, 2]]
    assert tables.addresses.tolist() == [[[0, 16], [0, 16]]]
    layers = SegmentTables(2, 100, num_layers=3, device="cpu")
    layers.fill([(9, 5, 0), (8, 20, 9)], [at[0] * 2] * 3, counts=[2, 0, 1])
    assert layers.totals.tolist() == [[2, 3], [0, 0], [1, 2]]
    for counts in ([2, 0], [3, 0, 0], [0, -1, 0]):
        with pytest.raises(ValueError, match=r"counts is \[.*\]; expected 3 numbers from 0 to 2"):
            layers.fill([(9, 5, 0), (8, 20, 9)], [at[0] * 2] * 3, counts=counts)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("addresses", lambda t: t.int(), "addresses is torch.int32; expected torch.int64"),
        ("segments", lambda t: t[:-1], "segments has shape"),
        ("segments", lambda t: t.t().contiguous().t(), "segments has strides"),
        ("totals", lambda t: t[:1], "totals has shape"),
        ("slot_mapping", lambda t: t.int(), "slot_mapping is torch.int32"),
        ("cos_sin_cache", lambda t: t[:, :31], "rotary_dim 31; expected an even number up to 64"),
        ("value_cache", lambda t: t.half(), "value_cache is torch.float16; expected torch.float32"),
        ("key_cache", lambda t: t.transpose(2, 3), "value_cache has shape"),
    ],
)
def test_the_door_names_the_argument(
    device: torch.device, name: str, change: Any, message: str
) -> None:
    case = Case(device, [19], torch.float32)
    tables = case.tables
    args = case.place | dict(
        addresses=tables.addresses[0], segments=tables.segments, totals=tables.totals[0]
    )
    with pytest.raises(ValueError, match=message):
        segment_scatter(**(args | {name: change(args[name])}))
    with pytest.raises(ValueError, match="num_programs is 0"):
        segment_scatter(**args, num_programs=0)
