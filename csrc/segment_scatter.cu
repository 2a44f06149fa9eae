#include "launch.cuh"
#include "segment_scatter.cuh"

namespace vllm_blend {

void segment_scatter_op(const Tensor& addresses, const Tensor& segments, const Tensor& totals,
                        const Tensor& slot_mapping, const Tensor& cos_sin_cache,
                        const Tensor& key_cache, const Tensor& value_cache, bool is_neox_style,
                        int64_t num_programs, int64_t unit_tokens) {
  if (segments.size(0) == 0 || key_cache.size(2) == 0 || key_cache.size(3) == 0) return;
  const Place place(key_cache);
  const Segments where{data<const int64_t>(addresses), data<const int>(segments),
                       data<const int>(totals)};
  with_type(key_cache, [&](auto t) {
    using T = decltype(t);
    with_type(cos_sin_cache, [&](auto c) {
      using C = decltype(c);
      const auto whole = target<T, C>(cos_sin_cache, key_cache, value_cache);
      // the sources are aligned: SegmentTables sees to it
      const auto rows = {&key_cache, &value_cache};
      with_pack(whole, cos_sin_cache, rows, [&](auto pack, const Target<T, C>& cut) {
        with_bool(is_neox_style, [&](auto neox) {
          STD_CUDA_CHECK((segment_scatter<T, C, pack.value, neox.value>(
              where, data<const int64_t>(slot_mapping), unit_tokens, cut, num_programs,
              place.stream)));
        });
      });
    });
  });
}

}  // namespace vllm_blend
