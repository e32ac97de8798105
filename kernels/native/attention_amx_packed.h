// Packed products on tile units: for more than one tile of columns a chunk's keys and values are packed once, as the B operand.
#pragma once

#include "attention_amx.h"

namespace batchllm {
namespace BATCHLLM_PATH {

// B operand of 16 positions' keys: [depth tiles, 16 pairs of the head, 16 positions, 2]; zeros behind the chunk.
inline void TileEngine::pack_keys(int start, int slot) const {
  const int rows = chunk_->count - start;
  for (int k = 0; k < depth_tiles_; ++k) {
    __m512i r[16];
    if (rows >= 16 && in_place_ && head_dim_ % 32 == 0) {
      const bf16* from = chunk_->keys[start] + 32 * k;
      for (int i = 0; i < 16; ++i, from += head_dim_) r[i] = _mm512_loadu_si512(from);
    } else if (rows >= 16) {
      for (int i = 0; i < 16; ++i) r[i] = load_row(chunk_->keys[start + i], 32 * k);
    } else {
      for (int i = 0; i < 16; ++i) r[i] = i < rows ? load_row(chunk_->keys[start + i], 32 * k) : _mm512_setzero_si512();
    }
    transpose(r);
    for (int i = 0; i < 16; ++i) _mm512_store_si512(key_tile(slot, k) + 32 * i, r[i]);
  }
}

// B operands of 32 positions' values: [width tiles, 16 pairs of positions, 16 of the head, 2], each position beside the sixteenth behind it; zeros
// behind the chunk.
inline void TileEngine::pack_values(int start, int slot) const {
  alignas(64) static const uint16_t order[64] = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42,
                                                 11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
                                                 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
  const __m512i low = _mm512_load_si512(order), high = _mm512_load_si512(order + 32);
  if (in_place_ && start + 32 <= chunk_->count && head_dim_ % 32 == 0) {  // sixteen rows that follow each other, twice
    const bf16 *lower = chunk_->value(start), *upper = chunk_->value(start + 16);
    bf16* to = value_tile(slot, 0);
    for (int pair = 0; pair < 16; ++pair, lower += head_dim_, upper += head_dim_, to += 32)
      for (int first = 0; first < head_dim_; first += 32) {
        const __m512i even = _mm512_loadu_si512(lower + first), odd = _mm512_loadu_si512(upper + first);
        _mm512_store_si512(to + first / 16 * 512, _mm512_permutex2var_epi16(even, low, odd));
        _mm512_store_si512(to + (first / 16 + 1) * 512, _mm512_permutex2var_epi16(even, high, odd));
      }
    return;
  }
  for (int pair = 0; pair < 16; ++pair) {
    const int first = start + pair, second = first + 16;
    for (int w = 0; w < width_tiles_; w += 2) {
      const __m512i even = first < chunk_->count ? load_row(chunk_->value(first), 16 * w) : _mm512_setzero_si512();
      const __m512i odd = second < chunk_->count ? load_row(chunk_->value(second), 16 * w) : _mm512_setzero_si512();
      _mm512_store_si512(value_tile(slot, w) + 32 * pair, _mm512_permutex2var_epi16(even, low, odd));
      if (w + 1 < width_tiles_) _mm512_store_si512(value_tile(slot, w + 1) + 32 * pair, _mm512_permutex2var_epi16(even, high, odd));
    }
  }
}

// Scores of N tiles of 16 positions from position tile `first` on.
template <int N>
inline void TileEngine::score(int tile, int first) const {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (N > 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int k = 0; k < depth_tiles_; ++k) {
    _tile_loadd(4, query_tile(tile, k), 64);
    _tile_loadd(5, key_tile(first, k), 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, key_tile(first + 1, k), 64);
    _tile_dpbf16ps(1, 4, 6);
    if constexpr (N > 2) {
      _tile_loadd(7, key_tile(first + 2, k), 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, key_tile(first + 3, k), 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, scores_ + 16 * first, kScoreStride * 4);
  _tile_stored(1, scores_ + 16 * first + 16, kScoreStride * 4);
  if constexpr (N > 2) {
    _tile_stored(2, scores_ + 16 * first + 32, kScoreStride * 4);
    _tile_stored(3, scores_ + 16 * first + 48, kScoreStride * 4);
  }
}

// Scores of two tiles of columns over two tiles of positions.
inline void TileEngine::score_pair(int tile, int first) const {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int k = 0; k < depth_tiles_; ++k) {
    _tile_loadd(4, query_tile(tile, k), 64);
    _tile_loadd(6, key_tile(first, k), 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, key_tile(first + 1, k), 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, query_tile(tile + 1, k), 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  float* lower = scores_ + 16 * kScoreStride;
  _tile_stored(0, scores_ + 16 * first, kScoreStride * 4);
  _tile_stored(1, scores_ + 16 * first + 16, kScoreStride * 4);
  _tile_stored(2, lower + 16 * first, kScoreStride * 4);
  _tile_stored(3, lower + 16 * first + 16, kScoreStride * 4);
}

// Sums over the packed values of `steps` steps.
inline void TileEngine::weigh_packed(int steps, int num_columns, float* a) const {
  int w = 0;
  amx::barrier();
  if (num_columns > kTileColumns)
    for (; w + 2 <= width_tiles_; w += 2) weigh_pair(steps, w, a);
  for (; w + 4 <= width_tiles_; w += 4) weigh<4>(steps, w, a);
  if (width_tiles_ - w == 3) weigh<3>(steps, w, a);
  if (width_tiles_ - w == 2) weigh<2>(steps, w, a);
  if (width_tiles_ - w == 1) weigh<1>(steps, w, a);
  if (width_tiles_ - w == 1 && num_columns > kTileColumns) weigh<1>(steps, w, a, kTileColumns);
  amx::barrier();
}

// N tiles of the head for the columns from `column` on.
template <int N>
inline void TileEngine::weigh(int steps, int w, float* a, int column) const {
  _tile_zero(0);
  if constexpr (N > 1) _tile_zero(1);
  if constexpr (N > 2) _tile_zero(2);
  if constexpr (N > 3) _tile_zero(3);
  for (int s = 0; s < steps; ++s) {
    _tile_loadd(4, weights_ + column * kWeightStride + 32 * s, kWeightStride * 2);
    _tile_loadd(5, value_tile(s, w), 64);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (N > 1) {
      _tile_loadd(6, value_tile(s, w + 1), 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (N > 2) {
      _tile_loadd(7, value_tile(s, w + 2), 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (N > 3) {
      _tile_loadd(5, value_tile(s, w + 3), 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  const int stride = width_tiles_ * 16 * int(sizeof(float));
  a += column * width_tiles_ * 16;
  _tile_stored(0, a + 16 * w, stride);
  if constexpr (N > 1) _tile_stored(1, a + 16 * (w + 1), stride);
  if constexpr (N > 2) _tile_stored(2, a + 16 * (w + 2), stride);
  if constexpr (N > 3) _tile_stored(3, a + 16 * (w + 3), stride);
}

// Two tiles of the head for two tiles of columns.
inline void TileEngine::weigh_pair(int steps, int w, float* a) const {
  const bf16* lower = weights_ + 16 * kWeightStride;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int s = 0; s < steps; ++s) {
    _tile_loadd(4, weights_ + 32 * s, kWeightStride * 2);
    _tile_loadd(6, value_tile(s, w), 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, value_tile(s, w + 1), 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, lower + 32 * s, kWeightStride * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  const int width = width_tiles_ * 16;
  _tile_stored(0, a + 16 * w, width * 4);
  _tile_stored(1, a + 16 * (w + 1), width * 4);
  _tile_stored(2, a + 16 * width + 16 * w, width * 4);
  _tile_stored(3, a + 16 * width + 16 * (w + 1), width * 4);
}

}  // namespace BATCHLLM_PATH
}  // namespace batchllm
