#define BATCHLLM_PATH avx2
#include "path_vector.h"

namespace batchllm {
const PathTable kAvx2Table = {avx2::attention, avx2::units_by_type, avx2::linear, avx2::linear_int8, avx2::between_attention, avx2::rms_norm, avx2::silu_mul, avx2::rope_write_kv};
}  // namespace batchllm
