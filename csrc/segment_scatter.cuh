// Stored K, rotated, and V of many chunks, read where they lie, into the paged cache: one launch
// whose arguments do not depend on the step.
#pragma once

#include "head_row.cuh"

namespace vllm_blend {

struct Segments {
  const int64_t* addresses;  // [num_segments_max, 2]: of the first K and the first V element
  const int* table;          // [num_segments_max, 4]: count, first position, first row, first unit
  const int* totals;         // [2]: num_segments, num_units
};

constexpr int kSegmentThreads = 512;
// Items of a thread: 64 bytes each in flight.
constexpr int kSegmentItems = 2;

// key_cache[slot] = rope(k, position), value_cache[slot] = v where slot >= 0.
//
// Units are `unit_tokens` consecutive tokens of one segment. A unit's items (see head_row.cuh) are
// cut into parts of 32 kSegmentItems; the warps of all blocks stride over the parts of all units.
// Warps do not wait for each other: while one waits for PCIe, another looks up its segment and
// slots. Grid: (num_programs,).
template <typename T, typename C, int kPack, bool kNeox>
__global__ void __launch_bounds__(kSegmentThreads)
    segment_scatter_kernel(Segments segments, const int64_t* slot_mapping, int unit_tokens,
                           Target<T, C> target) {
  const unsigned lane = threadIdx.x % 32;
  const unsigned num_warps = gridDim.x * (kSegmentThreads / 32);
  const unsigned num_segments = segments.totals[0];
  const unsigned unit_items = unit_tokens * target.num_heads * target.num_items;
  const unsigned parts = (unit_items + 32 * kSegmentItems - 1) / (32 * kSegmentItems);
  const unsigned num_parts = segments.totals[1] * parts;
  unsigned base = 0;  // the warp's units only grow: so do their segments

  for (unsigned part = blockIdx.x * (kSegmentThreads / 32) + threadIdx.x / 32; part < num_parts;
       part += num_warps) {
    const int unit = part / parts;
    // the last segment whose first unit is not behind this one; empty ones come before it
    unsigned segment;
    while (true) {
      const unsigned i = base + lane;
      const bool behind = i >= num_segments || segments.table[4 * i + 3] > unit;
      const unsigned ahead = __popc(__ballot_sync(~0u, !behind));
      segment = base + ahead - 1;
      if (ahead < 32) break;
      base += 32;
    }
    const int* const row = segments.table + 4 * static_cast<int64_t>(segment);
    const int count = row[0], first_position = row[1], first_row = row[2], first_unit = row[3];
    const T* const k = reinterpret_cast<const T*>(segments.addresses[2 * segment]);
    const T* const v = reinterpret_cast<const T*>(segments.addresses[2 * segment + 1]);

    int token[kSegmentItems], head[kSegmentItems], item_of_head[kSegmentItems];
    int64_t slot[kSegmentItems];
#pragma unroll
    for (int i = 0; i < kSegmentItems; ++i) {
      const unsigned index = ((part - unit * parts) * kSegmentItems + i) * 32 + lane;
      const unsigned head_row = index / target.num_items;
      const unsigned token_of_unit = head_row / target.num_heads;
      item_of_head[i] = index - head_row * target.num_items;
      head[i] = head_row - token_of_unit * target.num_heads;
      token[i] = (unit - first_unit) * unit_tokens + token_of_unit;
      const bool there = index < unit_items && token[i] < count;
      slot[i] = there ? slot_mapping[first_row + token[i]] : -1;
    }
    ItemData<T, kPack> data[kSegmentItems];
#pragma unroll
    for (int i = 0; i < kSegmentItems; ++i) {
      if (slot[i] < 0) continue;
      const Item<T, kPack, kNeox> item(target, item_of_head[i]);
      const int64_t start =
          (static_cast<int64_t>(token[i]) * target.num_heads + head[i]) * target.head_size;
      load_item(item, k + start, v + start, data[i]);
    }
#pragma unroll
    for (int i = 0; i < kSegmentItems; ++i) {
      if (slot[i] < 0) continue;
      const Item<T, kPack, kNeox> item(target, item_of_head[i]);
      Angles<C, kPack, kNeox> angles;
      load_angles(target, item, first_position + token[i], angles);
      rotate(item, angles, data[i]);
      int64_t block, offset;
      target.locate(slot[i], block, offset);
      store_item(item, data[i], target.key.row(block, offset, head[i]),
                 target.value.row(block, offset, head[i]));
    }
  }
}

template <typename T, typename C, int kPack, bool kNeox>
cudaError_t segment_scatter(const Segments& segments, const int64_t* slot_mapping, int unit_tokens,
                            const Target<T, C>& target, int num_programs, cudaStream_t stream) {
  segment_scatter_kernel<T, C, kPack, kNeox>
      <<<num_programs, kSegmentThreads, 0, stream>>>(segments, slot_mapping, unit_tokens, target);
  return cudaGetLastError();
}

}  // namespace vllm_blend
