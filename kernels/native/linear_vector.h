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

  // [parts, kBlockRows, kPartInputs] float32, zeros behind the last input up to where bf16 weights have them.
  static size_t block_bytes(int64_t in_size) { return sizeof(float) * kPartNumbers * ((padded(in_size) + kPartInputs - 1) / kPartInputs); }

  static void pack_block(const T* x, int64_t x_stride, int rows, int64_t in_size, char* to) {
    float* part = reinterpret_cast<float*>(to);
    for (int64_t start = 0; start < padded(in_size); start += kPartInputs, part += kPartNumbers) {
      const int64_t stop = start + kPartInputs < padded(in_size) ? start + kPartInputs : padded(in_size);
      for (int r = 0; r < rows; ++r) {
        const T* row = x + r * x_stride;
        float* numbers = part + r * kPartInputs;
        for (int64_t i = start; i < stop; i += 16)
          store(numbers + i - start, i < in_size ? load_some(row + i, in_size - i < 16 ? int(in_size - i) : 16) : broadcast(0.0f));
      }
    }
  }

  static const char* weight_tile(const LinearCall& call, int64_t tile) { return plain_weight_tile<T>(call, tile); }

  static bool reads_rows(const LinearCall&) { return false; }
  static Block rows_block(const LinearCall&, int64_t) { return nullptr; }
  static Block packed_block(const char* packed, int64_t) { return packed; }

  static constexpr int kStepInputs = 32;
  static int group_tiles(int64_t) { return kMostTiles == 4 ? 6 : 4; }

  template <class Beside>
  void multiply(Block block, int rows, const char* weight, int64_t in_size, int num_tiles, float* y, Beside& beside) {
    const float* x = reinterpret_cast<const float*>(block);
    const T* w = reinterpret_cast<const T*>(weight);
    const int64_t inputs = sizeof(T) == 2 ? padded(in_size) : in_size;
    for (int64_t start = 0; start < inputs; start += kPartInputs, x += kPartNumbers) {
      const int count = int(inputs - start < kPartInputs ? inputs - start : kPartInputs);
      for (int tile = 0; tile < num_tiles;) {
        const int tiles = tiles_together(num_tiles - tile);
        some_tiles<kMostTiles>(tiles, x, rows, w + 16 * (tile * inputs + start), 16 * inputs, count, start > 0, y + 16 * tile, 16 * num_tiles);
        for (int i = 0; i < count * tiles; i += 2 * kStepInputs) beside.ask();
        tile += tiles;
      }
    }
  }

  static void settle(Block, int, const char*, int64_t, int, float*) {}

 private:
  // Inputs that are multiplied before the sums go to memory: few enough that a block's rows and a group's weights stay in the second cache
  // level, and not near a power of two, so that rows do not fall on the same cache sets.
  static constexpr int kPartInputs = 1552;
  static constexpr int kPartNumbers = kBlockRows * kPartInputs;
  // Sums in registers: rows by tiles. Three tiles by eight rows take a quarter fewer loads for each product than two by eleven: as fast where
  // products are what takes time, faster where loads do, as on a core that seems to have a busy neighbour.
#if defined(__AVX512F__)
  static constexpr int kMostTiles = 4;
  static constexpr int kMostRows[kMostTiles + 1] = {0, 11, 11, 8, 6};
#elif defined(__AVX2__)
  static constexpr int kMostTiles = 1;
  static constexpr int kMostRows[kMostTiles + 1] = {0, 6};
#else
  static constexpr int kMostTiles = 1;
  static constexpr int kMostRows[kMostTiles + 1] = {0, 2};
#endif

  static int tiles_together(int left) {
    if (left <= kMostTiles) return left;
    return kMostTiles == 1 ? 1 : 3;
  }

  static int64_t padded(int64_t in_size) { return (in_size + 31) / 32 * 32; }

  template <int N>
  static void some_tiles(int tiles, const float* x, int rows, const T* w, int64_t tile_numbers, int count, bool adds, float* y, int y_stride) {
    if constexpr (N > 1) {
      if (tiles < N) return some_tiles<N - 1>(tiles, x, rows, w, tile_numbers, count, adds, y, y_stride);
    }
    const int shares = (rows + kMostRows[N] - 1) / kMostRows[N];
    for (int share = 0, row = 0; share < shares; ++share) {
      const int share_rows = (rows - row + shares - share - 1) / (shares - share);
      some_rows<kMostRows[N], N>(x + row * kPartInputs, share_rows, w, tile_numbers, count, adds, y + row * y_stride, y_stride);
      row += share_rows;
    }
  }

  template <int M, int N>
  static void some_rows(const float* x, int rows, const T* w, int64_t tile_numbers, int count, bool adds, float* y, int y_stride) {
    if constexpr (M > 1) {
      if (rows < M) return some_rows<M - 1, N>(x, rows, w, tile_numbers, count, adds, y, y_stride);
    }
    multiply_rows<M, N>(x, w, tile_numbers, count, adds, y, y_stride);
  }

  // M rows by N tiles over `count` inputs; `adds`: to what is in y. Unless it is told to unroll, the compiler keeps sums in memory.
  template <int M, int N>
  __attribute__((noinline)) static void multiply_rows(const float* x, const T* w, int64_t tile_numbers, int count, bool adds, float* y, int y_stride) {
    Vec sums[M][N];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[m][n] = adds ? load(y + m * y_stride + 16 * n) : broadcast(0.0f);
    if constexpr (sizeof(T) == 2) {
      for (int k = 0; k < count; k += 2, x += 2, w += 32) {
        Vec weights[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) weights[n] = widen_even(reinterpret_cast<const uint32_t*>(w + n * tile_numbers));
        add_products<M, N>(x, weights, sums);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) weights[n] = widen_odd(reinterpret_cast<const uint32_t*>(w + n * tile_numbers));
        add_products<M, N>(x + 1, weights, sums);
      }
    } else {
      for (int k = 0; k < count; ++k, ++x, w += 16) {
        Vec weights[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) weights[n] = load(w + n * tile_numbers);
        add_products<M, N>(x, weights, sums);
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) store(y + m * y_stride + 16 * n, sums[m][n]);
  }

  template <int M, int N>
  static BATCHLLM_INLINE void add_products(const float* x, const Vec (&weights)[N], Vec (&sums)[M][N]) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const Vec a = broadcast(x[m * kPartInputs]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[m][n] = fma(a, weights[n], sums[m][n]);
    }
  }
};

}  // namespace BATCHLLM_PATH
}  // namespace batchllm
