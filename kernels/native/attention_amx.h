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
    return sizeof(bf16) * (size_t(kUnitColumns) * depth + size_t(kChunk) * (depth + width) + kPairColumns * kWeightStride) +
           sizeof(float) * ((kPairColumns + kNarrow) * kScoreStride + kPairColumns * kChunk + 4 * 256);
  }

  TileEngine(const AttentionCall& call, char* memory)
      : head_dim_(call.head_dim),
        depth_tiles_((call.head_dim + 31) / 32),
        width_tiles_((call.head_dim + 15) / 16),
        in_place_(call.block_size % 16 == 0),
        scale_(call.scale * kLog2E) {
    query_ = reinterpret_cast<bf16*>(memory);
    keys_ = query_ + size_t(kUnitColumns) * depth_tiles_ * 32;
    values_ = keys_ + size_t(kChunk) * depth_tiles_ * 32;
    weights_ = values_ + size_t(kChunk) * width_tiles_ * 16;
    scores_ = reinterpret_cast<float*>(weights_ + kPairColumns * kWeightStride);
    turned_ = scores_ + (kPairColumns + kNarrow) * kScoreStride;
    sums_ = turned_ + kPairColumns * kChunk;
  }

  // One tile of columns reads each key once, so keys are not worth packing for it: they are the A operand as they lie, and the columns
  // B. The sums are the same either way.
  void start_unit(const AttentionUnit& unit) {
    forked_ = unit.front > 0;
    direct_ = !forked_ && unit.num_columns <= kTileColumns && head_dim_ % 32 == 0;
    configure(direct_ && unit.num_columns <= kNarrow ? kNarrow : 16);
  }

  static bool forks(const AttentionCall& call) { return call.head_dim % 32 == 0 && call.num_heads / call.num_kv_heads <= kTileColumns; }

  // A operand: [depth tiles, 16 columns, 32]; direct: B operand [depth tiles, 16 pairs of the head, columns, 2]; forked: the same of both
  // tiles and some columns more, so that a tile can begin at any of them.
  void pack_query(int tile, const bf16* const* pointers, int num_columns) {
    for (int k = 0; k < depth_tiles_; ++k) {
      if (forked_) {
        __m512i r[16];
        for (int c = 0; c < 16; ++c) r[c] = c < num_columns ? _mm512_loadu_si512(pointers[c] + 32 * k) : _mm512_setzero_si512();
        transpose(r);
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(fork_query(k, kTileColumns * tile) + 2 * kForkColumns * i, r[i]);
        continue;
      }
      if (!direct_) {
        for (int c = 0; c < 16; ++c)
          _mm512_storeu_si512(query_tile(tile, k) + 32 * c, c < num_columns ? load_row(pointers[c], 32 * k) : _mm512_setzero_si512());
        continue;
      }
      auto* to = reinterpret_cast<uint32_t*>(query_tile(0, k));
      for (int c = 0; c < columns_; ++c) {
        uint32_t pairs[16] = {};
        if (c < num_columns) std::memcpy(pairs, pointers[c] + 32 * k, 64);
        for (int i = 0; i < 16; ++i) to[i * columns_ + c] = pairs[i];
      }
    }
  }

  void pack_chunk(const UnitChunk<bf16>& chunk, Ahead<bf16>& ahead) {
    unit_chunk_ = &chunk;
    chunk_ = &chunk.together;
    if (direct_ || forked_) return;
    for (int start = 0; start < chunk_->count; start += 32) {
      pack_keys(start, start / 16), pack_keys(start + 16, start / 16 + 1);
      pack_values(start, start / 32);
      ahead.ask(kAskPacking);
    }
  }

  void multiply(int tile, const int32_t* visible, int num_columns, const Partials& result, Ahead<bf16>& ahead) {
    int seen = 0;
    for (int c = 0; c < num_columns; ++c) seen = visible[c] > seen ? visible[c] : seen;
    const int steps = (seen + 31) / 32;  // of 32 positions
    if (forked_) return multiply_forked(steps, visible, num_columns, result, ahead);
    amx::barrier();
    if (direct_) {
      score_direct(steps, num_columns, ahead);
    } else if (num_columns > kTileColumns) {
      for (int s = 0; s < steps; ++s) score_pair(tile, 2 * s);
    } else {
      int s = 0;
      for (; s + 2 <= steps; s += 2) score<4>(tile, 2 * s);
      if (s < steps) score<2>(tile, 2 * s);
    }
    amx::barrier();
    softmax<false>(visible, num_columns, steps, result, ahead);
    if (direct_) {
      for (int first = 0; first < head_dim_; first += 64) weigh_direct<false>(steps, first, num_columns, weights_, result.a, ahead);
    } else {
      weigh_packed(steps, num_columns, result.a);
    }
  }

 private:
  // Rows asked for at a time.
  static constexpr int kAskPacking = 16;
  // A forked unit's shares of its time.
  static constexpr int kAskApart = 10, kAskFront = 18, kAskFrontValues = 30, kAskWeighing = 20;
  static constexpr int kNarrow = 4;
  static constexpr int kForkColumns = kPairColumns + kTileColumns;
  // Registers of the direct products: 0 scores, 1 keys or values, 2 query columns, 3 weights, 4 to 7 sums.
  // Strides off the powers of two, so that the rows of a tile do not fall on the same cache sets.
  static constexpr int kScoreStride = kChunk + 16;
  static constexpr int kWeightStride = kChunk + 32;

  // 32 numbers from `first`, zeros behind the head.
  __m512i load_row(const bf16* row, int first) const {
    const int count = head_dim_ - first;
    if (count >= 32) return _mm512_loadu_si512(row + first);
    return _mm512_maskz_loadu_epi16((1u << count) - 1, row + first);
  }

  // Of what a forked unit says it is asked for its share of all.
  template <bool kForked>
  static void ask(Ahead<bf16>& ahead, int num_rows) {
    if constexpr (kForked) {
      ahead.ask_shares(num_rows);
    } else {
      ahead.ask(num_rows);
    }
  }

  // Few columns make narrow tiles, which are cheap to turn.
  void configure(int columns) {
    if (columns == columns_) return;
    columns_ = columns;
    amx::TileConfig config;
    if (columns == kNarrow) {
      config.row_bytes[0] = config.row_bytes[2] = 4 * kNarrow;
      for (int tile = 3; tile < 8; ++tile) config.rows[tile] = kNarrow;
    }
    tiles_.configure(config);
  }

  bf16* fork_query(int k, int column) const { return query_ + 2 * (size_t(k) * 16 * kForkColumns + column); }
  bf16* query_tile(int tile, int k) const { return query_ + size_t(tile * depth_tiles_ + k) * 512; }
  bf16* key_tile(int positions, int k) const { return keys_ + size_t(positions * depth_tiles_ + k) * 512; }
  bf16* value_tile(int positions, int w) const { return values_ + size_t(positions * width_tiles_ + w) * 512; }

  // B operand of 16 positions' keys: [depth tiles, 16 pairs of the head, 16 positions, 2]; zeros behind the chunk.
  void pack_keys(int start, int slot) const {
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

  // B operands of 32 positions' values: [width tiles, 16 pairs of positions, 16 of the head, 2]; zeros behind the chunk.
  void pack_values(int start, int slot) const {
    alignas(64) static const uint16_t order[64] = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42,
                                                   11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
                                                   22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    const __m512i low = _mm512_load_si512(order), high = _mm512_load_si512(order + 32);
    if (in_place_ && start + 32 <= chunk_->count && head_dim_ % 32 == 0) {  // rows that follow each other
      const int row = head_dim_, tile = 512;
      for (int half = 0; half < 2; ++half) {
        const bf16* from = chunk_->value(start + 16 * half);
        bf16* to = value_tile(slot, 0) + 256 * half;
        for (int pair = 0; pair < 8; ++pair, from += 2 * row, to += 32)
          for (int first = 0; first < row; first += 32) {
            const __m512i even = _mm512_loadu_si512(from + first), odd = _mm512_loadu_si512(from + row + first);
            _mm512_store_si512(to + first / 16 * tile, _mm512_permutex2var_epi16(even, low, odd));
            _mm512_store_si512(to + (first / 16 + 1) * tile, _mm512_permutex2var_epi16(even, high, odd));
          }
      }
      return;
    }
    for (int pair = 0; pair < 16; ++pair) {
      const int first = start + 2 * pair;
      for (int w = 0; w < width_tiles_; w += 2) {
        const __m512i even = first < chunk_->count ? load_row(chunk_->value(first), 16 * w) : _mm512_setzero_si512();
        const __m512i odd = first + 1 < chunk_->count ? load_row(chunk_->value(first + 1), 16 * w) : _mm512_setzero_si512();
        _mm512_store_si512(value_tile(slot, w) + 32 * pair, _mm512_permutex2var_epi16(even, low, odd));
        if (w + 1 < width_tiles_) _mm512_store_si512(value_tile(slot, w + 1) + 32 * pair, _mm512_permutex2var_epi16(even, high, odd));
      }
    }
  }

  // Scores of N tiles of 16 positions from position tile `first` on.
  template <int N>
  void score(int tile, int first) const {
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
  void score_pair(int tile, int first) const {
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

  // 16 positions' keys as they lie; a copy with zeros behind the chunk where blocks do not hold them in a row, or where the chunk ends among
  // them: the rest of its block would come from memory, unasked for.
  const bf16* key_rows(int start) const {
    if (in_place_ && start + 16 <= chunk_->count) return chunk_->keys[start];
    for (int i = 0; i < 16; ++i)
      for (int k = 0; k < depth_tiles_; ++k)
        _mm512_store_si512(keys_ + i * head_dim_ + 32 * k,
                           start + i < chunk_->count ? _mm512_loadu_si512(chunk_->keys[start + i] + 32 * k) : _mm512_setzero_si512());
    amx::barrier();
    return keys_;
  }

  void score_direct(int steps, int num_columns, Ahead<bf16>& ahead) const {
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
  static void turn_narrow(const float* from, float* to) {
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
  static void turn_wide(const float* from, float* to, int num_columns) {
    __m512i r[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(from + 16 * i);
    transpose(r);
    for (int c = 0; c < num_columns; ++c) _mm512_storeu_si512(to + c * kScoreStride, r[c]);
  }

  // attention_amx_forked.h
  void multiply_forked(int steps, const int32_t* visible, int num_columns, const Partials& result, Ahead<bf16>& ahead);
  void score_apart(int row, int group, int front, Ahead<bf16>& ahead);
  void score_front(int num_columns, Ahead<bf16>& ahead) const;
  void weigh_apart(int row, int group, int front, float* a, Ahead<bf16>& ahead);

  static __mmask16 lanes(int count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : __mmask16((1u << count) - 1); }

  // Maxima of the columns' visible scores, times the scale. All before the first power, so that no column waits for another.
  void find_maxima(const int32_t* visible, int num_columns, float* m) const {
    const __m512 nothing = _mm512_set1_ps(-__builtin_inff());
    for (int c = 0; c < num_columns; ++c) {
      const float* s = scores_ + c * kScoreStride;
      const int whole = visible[c] / 16 * 16;
      __m512 peaks[4] = {nothing, nothing, nothing, nothing};
      int i = 0;
      for (; i + 64 <= whole; i += 64)
        for (int k = 0; k < 4; ++k) peaks[k] = _mm512_max_ps(peaks[k], _mm512_loadu_ps(s + i + 16 * k));
      for (; i < whole; i += 16) peaks[0] = _mm512_max_ps(peaks[0], _mm512_loadu_ps(s + i));
      if (i < visible[c]) peaks[1] = _mm512_mask_max_ps(peaks[1], lanes(visible[c] - i), peaks[1], _mm512_loadu_ps(s + i));
      m[c] = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(peaks[0], peaks[1]), _mm512_max_ps(peaks[2], peaks[3]))) * scale_;
    }
  }

  // Maxima, weights and sums of all columns.
  template <bool kForked>
  void softmax(const int32_t* visible, int num_columns, int steps, const Partials& result, Ahead<bf16>& ahead) const {
    find_maxima(visible, num_columns, result.m);
    int c = 0;
    for (; c + 2 <= num_columns; c += 2) softmax<2, kForked>(c, visible + c, steps, result.m + c, result.l + c, ahead);
    if (c < num_columns) softmax<1, kForked>(c, visible + c, steps, result.m + c, result.l + c, ahead);
  }

  // Weights of N columns from `column` on, which take turns: one alone would wait for its own results.
  template <int N, bool kForked>
  void softmax(int column, const int32_t* visible, int steps, const float* m, float* l, Ahead<bf16>& ahead) const {
    const __m512 factor = _mm512_set1_ps(scale_);
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    __m512 offset[N], sum[N];
    for (int n = 0; n < N; ++n) {
      offset[n] = _mm512_set1_ps(-m[n]);
      sum[n] = _mm512_setzero_ps();
    }
    for (int i = 0; i < 32 * steps; i += 32) {
      for (int n = 0; n < N; ++n) {
        const float* s = scores_ + (column + n) * kScoreStride + i;
        __m512 even = exp2_rough({_mm512_fmadd_ps(_mm512_loadu_ps(s), factor, offset[n])}).v;
        __m512 odd = exp2_rough({_mm512_fmadd_ps(_mm512_loadu_ps(s + 16), factor, offset[n])}).v;
        if (i + 32 > visible[n]) {
          even = _mm512_maskz_mov_ps(lanes(visible[n] - i), even);
          odd = _mm512_maskz_mov_ps(lanes(visible[n] - i - 16), odd);
        }
        const __m512bh weights = _mm512_cvtne2ps_pbh(odd, even);
        sum[n] = _mm512_dpbf16_ps(sum[n], weights, ones);
        _mm512_storeu_si512(weights_ + (column + n) * kWeightStride + i, (__m512i)weights);
      }
      ask<kForked>(ahead, N);
    }
    for (int n = 0; n < N; ++n) l[n] = _mm512_reduce_add_ps(sum[n]);
  }

  // Sums over the packed values of `steps` steps.
  void weigh_packed(int steps, int num_columns, float* a) const {
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
  void weigh(int steps, int w, float* a, int column = 0) const {
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
  void weigh_pair(int steps, int w, float* a) const {
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

  // B operands of 32 positions' values, up to 64 of the head from `first` on: tiles 2 w and 2 w + 1 hold the lower and the upper four of
  // each eight of 32, which is how two rows interleave fastest.
  template <bool kForked>
  void pack_values_direct(int start, int first, bf16* to, Ahead<bf16>& ahead) const {
    const int num_vectors = head_dim_ - first < 64 ? 1 : 2;
    if (in_place_ && start + 32 <= chunk_->count) {  // rows that follow each other
      for (int half = 0; half < 2; ++half) {
        const bf16* from = chunk_->value(start + 16 * half) + first;
        for (int pair = 8 * half; pair < 8 * half + 8; ++pair, from += 2 * head_dim_) {
          for (int w = 0; w < num_vectors; ++w) {
            const __m512i even = _mm512_loadu_si512(from + 32 * w), odd = _mm512_loadu_si512(from + head_dim_ + 32 * w);
            _mm512_store_si512(to + 1024 * w + 32 * pair, _mm512_unpacklo_epi16(even, odd));
            _mm512_store_si512(to + 1024 * w + 512 + 32 * pair, _mm512_unpackhi_epi16(even, odd));
          }
          ask<kForked>(ahead, 1);
        }
      }
      return;
    }
    for (int pair = 0; pair < 16; ++pair) {
      const int at = start + 2 * pair;
      for (int w = 0; w < num_vectors; ++w) {
        const __m512i even = at < chunk_->count ? _mm512_loadu_si512(chunk_->value(at) + first + 32 * w) : _mm512_setzero_si512();
        const __m512i odd = at + 1 < chunk_->count ? _mm512_loadu_si512(chunk_->value(at + 1) + first + 32 * w) : _mm512_setzero_si512();
        _mm512_store_si512(to + 1024 * w + 32 * pair, _mm512_unpacklo_epi16(even, odd));
        _mm512_store_si512(to + 1024 * w + 512 + 32 * pair, _mm512_unpackhi_epi16(even, odd));
      }
      ask<kForked>(ahead, 1);
    }
  }

  // Sums of up to 64 of the head from `first` on, from nothing or, of a forked unit, from what `a` holds.
  template <bool kForked>
  void weigh_direct(int steps, int first, int num_columns, const bf16* weights, float* a, Ahead<bf16>& ahead) const {
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

  amx::Tiles tiles_;
  int head_dim_, depth_tiles_, width_tiles_;
  bool in_place_;  // whether 16 positions from a multiple of 16 on lie in one block
  bool direct_ = false;
  int columns_ = 16;  // of a tile
  float scale_;
  bool forked_ = false;
  const UnitChunk<bf16>* unit_chunk_ = nullptr;
  const Chunk<bf16>* chunk_ = nullptr;  // that is being multiplied
  bf16* query_;
  bf16* keys_;
  bf16* values_;
  bf16* weights_;  // [kPairColumns, kWeightStride]
  float* scores_;  // [kPairColumns + kNarrow, kScoreStride]
  float* turned_;  // direct: [kChunk, columns_]; forked: [2 tiles, kChunk, 16]
  float* sums_;    // direct: [4 tiles, 16, 16]
};

}  // namespace BATCHLLM_PATH
}  // namespace batchllm

#include "attention_amx_forked.h"
