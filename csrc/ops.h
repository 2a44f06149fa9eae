// The ops as torch calls them, through its stable ABI: one build serves torch 2.10 and later.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace vllm_blend {

using torch::stable::Tensor;

void shift_scatter_op(const Tensor& k, const Tensor& v, const Tensor& positions,
                      const Tensor& slot_mapping, const Tensor& cos_sin_cache,
                      const Tensor& key_cache, const Tensor& value_cache, bool is_neox_style);

void segment_scatter_op(const Tensor& addresses, const Tensor& segments, const Tensor& totals,
                        const Tensor& slot_mapping, const Tensor& cos_sin_cache,
                        const Tensor& key_cache, const Tensor& value_cache, bool is_neox_style,
                        int64_t num_programs, int64_t unit_tokens);

void deviation_op(const Tensor& fresh, const Tensor& stored, const Tensor& out);

}  // namespace vllm_blend
