#define BATCHLLM_PATH avx512
#include "path_vector.h"

namespace batchllm {
const PathTable kAvx512Table = avx512::kTable;
}  // namespace batchllm
