// Tile units, and the vector instructions of bf16 that come with them, in software: what Intel's manual (volume 2, "Operation" of each
// instruction) says that they do, for processors that have AVX512 only. Included before everything else by the compiler beside this file.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __AVX512BF16__ 1

namespace emulated_tiles {

constexpr int kRegisters = 8;

struct Register {
  int rows, row_bytes;
  alignas(64) uint8_t data[16][64];
};

struct Unit {
  bool configured = false;
  Register registers[kRegisters];
};

inline thread_local Unit unit;

// An instruction before the configuration, or with shapes that do not fit, is a fault of the processor.
inline void demand(bool met) {
  if (!met) std::abort();
}

inline Register& at(int number) {
  demand(unit.configured && number >= 0 && number < kRegisters && unit.registers[number].rows > 0);
  return unit.registers[number];
}

// The 64 bytes of memory: palette and start row, each register's bytes a row from byte 16 on, its rows from byte 48 on.
inline void load_config(const void* from) {
  uint8_t config[64];
  std::memcpy(config, from, sizeof(config));
  demand(config[0] == 1 && config[1] == 0);
  unit.configured = true;
  for (int number = 0; number < kRegisters; ++number) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, config + 16 + 2 * number, sizeof(row_bytes));
    demand(row_bytes <= 64 && config[48 + number] <= 16);
    unit.registers[number].row_bytes = row_bytes;
    unit.registers[number].rows = config[48 + number];
    std::memset(unit.registers[number].data, 0, sizeof(unit.registers[number].data));
  }
}

inline void release() { unit.configured = false; }

inline void zero(int number) { std::memset(at(number).data, 0, sizeof(Register::data)); }

inline void load(int number, const void* base, int64_t stride) {
  Register& to = at(number);
  std::memset(to.data, 0, sizeof(to.data));
  for (int row = 0; row < to.rows; ++row) std::memcpy(to.data[row], static_cast<const char*>(base) + row * stride, to.row_bytes);
}

inline void store(int number, void* base, int64_t stride) {
  const Register& from = at(number);
  for (int row = 0; row < from.rows; ++row) std::memcpy(static_cast<char*>(base) + row * stride, from.data[row], from.row_bytes);
}

// Denormal numbers count as zeros of their sign, going in and coming out.
inline __m512 flushed(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __mmask16 small = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
  return _mm512_castsi512_ps(_mm512_mask_and_epi32(bits, small, bits, _mm512_set1_epi32(int(0x80000000u))));
}
inline __m512 even_numbers(__m512i pairs) { return flushed(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))); }
inline __m512 odd_numbers(__m512i pairs) {
  return flushed(_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000u)))));
}

inline void demand_fitting(const Register& c, const Register& a, const Register& b) {
  demand(a.rows == c.rows && b.row_bytes == c.row_bytes && a.row_bytes == 4 * b.rows);
}

// c += a b: even and odd pairs are summed apart over a tile's depth, then together, then onto what was there.
inline void multiply_bf16(int to, int left, int right) {
  Register &c = at(to), &a = at(left), &b = at(right);
  demand_fitting(c, a, b);
  for (int row = 0; row < c.rows; ++row) {
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int k = 0; k < b.rows; ++k) {
      int32_t pair;
      std::memcpy(&pair, a.data[row] + 4 * k, sizeof(pair));
      const __m512i others = _mm512_load_si512(b.data[k]), pairs = _mm512_set1_epi32(pair);
      even = flushed(_mm512_fmadd_ps(even_numbers(pairs), even_numbers(others), even));
      odd = flushed(_mm512_fmadd_ps(odd_numbers(pairs), odd_numbers(others), odd));
    }
    const __m512 sums = flushed(_mm512_add_ps(flushed(_mm512_load_ps(c.data[row])), flushed(_mm512_add_ps(even, odd))));
    _mm512_store_ps(c.data[row], _mm512_maskz_mov_ps(__mmask16((1u << c.row_bytes / 4) - 1), sums));
  }
}

// c += a b of signed bytes, in fours.
inline void multiply_int8(int to, int left, int right) {
  Register &c = at(to), &a = at(left), &b = at(right);
  demand_fitting(c, a, b);
  for (int row = 0; row < c.rows; ++row) {
    int32_t sums[16];
    std::memcpy(sums, c.data[row], sizeof(sums));
    for (int k = 0; k < b.rows; ++k)
      for (int n = 0; n < c.row_bytes / 4; ++n)
        for (int i = 0; i < 4; ++i) sums[n] += int32_t(int8_t(a.data[row][4 * k + i])) * int8_t(b.data[k][4 * n + i]);
    std::memcpy(c.data[row], sums, sizeof(sums));
  }
}

// Nearest, ties to even; quiet where not a number. In the lower half of each lane.
inline __m512i upper_halves(__m512 x) {
  const __m512i bits = _mm512_castps_si512(flushed(x));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  rounded = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x400000));
  return _mm512_srli_epi32(rounded, 16);
}
inline __m256i narrow(__m512 x) { return _mm512_cvtepi32_epi16(upper_halves(x)); }
// The second operand makes the lower half.
inline __m512i narrow_two(__m512 upper, __m512 lower) { return _mm512_inserti64x4(_mm512_castsi256_si512(narrow(lower)), narrow(upper), 1); }
// Each lane's pair of products, the odd one first, rounded after each.
inline __m512 add_products(__m512 sum, __m512i a, __m512i b) {
  const __m512 after_odd = flushed(_mm512_fmadd_ps(odd_numbers(a), odd_numbers(b), flushed(sum)));
  return flushed(_mm512_fmadd_ps(even_numbers(a), even_numbers(b), after_odd));
}

// Each chosen byte is one of 128: the index's seventh bit says of which half.
inline __m512i chosen_bytes(uint64_t mask, __m512i lower, __m512i index, __m512i upper) {
  uint8_t from[128], at[64], to[64] = {};
  _mm512_storeu_si512(from, lower);
  _mm512_storeu_si512(from + 64, upper);
  _mm512_storeu_si512(at, index);
  for (int i = 0; i < 64; ++i)
    if (mask >> i & 1) to[i] = from[at[i] & 127];
  return _mm512_loadu_si512(to);
}

}  // namespace emulated_tiles

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig(from) emulated_tiles::load_config(from)
#define _tile_release() emulated_tiles::release()
#define _tile_zero(number) emulated_tiles::zero(number)
#define _tile_loadd(number, base, stride) emulated_tiles::load(number, base, stride)
#define _tile_stream_loadd(number, base, stride) emulated_tiles::load(number, base, stride)
#define _tile_stored(number, base, stride) emulated_tiles::store(number, base, stride)
#define _tile_dpbf16ps(to, left, right) emulated_tiles::multiply_bf16(to, left, right)
#define _tile_dpbssd(to, left, right) emulated_tiles::multiply_int8(to, left, right)
#define _mm512_cvtneps_pbh(x) ((__m256bh)emulated_tiles::narrow(x))
#define _mm512_cvtne2ps_pbh(upper, lower) ((__m512bh)emulated_tiles::narrow_two(upper, lower))
#define _mm512_dpbf16_ps(sum, a, b) emulated_tiles::add_products(sum, (__m512i)(a), (__m512i)(b))
#define _mm512_maskz_permutex2var_epi8(mask, lower, index, upper) emulated_tiles::chosen_bytes(mask, lower, index, upper)
