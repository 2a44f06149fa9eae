// What the launchers share: torch's types and tensors to those of the kernels.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include <initializer_list>
#include <type_traits>

#include "head_row.cuh"
#include "ops.h"

namespace vllm_blend {

using torch::headeronly::ScalarType;

// The tensor's device as the current one, and the stream that torch is using there.
struct Place {
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;

  explicit Place(const Tensor& tensor) : guard(tensor.get_device_index()) {
    void* current = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &current));
    stream = static_cast<cudaStream_t>(current);
  }
};

// Calls f with a value of the kernels' type for a tensor's elements.
template <typename F>
void with_type(const Tensor& tensor, F&& f) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return f(float{});
    case ScalarType::Half:
      return f(__half{});
    case ScalarType::BFloat16:
      return f(__nv_bfloat16{});
    default:
      STD_TORCH_CHECK(false, "expected float16, bfloat16 or float32");
  }
}

// Calls f with the constant true or false.
template <typename F>
void with_bool(bool value, F&& f) {
  value ? f(std::true_type{}) : f(std::false_type{});
}

template <typename T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

inline Ints ints(const Tensor& tensor) {
  return {tensor.data_ptr(), tensor.scalar_type() == ScalarType::Long};
}

// Whether every row of a tensor starts at a multiple of so many bytes.
inline bool aligned(const Tensor& tensor, int64_t bytes) {
  if (reinterpret_cast<uintptr_t>(tensor.data_ptr()) % bytes) return false;
  for (int64_t i = 0; i + 1 < tensor.dim(); ++i) {
    if (tensor.size(i) > 1 && tensor.stride(i) * tensor.element_size() % bytes) return false;
  }
  return true;
}

template <typename T>
Cache<T> cache(const Tensor& tensor) {
  return {data<T>(tensor), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

template <typename T, typename C>
Target<T, C> target(const Tensor& cos_sin_cache, const Tensor& key_cache,
                    const Tensor& value_cache) {
  Target<T, C> target;
  target.key = cache<T>(key_cache);
  target.value = cache<T>(value_cache);
  target.cos_sin = data<C>(cos_sin_cache);
  target.cos_stride = cos_sin_cache.stride(0);
  target.block_size = key_cache.size(1);
  target.block_shift = -1;
  for (int shift = 0; shift < 31; ++shift) {
    if (target.block_size == int64_t{1} << shift) target.block_shift = shift;
  }
  target.num_heads = key_cache.size(2);
  target.head_size = key_cache.size(3);
  target.rotary_dim = cos_sin_cache.size(1);
  return target;
}

// Calls f with the width of packs, a constant: 16 bytes where rows of all tensors allow it, or one
// element; and with the target cut into such packs.
template <typename T, typename C, typename F>
void with_pack(Target<T, C> target, const Tensor& cos_sin_cache,
               std::initializer_list<const Tensor*> rows, F&& f) {
  constexpr int kWide = kWidest<T>;
  constexpr int64_t kAngleBytes = kWide * sizeof(C) < 16 ? kWide * sizeof(C) : 16;
  bool wide = target.head_size % kWide == 0 && target.rotary_dim % (2 * kWide) == 0 &&
              aligned(cos_sin_cache, kAngleBytes);
  for (const Tensor* tensor : rows) wide = wide && aligned(*tensor, 16);
  const int pack = wide ? kWide : 1;
  target.num_packs = target.head_size / pack;
  target.num_pairs = target.rotary_dim / 2 / pack;
  target.num_items = (target.num_packs + 1) / 2;
  if (wide) {
    f(std::integral_constant<int, kWide>{}, target);
  } else {
    f(std::integral_constant<int, 1>{}, target);
  }
}

}  // namespace vllm_blend
