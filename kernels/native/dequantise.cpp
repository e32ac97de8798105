// Blocks of 32 quantised weights, as GGUF stores them, to float32 or bfloat16: products and sums in float32, each rounded once.
#include <cstring>

#include "native.h"

#define ALWAYS_INLINE __attribute__((always_inline)) inline

namespace batchllm {
namespace {

constexpr int kBlockWeights = 32;
constexpr int64_t kRangeBlocks = 512;  // blocks that a thread takes at once

constexpr int kBlockBytes[kNumBlockKinds] = {18, 20, 34};

ALWAYS_INLINE float load_half(const uint8_t* from) {
  uint16_t half;
  std::memcpy(&half, from, 2);
  const uint32_t sign = uint32_t(half & 0x8000u) << 16, exponent = half >> 10 & 31u, fraction = half & 1023u;
  uint32_t bits = exponent == 31 ? 0x7f800000u | fraction << 13 : (exponent + 112) << 23 | fraction << 13;
  if (exponent == 0) {
    const float small = float(fraction) * 5.9604644775390625e-08f;
    std::memcpy(&bits, &small, 4);
  }
  bits |= sign;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

ALWAYS_INLINE void store(float* to, const float* values) { std::memcpy(to, values, kBlockWeights * sizeof(float)); }

ALWAYS_INLINE void store(bf16* to, const float* values) {
  // Nearest, ties to even.
  uint32_t bits[kBlockWeights];
  std::memcpy(bits, values, sizeof bits);
  for (int i = 0; i < kBlockWeights; ++i) {
    const bool is_nan = (bits[i] & 0x7fffffffu) > 0x7f800000u;
    to[i] = is_nan ? bf16(0x7fc0) : bf16((bits[i] + 0x7fffu + (bits[i] >> 16 & 1u)) >> 16);
  }
}

template <int kKind, class Out>
ALWAYS_INLINE void run_blocks(const uint8_t* from, Out* to, int64_t num_blocks) {
  for (int64_t block = 0; block < num_blocks; ++block, from += kBlockBytes[kKind], to += kBlockWeights) {
    const float scale = load_half(from);
    float values[kBlockWeights];
    if (kKind == kQ8_0) {
      for (int i = 0; i < 32; ++i) values[i] = float(int8_t(from[2 + i])) * scale;
    } else {
      const uint8_t* nibbles = from + (kKind == kQ4_1 ? 4 : 2);
      const int zero = kKind == kQ4_1 ? 0 : 8;
      for (int i = 0; i < 16; ++i) values[i] = float(int(nibbles[i] & 15) - zero) * scale;
      for (int i = 0; i < 16; ++i) values[16 + i] = float(int(nibbles[i] >> 4) - zero) * scale;
      if (kKind == kQ4_1) {
        const float least = load_half(from + 2);
        for (int i = 0; i < 32; ++i) values[i] += least;
      }
    }
    store(to, values);
  }
}

template <class Out>
ALWAYS_INLINE void run_kind(int kind, const uint8_t* from, Out* to, int64_t num_blocks) {
  if (kind == kQ4_0) return run_blocks<kQ4_0>(from, to, num_blocks);
  if (kind == kQ4_1) return run_blocks<kQ4_1>(from, to, num_blocks);
  run_blocks<kQ8_0>(from, to, num_blocks);
}

#define RUN_RANGE                                                                           \
  if (data_type == kBFloat16)                                                               \
    run_kind(kind, from, static_cast<bf16*>(to) + first * kBlockWeights, num_blocks);       \
  else                                                                                      \
    run_kind(kind, from, static_cast<float*>(to) + first * kBlockWeights, num_blocks)

using Range = void (*)(int kind, const uint8_t* from, void* to, int64_t first, int64_t num_blocks, int data_type);

void range_portable(int kind, const uint8_t* from, void* to, int64_t first, int64_t num_blocks, int data_type) { RUN_RANGE; }

#if defined(__x86_64__)
__attribute__((target("avx2"))) void range_avx2(int kind, const uint8_t* from, void* to, int64_t first, int64_t num_blocks, int data_type) {
  RUN_RANGE;
}
#endif

}  // namespace

void dequantise(const void* from, void* to, int64_t num_blocks, int kind, int data_type, bool has_avx2) {
  Range range = range_portable;
#if defined(__x86_64__)
  if (has_avx2) range = range_avx2;
#endif
  const int64_t num_ranges = (num_blocks + kRangeBlocks - 1) / kRangeBlocks;
#pragma omp parallel for if (num_ranges > 8) schedule(static)
  for (int64_t i = 0; i < num_ranges; ++i) {
    const int64_t first = i * kRangeBlocks, left = num_blocks - first;
    range(kind, static_cast<const uint8_t*>(from) + first * kBlockBytes[kind], to, first, left < kRangeBlocks ? left : kRangeBlocks, data_type);
  }
}

}  // namespace batchllm
