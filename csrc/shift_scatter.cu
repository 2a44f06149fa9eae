#include "launch.cuh"
#include "shift_scatter.cuh"

namespace vllm_blend {

template <typename T>
static Stored<T> stored(const Tensor& tensor) {
  return {data<T>(tensor), tensor.stride(0), tensor.stride(1)};
}

void shift_scatter_op(const Tensor& k, const Tensor& v, const Tensor& positions,
                      const Tensor& slot_mapping, const Tensor& cos_sin_cache,
                      const Tensor& key_cache, const Tensor& value_cache, bool is_neox_style) {
  const int64_t num_tokens = k.size(0);
  if (num_tokens == 0 || k.size(1) == 0 || k.size(2) == 0) return;
  const Place place(key_cache);
  with_type(key_cache, [&](auto t) {
    using T = decltype(t);
    with_type(cos_sin_cache, [&](auto c) {
      using C = decltype(c);
      const auto whole = target<T, C>(cos_sin_cache, key_cache, value_cache);
      const auto rows = {&k, &v, &key_cache, &value_cache};
      with_pack(whole, cos_sin_cache, rows, [&](auto pack, const Target<T, C>& cut) {
        with_bool(is_neox_style, [&](auto neox) {
          STD_CUDA_CHECK((shift_scatter<T, C, pack.value, neox.value>(
              stored<T>(k), stored<T>(v), ints(positions), ints(slot_mapping), num_tokens, cut,
              place.stream)));
        });
      });
    });
  });
}

}  // namespace vllm_blend
