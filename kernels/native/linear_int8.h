// y = x W^T + b over int8 weights and rows that are rounded to int8 on the way in. Meaning: kernels/linear.py. The products are whole
// numbers summed without rounding, and what follows is one order of float operations, so all paths give the same sums bit for bit.
//
// Packed weights are tiles of 16 outputs: float32 scales [16]; int32 [16], each output's sum of weights times 128; int8
// [padded inputs / 4, 16, 4] where inputs are padded with zeros to a multiple of 64. Tile units and vector units read the same form.
//
// A multiplier is one of linear.h whose blocks are all packed: it has neither Number, Block, weight_tile, reads_rows, rows_block nor
// packed_block, and
//   static size_t block_bytes(in_size)                      a packed block: float32 scales [32], then rows
//   static void pack_block<T>(x, x_stride, rows, in_size, to)
//   void multiply(block, rows, weight, in_size, num_tiles, y, beside)   y [32, 16 * num_tiles] float32, or what settle() makes of it
#pragma once

#include "linear.h"

namespace batchllm {
namespace BATCHLLM_PATH {

inline constexpr size_t kInt8ScaleBytes = kBlockRows * sizeof(float);
inline constexpr int64_t kInt8HeaderBytes = 128;  // scales and sums in front of a tile's weights

BATCHLLM_INLINE int64_t int8_padded(int64_t in_size) { return (in_size + 63) / 64 * 64; }
BATCHLLM_INLINE int64_t int8_tile_bytes(int64_t in_size) { return kInt8HeaderBytes + 16 * int8_padded(in_size); }

// Sixteen whole numbers of at most 127 as int8, as uint8 raised by 128, or as int16.
#if defined(__AVX512F__)
BATCHLLM_INLINE void store_rounded(int8_t* to, Vec a) { _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v))); }
BATCHLLM_INLINE void store_rounded(uint8_t* to, Vec a) {
  _mm_storeu_si128((__m128i*)to, _mm_xor_si128(_mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)), _mm_set1_epi8(char(0x80))));
}
BATCHLLM_INLINE void store_rounded(int16_t* to, Vec a) {
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a.v)));
}
#elif defined(__AVX2__)
BATCHLLM_INLINE __m256i rounded_words(Vec a) {
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(a.lo.v), _mm256_cvtps_epi32(a.hi.v)), 0xd8);
}
BATCHLLM_INLINE void store_rounded(int16_t* to, Vec a) { _mm256_storeu_si256((__m256i*)to, rounded_words(a)); }
BATCHLLM_INLINE void store_rounded(uint8_t* to, Vec a) {
  const __m256i words = rounded_words(a);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128((__m128i*)to, _mm_xor_si128(bytes, _mm_set1_epi8(char(0x80))));
}
#else
BATCHLLM_INLINE void store_rounded(int16_t* to, Vec a) {
  float numbers[16];
  store(numbers, nearest(a));
  for (int i = 0; i < 16; ++i) to[i] = int16_t(numbers[i]);
}
#endif

// The largest magnitude as the bits of a float, which are in the order of the numbers; above those of infinity for what is none.
BATCHLLM_INLINE uint32_t largest_bits(const bf16* x, int64_t size) {
  int16_t largest = 0;
  for (int64_t i = 0; i < size; ++i) {
    const int16_t bits = int16_t(x[i] & 0x7fff);
    largest = bits > largest ? bits : largest;
  }
  return uint32_t(largest) << 16;
}
BATCHLLM_INLINE uint32_t largest_bits(const float* x, int64_t size) {
  int32_t largest = 0;
  for (int64_t i = 0; i < size; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return uint32_t(largest);
}

// Rounds a row to at most 127 in magnitude, pieces of 64 numbers `piece_stride` apart, and returns what one unit is worth. A row with
// a number that is not finite becomes zeros worth no number, so that all its outputs say so.
template <class T, class To>
BATCHLLM_INLINE float quantise_row(const T* x, int64_t in_size, To* to, int64_t piece_stride) {
  const uint32_t bits = largest_bits(x, in_size);
  const bool is_finite = bits < 0x7f800000u;
  float largest;
  std::memcpy(&largest, &bits, sizeof(largest));
  largest = largest > 1e-30f ? largest : 1e-30f;
  const Vec factor = broadcast(127.0f / largest), zero = broadcast(0.0f);
  for (int64_t piece = 0; 64 * piece < in_size; ++piece) {
    To* target = to + piece * piece_stride;
    const T* from = x + 64 * piece;
    const int64_t count = in_size - 64 * piece;
    for (int i = 0; i < 64; i += 16)
      store_rounded(target + i, is_finite && i < count ? load_some(from + i, count - i < 16 ? int(count - i) : 16) * factor : zero);
  }
  return is_finite ? largest / 127.0f : __builtin_nanf("");
}

// An int8 multiplier as run_linear() wants it, for rows and outputs of type T.
template <class Multiplier, class T>
struct Int8Rows : Multiplier {
  using Number = T;
  using Block = const char*;

  static const char* weight_tile(const LinearCall& call, int64_t tile) {
    return static_cast<const char*>(call.weight) + tile * int8_tile_bytes(call.in_size);
  }
  static bool reads_rows(const LinearCall&) { return false; }
  static Block rows_block(const LinearCall&, int64_t) { return nullptr; }
  static Block packed_block(const char* packed, int64_t) { return packed; }
};

template <class Multiplier>
void linear_int8_by_type(const LinearCall& call) {
  if (call.data_type == kBFloat16) return run_linear<Int8Rows<Multiplier, bf16>>(call);
  run_linear<Int8Rows<Multiplier, float>>(call);
}

}  // namespace BATCHLLM_PATH
}  // namespace batchllm
