// The attention engine without tile units: float32 throughout, query, keys and values of either type.
#pragma once

#include "attention.h"

namespace batchllm {
namespace BATCHLLM_PATH {

// s [visible ... padded]: raw products on entry, weights on return, zero behind `visible`. Returns the row's maximum and sum.
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
    const Vec p = exp2_negative(fma(load(s + i), factor, offset));
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
    return sizeof(float) * (size_t(kUnitColumns) * head_dim + size_t(head_dim) * kKeyStride + size_t(kChunk) * width + kPairColumns * kScoreStride);
  }

  VectorEngine(const AttentionCall& call, char* memory)
      : head_dim_(call.head_dim), width_(round_up(call.head_dim, 16)), scale_(call.scale * kLog2E) {
    query_ = reinterpret_cast<float*>(memory);
    keys_ = query_ + size_t(kUnitColumns) * head_dim_;
    values_ = keys_ + size_t(head_dim_) * kKeyStride;
    scores_ = values_ + size_t(kChunk) * width_;
  }

  static bool forks(const AttentionCall&) { return false; }

  void start_unit(const AttentionUnit&) {}

  void pack_query(int tile, const T* const* pointers, int num_columns) {
    for (int c = 0; c < num_columns; ++c) {
      float* to = query_ + size_t(tile * kTileColumns + c) * head_dim_;
      for (int d = 0; d < head_dim_; d += 16) store_some(to + d, load_some(pointers[c] + d, head_dim_ - d), head_dim_ - d);
    }
  }

  void pack_chunk(const UnitChunk<T>& unit_chunk, Ahead<T>& ahead) {
    const Chunk<T>& chunk = unit_chunk.together;
    const int count = chunk.count;
    count_ = round_up(count, 16);
    float rows[16][16];
    for (int start = 0; start < count_; start += 16) {
      for (int d = 0; d < head_dim_; d += 16) {
        const int lanes = head_dim_ - d < 16 ? head_dim_ - d : 16;
        for (int i = 0; i < 16; ++i)
          store(rows[i], start + i < count ? load_some(chunk.keys[start + i] + d, lanes) : broadcast(0.0f));
        transpose(rows);
        for (int j = 0; j < lanes; ++j) store(keys_ + size_t(d + j) * kKeyStride + start, load(rows[j]));
      }
      ahead.ask(8);
    }
    for (int i = 0; i < count_; ++i) {
      float* to = values_ + size_t(i) * width_;
      for (int d = 0; d < width_; d += 16) store(to + d, i < count ? load_some(chunk.value(i) + d, head_dim_ - d) : broadcast(0.0f));
    }
  }

  void multiply(int tile, const int32_t* visible, int num_columns, const Partials& result, Ahead<T>& ahead) {
    int seen = 0;
    for (int c = 0; c < num_columns; ++c) seen = visible[c] > seen ? visible[c] : seen;
    const int padded = round_up(seen, 16);
    const float* query = query_ + size_t(tile) * kTileColumns * head_dim_;
    int c = 0;
    for (; c + kColumns <= num_columns; c += kColumns) score<kColumns>(query + c * head_dim_, scores_ + c * kScoreStride, padded);
    for (; c < num_columns; ++c) score<1>(query + c * head_dim_, scores_ + c * kScoreStride, padded);
    ahead.ask(64);
    for (c = 0; c < num_columns; ++c) softmax_row(scores_ + c * kScoreStride, visible[c], padded, scale_, result.m + c, result.l + c);
    c = 0;
    for (; c + kColumns <= num_columns; c += kColumns) weigh<kColumns>(scores_ + c * kScoreStride, result.a + c * width_, padded);
    for (; c < num_columns; ++c) weigh<1>(scores_ + c * kScoreStride, result.a + c * width_, padded);
  }

 private:
  // Strides off the powers of two, so that rows do not fall on the same cache sets.
  static constexpr int kKeyStride = kChunk + 16;
  static constexpr int kScoreStride = kChunk + 16;
#if defined(__AVX512F__)
  static constexpr int kColumns = 4, kVectors = 4;
#else
  static constexpr int kColumns = 3, kVectors = 2;
#endif

  static void transpose(float (*m)[16]) {
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < i; ++j) {
        const float kept = m[i][j];
        m[i][j] = m[j][i], m[j][i] = kept;
      }
  }

  // Each sum runs over ascending head dimension, so its bits do not depend on the blocking.
  template <int C, int V>
  void score_block(const float* query, float* scores, int start) const {
    Vec sums[C][V];
    for (int c = 0; c < C; ++c)
      for (int v = 0; v < V; ++v) sums[c][v] = broadcast(0.0f);
    const float* key = keys_ + start;
    for (int d = 0; d < head_dim_; ++d, key += kKeyStride) {
      Vec k[V];
      for (int v = 0; v < V; ++v) k[v] = load(key + 16 * v);
      for (int c = 0; c < C; ++c) {
        const Vec q = broadcast(query[c * head_dim_ + d]);
        for (int v = 0; v < V; ++v) sums[c][v] = fma(q, k[v], sums[c][v]);
      }
    }
    for (int c = 0; c < C; ++c)
      for (int v = 0; v < V; ++v) store(scores + c * kScoreStride + start + 16 * v, sums[c][v]);
  }

  template <int C>
  void score(const float* query, float* scores, int padded) const {
    int start = 0;
    for (; start + 16 * kVectors <= padded; start += 16 * kVectors) score_block<C, kVectors>(query, scores, start);
    for (; start < padded; start += 16) score_block<C, 1>(query, scores, start);
  }

  template <int C, int V>
  void weigh_block(const float* weights, float* a, int first, int padded) const {
    Vec sums[C][V];
    for (int c = 0; c < C; ++c)
      for (int v = 0; v < V; ++v) sums[c][v] = broadcast(0.0f);
    const float* value = values_ + first;
    for (int i = 0; i < padded; ++i, value += width_) {
      Vec x[V];
      for (int v = 0; v < V; ++v) x[v] = load(value + 16 * v);
      for (int c = 0; c < C; ++c) {
        const Vec p = broadcast(weights[c * kScoreStride + i]);
        for (int v = 0; v < V; ++v) sums[c][v] = fma(p, x[v], sums[c][v]);
      }
    }
    for (int c = 0; c < C; ++c)
      for (int v = 0; v < V; ++v) store(a + c * width_ + first + 16 * v, sums[c][v]);
  }

  template <int C>
  void weigh(const float* weights, float* a, int padded) const {
    int first = 0;
    for (; first + 16 * kVectors <= width_; first += 16 * kVectors) weigh_block<C, kVectors>(weights, a, first, padded);
    for (; first < width_; first += 16) weigh_block<C, 1>(weights, a, first, padded);
  }

  int head_dim_, width_, count_ = 0;
  float scale_;
  float* query_;
  float* keys_;    // [head_dim, kKeyStride]: transposed
  float* values_;  // [kChunk, width]
  float* scores_;  // [kPairColumns, kScoreStride]
};

}  // namespace BATCHLLM_PATH
}  // namespace batchllm
