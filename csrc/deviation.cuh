// Squared L2 distance of fresh to stored V, per token.
#pragma once

#include "pack.cuh"

namespace vllm_blend {

// [num_tokens, num_kv_heads, head_size], any strides but the last
template <typename T>
struct Values {
  const T* data;
  int64_t stride_token, stride_head;
};

constexpr int kDeviationThreads = 128;
// Packs of each tensor that a lane has in flight.
constexpr int kDeviationAbreast = 4;
// Blocks of a multiprocessor. With more allowed, ptxas saves registers by loading later.
constexpr int kDeviationBlocks = 8;

// out[t] = sum over heads h and dims d of (fresh[t, h, d] - stored[t, h, d])^2, in fp32.
//
// A warp for each token. Grid: (ceil(num_tokens / warps of a block),). `num_packs` is of a head;
// kFlat: there is one, or a token's heads are one piece.
template <typename T, int kPack, bool kFlat>
__global__ void __launch_bounds__(kDeviationThreads, kDeviationBlocks)
    deviation_kernel(Values<T> fresh, Values<T> stored, float* out, int64_t num_tokens,
                     int num_heads, int num_packs) {
  const int lane = threadIdx.x % 32;
  const int64_t token =
      static_cast<int64_t>(blockIdx.x) * (kDeviationThreads / 32) + threadIdx.x / 32;
  if (token >= num_tokens) return;
  const T* const x_row = fresh.data + token * fresh.stride_token;
  const T* const y_row = stored.data + token * stored.stride_token;
  const auto load = [&](int pack, Pack<T, kPack>& x, Pack<T, kPack>& y) {
    const int head = kFlat ? 0 : pack / num_packs;
    const int dim = (pack - head * num_packs) * kPack;
    x = load_once<T, kPack>(x_row + head * fresh.stride_head + dim);
    y = load_once<T, kPack>(y_row + head * stored.stride_head + dim);
  };
  float sum = 0;
  const auto add = [&](const Pack<T, kPack>& x, const Pack<T, kPack>& y) {
    float a[kPack], b[kPack];
    unpack(x, a);
    unpack(y, b);
#pragma unroll
    for (int i = 0; i < kPack; ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  };

  const int total = num_heads * num_packs;
  int first = 0;
  for (; first + 32 * kDeviationAbreast <= total; first += 32 * kDeviationAbreast) {
    Pack<T, kPack> x[kDeviationAbreast], y[kDeviationAbreast];
#pragma unroll
    for (int i = 0; i < kDeviationAbreast; ++i) load(first + 32 * i + lane, x[i], y[i]);
#pragma unroll
    for (int i = 0; i < kDeviationAbreast; ++i) add(x[i], y[i]);
  }
  for (int pack = first + lane; pack < total; pack += 32) {
    Pack<T, kPack> x, y;
    load(pack, x, y);
    add(x, y);
  }
#pragma unroll
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
  if (lane == 0) out[token] = sum;
}

template <typename T, int kPack, bool kFlat>
cudaError_t deviation(Values<T> fresh, Values<T> stored, float* out, int64_t num_tokens,
                      int num_heads, int head_size, cudaStream_t stream) {
  const int warps = kDeviationThreads / 32;
  const unsigned blocks = (num_tokens + warps - 1) / warps;
  deviation_kernel<T, kPack, kFlat><<<blocks, kDeviationThreads, 0, stream>>>(
      fresh, stored, out, num_tokens, num_heads, head_size / kPack);
  return cudaGetLastError();
}

}  // namespace vllm_blend
