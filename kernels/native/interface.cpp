// The C interface: raw pointers in, one path of instructions chosen at start or set by the caller. Compiled for any processor.
#include <omp.h>

#include <atomic>
#include <cstring>

#include "native.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace batchllm {
namespace {

enum Path : int { kPortable, kAvx2, kAvx2Vnni, kAvx512, kAvx512Vnni, kAmx, kNumPaths };

#if defined(__x86_64__)

uint64_t enabled_states() {
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

// Tile state is given to a process that asks (ARCH_REQ_XCOMP_PERM for feature 18); threads made later inherit it.
bool tiles_permitted() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

bool can_run(Path path) {
  if (path == kPortable) return true;
  uint32_t a, b, c, d, b7, c7, d7, a1 = 0, unused;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return false;
  if (a >= 1) __get_cpuid_count(7, 1, &a1, &unused, &unused, &unused);
  const uint64_t states = enabled_states();
  const bool avx2 = (states & 0x6) == 0x6 && (c & bit_AVX) && (c & bit_FMA) && (c & bit_F16C) && (b7 & bit_AVX2);
  if (path == kAvx2) return avx2;
  if (path == kAvx2Vnni) return avx2 && (a1 & (1u << 4));
  const uint32_t avx512_bits = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
  const bool avx512 = avx2 && (states & 0xe6) == 0xe6 && (b7 & avx512_bits) == avx512_bits;
  if (path == kAvx512) return avx512;
  if (path == kAvx512Vnni) return avx512 && (c7 & (1u << 11));
#if defined(BATCHLLM_EMULATED_TILES)  // tests/kernels/emulated_tiles
  return avx512;
#endif
  const bool avx512_bf16 = a1 & (1u << 5), avx512_vbmi = c7 & (1u << 1);
  const bool amx_tile = d7 & (1u << 24), amx_bf16 = d7 & (1u << 22), amx_int8 = d7 & (1u << 25);
  return avx512 && avx512_bf16 && avx512_vbmi && amx_tile && amx_bf16 && amx_int8 && (states & 0x60000) == 0x60000 && tiles_permitted();
}

const PathTable* path_table(int path) {
  static const PathTable* const tables[kNumPaths] = {&kPortableTable, &kAvx2Table,   &kAvx2Table,
                                                    &kAvx512Table,  &kAvx512Table, &kAmxTable};
  return tables[path];
}

void run_linear_int8(int path, const LinearCall& call) {
  if (path == kAvx2Vnni) return linear_int8_avx2_vnni(call);
  if (path == kAvx512Vnni) return linear_int8_avx512_vnni(call);
  path_table(path)->linear_int8(call);
}

#else

bool can_run(Path path) { return path == kPortable; }
const PathTable* path_table(int) { return &kPortableTable; }
void run_linear_int8(int, const LinearCall& call) { kPortableTable.linear_int8(call); }

#endif

int best_path() {
  for (int path = kNumPaths - 1; path > 0; --path)
    if (can_run(Path(path))) return path;
  return kPortable;
}

std::atomic<int>& current() {
  static std::atomic<int> path{best_path()};
  return path;
}

int current_path() { return current().load(std::memory_order_relaxed); }
const PathTable& table() { return *path_table(current_path()); }

void run_linear(const LinearCall& call) {
  if (call.weight_type == kInt8) return run_linear_int8(current_path(), call);
  table().linear(call);
}

}  // namespace
}  // namespace batchllm

using namespace batchllm;

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int64_t batchllm_source_digest() { return BATCHLLM_SOURCE_DIGEST; }
EXPORT int batchllm_can_run(int path) { return path >= 0 && path < kNumPaths && can_run(Path(path)); }
EXPORT int batchllm_path() { return current(); }
// The caller asks batchllm_can_run first.
EXPORT void batchllm_set_path(int path) { current() = path; }
EXPORT int batchllm_num_threads() { return num_threads(); }

EXPORT void batchllm_attention(const void* query, void* out, const void* kv, int64_t block_stride, int64_t num_rows, int32_t data_type,
                               int32_t num_heads, int32_t num_kv_heads, int32_t head_dim, int32_t block_size, const int32_t* positions,
                               const int32_t* tables, const int32_t* block_table, int64_t max_blocks, const int32_t* items,
                               int64_t num_items, const int32_t* merge_rows, const int32_t* merge_start, const int32_t* merge_partials,
                               int64_t num_merge_rows, int64_t num_partials, float scale) {
  table().attention({query, out, kv, block_stride, num_rows, data_type, num_heads, num_kv_heads, head_dim, block_size, positions,
                     tables, block_table, max_blocks, items, num_items, merge_rows, merge_start, merge_partials, num_merge_rows,
                     num_partials, scale});
}

EXPORT void batchllm_rms_norm(const void* x, const void* weight, void* residual, void* out, int64_t num_rows, int64_t size, float eps,
                              int32_t data_type) {
  table().rms_norm(x, weight, residual, out, num_rows, size, eps, data_type);
}

EXPORT void batchllm_silu_mul(const void* gate_up, void* out, int64_t num_rows, int64_t size, int32_t data_type) {
  table().silu_mul(gate_up, out, num_rows, size, data_type);
}

EXPORT void batchllm_rope_write_kv(const void* qkv, void* query, int64_t num_rows, int32_t data_type, const float* cos_sin,
                                   const int32_t* positions, const int64_t* slots, void* kv, int64_t block_stride, int32_t num_heads,
                                   int32_t num_kv_heads, int32_t head_dim, int32_t block_size) {
  table().rope_write_kv(qkv, query, num_rows, data_type,
                        {cos_sin, positions, slots, kv, block_stride, num_heads, num_kv_heads, head_dim, block_size});
}

EXPORT void batchllm_linear(const void* x, const void* weight, const float* bias, void* out, int64_t num_rows, int64_t in_size,
                            int64_t out_size, int64_t x_stride, int32_t data_type, int32_t weight_type, int32_t end) {
  run_linear({x, weight, bias, out, num_rows, in_size, out_size, x_stride, end == kSiluMul ? out_size / 2 : out_size, data_type, weight_type, end, {}});
}

EXPORT void batchllm_linear_rope_write_kv(const void* x, const void* weight, const float* bias, void* query, int64_t num_rows,
                                          int64_t in_size, int64_t out_size, int64_t x_stride, int32_t data_type, int32_t weight_type,
                                          const float* cos_sin, const int32_t* positions, const int64_t* slots, void* kv, int64_t block_stride,
                                          int32_t num_heads, int32_t num_kv_heads, int32_t head_dim, int32_t block_size) {
  run_linear({x, weight, bias, query, num_rows, in_size, out_size, x_stride, out_size, data_type, weight_type, kRopeWriteKv,
              {cos_sin, positions, slots, kv, block_stride, num_heads, num_kv_heads, head_dim, block_size}});
}

EXPORT void batchllm_to_last_attention(void* residual, int64_t num_rows, int64_t size, float eps, int32_t data_type, const LayerWeights* layers,
                                       int64_t num_layers, void* query, void* attended, void* normed, void* gated, void* wide,
                                       int64_t layer_stride, const float* cos_sin, const int32_t* row_positions, const int64_t* slots, void* kv,
                                       int64_t block_stride, int32_t num_heads, int32_t num_kv_heads, int32_t head_dim, int32_t block_size,
                                       const int32_t* positions, const int32_t* tables, const int32_t* block_table, int64_t max_blocks,
                                       const int32_t* items, int64_t num_items, const int32_t* merge_rows, const int32_t* merge_start,
                                       const int32_t* merge_partials, int64_t num_merge_rows, int64_t num_partials, const int32_t* last_items,
                                       int64_t num_last_items, float scale) {
  to_last_attention({residual, num_rows, size, eps, data_type, layers, num_layers, query, attended, normed, gated, wide,
                     layer_stride * (data_type == kBFloat16 ? 2 : 4),
                     {cos_sin, row_positions, slots, kv, block_stride, num_heads, num_kv_heads, head_dim, block_size},
                     {query, attended, kv, block_stride, num_rows, data_type, num_heads, num_kv_heads, head_dim, block_size, positions,
                      tables, block_table, max_blocks, items, num_items, merge_rows, merge_start, merge_partials, num_merge_rows,
                      num_partials, scale},
                     last_items, num_last_items},
                    table(), run_linear);
}

EXPORT int batchllm_after_last_attention(void* residual, const void* attended, int64_t num_rows, int64_t size, float eps, int32_t data_type,
                                         const LayerWeights* end, const int64_t* rows, int64_t num_chosen, const void* norm, void* out,
                                         void* normed, void* gated, void* wide) {
  return after_last_attention({residual, attended, num_rows, size, eps, data_type, end, rows, num_chosen, norm, out, normed, gated, wide}, table(),
                              run_linear);
}

EXPORT int batchllm_packed_rows(const uint32_t* weight, uint32_t* out, const int64_t* ids, int64_t num_ids, int64_t num_outputs,
                                int64_t row_words) {
  return packed_rows(weight, out, ids, num_ids, num_outputs, row_words);
}

EXPORT void batchllm_copy_blocks(void* to, int64_t to_stride, const int64_t* to_ids, const void* from, int64_t from_stride,
                                 const int64_t* from_ids, int64_t count, int64_t num_bytes) {
  copy_whole(static_cast<char*>(to), to_stride, to_ids, static_cast<const char*>(from), from_stride, from_ids, count, num_bytes);
}

EXPORT uint64_t batchllm_copy_checksum(void* to, const void* from, int64_t num_bytes) {
  return copy_checksum(to, from, num_bytes, current_path() >= kAvx512);
}

EXPORT void batchllm_dequantise(const void* from, void* to, int64_t num_blocks, int32_t kind, int32_t data_type) {
  dequantise(from, to, num_blocks, kind, data_type, current_path() >= kAvx2);
}
