// Tile units for bf16 and int8; float32 and the small operations as on AVX512.
#define BATCHLLM_PATH amx_path
#include "attention_amx.h"
#include "linear_amx.h"
#include "linear_int8_amx.h"
#include "path_vector.h"

namespace batchllm {
namespace amx_path {

void attention_by_type(const AttentionCall& call) {
  if (call.data_type == kBFloat16) return run_attention<TileEngine>(call);
  attention(call);
}

const AttentionUnit* tile_units_by_type(const AttentionCall& call, int64_t* num_units) {
  if (call.data_type == kBFloat16) return units_for<TileEngine>(call, num_units);
  return units_by_type(call, num_units);
}

void linear_by_type(const LinearCall& call) {
  if (call.data_type == kBFloat16) return run_linear<TileMultiplier>(call);
  linear(call);
}

void between_attention_by_type(const BetweenAttentionCall& call) {
  if (call.data_type == kBFloat16) return run_between_attention<TileMultiplier>(call);
  between_attention(call);
}

void linear_int8_tiles(const LinearCall& call) { linear_int8_by_type<Int8TileMultiplier>(call); }

}  // namespace amx_path

const PathTable kAmxTable = {amx_path::attention_by_type,
                             amx_path::tile_units_by_type,
                             amx_path::linear_by_type,
                             amx_path::linear_int8_tiles,
                             amx_path::between_attention_by_type,
                             amx_path::rms_norm,
                             amx_path::silu_mul,
                             amx_path::rope_write_kv};
}  // namespace batchllm
