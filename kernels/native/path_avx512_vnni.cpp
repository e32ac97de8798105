// AVX512 with dot products of int8; all else is the plain AVX512 path's.
#define BATCHLLM_PATH avx512_vnni
#include "linear_int8_vector.h"

namespace batchllm {
void linear_int8_avx512_vnni(const LinearCall& call) { avx512_vnni::linear_int8_by_type<avx512_vnni::Int8VectorMultiplier>(call); }
}  // namespace batchllm
