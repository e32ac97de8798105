#define BATCHLLM_PATH portable
#include "path_vector.h"

namespace batchllm {
const PathTable kPortableTable = portable::kTable;
}  // namespace batchllm
