#define BATCHLLM_PATH portable
#include "path_vector.h"

namespace batchllm {
const PathTable kPortableTable = {portable::attention, portable::units_by_type, portable::linear, portable::linear_int8, portable::between_attention, portable::rms_norm, portable::silu_mul, portable::rope_write_kv};
}  // namespace batchllm
