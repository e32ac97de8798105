// The table of a path without tile units; the including file names the path and its table.
#pragma once

#include "attention_vector.h"
#include "feed_forward.h"
#include "linear_int8_vector.h"
#include "linear_vector.h"

namespace batchllm {
namespace BATCHLLM_PATH {

inline void attention(const AttentionCall& call) {
  if (call.data_type == kBFloat16) return run_attention<VectorEngine<bf16>>(call);
  run_attention<VectorEngine<float>>(call);
}

inline void linear(const LinearCall& call) {
  if (call.data_type == kBFloat16) return run_linear<VectorMultiplier<bf16>>(call);
  run_linear<VectorMultiplier<float>>(call);
}

inline void feed_forward(const FeedForwardCall& call) {
  if (call.gate_up.data_type == kBFloat16) return run_feed_forward<VectorMultiplier<bf16>>(call);
  run_feed_forward<VectorMultiplier<float>>(call);
}

inline void linear_int8(const LinearCall& call) { linear_int8_by_type<Int8VectorMultiplier>(call); }

}  // namespace BATCHLLM_PATH
}  // namespace batchllm
