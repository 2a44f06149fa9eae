// Packs of neighbouring elements: what one load or store instruction moves.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace vllm_blend {

// Elements of the widest access, 16 bytes.
template <typename T>
constexpr int kWidest = 16 / sizeof(T);

template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ inline void from_float(float x, float& to) { to = x; }
__device__ inline void from_float(float x, __half& to) { to = __float2half_rn(x); }
__device__ inline void from_float(float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); }

// Two at a time: one instruction for the 16-bit types.
__device__ inline void from_floats(float x, float y, float* to) { to[0] = x, to[1] = y; }
__device__ inline void from_floats(float x, float y, __half* to) {
  *reinterpret_cast<__half2*>(to) = __floats2half2_rn(x, y);
}
__device__ inline void from_floats(float x, float y, __nv_bfloat16* to) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(x, y);
}

template <typename T, int N>
__device__ inline void unpack(const Pack<T, N>& from, float (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = to_float(from.at[i]);
}

template <typename T, int N>
__device__ inline void repack(const float (&from)[N], Pack<T, N>& to) {
  if constexpr (N == 1) {
    from_float(from[0], to.at[0]);
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 2) from_floats(from[i], from[i + 1], &to.at[i]);
  }
}

// What is read once: the first to leave the caches.
template <typename T, int N>
__device__ inline Pack<T, N> load_once(const T* from) {
  Pack<T, N> pack;
  if constexpr (sizeof(pack) == 16) {
    *reinterpret_cast<uint4*>(&pack) = __ldcs(reinterpret_cast<const uint4*>(from));
  } else {
    pack = *reinterpret_cast<const Pack<T, N>*>(from);
  }
  return pack;
}

template <typename T, int N>
__device__ inline void store(T* to, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

// N neighbouring numbers, read by the widest loads that their alignment, N elements or 16 bytes,
// allows.
template <typename T, int N>
struct Floats {
  static constexpr int kPart = N < kWidest<T> ? N : kWidest<T>;
  Pack<T, kPart> parts[N / kPart];

  __device__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < N / kPart; ++i) {
      parts[i] = *reinterpret_cast<const Pack<T, kPart>*>(from + i * kPart);
    }
  }
  __device__ float operator[](int i) const { return to_float(parts[i / kPart].at[i % kPart]); }
};

// One of two widths of integers, as torch has them.
struct Ints {
  const void* data;
  bool wide;  // int64, else int32

  __device__ int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

}  // namespace vllm_blend
