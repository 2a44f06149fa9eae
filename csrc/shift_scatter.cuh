// Stored K, rotated to its new position, and V into their slots of the paged cache.
#pragma once

#include "head_row.cuh"

namespace vllm_blend {

// Stored K or V: [num_tokens, num_kv_heads, head_size], any strides but the last
template <typename T>
struct Stored {
  const T* data;
  int64_t stride_token, stride_head;
};

constexpr int kShiftThreads = 256;
// Heads of a thread: their loads are in flight together, and they share cosines and sines.
constexpr int kShiftHeads = 1;

// key_cache[slot] = rope(k, position), value_cache[slot] = v where slot >= 0.
//
// A thread for each item (see head_row.cuh) of kShiftHeads heads.
// Block: (items, heads, tokens), kShiftThreads threads at most. Grid: (tokens, heads, items).
template <typename T, typename C, int kPack, bool kNeox>
__global__ void __launch_bounds__(kShiftThreads)
    shift_scatter_kernel(Stored<T> k, Stored<T> v, Ints positions, Ints slot_mapping,
                         int64_t num_tokens, Target<T, C> target) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.z + threadIdx.z;
  const int i = blockIdx.z * blockDim.x + threadIdx.x;
  if (token >= num_tokens || i >= target.num_items) return;
  const int64_t slot = slot_mapping[token], position = positions[token];
  if (slot < 0) return;
  const Item<T, kPack, kNeox> item(target, i);
  const int first_head = blockIdx.y * blockDim.y * kShiftHeads + threadIdx.y;

  ItemData<T, kPack> data[kShiftHeads];
#pragma unroll
  for (int h = 0; h < kShiftHeads; ++h) {
    const int64_t head = first_head + h * blockDim.y;
    if (head >= target.num_heads) continue;
    load_item(item, k.data + token * k.stride_token + head * k.stride_head,
              v.data + token * v.stride_token + head * v.stride_head, data[h]);
  }
  Angles<C, kPack, kNeox> angles;
  load_angles(target, item, position, angles);
  int64_t block, offset;
  target.locate(slot, block, offset);
#pragma unroll
  for (int h = 0; h < kShiftHeads; ++h) {
    const int64_t head = first_head + h * blockDim.y;
    if (head >= target.num_heads) continue;
    rotate(item, angles, data[h]);
    store_item(item, data[h], target.key.row(block, offset, head),
               target.value.row(block, offset, head));
  }
}

template <typename T, typename C, int kPack, bool kNeox>
cudaError_t shift_scatter(Stored<T> k, Stored<T> v, Ints positions, Ints slot_mapping,
                          int64_t num_tokens, const Target<T, C>& target, cudaStream_t stream) {
  const auto at_most = [](int64_t x, int64_t most) {
    return static_cast<unsigned>(x < 1 ? 1 : x < most ? x : most);
  };
  const auto pieces = [](int64_t x, unsigned size) {
    return static_cast<unsigned>((x + size - 1) / size);
  };
  const int64_t heads = pieces(target.num_heads, kShiftHeads);
  dim3 threads;
  threads.x = at_most(target.num_items, kShiftThreads);
  threads.y = at_most(heads, kShiftThreads / threads.x);
  threads.z = at_most(kShiftThreads / (threads.x * threads.y), 64);
  const dim3 blocks(pieces(num_tokens, threads.z), pieces(heads, threads.y),
                    pieces(target.num_items, threads.x));
  shift_scatter_kernel<T, C, kPack, kNeox>
      <<<blocks, threads, 0, stream>>>(k, v, positions, slot_mapping, num_tokens, target);
  return cudaGetLastError();
}

}  // namespace vllm_blend
