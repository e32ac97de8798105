// AVX2 with dot products of int8; all else is the plain AVX2 path's.
#define BATCHLLM_PATH avx2_vnni
#include "linear_int8_vector.h"

namespace batchllm {
void linear_int8_avx2_vnni(const LinearCall& call) { avx2_vnni::linear_int8_by_type<avx2_vnni::Int8VectorMultiplier>(call); }
}  // namespace batchllm
