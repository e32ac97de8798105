// The table of a path without tile units; the including file names the path.
#pragma once

#include "attention_vector.h"
#include "between_attention.h"
#include "linear_int8_vector.h"
#include "linear_vector.h"

namespace batchllm {
namespace BATCHLLM_PATH {

inline void attention(const AttentionCall& call) {
  if (call.data_type == kBFloat16) return run_attention<VectorEngine<bf16>>(call);
  run_attention<VectorEngine<float>>(call);
}

inline const AttentionUnit* units_by_type(const AttentionCall& call, int64_t* num_units) {
  if (call.data_type == kBFloat16) return units_for<VectorEngine<bf16>>(call, num_units);
  return units_for<VectorEngine<float>>(call, num_units);
}

inline void linear(const LinearCall& call) {
  if (call.data_type == kBFloat16) return run_linear<VectorMultiplier<bf16>>(call);
  run_linear<VectorMultiplier<float>>(call);
}

inline void between_attention(const BetweenAttentionCall& call) {
  if (call.data_type == kBFloat16) return run_between_attention<VectorMultiplier<bf16>>(call);
  run_between_attention<VectorMultiplier<float>>(call);
}

inline void linear_int8(const LinearCall& call) { linear_int8_by_type<Int8VectorMultiplier>(call); }

inline constexpr PathTable kTable = {attention, units_by_type, linear, linear_int8, between_attention, rms_norm, silu_mul, rope_write_kv};

}  // namespace BATCHLLM_PATH
}  // namespace batchllm
