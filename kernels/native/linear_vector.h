// The multiplier without tile units: float32 products of rows widened once, weights of either type.
#pragma once

#include "linear.h"

namespace batchllm {
namespace BATCHLLM_PATH {

template <class T>
class VectorMultiplier {
 public:
  using Number = T;
  using Block = const char*;

  static size_t block_bytes(int64_t in_size) { return sizeof(float) * kBlockRows * padded(in_size); }

  static void pack_block(const T* x, int64_t x_stride, int rows, int64_t in_size, char* to) {
    for (int r = 0; r < rows; ++r) {
      float* row = reinterpret_cast<float*>(to) + r * padded(in_size);
      for (int64_t i = 0; i < in_size; i += 16) {
        const int count = in_size - i < 16 ? int(in_size - i) : 16;
        store(row + i, load_some(x + r * x_stride + i, count));
      }
      for (int64_t i = (in_size + 15) / 16 * 16; i < padded(in_size); i += 16) store(row + i, broadcast(0.0f));
    }
  }

  static const char* weight_tile(const LinearCall& call, int64_t tile) { return plain_weight_tile<T>(call, tile); }

  static bool reads_rows(const LinearCall&) { return false; }
  static Block rows_block(const LinearCall&, int64_t) { return nullptr; }
  static Block packed_block(const char* packed, int64_t) { return packed; }

  static constexpr int kStepInputs = 32;
  static int group_tiles(int64_t) { return 4; }

  template <class Beside>
  void multiply(Block block, int rows, const char* weight, int64_t in_size, int num_tiles, float* y, Beside&) {
    const float* x = reinterpret_cast<const float*>(block);
    const T* w = reinterpret_cast<const T*>(weight);
    const int64_t tile_numbers = 16 * (sizeof(T) == 2 ? padded(in_size) : in_size);
    int tile = 0;
    for (; tile + kTiles <= num_tiles; tile += kTiles) columns<kTiles>(x, rows, w + tile * tile_numbers, tile_numbers, in_size, y + 16 * tile, 16 * num_tiles);
    for (; tile < num_tiles; ++tile) columns<1>(x, rows, w + tile * tile_numbers, tile_numbers, in_size, y + 16 * tile, 16 * num_tiles);
  }

  static void settle(Block, int, const char*, int64_t, int, float*) {}

 private:
#if defined(__AVX512F__)
  static constexpr int kRows = 8, kTiles = 2;
#elif defined(__AVX2__)
  static constexpr int kRows = 5, kTiles = 1;
#else
  static constexpr int kRows = 2, kTiles = 1;
#endif

  static int64_t padded(int64_t in_size) { return (in_size + 31) / 32 * 32; }

  template <int N>
  void columns(const float* x, int rows, const T* w, int64_t tile_numbers, int64_t in_size, float* y, int y_stride) {
    int r = 0;
    for (; r + kRows <= rows; r += kRows) tile<kRows, N>(x + r * padded(in_size), w, tile_numbers, in_size, y + r * y_stride, y_stride);
    for (; r < rows; ++r) tile<1, N>(x + r * padded(in_size), w, tile_numbers, in_size, y + r * y_stride, y_stride);
  }

  template <int M, int N>
  void tile(const float* x, const T* w, int64_t tile_numbers, int64_t in_size, float* y, int y_stride) {
    const int64_t stride = padded(in_size);
    Vec sums[M][N];
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n) sums[m][n] = broadcast(0.0f);
    if constexpr (sizeof(T) == 2) {
      for (int64_t k = 0; k < stride; k += 2) {
        for (int odd = 0; odd < 2; ++odd) {
          Vec b[N];
          for (int n = 0; n < N; ++n) {
            const uint32_t* pairs = reinterpret_cast<const uint32_t*>(w + n * tile_numbers) + 8 * k;
            b[n] = odd ? widen_odd(pairs) : widen_even(pairs);
          }
          for (int m = 0; m < M; ++m) {
            const Vec a = broadcast(x[m * stride + k + odd]);
            for (int n = 0; n < N; ++n) sums[m][n] = fma(a, b[n], sums[m][n]);
          }
        }
      }
    } else {
      for (int64_t k = 0; k < in_size; ++k) {
        Vec b[N];
        for (int n = 0; n < N; ++n) b[n] = load(w + n * tile_numbers + 16 * k);
        for (int m = 0; m < M; ++m) {
          const Vec a = broadcast(x[m * stride + k]);
          for (int n = 0; n < N; ++n) sums[m][n] = fma(a, b[n], sums[m][n]);
        }
      }
    }
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n) store(y + m * y_stride + 16 * n, sums[m][n]);
  }
};

}  // namespace BATCHLLM_PATH
}  // namespace batchllm
