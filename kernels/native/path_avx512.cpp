#define BATCHLLM_PATH avx512
#include "path_vector.h"

namespace batchllm {
const PathTable kAvx512Table = {avx512::attention, avx512::units_by_type, avx512::linear, avx512::linear_int8, avx512::between_attention, avx512::rms_norm, avx512::silu_mul, avx512::rope_write_kv};
}  // namespace batchllm
