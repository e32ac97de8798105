// The int8 multiplier without tile units: products of four inputs at a time by the dot-product instructions where the path has them
// (they take unsigned rows, so 128 times the sum of the weights is taken off at the end), else of pairs of int16.
#pragma once

#include "linear_int8.h"

namespace batchllm {
namespace BATCHLLM_PATH {

// Sums: int32 sums of 16 outputs. Weights: four inputs of 16 outputs. Operand: four inputs of one row.
#if defined(__AVX512VNNI__)

using Int8Row = uint8_t;
inline constexpr int kInt8TileRows = 8, kInt8TileOutputs = 2;
struct Sums {
  __m512i v = _mm512_setzero_si512();
};
using Int8Weights = __m512i;
using Operand = __m512i;
BATCHLLM_INLINE void load_weights(const int8_t* p, Int8Weights& w) { w = _mm512_loadu_si512(p); }
BATCHLLM_INLINE Operand load_operand(const Int8Row* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof(four));
  return _mm512_set1_epi32(four);
}
BATCHLLM_INLINE void add_products(Sums& sums, Operand x, const Int8Weights& w) { sums.v = _mm512_dpbusd_epi32(sums.v, x, w); }
BATCHLLM_INLINE Vec total(const Sums& sums, const char* raised) {
  return {_mm512_cvtepi32_ps(_mm512_sub_epi32(sums.v, _mm512_loadu_si512(raised)))};
}

#elif defined(__AVX512F__)

using Int8Row = int16_t;
inline constexpr int kInt8TileRows = 8, kInt8TileOutputs = 1;
struct Sums {
  __m512i lo = _mm512_setzero_si512(), hi = _mm512_setzero_si512();  // two sums for each of 8 outputs
};
struct Int8Weights {
  __m512i lo, hi;
};
using Operand = __m512i;
BATCHLLM_INLINE void load_weights(const int8_t* p, Int8Weights& w) {
  w.lo = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
  w.hi = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(p + 32)));
}
BATCHLLM_INLINE Operand load_operand(const Int8Row* p) {
  int64_t four;
  std::memcpy(&four, p, sizeof(four));
  return _mm512_set1_epi64(four);
}
BATCHLLM_INLINE void add_products(Sums& sums, Operand x, const Int8Weights& w) {
  sums.lo = _mm512_add_epi32(sums.lo, _mm512_madd_epi16(x, w.lo));
  sums.hi = _mm512_add_epi32(sums.hi, _mm512_madd_epi16(x, w.hi));
}
BATCHLLM_INLINE Vec total(const Sums& sums, const char*) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return {_mm512_cvtepi32_ps(
      _mm512_add_epi32(_mm512_permutex2var_epi32(sums.lo, even, sums.hi), _mm512_permutex2var_epi32(sums.lo, odd, sums.hi)))};
}

#elif defined(__AVXVNNI__)

using Int8Row = uint8_t;
inline constexpr int kInt8TileRows = 5, kInt8TileOutputs = 1;
struct Sums {
  __m256i lo = _mm256_setzero_si256(), hi = _mm256_setzero_si256();
};
struct Int8Weights {
  __m256i lo, hi;
};
using Operand = __m256i;
BATCHLLM_INLINE void load_weights(const int8_t* p, Int8Weights& w) {
  w.lo = _mm256_loadu_si256((const __m256i*)p);
  w.hi = _mm256_loadu_si256((const __m256i*)(p + 32));
}
BATCHLLM_INLINE Operand load_operand(const Int8Row* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof(four));
  return _mm256_set1_epi32(four);
}
BATCHLLM_INLINE void add_products(Sums& sums, Operand x, const Int8Weights& w) {
  sums.lo = _mm256_dpbusd_avx_epi32(sums.lo, x, w.lo);
  sums.hi = _mm256_dpbusd_avx_epi32(sums.hi, x, w.hi);
}
BATCHLLM_INLINE Vec total(const Sums& sums, const char* raised) {
  const __m256i* off = (const __m256i*)raised;
  return {{_mm256_cvtepi32_ps(_mm256_sub_epi32(sums.lo, _mm256_loadu_si256(off)))},
          {_mm256_cvtepi32_ps(_mm256_sub_epi32(sums.hi, _mm256_loadu_si256(off + 1)))}};
}

#elif defined(__AVX2__)

using Int8Row = int16_t;
inline constexpr int kInt8TileRows = 2, kInt8TileOutputs = 1;
struct Sums {
  __m256i v[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};  // two for each output
};
struct Int8Weights {
  __m256i v[4];
};
using Operand = __m256i;
BATCHLLM_INLINE void load_weights(const int8_t* p, Int8Weights& w) {
  for (int i = 0; i < 4; ++i) w.v[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + 16 * i)));
}
BATCHLLM_INLINE Operand load_operand(const Int8Row* p) {
  int64_t four;
  std::memcpy(&four, p, sizeof(four));
  return _mm256_set1_epi64x(four);
}
BATCHLLM_INLINE void add_products(Sums& sums, Operand x, const Int8Weights& w) {
  for (int i = 0; i < 4; ++i) sums.v[i] = _mm256_add_epi32(sums.v[i], _mm256_madd_epi16(x, w.v[i]));
}
BATCHLLM_INLINE Vec total(const Sums& sums, const char*) {
  // Adding neighbours leaves outputs 0, 1, 4, 5, 2, 3, 6, 7.
  return {{_mm256_cvtepi32_ps(_mm256_permute4x64_epi64(_mm256_hadd_epi32(sums.v[0], sums.v[1]), 0xd8))},
          {_mm256_cvtepi32_ps(_mm256_permute4x64_epi64(_mm256_hadd_epi32(sums.v[2], sums.v[3]), 0xd8))}};
}

#else

using Int8Row = int16_t;
inline constexpr int kInt8TileRows = 2, kInt8TileOutputs = 1;
struct Sums {
  int32_t v[16] = {};
};
struct Int8Weights {
  int8_t v[64];
};
using Operand = const Int8Row*;
BATCHLLM_INLINE void load_weights(const int8_t* p, Int8Weights& w) { std::memcpy(w.v, p, sizeof(w.v)); }
BATCHLLM_INLINE Operand load_operand(const Int8Row* p) { return p; }
BATCHLLM_INLINE void add_products(Sums& sums, Operand x, const Int8Weights& w) {
  for (int i = 0; i < 16; ++i)
    sums.v[i] += x[0] * w.v[4 * i] + x[1] * w.v[4 * i + 1] + x[2] * w.v[4 * i + 2] + x[3] * w.v[4 * i + 3];
}
BATCHLLM_INLINE Vec total(const Sums& sums, const char*) {
  float numbers[16];
  for (int i = 0; i < 16; ++i) numbers[i] = float(sums.v[i]);
  return load(numbers);
}

#endif

class Int8VectorMultiplier {
 public:
  static size_t block_bytes(int64_t in_size) { return kInt8ScaleBytes + sizeof(Int8Row) * kBlockRows * int8_padded(in_size); }

  template <class T>
  static void pack_block(const T* x, int64_t x_stride, int rows, int64_t in_size, char* to) {
    Int8Row* row = reinterpret_cast<Int8Row*>(to + kInt8ScaleBytes);
    for (int r = 0; r < rows; ++r)
      reinterpret_cast<float*>(to)[r] = quantise_row(x + r * x_stride, in_size, row + r * int8_padded(in_size), 64);
  }

  static constexpr int kStepInputs = 64;
  static int group_tiles(int64_t) { return 4; }

  template <class Beside>
  void multiply(const char* block, int rows, const char* weight, int64_t in_size, int num_tiles, float* y, Beside&) {
    const int64_t tile_bytes = int8_tile_bytes(in_size);
    int n = 0;
    for (; n + kInt8TileOutputs <= num_tiles; n += kInt8TileOutputs)
      columns<kInt8TileOutputs>(block, rows, weight + n * tile_bytes, in_size, y + 16 * n, 16 * num_tiles);
    for (; n < num_tiles; ++n) columns<1>(block, rows, weight + n * tile_bytes, in_size, y + 16 * n, 16 * num_tiles);
  }

  static void settle(const char*, int, const char*, int64_t, int, float*) {}

 private:
  template <int N>
  void columns(const char* block, int rows, const char* weight, int64_t in_size, float* y, int y_stride) {
    const float* scales = reinterpret_cast<const float*>(block);
    const Int8Row* x = reinterpret_cast<const Int8Row*>(block + kInt8ScaleBytes);
    const int64_t padded = int8_padded(in_size);
    int r = 0;
    for (; r + kInt8TileRows <= rows; r += kInt8TileRows) tile<kInt8TileRows, N>(x + r * padded, scales + r, weight, padded, y + r * y_stride, y_stride);
    for (; r < rows; ++r) tile<1, N>(x + r * padded, scales + r, weight, padded, y + r * y_stride, y_stride);
  }

  template <int M, int N>
  void tile(const Int8Row* x, const float* scales, const char* weight, int64_t padded, float* y, int y_stride) {
    const int64_t tile_bytes = kInt8HeaderBytes + 16 * padded;
    Sums sums[M][N];
    for (int64_t k = 0; k < padded; k += 4) {
      Int8Weights w[N];
      for (int n = 0; n < N; ++n) load_weights(reinterpret_cast<const int8_t*>(weight + n * tile_bytes + kInt8HeaderBytes + 16 * k), w[n]);
      for (int m = 0; m < M; ++m) {
        const Operand row = load_operand(x + m * padded + k);
        for (int n = 0; n < N; ++n) add_products(sums[m][n], row, w[n]);
      }
    }
    for (int n = 0; n < N; ++n) {
      const char* header = weight + n * tile_bytes;
      const Vec channels = load(reinterpret_cast<const float*>(header));
      for (int m = 0; m < M; ++m) store(y + m * y_stride + 16 * n, total(sums[m][n], header + 64) * broadcast(scales[m]) * channels);
    }
  }
};

}  // namespace BATCHLLM_PATH
}  // namespace batchllm
