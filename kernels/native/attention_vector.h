// The attention engine without tile units: float32 throughout, query, keys and values of either type.
#pragma once

#include "attention.h"

namespace batchllm {
namespace BATCHLLM_PATH {

// A weight as exactly as an output of T needs it.
template <class T>
BATCHLLM_INLINE Vec weight_for(Vec t) { return exp2_negative(t); }
#if defined(__AVX512F__)
template <>
BATCHLLM_INLINE Vec weight_for<bf16>(Vec t) { return exp2_rough(t); }
#endif

// s [visible ... padded]: raw products on entry, weights on return, zero behind `visible`. Returns the row's maximum and sum.
template <class T>
BATCHLLM_INLINE void softmax_row(float* s, int visible, int padded, float scale, float* m, float* l) {
  const float infinity = __builtin_inff();
  for (int i = visible; i < padded; ++i) s[i] = -infinity;
  const Vec factor = broadcast(scale);
  Vec peak = broadcast(-infinity);
  for (int i = 0; i < padded; i += 16) peak = maximum(peak, load(s + i));
  *m = maximum_lanes(peak) * scale;
  const Vec offset = broadcast(-*m);
  Vec sum = broadcast(0.0f);
  for (int i = 0; i < padded; i += 16) {
    const Vec p = weight_for<T>(fma(load(s + i), factor, offset));
    store(s + i, p);
    sum = sum + p;
  }
  // A power that only just underflows differs from zero by path; hidden positions must be exactly zero.
  for (int i = visible; i < padded; ++i) s[i] = 0.0f;
  *l = sum_lanes(sum);
}

template <class T>
class VectorEngine {
 public:
  using Number = T;

  static size_t scratch_bytes(int head_dim) {
    const int width = round_up(head_dim, 16);
    return sizeof(float) * (size_t(kUnitColumns) * head_dim + size_t(kChunk) * (head_dim + width) + kPairColumns * kScoreStride);
  }

  VectorEngine(const AttentionCall& call, char* memory)
      : head_dim_(call.head_dim), width_(round_up(call.head_dim, 16)), scale_(call.scale * kLog2E) {
    keys_ = reinterpret_cast<float*>(memory);
    values_ = keys_ + size_t(kChunk) * head_dim_;
    scores_ = values_ + size_t(kChunk) * width_;
    query_ = scores_ + kPairColumns * kScoreStride;
  }

  // With more columns a row a unit has room for one.
  static bool forks(const AttentionCall& call) { return call.num_heads / call.num_kv_heads <= kPairColumns / 2; }

  // A unit of few columns is done soon after its keys are packed: most of what comes next is asked for meanwhile.
  void start_unit(const AttentionUnit& unit) {
    forked_ = unit.front > 0;
    pack_asks_ = unit.num_columns <= kTileColumns ? 12 : 2;
  }

  void pack_query(int tile, const T* const* pointers, int num_columns) {
    for (int c = 0; c < num_columns; ++c) {
      float* to = query_ + size_t(tile * kTileColumns + c) * head_dim_;
      for (int d = 0; d < head_dim_; d += 16) store_some(to + d, load_some(pointers[c] + d, head_dim_ - d), head_dim_ - d);
    }
  }

  void pack_chunk(const UnitChunk<T>& chunk, Ahead<T>& ahead) {
    unit_chunk_ = &chunk;
    const int count = chunk.together.count;
    if (forked_) {
      int blocks = 0;
      for (int row = 0; row < chunk.num_apart; ++row) blocks += 2 * ((chunk.apart[row].count + kBlock - 1) / kBlock);
      ahead.spread(round_up(count, 16) / 16 + blocks);
    }
    for (int start = 0; start < count; start += 16) {
      pack_keys(chunk.together, start, start);
      pack_values(chunk.together, start, start);
      if (forked_) {
        ahead.ask_shares(1);
      } else {
        ahead.ask(pack_asks_);
      }
    }
  }

  void multiply(int tile, const int32_t* visible, int num_columns, const Partials& result, Ahead<T>& ahead) {
    if (forked_) return multiply_forked(visible, num_columns, result, ahead);
    const int padded = padded_positions(visible, num_columns);
    score_columns(query_ + size_t(tile) * kTileColumns * head_dim_, num_columns, 0, padded, scores_, [&] { ahead.ask(8); });
    for (int c = 0; c < num_columns; ++c) softmax_row<T>(scores_ + c * kScoreStride, visible[c], padded, scale_, result.m + c, result.l + c);
    weigh_columns(scores_, num_columns, 0, padded, result.a, [&] { ahead.ask(8); });
  }

 private:
  // A stride off the powers of two, so that rows do not fall on the same cache sets.
  static constexpr int kScoreStride = kChunk + 16;
  // Sums in registers: columns by vectors.
#if defined(__AVX512F__)
  static constexpr int kColumns = 6, kVectors = 4;
#else
  static constexpr int kColumns = 3, kVectors = 2;
#endif
  static constexpr int kBlock = 16 * kVectors;

  template <int C>
  struct Share {
    static constexpr int kCount = C;
  };

  // Calls take(Share<C>(), first column) for shares of up to kColumns columns, all about as large.
  template <class Take>
  static BATCHLLM_INLINE void in_shares(int num_columns, const Take& take) {
    const int shares = (num_columns + kColumns - 1) / kColumns;
    for (int share = 0, c = 0; share < shares; ++share) c += take_share<kColumns>((num_columns - c + shares - share - 1) / (shares - share), c, take);
  }
  template <int C, class Take>
  static BATCHLLM_INLINE int take_share(int count, int first, const Take& take) {
    if constexpr (C > 1) {
      if (count < C) return take_share<C - 1>(count, first, take);
    }
    take(Share<C>(), first);
    return C;
  }

  static int padded_positions(const int32_t* visible, int num_columns) {
    int seen = 0;
    for (int c = 0; c < num_columns; ++c) seen = visible[c] > seen ? visible[c] : seen;
    return round_up(seen, 16);
  }

  // A unit with a front: what its rows share is multiplied for all columns at once, what each goes on to read for its own. Each column's scores
  // lie in a row as ever, and its sums run on from the front's, so they are those of the row alone. Keys and values that a row reads alone
  // lie behind the front's until the next row's turn, so values are packed once its weights are there.
  void multiply_forked(const int32_t* visible, int num_columns, const Partials& result, Ahead<T>& ahead) {
    const int num_rows = unit_chunk_->num_apart, group = num_columns / num_rows, front = unit_chunk_->together.count;
    score_columns(query_, num_columns, 0, front, scores_, [] {});
    for (int row = 0, c = 0; row < num_rows; ++row, c += group) {
      const Chunk<T>& apart = unit_chunk_->apart[row];
      for (int start = 0; start < apart.count; start += 16) pack_keys(apart, start, front + start);
      const int padded = front + round_up(apart.count, 16);
      score_columns(query_ + c * head_dim_, group, front, padded, scores_ + c * kScoreStride, [&] { ahead.ask_shares(1); });
      for (int i = c; i < c + group; ++i) softmax_row<T>(scores_ + i * kScoreStride, visible[i], padded, scale_, result.m + i, result.l + i);
    }
    weigh_columns(scores_, num_columns, 0, front, result.a, [] {});
    for (int row = 0, c = 0; row < num_rows; ++row, c += group) {
      const Chunk<T>& apart = unit_chunk_->apart[row];
      for (int start = 0; start < apart.count; start += 16) pack_values(apart, start, front + start);
      const int padded = front + round_up(apart.count, 16);
      weigh_columns(scores_ + c * kScoreStride, group, front, padded, result.a + c * width_, [&] { ahead.ask_shares(1); });
    }
  }

  // Scores of positions [start, stop), as they lie, for columns at `query` and `scores`. Block by block of positions for all columns: a block
  // stays in the first cache level meanwhile. `then` is called behind each.
  template <class Then>
  BATCHLLM_INLINE void score_columns(const float* query, int num_columns, int start, int stop, float* scores, const Then& then) const {
    for (int first = start, next; first < stop; first = next) {
      next = block_stop(first, stop);
      const float* keys = key_block(first);
      in_shares(num_columns, [&](auto share, int c) __attribute__((always_inline)) {
        score<decltype(share)::kCount>(query + c * head_dim_, keys, scores + c * kScoreStride + first, (next - first) / 16);
      });
      then();
    }
  }

  // Sums of values of positions [start, stop), from nothing at position 0 and otherwise from what `a` holds.
  template <class Then>
  BATCHLLM_INLINE void weigh_columns(const float* weights, int num_columns, int start, int stop, float* a, const Then& then) const {
    for (int first = start, next; first < stop; first = next) {
      next = block_stop(first, stop);
      const float* values = values_ + size_t(first) * width_;
      in_shares(num_columns, [&](auto share, int c) __attribute__((always_inline)) {
        weigh<decltype(share)::kCount>(weights + c * kScoreStride + first, values, next - first, first > 0, a + c * width_);
      });
      then();
    }
  }

  static int block_stop(int first, int stop) {
    const int next = (first / kBlock + 1) * kBlock;
    return next < stop ? next : stop;
  }
  float* key_block(int position) const { return keys_ + size_t(position / kBlock) * kBlock * head_dim_ + position % kBlock; }

  // 16 positions of `chunk` from `start` on, zeros behind its last, become positions from `to` on.
  void pack_keys(const Chunk<T>& chunk, int start, int to) const {
    pack_keys(chunk.keys + start, chunk.count - start < 16 ? chunk.count - start : 16, key_block(to));
  }
  void pack_values(const Chunk<T>& chunk, int start, int to) const {
    for (int i = start; i < start + 16; ++i) {
      float* values = values_ + size_t(to + i - start) * width_;
      for (int d = 0; d < width_; d += 16) store(values + d, i < chunk.count ? load_some(chunk.value(i) + d, head_dim_ - d) : broadcast(0.0f));
    }
  }

  // `count` of 16 positions, zeros behind them, to `to` [head_dim, kBlock].
  void pack_keys(const T* const* keys, int count, float* to) const {
    constexpr int kUnitNumbers = sizeof(uint32_t) / sizeof(T), kTaken = 16 * kUnitNumbers;
    alignas(64) uint32_t units[16][16];
    for (int d = 0; d < head_dim_; d += kTaken) {
      const int numbers = head_dim_ - d < kTaken ? head_dim_ - d : kTaken;
      for (int i = 0; i < 16; ++i) {
        if (i < count && numbers == kTaken) {
          std::memcpy(units[i], keys[i] + d, sizeof(units[i]));
        } else {
          std::memset(units[i], 0, sizeof(units[i]));
          if (i < count) std::memcpy(units[i], keys[i] + d, numbers * sizeof(T));
        }
      }
      transpose(units);
      for (int j = 0; j < numbers; j += kUnitNumbers) {
        const uint32_t* unit = units[j / kUnitNumbers];
        if constexpr (kUnitNumbers == 2) {
          store(to + (d + j) * kBlock, widen_even(unit));
          if (j + 1 < numbers) store(to + (d + j + 1) * kBlock, widen_odd(unit));
        } else {
          std::memcpy(to + (d + j) * kBlock, unit, sizeof(units[0]));
        }
      }
    }
  }

  // Products of each of C numbers, `stride` apart, with V vectors. Unless it is told to unroll, the compiler keeps sums in memory.
  template <int C, int V>
  static BATCHLLM_INLINE void add_products(const float* numbers, int stride, const float* vectors, Vec (&sums)[C][V]) {
    Vec x[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) x[v] = load(vectors + 16 * v);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const Vec a = broadcast(numbers[c * stride]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[c][v] = fma(a, x[v], sums[c][v]);
    }
  }
  template <int C, int V>
  static BATCHLLM_INLINE void load_sums(const float* from, int stride, bool adds, Vec (&sums)[C][V]) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[c][v] = adds ? load(from + c * stride + 16 * v) : broadcast(0.0f);
  }
  template <int C, int V>
  static BATCHLLM_INLINE void store_sums(float* to, int stride, const Vec (&sums)[C][V]) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) store(to + c * stride + 16 * v, sums[c][v]);
  }

  // Each sum runs over ascending head dimension, so its bits do not depend on the blocking.
  template <int C, int V>
  __attribute__((noinline)) static void score_block(const float* query, int head_dim, const float* keys, float* scores) {
    Vec sums[C][V];
    load_sums(scores, kScoreStride, false, sums);
    for (int d = 0; d < head_dim; ++d) add_products(query + d, head_dim, keys + d * kBlock, sums);
    store_sums(scores, kScoreStride, sums);
  }

  template <int C, int V = kVectors>
  BATCHLLM_INLINE void score(const float* query, const float* keys, float* scores, int vectors) const {
    if constexpr (V > 1) {
      if (vectors < V) return score<C, V - 1>(query, keys, scores, vectors);
    }
    score_block<C, V>(query, head_dim_, keys, scores);
  }

  // `adds`: to what is in `a`; positions ascend, here and from block to block.
  template <int C, int V>
  __attribute__((noinline)) static void weigh_block(const float* weights, const float* values, int width, int count, bool adds, float* a) {
    Vec sums[C][V];
    load_sums(a, width, adds, sums);
    for (int i = 0; i < count; ++i) add_products(weights + i, kScoreStride, values + i * width, sums);
    store_sums(a, width, sums);
  }

  template <int C>
  BATCHLLM_INLINE void weigh(const float* weights, const float* values, int count, bool adds, float* a) const {
    int first = 0;
    for (; first + 16 * kVectors <= width_; first += 16 * kVectors) weigh_block<C, kVectors>(weights, values + first, width_, count, adds, a + first);
    for (; first < width_; first += 16) weigh_block<C, 1>(weights, values + first, width_, count, adds, a + first);
  }

  int head_dim_, width_, pack_asks_ = 0;
  bool forked_ = false;
  const UnitChunk<T>* unit_chunk_ = nullptr;
  float scale_;
  float* keys_;    // [kChunk / kBlock, head_dim, kBlock]: transposed block by block
  float* values_;  // [kChunk, width]
  float* scores_;  // [kPairColumns, kScoreStride]
  float* query_;   // [kUnitColumns, head_dim]
};

}  // namespace BATCHLLM_PATH
}  // namespace batchllm
