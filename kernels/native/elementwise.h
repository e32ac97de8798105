// Operations on rows: RMSNorm with residual add, SiLU-gated product, rotation with the write of keys and values. Meaning: kernels/norm.py,
// kernels/activation.py, kernels/rope.py.
#pragma once

#include "vector.h"

namespace batchllm {
namespace BATCHLLM_PATH {

inline constexpr int64_t kParallelNumbers = 16384;  // below, a second thread costs more than it saves

template <class T>
BATCHLLM_INLINE Vec rounded(Vec a) {
  T numbers[16];
  store(numbers, a);
  return load(numbers);
}
template <>
BATCHLLM_INLINE Vec rounded<float>(Vec a) { return a; }
#if defined(__AVX512BF16__)
template <>
BATCHLLM_INLINE Vec rounded<bf16>(Vec a) { return rounded_to_bf16(a); }
#endif

// part(i, count, turn) for each 16 of `size` numbers, with 0 and 1 for `turn` in turn. Both, and but for the last part `count`, are known when
// it is compiled.
template <class PartOf>
BATCHLLM_INLINE void in_parts(int64_t size, const PartOf& part) {
  int64_t i = 0;
  for (; i + 32 <= size; i += 32) part(i, 16, 0), part(i + 16, 16, 1);
  if (i + 16 > size) {
    if (i < size) part(i, int(size - i), 0);
    return;
  }
  part(i, 16, 0);
  if (i + 16 < size) part(i + 16, int(size - i - 16), 1);
}

template <class T>
void rms_norm_row(const T* x, const T* weight, T* residual, T* out, int64_t size, float eps) {
  Vec sums[2] = {broadcast(0.0f), broadcast(0.0f)};
  const T* wide = residual != nullptr ? residual : x;
  in_parts(size, [&](int64_t i, int count, int turn) __attribute__((always_inline)) {
    Vec h = load_some(x + i, count);
    if (residual != nullptr) {
      store_some(residual + i, load_some(residual + i, count) + h, count);
      h = load_some(residual + i, count);
    }
    sums[turn] = fma(h, h, sums[turn]);
  });
  const float mean = sum_lanes(sums[0] + sums[1]) / float(size);
  const Vec factor = broadcast(1.0f / __builtin_sqrtf(mean + eps));
  in_parts(size, [&](int64_t i, int count, int) __attribute__((always_inline)) {
    store_some(out + i, rounded<T>(load_some(wide + i, count) * factor) * load_some(weight + i, count), count);
  });
}

template <class T>
void rms_norm_rows(const void* x, const void* weight, void* residual, void* out, int64_t num_rows, int64_t size, float eps) {
#pragma omp parallel for if (num_rows * size > kParallelNumbers) schedule(static)
  for (int64_t row = 0; row < num_rows; ++row) {
    T* sum = residual != nullptr ? static_cast<T*>(residual) + row * size : nullptr;
    rms_norm_row(static_cast<const T*>(x) + row * size, static_cast<const T*>(weight), sum, static_cast<T*>(out) + row * size, size, eps);
  }
}

inline void rms_norm(const void* x, const void* weight, void* residual, void* out, int64_t num_rows, int64_t size, float eps,
                     int32_t data_type) {
  if (data_type == kBFloat16) return rms_norm_rows<bf16>(x, weight, residual, out, num_rows, size, eps);
  rms_norm_rows<float>(x, weight, residual, out, num_rows, size, eps);
}

// x / (1 + e^-x) by the power of -|x|, which cannot overflow.
BATCHLLM_INLINE Vec silu(Vec x) {
  const Vec zero = broadcast(0.0f), one = broadcast(1.0f);
  const Vec power = exp2_negative(maximum(x, zero - x) * broadcast(-1.44269504f));
  return where_less(x, zero, x * power, x) / (one + power);
}

// As exactly as T can hold it.
template <class T>
BATCHLLM_INLINE Vec silu_for(Vec x) { return silu(x); }
#if defined(__AVX512F__)
template <>
BATCHLLM_INLINE Vec silu_for<bf16>(Vec x) {
  return x * reciprocal_rough(broadcast(1.0f) + exp2_rough(x * broadcast(-1.44269504f)));
}
#endif

template <class T>
void silu_mul_rows(const void* gate_up, void* out, int64_t num_rows, int64_t size) {
#pragma omp parallel for if (num_rows * size > kParallelNumbers) schedule(static)
  for (int64_t row = 0; row < num_rows; ++row) {
    const T* gate = static_cast<const T*>(gate_up) + 2 * row * size;
    T* to = static_cast<T*>(out) + row * size;
    for (int64_t i = 0; i < size; i += 16) {
      const int count = size - i < 16 ? int(size - i) : 16;
      store_some(to + i, rounded<T>(silu_for<T>(load_some(gate + i, count))) * load_some(gate + size + i, count), count);
    }
  }
}

inline void silu_mul(const void* gate_up, void* out, int64_t num_rows, int64_t size, int32_t data_type) {
  if (data_type == kBFloat16) return silu_mul_rows<bf16>(gate_up, out, num_rows, size);
  silu_mul_rows<float>(gate_up, out, num_rows, size);
}

// One head of one row: rotated, in T, to `to`. `from` and `to` may be the same.
template <class From, class T>
BATCHLLM_INLINE void rotate(const From* from, T* to, const float* cos_sin, int head_dim) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; i += 16) {
    const int count = half - i < 16 ? half - i : 16;
    const Vec first = load_some(from + i, count), second = load_some(from + half + i, count);
    const Vec cosine = load_some(cos_sin + i, count), sine = load_some(cos_sin + half + i, count);
    store_some(to + i, first * cosine - second * sine, count);
    store_some(to + half + i, second * cosine + first * sine, count);
  }
}

template <class From, class T>
BATCHLLM_INLINE void copy_numbers(const From* from, T* to, int count) {
  for (int i = 0; i < count; i += 16) store_some(to + i, load_some(from + i, count - i), count - i);
}

// Head `head` of the row's queries, keys and values, `from` [head_dim]: to its place in `query` or in the pool.
template <class From, class T>
BATCHLLM_INLINE void place_head(const From* from, T* query, int64_t row, int head, const RopeTarget& target) {
  const int head_dim = target.head_dim;
  const float* cos_sin = target.cos_sin + int64_t(target.positions[row]) * head_dim;
  if (head < target.num_heads) return rotate(from, query + (row * target.num_heads + head) * head_dim, cos_sin, head_dim);
  const int64_t slot = target.slots[row];
  if (slot < 0) return;
  const int64_t kv_head = head - target.num_heads;  // values follow the keys
  T* to = static_cast<T*>(target.kv) + slot / target.block_size * target.block_stride +
          (kv_head * target.block_size + slot % target.block_size) * head_dim;
  if (kv_head < target.num_kv_heads) return rotate(from, to, cos_sin, head_dim);
  copy_numbers(from, to, head_dim);
}

template <class T>
void rope_write_kv_rows(const void* qkv, void* query, int64_t num_rows, const RopeTarget& target) {
  const int num_all = target.num_heads + 2 * target.num_kv_heads;
  const int64_t size = int64_t(num_all) * target.head_dim;
#pragma omp parallel for if (num_rows * size > kParallelNumbers) schedule(static)
  for (int64_t row = 0; row < num_rows; ++row)
    for (int head = 0; head < num_all; ++head)
      place_head(static_cast<const T*>(qkv) + row * size + head * target.head_dim, static_cast<T*>(query), row, head, target);
}

inline void rope_write_kv(const void* qkv, void* query, int64_t num_rows, int32_t data_type, const RopeTarget& target) {
  if (data_type == kBFloat16) return rope_write_kv_rows<bf16>(qkv, query, num_rows, target);
  rope_write_kv_rows<float>(qkv, query, num_rows, target);
}

}  // namespace BATCHLLM_PATH
}  // namespace batchllm
