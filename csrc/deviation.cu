#include "deviation.cuh"
#include "launch.cuh"

namespace vllm_blend {

void deviation_op(const Tensor& fresh, const Tensor& stored, const Tensor& out) {
  const int64_t num_tokens = fresh.size(0);
  if (num_tokens == 0) return;
  const Place place(fresh);
  int num_heads = fresh.size(1), head_size = fresh.size(2);
  const bool flat =
      num_heads == 1 || (fresh.stride(1) == head_size && stored.stride(1) == head_size);
  if (flat) {
    head_size *= num_heads;
    num_heads = 1;
  }
  with_type(fresh, [&](auto t) {
    using T = decltype(t);
    const Values<T> x{data<T>(fresh), fresh.stride(0), fresh.stride(1)};
    const Values<T> y{data<T>(stored), stored.stride(0), stored.stride(1)};
    const bool wide = head_size % kWidest<T> == 0 && aligned(fresh, 16) && aligned(stored, 16);
    with_bool(wide, [&](auto is_wide) {
      constexpr int kPack = is_wide.value ? kWidest<T> : 1;
      with_bool(flat, [&](auto is_flat) {
        STD_CUDA_CHECK((deviation<T, kPack, is_flat.value>(x, y, data<float>(out), num_tokens,
                                                           num_heads, head_size, place.stream)));
      });
    });
  });
}

}  // namespace vllm_blend
