// The attention engine on tile units: bf16 query, keys, values and weights, float32 sums.
#pragma once

#include "amx.h"
#include "attention.h"

namespace batchllm {
namespace BATCHLLM_PATH {

// By the seven bits of a fraction f: how far 128 (2^f - 1) lies below 128 f, rounded.
struct alignas(64) BelowLine {
  uint8_t bytes[128] = {};

  constexpr BelowLine() {
    double power = 128;  // 128 * 2^(i / 128)
    for (int i = 0; i < 128; ++i, power *= 1.0054299011128028) bytes[i] = uint8_t(i + 128 - int(power + 0.5));
  }
};
inline constexpr BelowLine kBelowLine;

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

  // attention_amx_packed.h
  void pack_keys(int start, int slot) const;
  void pack_values(int start, int slot) const;
  template <int N>
  void score(int tile, int first) const;
  void score_pair(int tile, int first) const;
  void weigh_packed(int steps, int num_columns, float* a) const;
  template <int N>
  void weigh(int steps, int w, float* a, int column = 0) const;
  void weigh_pair(int steps, int w, float* a) const;
  // attention_amx_direct.h
  const bf16* key_rows(int start) const;
  void score_direct(int steps, int num_columns, Ahead<bf16>& ahead) const;
  static void turn_narrow(const float* from, float* to);
  static void turn_wide(const float* from, float* to, int num_columns);
  template <bool kForked>
  void pack_values_direct(int start, int first, bf16* to, Ahead<bf16>& ahead) const;
  template <bool kForked>
  void weigh_direct(int steps, int first, int num_columns, const bf16* weights, float* a, Ahead<bf16>& ahead) const;
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

  // Weights of N columns from `column` on, which take turns: one alone would wait for its own results. 32 positions at a time, position i beside
  // i + 16, as pack_values() pairs them.
  //
  // 2^t in bf16 is a whole number of 16 bits, made without a power: 128 (t + 127), whose upper bits are the exponent and whose seven lower ones stand
  // for the fraction f of t, less what the mantissa 128 (2^f - 1) lies below 128 f. Rounding t to 1 / 128 costs up to 0.3 %, where rounding to
  // bf16 costs up to 0.4 %. Both go into sums and weights alike. What is not a number becomes 0xffff, which is none either.
  template <int N, bool kForked>
  void softmax(int column, const int32_t* visible, int steps, const float* m, float* l, Ahead<bf16>& ahead) const {
    const __m512 factor = _mm512_set1_ps(scale_ * 128), upper_factor = _mm512_set1_ps(scale_ * 128 * 65536);
    const __m512i below[2] = {_mm512_load_si512(kBelowLine.bytes), _mm512_load_si512(kBelowLine.bytes + 64)};
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    const float* scores[N];
    bf16* weights[N];
    __m512 offset[N], upper_offset[N], sum[N];
    int seen_by_all = visible[0];
    for (int n = 0; n < N; ++n) {
      scores[n] = scores_ + (column + n) * kScoreStride;
      weights[n] = weights_ + (column + n) * kWeightStride;
      offset[n] = _mm512_set1_ps((127 - m[n]) * 128);
      upper_offset[n] = _mm512_set1_ps((127 - m[n]) * 128 * 65536 + 32768);
      sum[n] = _mm512_setzero_ps();
      seen_by_all = visible[n] < seen_by_all ? visible[n] : seen_by_all;
    }
    const auto weigh_some = [&](int n, int i, __mmask16 lower_seen, __mmask16 upper_seen) __attribute__((always_inline)) {
      const __m512i lower = whole(lower_seen, _mm512_fmadd_ps(_mm512_loadu_ps(scores[n] + i), factor, offset[n]));
      const __m512i upper = whole(upper_seen, _mm512_fmadd_ps(_mm512_loadu_ps(scores[n] + i + 16), upper_factor, upper_offset[n]));
      const __m512i both = _mm512_mask_blend_epi16(0x55555555, upper, lower);
      const __m512i found = _mm512_sub_epi16(both, _mm512_maskz_permutex2var_epi8(0x5555555555555555, below[0], both, below[1]));
      sum[n] = _mm512_dpbf16_ps(sum[n], (__m512bh)found, ones);
      _mm512_storeu_si512(weights[n] + i, found);
    };
    int i = 0;
    for (; i + 64 <= seen_by_all; i += 64) {
      for (int k = 0; k < 64; k += 32)
        for (int n = 0; n < N; ++n) weigh_some(n, i + k, 0xffff, 0xffff);
      ask<kForked>(ahead, 2 * N);
    }
    for (; i < 32 * steps; i += 32) {
      for (int n = 0; n < N; ++n) weigh_some(n, i, lanes(visible[n] - i), lanes(visible[n] - i - 16));
      ask<kForked>(ahead, N);
    }
    for (int n = 0; n < N; ++n) l[n] = _mm512_reduce_add_ps(sum[n]);
  }

  // The nearest whole number from 0 on, all bits where it is none; zero for lanes that are not `seen`.
  static __m512i whole(__mmask16 seen, __m512 x) { return _mm512_maskz_cvtps_epu32(seen, _mm512_max_ps(_mm512_setzero_ps(), x)); }

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

#include "attention_amx_packed.h"
#include "attention_amx_direct.h"
#include "attention_amx_forked.h"
