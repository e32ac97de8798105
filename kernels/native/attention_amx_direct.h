// Direct products on tile units: for one tile of columns or less keys are an operand as they lie, and values are packed two steps at a time.
// Registers: 0 scores, 1 keys or values, 2 query columns, 3 weights, 4 to 7 sums.
#pragma once

#include "attention_amx.h"

namespace batchllm {
namespace BATCHLLM_PATH {

// 16 positions' keys as they lie; a copy with zeros behind the chunk where blocks do not hold them in a row, or where the chunk ends among
// them: the rest of its block would come from memory, unasked for.
inline const bf16* TileEngine::key_rows(int start) const {
  if (in_place_ && start + 16 <= chunk_->count) return chunk_->keys[start];
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < depth_tiles_; ++k)
      _mm512_store_si512(keys_ + i * head_dim_ + 32 * k,
                         start + i < chunk_->count ? _mm512_loadu_si512(chunk_->keys[start + i] + 32 * k) : _mm512_setzero_si512());
  amx::barrier();
  return keys_;
}

inline void TileEngine::score_direct(int steps, int num_columns, Ahead<bf16>& ahead) const {
  const int num_tiles = chunk_->count <= 32 * steps - 16 ? 2 * steps - 1 : 2 * steps;  // the last may lie behind the chunk
  for (int p = 0; p < num_tiles; ++p) {
    const bf16* rows = key_rows(16 * p);
    _tile_zero(0);
    for (int k = 0; k < depth_tiles_; ++k) {
      _tile_loadd(2, query_tile(0, k), 4 * columns_);
      _tile_loadd(1, rows + 32 * k, 2 * head_dim_);
      _tile_dpbf16ps(0, 1, 2);
      ahead.ask(1);
    }
    _tile_stored(0, turned_ + 16 * columns_ * p, 4 * columns_);
    amx::barrier();
    ahead.ask(2);
  }
  for (int p = 0; p < num_tiles; ++p) {
    const float* from = turned_ + 16 * columns_ * p;
    float* to = scores_ + 16 * p;
    if (columns_ == kNarrow) {
      turn_narrow(from, to);
    } else {
      turn_wide(from, to, num_columns);
    }
  }
}

// [16 positions, 4 columns] to rows of positions.
inline void TileEngine::turn_narrow(const float* from, float* to) {
  const __m512i first_two = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
  const __m512i last_two = _mm512_setr_epi32(2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31);
  __m512 r[4];
  for (int i = 0; i < 4; ++i) r[i] = _mm512_loadu_ps(from + 16 * i);
  const __m512 early = _mm512_permutex2var_ps(r[0], first_two, r[1]), late = _mm512_permutex2var_ps(r[2], first_two, r[3]);
  _mm512_storeu_ps(to, _mm512_shuffle_f32x4(early, late, 0x44));
  _mm512_storeu_ps(to + kScoreStride, _mm512_shuffle_f32x4(early, late, 0xee));
  const __m512 early_last = _mm512_permutex2var_ps(r[0], last_two, r[1]), late_last = _mm512_permutex2var_ps(r[2], last_two, r[3]);
  _mm512_storeu_ps(to + 2 * kScoreStride, _mm512_shuffle_f32x4(early_last, late_last, 0x44));
  _mm512_storeu_ps(to + 3 * kScoreStride, _mm512_shuffle_f32x4(early_last, late_last, 0xee));
}

// [16 positions, 16 columns] to rows of positions.
inline void TileEngine::turn_wide(const float* from, float* to, int num_columns) {
  __m512i r[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(from + 16 * i);
  transpose(r);
  for (int c = 0; c < num_columns; ++c) _mm512_storeu_si512(to + c * kScoreStride, r[c]);
}

// B operands of 32 positions' values, paired as in pack_values(), up to 64 of the head from `first` on: tiles 2 w and 2 w + 1 hold the
// lower and the upper four of each eight of 32, which is how two rows interleave fastest.
template <bool kForked>
inline void TileEngine::pack_values_direct(int start, int first, bf16* to, Ahead<bf16>& ahead) const {
  const int num_vectors = head_dim_ - first < 64 ? 1 : 2;
  if (in_place_ && start + 32 <= chunk_->count) {  // sixteen rows that follow each other, twice
    const bf16 *lower = chunk_->value(start) + first, *upper = chunk_->value(start + 16) + first;
    for (int pair = 0; pair < 16; ++pair, lower += head_dim_, upper += head_dim_) {
      for (int w = 0; w < num_vectors; ++w) {
        const __m512i even = _mm512_loadu_si512(lower + 32 * w), odd = _mm512_loadu_si512(upper + 32 * w);
        _mm512_store_si512(to + 1024 * w + 32 * pair, _mm512_unpacklo_epi16(even, odd));
        _mm512_store_si512(to + 1024 * w + 512 + 32 * pair, _mm512_unpackhi_epi16(even, odd));
      }
      ask<kForked>(ahead, 1);
    }
    return;
  }
  for (int pair = 0; pair < 16; ++pair) {
    const int at = start + pair, after = at + 16;
    for (int w = 0; w < num_vectors; ++w) {
      const __m512i even = at < chunk_->count ? _mm512_loadu_si512(chunk_->value(at) + first + 32 * w) : _mm512_setzero_si512();
      const __m512i odd = after < chunk_->count ? _mm512_loadu_si512(chunk_->value(after) + first + 32 * w) : _mm512_setzero_si512();
      _mm512_store_si512(to + 1024 * w + 32 * pair, _mm512_unpacklo_epi16(even, odd));
      _mm512_store_si512(to + 1024 * w + 512 + 32 * pair, _mm512_unpackhi_epi16(even, odd));
    }
    ask<kForked>(ahead, 1);
  }
}

// Sums of up to 64 of the head from `first` on, from nothing or, of a forked unit, from what `a` holds.
template <bool kForked>
inline void TileEngine::weigh_direct(int steps, int first, int num_columns, const bf16* weights, float* a, Ahead<bf16>& ahead) const {
  const int width = width_tiles_ * 16;
  const bool both = head_dim_ - first >= 64;
  if constexpr (kForked) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    const __m512i high = _mm512_setr_epi32(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    for (int c = 0; c < num_columns; ++c)
      for (int w = 0; w < (both ? 2 : 1); ++w) {
        const float* from = a + c * width + first + 32 * w;
        const __m512 front = _mm512_loadu_ps(from), back = _mm512_loadu_ps(from + 16);
        _mm512_store_ps(sums_ + 512 * w + 16 * c, _mm512_permutex2var_ps(front, low, back));
        _mm512_store_ps(sums_ + 512 * w + 256 + 16 * c, _mm512_permutex2var_ps(front, high, back));
      }
    amx::barrier();
    _tile_loadd(4, sums_, 64);
    _tile_loadd(5, sums_ + 256, 64);
    _tile_loadd(6, sums_ + 512, 64);
    _tile_loadd(7, sums_ + 768, 64);
  } else {
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
  }
  pack_values_direct<kForked>(0, first, values_, ahead);
  for (int s = 0; s < steps; ++s) {
    const bf16* packed = values_ + s % 2 * 2048;
    if (s + 1 < steps) pack_values_direct<kForked>(32 * (s + 1), first, values_ + (s + 1) % 2 * 2048, ahead);
    amx::barrier();
    ask<kForked>(ahead, 4);
    _tile_loadd(3, weights + 32 * s, kWeightStride * 2);
    _tile_loadd(1, packed, 64);
    _tile_dpbf16ps(4, 3, 1);
    _tile_loadd(1, packed + 512, 64);
    _tile_dpbf16ps(5, 3, 1);
    if (both) {
      _tile_loadd(1, packed + 1024, 64);
      _tile_dpbf16ps(6, 3, 1);
      _tile_loadd(1, packed + 1536, 64);
      _tile_dpbf16ps(7, 3, 1);
    }
    amx::barrier();
  }
  _tile_stored(4, sums_, 64);
  _tile_stored(5, sums_ + 256, 64);
  _tile_stored(6, sums_ + 512, 64);
  _tile_stored(7, sums_ + 768, 64);
  amx::barrier();
  const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i back = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int c = 0; c < num_columns; ++c)
    for (int w = 0; w < (both ? 2 : 1); ++w) {
      const __m512 low = _mm512_load_ps(sums_ + 512 * w + 16 * c), high = _mm512_load_ps(sums_ + 512 * w + 256 + 16 * c);
      float* to = a + c * width + first + 32 * w;
      _mm512_storeu_ps(to, _mm512_permutex2var_ps(low, front, high));
      _mm512_storeu_ps(to + 16, _mm512_permutex2var_ps(low, back, high));
    }
}

}  // namespace BATCHLLM_PATH
}  // namespace batchllm
