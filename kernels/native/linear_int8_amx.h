// The int8 multiplier on tile units: int8 rows and weights, int32 sums.
#pragma once

#include "amx.h"
#include "linear_int8.h"

namespace batchllm {
namespace BATCHLLM_PATH {

class Int8TileMultiplier {
 public:
  static size_t block_bytes(int64_t in_size) { return kInt8ScaleBytes + kBlockRows * int8_padded(in_size); }

  // A operands: [2, depth tiles, 16 rows, 64]; the second half only where there are more than 16 rows.
  template <class T>
  static void pack_block(const T* x, int64_t x_stride, int rows, int64_t in_size, char* to) {
    float* scales = reinterpret_cast<float*>(to);
    const int64_t depth = int8_padded(in_size) / 64;
    for (int r = 0; r < (rows > 16 ? 32 : 16); ++r) {
      int8_t* row = reinterpret_cast<int8_t*>(to + kInt8ScaleBytes) + (r / 16 * depth * 16 + r % 16) * 64;
      if (r < rows) {
        scales[r] = quantise_row(x + r * x_stride, in_size, row, 1024);
      } else {
        for (int64_t k = 0; k < depth; ++k) _mm512_store_si512(row + 1024 * k, _mm512_setzero_si512());
      }
    }
  }

  static constexpr int kStepInputs = 64;
  static int group_tiles(int64_t rows) { return rows > 16 ? 2 : 4; }

  // y becomes int32 sums.
  template <class Beside>
  void multiply(const char* block, int rows, const char* weight, int64_t in_size, int num_tiles, float* y, Beside& beside) {
    const char* a = block + kInt8ScaleBytes;
    const int64_t size = 16 * int8_padded(in_size), tile_bytes = int8_tile_bytes(in_size);
    const char* b = weight + kInt8HeaderBytes;
    const int stride = 16 * num_tiles;
    amx::barrier();
    int n = 0;
    if (rows > 16) {
      for (; n + 2 <= num_tiles; n += 2) two_by_two(a, b + n * tile_bytes, size, y + 16 * n, stride, beside);
      if (n < num_tiles) {
        row_of_tiles<1>(a, b + n * tile_bytes, size, y + 16 * n, stride, beside);
        row_of_tiles<1>(a + size, b + n * tile_bytes, size, y + 16 * stride + 16 * n, stride, beside);
      }
    } else {
      for (; n + 4 <= num_tiles; n += 4) row_of_tiles<4>(a, b + n * tile_bytes, size, y + 16 * n, stride, beside);
      for (; n + 2 <= num_tiles; n += 2) row_of_tiles<2>(a, b + n * tile_bytes, size, y + 16 * n, stride, beside);
      if (n < num_tiles) row_of_tiles<1>(a, b + n * tile_bytes, size, y + 16 * n, stride, beside);
    }
    amx::barrier();
  }

  static void settle(const char* block, int row, const char* weight, int64_t in_size, int num_tiles, float* y) {
    const __m512 scale = _mm512_set1_ps(reinterpret_cast<const float*>(block)[row]);
    const int64_t tile_bytes = int8_tile_bytes(in_size);
    for (int n = 0; n < num_tiles; ++n) {
      const __m512 sums = _mm512_cvtepi32_ps(_mm512_loadu_si512(y + 16 * n));
      _mm512_storeu_ps(y + 16 * n, _mm512_mul_ps(_mm512_mul_ps(sums, scale), _mm512_loadu_ps(weight + n * tile_bytes)));
    }
  }

 private:
  // The sums go to `y` as int32.
  template <class Beside>
  static void two_by_two(const char* a, const char* b, int64_t size, float* y, int stride, Beside& beside) {
    const char *lower = a + size, *right = b + kInt8HeaderBytes + size;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < size; k += 1024) {
      _tile_loadd(4, a + k, 64);
      _tile_stream_loadd(6, b + k, 64);
      _tile_dpbssd(0, 4, 6);
      _tile_stream_loadd(7, right + k, 64);
      _tile_dpbssd(1, 4, 7);
      _tile_loadd(5, lower + k, 64);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
      beside.step();
    }
    _tile_stored(0, y, stride * 4);
    _tile_stored(1, y + 16, stride * 4);
    _tile_stored(2, y + 16 * stride, stride * 4);
    _tile_stored(3, y + 16 * stride + 16, stride * 4);
  }

  template <int N, class Beside>
  static void row_of_tiles(const char* a, const char* b, int64_t size, float* y, int stride, Beside& beside) {
    const int64_t step = kInt8HeaderBytes + size;
    _tile_zero(0);
    if constexpr (N > 1) _tile_zero(1);
    if constexpr (N > 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t k = 0; k < size; k += 1024) {
      _tile_loadd(4, a + k, 64);
      _tile_loadd(5, b + k, 64);
      _tile_dpbssd(0, 4, 5);
      if constexpr (N > 1) {
        _tile_loadd(6, b + step + k, 64);
        _tile_dpbssd(1, 4, 6);
        beside.step();
      }
      if constexpr (N > 2) {
        _tile_loadd(7, b + 2 * step + k, 64);
        _tile_dpbssd(2, 4, 7);
        _tile_loadd(5, b + 3 * step + k, 64);
        _tile_dpbssd(3, 4, 5);
        beside.step();
      }
    }
    _tile_stored(0, y, stride * 4);
    if constexpr (N > 1) _tile_stored(1, y + 16, stride * 4);
    if constexpr (N > 2) {
      _tile_stored(2, y + 32, stride * 4);
      _tile_stored(3, y + 48, stride * 4);
    }
  }

  amx::Tiles tiles_;
};

}  // namespace BATCHLLM_PATH
}  // namespace batchllm
