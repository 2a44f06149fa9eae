// The ops under torch.ops.vllm_blend_C. Their Python twins, in vllm_blend/ops, check the arguments.

#include "ops.h"

STABLE_TORCH_LIBRARY(vllm_blend_C, m) {
  m.def(
      "shift_scatter(Tensor k, Tensor v, Tensor positions, Tensor slot_mapping, "
      "Tensor cos_sin_cache, Tensor(a!) key_cache, Tensor(b!) value_cache, bool is_neox_style) "
      "-> ()");
  m.def(
      "segment_scatter(Tensor addresses, Tensor segments, Tensor totals, Tensor slot_mapping, "
      "Tensor cos_sin_cache, Tensor(a!) key_cache, Tensor(b!) value_cache, bool is_neox_style, "
      "int num_programs, int unit_tokens) -> ()");
  m.def("deviation(Tensor fresh, Tensor stored, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_blend_C, CUDA, m) {
  m.impl("shift_scatter", TORCH_BOX(&vllm_blend::shift_scatter_op));
  m.impl("segment_scatter", TORCH_BOX(&vllm_blend::segment_scatter_op));
  m.impl("deviation", TORCH_BOX(&vllm_blend::deviation_op));
}
