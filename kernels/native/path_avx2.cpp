#define BATCHLLM_PATH avx2
#include "path_vector.h"

namespace batchllm {
const PathTable kAvx2Table = avx2::kTable;
}  // namespace batchllm
