// The attention engine on tile units: bf16 query, keys, values and weights, float32 sums.
#pragma once

#include "amx.h"
#include "attention.h"

namespace batchllm {
namespace BATCHLLM_PATH {

class TileEngine {
 public:
  using Number = bf16;

  static size_t scratch_bytes(int head_dim) {
    const int depth = round_up(head_dim, 32), width = round_up(head_dim, 16);
    return sizeof(bf16) * (size_t(kUnitColumns) * depth + size_t(kChunk) * (depth + width) + 16 * kWeightStride) + sizeof(float) * 16 * kScoreStride;
  }

  TileEngine(const AttentionCall& call, char* memory)
      : head_dim_(call.head_dim), depth_tiles_((call.head_dim + 31) / 32), width_tiles_((call.head_dim + 15) / 16), scale_(call.scale * kLog2E) {
    query_ = reinterpret_cast<bf16*>(memory);
    keys_ = query_ + size_t(kUnitColumns) * depth_tiles_ * 32;
    values_ = keys_ + size_t(kChunk) * depth_tiles_ * 32;
    weights_ = values_ + size_t(kChunk) * width_tiles_ * 16;
    scores_ = reinterpret_cast<float*>(weights_ + 16 * kWeightStride);
  }

  // A operand: [depth tiles, 16 columns, 32].
  void pack_query(int tile, const bf16* const* pointers, int num_columns) {
    for (int k = 0; k < depth_tiles_; ++k)
      for (int c = 0; c < 16; ++c)
        _mm512_storeu_si512(query_tile(tile, k) + 32 * c, c < num_columns ? load_row(pointers[c], 32 * k) : _mm512_setzero_si512());
  }

  // For a single tile of columns packing waits until multiply() needs a piece: then a piece stays in the first cache level, and the
  // lines that are asked for ahead do not stand in its way.
  void pack_chunk(const Chunk<bf16>& chunk, int num_tiles, Ahead<bf16>& ahead) {
    chunk_ = &chunk;
    packs_late_ = num_tiles == 1;
    if (packs_late_) return;
    for (int start = 0; start < chunk.count; start += 32) {
      pack_keys(start, start / 16), pack_keys(start + 16, start / 16 + 1);
      pack_values(start, start / 32, 0, width_tiles_);
      ahead.ask(kAskPacking);
    }
  }

  void multiply(int tile, const int32_t* visible, int num_columns, const Partials& result, Ahead<bf16>& ahead) {
    int seen = 0;
    for (int c = 0; c < num_columns; ++c) seen = visible[c] > seen ? visible[c] : seen;
    const int steps = (seen + 31) / 32;  // of 32 positions
    for (int s = 0; s < steps; s += 2) {
      const int num_tiles = s + 2 <= steps ? 4 : 2;
      if (packs_late_)
        for (int i = 0; i < num_tiles; ++i) {
          pack_keys(32 * s + 16 * i, i);
          ahead.ask(kAskLate);
        }
      amx::barrier();
      const int slot = packs_late_ ? 0 : 2 * s;
      if (num_tiles == 4) {
        score<4>(tile, slot, 2 * s);
      } else {
        score<2>(tile, slot, 2 * s);
      }
      ahead.ask(kAskLate);
    }
    amx::barrier();
    for (int c = 0; c < num_columns; ++c) {
      softmax(c, visible[c], steps, result.m + c, result.l + c);
      ahead.ask(kAskLate);
    }
    int w = 0;
    for (; w + 4 <= width_tiles_; w += 4) weigh<4>(steps, w, result.a, ahead);
    if (width_tiles_ - w == 3) weigh<3>(steps, w, result.a, ahead);
    if (width_tiles_ - w == 2) weigh<2>(steps, w, result.a, ahead);
    if (width_tiles_ - w == 1) weigh<1>(steps, w, result.a, ahead);
    amx::barrier();
  }

 private:
  // Rows asked for at a time: a decode tile over a whole chunk makes about 30 steps.
  static constexpr int kAskPacking = 16, kAskLate = 8;
  // Strides off the powers of two, so that the rows of a tile do not fall on the same cache sets.
  static constexpr int kScoreStride = kChunk + 16;
  static constexpr int kWeightStride = kChunk + 32;

  // 32 numbers from `first`, zeros behind the head.
  __m512i load_row(const bf16* row, int first) const {
    const int count = head_dim_ - first;
    if (count >= 32) return _mm512_loadu_si512(row + first);
    return _mm512_maskz_loadu_epi16((1u << count) - 1, row + first);
  }

  bf16* query_tile(int tile, int k) const { return query_ + size_t(tile * depth_tiles_ + k) * 512; }
  bf16* key_tile(int positions, int k) const { return keys_ + size_t(positions * depth_tiles_ + k) * 512; }
  bf16* value_tile(int positions, int w) const { return values_ + size_t(positions * width_tiles_ + w) * 512; }

  // B operand of 16 positions' keys: [depth tiles, 16 pairs of the head, 16 positions, 2]; zeros behind the chunk.
  void pack_keys(int start, int slot) const {
    const int rows = chunk_->count - start;
    for (int k = 0; k < depth_tiles_; ++k) {
      __m512i r[16];
      if (rows >= 16) {
        for (int i = 0; i < 16; ++i) r[i] = load_row(chunk_->keys[start + i], 32 * k);
      } else {
        for (int i = 0; i < 16; ++i) r[i] = i < rows ? load_row(chunk_->keys[start + i], 32 * k) : _mm512_setzero_si512();
      }
      amx::transpose(r);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(key_tile(slot, k) + 32 * i, r[i]);
    }
  }

  // B operands of 32 positions' values: [width tiles, 16 pairs of positions, 16 of the head, 2]; zeros behind the chunk.
  void pack_values(int start, int slot, int first_tile, int last_tile) const {
    alignas(64) static const uint16_t order[64] = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42,
                                                   11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
                                                   22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    const __m512i low = _mm512_load_si512(order), high = _mm512_load_si512(order + 32);
    for (int pair = 0; pair < 16; ++pair) {
      const int first = start + 2 * pair;
      for (int w = first_tile; w < last_tile; w += 2) {
        const __m512i even = first < chunk_->count ? load_row(chunk_->value(first), 16 * w) : _mm512_setzero_si512();
        const __m512i odd = first + 1 < chunk_->count ? load_row(chunk_->value(first + 1), 16 * w) : _mm512_setzero_si512();
        _mm512_store_si512(value_tile(slot, w) + 32 * pair, _mm512_permutex2var_epi16(even, low, odd));
        if (w + 1 < last_tile) _mm512_store_si512(value_tile(slot, w + 1) + 32 * pair, _mm512_permutex2var_epi16(even, high, odd));
      }
    }
  }

  // Scores of N tiles of 16 positions: keys from `slot` on, results from position tile `first` on.
  template <int N>
  void score(int tile, int slot, int first) const {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (N > 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int k = 0; k < depth_tiles_; ++k) {
      _tile_loadd(4, query_tile(tile, k), 64);
      _tile_loadd(5, key_tile(slot, k), 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, key_tile(slot + 1, k), 64);
      _tile_dpbf16ps(1, 4, 6);
      if constexpr (N > 2) {
        _tile_loadd(7, key_tile(slot + 2, k), 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, key_tile(slot + 3, k), 64);
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

  // 2^t to 1e-4, which is finer than the weights' eight bits.
  static __m512 power(__m512 t) {
    const __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(t, n);
    __m512 p = _mm512_set1_ps(5.5171669e-2f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4261112e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9326099e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.9992807e-1f));
    return _mm512_scalef_ps(p, n);
  }

  static __mmask16 lanes(int count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : __mmask16((1u << count) - 1); }

  void softmax(int column, int visible, int steps, float* m, float* l) const {
    const float* s = scores_ + column * kScoreStride;
    bf16* to = weights_ + column * kWeightStride;
    __m512 peak = _mm512_set1_ps(-__builtin_inff());
    const int whole = visible / 16 * 16;
    for (int i = 0; i < whole; i += 16) peak = _mm512_max_ps(peak, _mm512_loadu_ps(s + i));
    if (whole < visible) peak = _mm512_mask_max_ps(peak, lanes(visible - whole), peak, _mm512_loadu_ps(s + whole));
    *m = _mm512_reduce_max_ps(peak) * scale_;
    const __m512 factor = _mm512_set1_ps(scale_), offset = _mm512_set1_ps(-*m);
    __m512 even_sum = _mm512_setzero_ps(), odd_sum = _mm512_setzero_ps();
    for (int i = 0; i < 32 * steps; i += 32) {
      __m512 even = power(_mm512_fmadd_ps(_mm512_loadu_ps(s + i), factor, offset));
      __m512 odd = power(_mm512_fmadd_ps(_mm512_loadu_ps(s + i + 16), factor, offset));
      if (i + 32 > visible) {
        even = _mm512_maskz_mov_ps(lanes(visible - i), even);
        odd = _mm512_maskz_mov_ps(lanes(visible - i - 16), odd);
      }
      even_sum = _mm512_add_ps(even_sum, even), odd_sum = _mm512_add_ps(odd_sum, odd);
      _mm512_storeu_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
    }
    *l = _mm512_reduce_add_ps(_mm512_add_ps(even_sum, odd_sum));
  }

  template <int N>
  void weigh(int steps, int w, float* a, Ahead<bf16>& ahead) const {
    _tile_zero(0);
    if constexpr (N > 1) _tile_zero(1);
    if constexpr (N > 2) _tile_zero(2);
    if constexpr (N > 3) _tile_zero(3);
    for (int s = 0; s < steps; ++s) {
      const int slot = packs_late_ ? 0 : s;
      if (packs_late_) {
        pack_values(32 * s, slot, w, w + N);
        ahead.ask(kAskLate);
      }
      amx::barrier();
      _tile_loadd(4, weights_ + 32 * s, kWeightStride * 2);
      _tile_loadd(5, value_tile(slot, w), 64);
      _tile_dpbf16ps(0, 4, 5);
      if constexpr (N > 1) {
        _tile_loadd(6, value_tile(slot, w + 1), 64);
        _tile_dpbf16ps(1, 4, 6);
      }
      if constexpr (N > 2) {
        _tile_loadd(7, value_tile(slot, w + 2), 64);
        _tile_dpbf16ps(2, 4, 7);
      }
      if constexpr (N > 3) {
        _tile_loadd(5, value_tile(slot, w + 3), 64);
        _tile_dpbf16ps(3, 4, 5);
      }
      amx::barrier();
    }
    const int stride = width_tiles_ * 16 * int(sizeof(float));
    _tile_stored(0, a + 16 * w, stride);
    if constexpr (N > 1) _tile_stored(1, a + 16 * (w + 1), stride);
    if constexpr (N > 2) _tile_stored(2, a + 16 * (w + 2), stride);
    if constexpr (N > 3) _tile_stored(3, a + 16 * (w + 3), stride);
  }

  amx::Tiles tiles_;
  int head_dim_, depth_tiles_, width_tiles_;
  bool packs_late_ = false;
  float scale_;
  const Chunk<bf16>* chunk_ = nullptr;
  bf16* query_;
  bf16* keys_;
  bf16* values_;
  bf16* weights_;  // [16, kWeightStride]
  float* scores_;  // [16, kScoreStride]
};

}  // namespace BATCHLLM_PATH
}  // namespace batchllm
