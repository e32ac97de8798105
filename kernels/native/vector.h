// Sixteen float32 lanes on each instruction set, with the few functions of them that the kernels need. Every function works lane by
// lane and rounds as IEEE says, so the bits of a lane do not depend on its neighbours. Included once by each path.
#pragma once

#include <cstring>

#include "native.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define BATCHLLM_INLINE inline __attribute__((always_inline))

namespace batchllm {
namespace BATCHLLM_PATH {

#if defined(__AVX512F__)

struct Vec {
  __m512 v;
};
BATCHLLM_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
BATCHLLM_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
BATCHLLM_INLINE Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
BATCHLLM_INLINE Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
BATCHLLM_INLINE Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
BATCHLLM_INLINE Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
BATCHLLM_INLINE Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
// a * b + c, rounded once where the instruction set can.
BATCHLLM_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// The second operand where a lane is not a number.
BATCHLLM_INLINE Vec maximum(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
BATCHLLM_INLINE bool any_reaches(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ) != 0; }
BATCHLLM_INLINE Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
BATCHLLM_INLINE Vec nearest(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a * 2^n for a whole n.
BATCHLLM_INLINE Vec scale_by_power(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }
BATCHLLM_INLINE Vec widen(const bf16* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
// The even and the odd of 32 numbers, for pairs that lie together.
BATCHLLM_INLINE Vec widen_even(const uint32_t* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))}; }
BATCHLLM_INLINE Vec widen_odd(const uint32_t* p) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xffff0000u))))};
}
// 2^t and 1 / a to 1e-4, which is finer than a bf16's eight bits. Nothing keeps t from being infinite.
BATCHLLM_INLINE Vec exp2_rough(Vec t) {
  // What t is above the next lower whole number, by which scalef() goes as well. The polynomial has the least relative error in [0, 1).
  const Vec f = {_mm512_reduce_ps(t.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
  Vec p = broadcast(7.8024520e-2f);
  p = fma(p, f, broadcast(2.2606716e-1f));
  p = fma(p, f, broadcast(6.9583354e-1f));
  p = fma(p, f, broadcast(9.9992522e-1f));
  return {_mm512_scalef_ps(p.v, t.v)};
}
BATCHLLM_INLINE Vec reciprocal_rough(Vec a) { return {_mm512_rcp14_ps(a.v)}; }
// In place: 16 rows of sixteen 32-bit units.
BATCHLLM_INLINE void transpose(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; ++j) {
      t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
      t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xdd);
    }
  for (int j = 0; j < 8; ++j) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
    r[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
  }
}
BATCHLLM_INLINE void transpose(uint32_t (&m)[16][16]) {
  __m512i r[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(m[i]);
  transpose(r);
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(m[i], r[i]);
}
#if defined(__AVX512BF16__)
BATCHLLM_INLINE Vec rounded_to_bf16(Vec a) {
  const __m256i numbers = (__m256i)_mm512_cvtneps_pbh(a.v);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16))};
}
BATCHLLM_INLINE void narrow(bf16* p, Vec a) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a.v)); }
#else
BATCHLLM_INLINE void narrow(bf16* p, Vec a) {
  // Nearest, ties to even; a lane that is not a number keeps its upper half with the quiet bit set.
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  rounded = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
#endif

#else

inline void transpose(uint32_t (&m)[16][16]) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < i; ++j) {
      const uint32_t kept = m[i][j];
      m[i][j] = m[j][i], m[j][i] = kept;
    }
}

template <class Half>
struct Pair {
  Half lo, hi;
};

#if defined(__AVX2__)

struct Part {
  __m256 v;
};
inline constexpr int kPartLanes = 8;
BATCHLLM_INLINE void load_part(const float* p, Part& a) { a.v = _mm256_loadu_ps(p); }
BATCHLLM_INLINE void store(float* p, Part a) { _mm256_storeu_ps(p, a.v); }
BATCHLLM_INLINE void broadcast_part(float x, Part& a) { a.v = _mm256_set1_ps(x); }
BATCHLLM_INLINE Part operator+(Part a, Part b) { return {_mm256_add_ps(a.v, b.v)}; }
BATCHLLM_INLINE Part operator-(Part a, Part b) { return {_mm256_sub_ps(a.v, b.v)}; }
BATCHLLM_INLINE Part operator*(Part a, Part b) { return {_mm256_mul_ps(a.v, b.v)}; }
BATCHLLM_INLINE Part operator/(Part a, Part b) { return {_mm256_div_ps(a.v, b.v)}; }
BATCHLLM_INLINE Part fma(Part a, Part b, Part c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
BATCHLLM_INLINE Part maximum(Part a, Part b) { return {_mm256_max_ps(a.v, b.v)}; }
BATCHLLM_INLINE bool any_reaches(Part a, Part b) { return _mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ)) != 0; }
BATCHLLM_INLINE Part where_less(Part a, Part b, Part yes, Part no) {
  return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
BATCHLLM_INLINE Part nearest(Part a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
BATCHLLM_INLINE Part scale_by_power(Part a, Part n) {
  // Below 2^-126 the exponent field has no room: such lanes become zero.
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  const __m256 power = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_max_epi32(exponent, _mm256_setzero_si256()), 23));
  return {_mm256_mul_ps(a.v, power)};
}
BATCHLLM_INLINE void widen_part(const bf16* p, Part& a) {
  a.v = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
BATCHLLM_INLINE void widen_even_part(const uint32_t* p, Part& a) {
  a.v = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)p), 16));
}
BATCHLLM_INLINE void widen_odd_part(const uint32_t* p, Part& a) {
  a.v = _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i*)p), _mm256_set1_epi32(int(0xffff0000u))));
}
using Vec = Pair<Part>;

#else

typedef float FloatPart __attribute__((vector_size(16)));
typedef int32_t IntPart __attribute__((vector_size(16)));
typedef uint32_t BitPart __attribute__((vector_size(16)));
struct Part {
  FloatPart v;
};
inline constexpr int kPartLanes = 4;
BATCHLLM_INLINE void load_part(const float* p, Part& a) { std::memcpy(&a.v, p, sizeof(a.v)); }
BATCHLLM_INLINE void store(float* p, Part a) { std::memcpy(p, &a.v, sizeof(a.v)); }
BATCHLLM_INLINE void broadcast_part(float x, Part& a) { a.v = FloatPart{x, x, x, x}; }
BATCHLLM_INLINE Part operator+(Part a, Part b) { return {a.v + b.v}; }
BATCHLLM_INLINE Part operator-(Part a, Part b) { return {a.v - b.v}; }
BATCHLLM_INLINE Part operator*(Part a, Part b) { return {a.v * b.v}; }
BATCHLLM_INLINE Part operator/(Part a, Part b) { return {a.v / b.v}; }
BATCHLLM_INLINE Part fma(Part a, Part b, Part c) { return {a.v * b.v + c.v}; }
BATCHLLM_INLINE Part maximum(Part a, Part b) { return {a.v > b.v ? a.v : b.v}; }
BATCHLLM_INLINE bool any_reaches(Part a, Part b) {
  const auto reaches = a.v >= b.v;
  return (reaches[0] | reaches[1] | reaches[2] | reaches[3]) != 0;
}
BATCHLLM_INLINE Part where_less(Part a, Part b, Part yes, Part no) { return {a.v < b.v ? yes.v : no.v}; }
BATCHLLM_INLINE Part nearest(Part a) {
  // Adding 1.5 * 2^23 leaves no bits behind the point; true for |a| < 2^22.
  const FloatPart magic = {12582912.0f, 12582912.0f, 12582912.0f, 12582912.0f};
  return {(a.v + magic) - magic};
}
BATCHLLM_INLINE Part scale_by_power(Part a, Part n) {
  const IntPart exponent = __builtin_convertvector(n.v, IntPart) + 127;
  const IntPart bits = (exponent > 0 ? exponent : IntPart{0, 0, 0, 0}) << 23;
  return {a.v * (FloatPart)bits};
}
BATCHLLM_INLINE void widen_part(const bf16* p, Part& a) {
  a.v = (FloatPart)(BitPart{p[0], p[1], p[2], p[3]} << 16);
}
BATCHLLM_INLINE void widen_even_part(const uint32_t* p, Part& a) {
  BitPart bits;
  std::memcpy(&bits, p, sizeof(bits));
  a.v = (FloatPart)(bits << 16);
}
BATCHLLM_INLINE void widen_odd_part(const uint32_t* p, Part& a) {
  BitPart bits;
  std::memcpy(&bits, p, sizeof(bits));
  a.v = (FloatPart)(bits & 0xffff0000u);
}
using Vec = Pair<Pair<Part>>;

#endif

template <class V>
inline constexpr int kLanes = kPartLanes;
template <class H>
inline constexpr int kLanes<Pair<H>> = 2 * kLanes<H>;

template <class H>
BATCHLLM_INLINE void load_part(const float* p, Pair<H>& a) { load_part(p, a.lo), load_part(p + kLanes<H>, a.hi); }
template <class H>
BATCHLLM_INLINE void store(float* p, Pair<H> a) { store(p, a.lo), store(p + kLanes<H>, a.hi); }
template <class H>
BATCHLLM_INLINE void broadcast_part(float x, Pair<H>& a) { broadcast_part(x, a.lo), broadcast_part(x, a.hi); }
template <class H>
BATCHLLM_INLINE Pair<H> operator+(Pair<H> a, Pair<H> b) { return {a.lo + b.lo, a.hi + b.hi}; }
template <class H>
BATCHLLM_INLINE Pair<H> operator-(Pair<H> a, Pair<H> b) { return {a.lo - b.lo, a.hi - b.hi}; }
template <class H>
BATCHLLM_INLINE Pair<H> operator*(Pair<H> a, Pair<H> b) { return {a.lo * b.lo, a.hi * b.hi}; }
template <class H>
BATCHLLM_INLINE Pair<H> operator/(Pair<H> a, Pair<H> b) { return {a.lo / b.lo, a.hi / b.hi}; }
template <class H>
BATCHLLM_INLINE Pair<H> fma(Pair<H> a, Pair<H> b, Pair<H> c) { return {fma(a.lo, b.lo, c.lo), fma(a.hi, b.hi, c.hi)}; }
template <class H>
BATCHLLM_INLINE Pair<H> maximum(Pair<H> a, Pair<H> b) { return {maximum(a.lo, b.lo), maximum(a.hi, b.hi)}; }
template <class H>
BATCHLLM_INLINE bool any_reaches(Pair<H> a, Pair<H> b) { return any_reaches(a.lo, b.lo) || any_reaches(a.hi, b.hi); }
template <class H>
BATCHLLM_INLINE Pair<H> where_less(Pair<H> a, Pair<H> b, Pair<H> yes, Pair<H> no) {
  return {where_less(a.lo, b.lo, yes.lo, no.lo), where_less(a.hi, b.hi, yes.hi, no.hi)};
}
template <class H>
BATCHLLM_INLINE Pair<H> nearest(Pair<H> a) { return {nearest(a.lo), nearest(a.hi)}; }
template <class H>
BATCHLLM_INLINE Pair<H> scale_by_power(Pair<H> a, Pair<H> n) { return {scale_by_power(a.lo, n.lo), scale_by_power(a.hi, n.hi)}; }
template <class H>
BATCHLLM_INLINE void widen_part(const bf16* p, Pair<H>& a) { widen_part(p, a.lo), widen_part(p + kLanes<H>, a.hi); }
template <class H>
BATCHLLM_INLINE void widen_even_part(const uint32_t* p, Pair<H>& a) {
  widen_even_part(p, a.lo), widen_even_part(p + kLanes<H>, a.hi);
}
template <class H>
BATCHLLM_INLINE void widen_odd_part(const uint32_t* p, Pair<H>& a) {
  widen_odd_part(p, a.lo), widen_odd_part(p + kLanes<H>, a.hi);
}

BATCHLLM_INLINE Vec load(const float* p) {
  Vec a;
  load_part(p, a);
  return a;
}
BATCHLLM_INLINE Vec broadcast(float x) {
  Vec a;
  broadcast_part(x, a);
  return a;
}
BATCHLLM_INLINE Vec widen(const bf16* p) {
  Vec a;
  widen_part(p, a);
  return a;
}
BATCHLLM_INLINE Vec widen_even(const uint32_t* p) {
  Vec a;
  widen_even_part(p, a);
  return a;
}
BATCHLLM_INLINE Vec widen_odd(const uint32_t* p) {
  Vec a;
  widen_odd_part(p, a);
  return a;
}
BATCHLLM_INLINE void narrow(bf16* p, Vec a) {
  // Nearest, ties to even; a lane that is not a number keeps its upper half with the quiet bit set.
  uint32_t bits[16];
  std::memcpy(bits, &a, sizeof(bits));
  for (int i = 0; i < 16; ++i) {
    const bool is_nan = (bits[i] & 0x7fffffffu) > 0x7f800000u;
    const uint32_t rounded = bits[i] + 0x7fffu + ((bits[i] >> 16) & 1);
    p[i] = bf16((is_nan ? (bits[i] | 0x400000u) : rounded) >> 16);
  }
}

#endif

// Loads and stores of either type, and of the first `count` lanes; the other lanes are zero.
BATCHLLM_INLINE Vec load(const bf16* p) { return widen(p); }
BATCHLLM_INLINE void store(bf16* p, Vec a) { narrow(p, a); }
template <class T>
BATCHLLM_INLINE Vec load_some(const T* p, int count) {
  if (count >= 16) return load(p);
  T padded[16] = {};
  std::memcpy(padded, p, count * sizeof(T));
  return load(padded);
}
template <class T>
BATCHLLM_INLINE void store_some(T* p, Vec a, int count) {
  if (count >= 16) return store(p, a);
  T padded[16];
  store(padded, a);
  std::memcpy(p, padded, count * sizeof(T));
}

// 2^t for t <= 0 to about one unit in the last place; 0 below 2^-126 or so, also for -inf.
BATCHLLM_INLINE Vec exp2_negative(Vec t) {
  t = maximum(broadcast(-160.0f), t);  // this order keeps a lane that is not a number
  const Vec n = nearest(t);
  const Vec f = t - n;
  Vec p = broadcast(1.5403530e-4f);
  p = fma(p, f, broadcast(1.3333558e-3f));
  p = fma(p, f, broadcast(9.6181291e-3f));
  p = fma(p, f, broadcast(5.5504109e-2f));
  p = fma(p, f, broadcast(2.4022651e-1f));
  p = fma(p, f, broadcast(6.9314718e-1f));
  p = fma(p, f, broadcast(1.0f));
  return scale_by_power(p, n);
}

// One order of adding, by halves.
#if defined(__AVX512F__)
BATCHLLM_INLINE float sum_lanes(Vec a) { return _mm512_reduce_add_ps(a.v); }
BATCHLLM_INLINE float maximum_lanes(Vec a) { return _mm512_reduce_max_ps(a.v); }
#else
BATCHLLM_INLINE float sum_lanes(Vec a) {
  float lanes[16];
  store(lanes, a);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}
BATCHLLM_INLINE float maximum_lanes(Vec a) {
  float lanes[16];
  store(lanes, a);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
}
#endif

}  // namespace BATCHLLM_PATH
}  // namespace batchllm
