// The multiplier on tile units: bf16 rows and weights, float32 sums.
#pragma once

#include "amx.h"
#include "linear.h"

namespace batchllm {
namespace BATCHLLM_PATH {

class TileMultiplier {
 public:
  using Number = bf16;
  // Two halves of 16 rows: bytes between rows, and numbers from one piece of 32 inputs to the next.
  struct Block {
    const bf16* upper;
    const bf16* lower;
    int64_t stride, step;
  };

  static size_t block_bytes(int64_t in_size) { return sizeof(bf16) * kBlockRows * ((in_size + 31) / 32 * 32); }

  // A operands: [2, depth tiles, 16 rows, 32]; the second half only where there are more than 16 rows.
  static void pack_block(const bf16* x, int64_t x_stride, int rows, int64_t in_size, char* to) {
    const int64_t depth = (in_size + 31) / 32;
    const int padded_rows = rows > 16 ? 32 : 16;
    for (int r = 0; r < padded_rows; ++r) {
      bf16* row = reinterpret_cast<bf16*>(to) + (r / 16 * depth * 16 + r % 16) * 32;
      for (int64_t k = 0; k < depth; ++k) {
        __m512i numbers = _mm512_setzero_si512();
        if (r < rows) {
          const int64_t count = in_size - 32 * k;
          numbers = _mm512_maskz_loadu_epi16(count >= 32 ? ~0u : (1u << count) - 1, x + r * x_stride + 32 * k);
        }
        _mm512_store_si512(row + 512 * k, numbers);
      }
    }
  }

  static const char* weight_tile(const LinearCall& call, int64_t tile) { return plain_weight_tile<bf16>(call, tile); }

  // Rows whose distance is a large power of two would all fall on the same cache sets.
  static bool reads_rows(const LinearCall& call) { return call.in_size % 32 == 0 && call.x_stride % 512 != 0; }

  static Block rows_block(const LinearCall& call, int64_t first_row) {
    const bf16* rows = static_cast<const bf16*>(call.x) + first_row * call.x_stride;
    return {rows, rows + 16 * call.x_stride, call.x_stride * int64_t(sizeof(bf16)), 32};
  }

  static Block packed_block(const char* packed, int64_t in_size) {
    const bf16* rows = reinterpret_cast<const bf16*>(packed);
    return {rows, rows + 512 * ((in_size + 31) / 32), 64, 512};
  }

  static constexpr int kStepInputs = 32;
  static int group_tiles(int64_t rows) { return rows > 16 ? 2 : 4; }

  template <class Beside>
  void multiply(const Block& block, int rows, const char* weight, int64_t in_size, int num_tiles, float* y, Beside& beside) {
    const bf16* b = reinterpret_cast<const bf16*>(weight);
    const int64_t depth = (in_size + 31) / 32;
    const int stride = 16 * num_tiles;
    amx::barrier();
    int n = 0;
    if (rows > 16) {
      for (; n + 2 <= num_tiles; n += 2) two_by_two(block, b + 512 * depth * n, depth, y + 16 * n, stride, beside);
      if (n < num_tiles) {
        row_of_tiles<1>(block, b + 512 * depth * n, depth, y + 16 * n, stride, beside);
        row_of_tiles<1>({block.lower, nullptr, block.stride, block.step}, b + 512 * depth * n, depth, y + 16 * stride + 16 * n, stride, beside);
      }
      amx::barrier();
      return;
    }
    for (; n + 4 <= num_tiles; n += 4) row_of_tiles<4>(block, b + 512 * depth * n, depth, y + 16 * n, stride, beside);
    for (; n + 2 <= num_tiles; n += 2) row_of_tiles<2>(block, b + 512 * depth * n, depth, y + 16 * n, stride, beside);
    if (n < num_tiles) row_of_tiles<1>(block, b + 512 * depth * n, depth, y + 16 * n, stride, beside);
    amx::barrier();
  }

  static void settle(const Block&, int, const char*, int64_t, int, float*) {}

 private:
  template <class Beside>
  static void two_by_two(const Block& block, const bf16* b, int64_t depth, float* y, int stride, Beside& beside) {
    const bf16 *upper = block.upper, *lower = block.lower, *right = b + 512 * depth;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < depth; ++k, upper += block.step, lower += block.step, b += 512, right += 512) {
      _tile_loadd(4, upper, block.stride);
      _tile_stream_loadd(6, b, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_stream_loadd(7, right, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, lower, block.stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      beside.step();
    }
    _tile_stored(0, y, stride * 4);
    _tile_stored(1, y + 16, stride * 4);
    _tile_stored(2, y + 16 * stride, stride * 4);
    _tile_stored(3, y + 16 * stride + 16, stride * 4);
  }

  template <int N, class Beside>
  static void row_of_tiles(const Block& block, const bf16* b, int64_t depth, float* y, int stride, Beside& beside) {
    const bf16* a = block.upper;
    const int64_t step = 512 * depth;
    _tile_zero(0);
    if constexpr (N > 1) _tile_zero(1);
    if constexpr (N > 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t k = 0; k < depth; ++k, a += block.step, b += 512) {
      _tile_loadd(4, a, block.stride);
      _tile_loadd(5, b, 64);
      _tile_dpbf16ps(0, 4, 5);
      if constexpr (N > 1) {
        _tile_loadd(6, b + step, 64);
        _tile_dpbf16ps(1, 4, 6);
        beside.step();
      }
      if constexpr (N > 2) {
        _tile_loadd(7, b + 2 * step, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, b + 3 * step, 64);
        _tile_dpbf16ps(3, 4, 5);
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
