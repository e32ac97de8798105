// Rows that are copied from where they lie apart. Compiled for any processor.
#include <cstring>

#include "native.h"

namespace batchllm {

void copy_whole(char* to, int64_t to_stride, const int64_t* to_ids, const char* from, int64_t from_stride, const int64_t* from_ids,
                int64_t count, int64_t num_bytes) {
#pragma omp parallel for if (count > 1 && count * num_bytes > 65536) schedule(static)
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(to + (to_ids != nullptr ? to_ids[i] : i) * to_stride, from + (from_ids != nullptr ? from_ids[i] : i) * from_stride, num_bytes);
}

bool packed_rows(const uint32_t* weight, uint32_t* out, const int64_t* ids, int64_t num_ids, int64_t num_outputs, int64_t row_words) {
  for (int64_t i = 0; i < num_ids; ++i)
    if (ids[i] < 0 || ids[i] >= num_outputs) return false;
  // A row's words lie 64 bytes apart: its whole tile is read.
#pragma omp parallel for if (num_ids * row_words > 4096) schedule(dynamic, 4)
  for (int64_t i = 0; i < num_ids; ++i) {
    const uint32_t* from = weight + ids[i] / 16 * row_words * 16 + ids[i] % 16;
    for (int64_t word = 0; word < row_words; ++word) out[i * row_words + word] = from[word * 16];
  }
  return true;
}

}  // namespace batchllm
