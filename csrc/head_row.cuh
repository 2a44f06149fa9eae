// K and V of one token's head on their way to the paged cache: what shift_scatter and
// segment_scatter have in common.
//
// A head's row is cut into packs of kPack elements (16 bytes; 1 element where alignment asks for
// it). An item is two packs of K and two of V, one thread's. Of `num_items` items the first
// `num_pairs` rotate: their K packs hold the two halves of pairs (NeoX), or pairs side by side
// (GPT-J). The others move K as it is. V is always moved as it is.
#pragma once

#include "pack.cuh"

namespace vllm_blend {

// [num_blocks, block_size, num_kv_heads, head_size], any strides but the last
template <typename T>
struct Cache {
  T* data;
  int64_t stride_block, stride_slot, stride_head;

  __device__ T* row(int64_t block, int64_t offset, int64_t head) const {
    return data + block * stride_block + offset * stride_slot + head * stride_head;
  }
};

// What does not depend on the token.
template <typename T, typename C>
struct Target {
  Cache<T> key, value;
  const C* cos_sin;  // [max_position, rotary_dim]: cosines, then sines
  int64_t cos_stride;
  int64_t block_size;
  int block_shift;  // its logarithm, or -1 where it is no power of two
  int num_heads, head_size, rotary_dim;
  int num_packs;  // head_size / kPack
  int num_pairs;  // rotary_dim / 2 / kPack
  int num_items;  // ceil(num_packs / 2)

  __device__ void locate(int64_t slot, int64_t& block, int64_t& offset) const {
    block = block_shift >= 0 ? slot >> block_shift : slot / block_size;
    offset = slot - block * block_size;
  }
};

template <typename T, int kPack, bool kNeox>
struct Item {
  int a, b;    // first elements of the two packs of K
  int va, vb;  // and of V
  int angle;   // of the first cosine of pack a, or -1: K is moved as it is
  bool has_b, has_vb;

  template <typename C>
  __device__ Item(const Target<T, C>& target, int item) {
    const int pairs = target.num_pairs;
    const bool rotates = item < pairs;
    if (rotates) {
      const bool side_by_side = !kNeox && kPack == 1;
      a = side_by_side ? 2 * item : item;
      b = side_by_side ? a + 1 : item + pairs;
    } else {
      a = pairs + item;
      b = a + target.num_items - pairs;
    }
    has_b = b < target.num_packs;
    vb = item + target.num_items;
    has_vb = vb < target.num_packs;
    angle = rotates ? item * kPack / (kNeox || kPack == 1 ? 1 : 2) : -1;
    a *= kPack;
    b *= kPack;
    va = item * kPack;
    vb *= kPack;
  }
};

template <typename T, int kPack>
struct ItemData {
  Pack<T, kPack> ka, kb, va, vb;
};

template <typename T, int kPack, bool kNeox>
__device__ inline void load_item(const Item<T, kPack, kNeox>& item, const T* k, const T* v,
                                 ItemData<T, kPack>& data) {
  data.va = load_once<T, kPack>(v + item.va);
  if (item.has_vb) data.vb = load_once<T, kPack>(v + item.vb);
  data.ka = load_once<T, kPack>(k + item.a);
  if (item.has_b) data.kb = load_once<T, kPack>(k + item.b);
}

// Cosines and sines of an item at a position, in parts that its packs of K take.
template <typename C, int kPack, bool kNeox>
struct Angles {
  // NeoX: one angle for each pair of elements of packs a and b. GPT-J: half of that, for either
  // pack.
  static constexpr bool kInside = !kNeox && kPack > 1;  // pairs are inside of packs
  static constexpr int kPart = kInside ? kPack / 2 : kPack;
  Floats<C, kPart> cos[kInside ? 2 : 1], sin[kInside ? 2 : 1];
};

template <typename T, typename C, int kPack, bool kNeox>
__device__ inline void load_angles(const Target<T, C>& target, const Item<T, kPack, kNeox>& item,
                                   int64_t position, Angles<C, kPack, kNeox>& angles) {
  if (item.angle < 0) return;
  using A = Angles<C, kPack, kNeox>;
  const C* const cos = target.cos_sin + position * target.cos_stride + item.angle;
  const C* const sin = cos + target.rotary_dim / 2;
  angles.cos[0].load(cos);
  angles.sin[0].load(sin);
  if constexpr (A::kInside) {
    angles.cos[1].load(cos + target.num_pairs * A::kPart);
    angles.sin[1].load(sin + target.num_pairs * A::kPart);
  }
}

__device__ inline void rotate_pair(float& x1, float& x2, float cos, float sin) {
  const float y1 = x1 * cos - x2 * sin;
  x2 = x2 * cos + x1 * sin;
  x1 = y1;
}

template <typename T, typename C, int kPack, bool kNeox>
__device__ inline void rotate(const Item<T, kPack, kNeox>& item,
                              const Angles<C, kPack, kNeox>& angles, ItemData<T, kPack>& data) {
  if (item.angle < 0) return;
  float a[kPack], b[kPack];
  unpack(data.ka, a);
  unpack(data.kb, b);
  using A = Angles<C, kPack, kNeox>;
#pragma unroll
  for (int i = 0; i < A::kPart; ++i) {
    if constexpr (A::kInside) {
      rotate_pair(a[2 * i], a[2 * i + 1], angles.cos[0][i], angles.sin[0][i]);
      rotate_pair(b[2 * i], b[2 * i + 1], angles.cos[1][i], angles.sin[1][i]);
    } else {
      rotate_pair(a[i], b[i], angles.cos[0][i], angles.sin[0][i]);
    }
  }
  repack(a, data.ka);
  repack(b, data.kb);
}

template <typename T, int kPack, bool kNeox>
__device__ inline void store_item(const Item<T, kPack, kNeox>& item, const ItemData<T, kPack>& data,
                                  T* key, T* value) {
  store(value + item.va, data.va);
  if (item.has_vb) store(value + item.vb, data.vb);
  store(key + item.a, data.ka);
  if (item.has_b) store(key + item.b, data.kb);
}

}  // namespace vllm_blend
