// Tile units: eight registers of up to 16 rows by 64 bytes. A product adds those of A [16, 32] bf16 and B [16 pairs, 16, 2] bf16 to
// C [16, 16] float32.
#pragma once

#include <immintrin.h>

#include "native.h"

namespace batchllm {
namespace amx {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Tile registers are the thread's own: configured while this lives.
class Tiles {
 public:
  explicit Tiles(const TileConfig& config = TileConfig()) { configure(config); }
  void configure(const TileConfig& config) {
    // GCC 12 declares 8 bytes of the operand only: without the barrier the rest may not have been stored yet.
    asm volatile("" : : "m"(config) : "memory");
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// GCC's tile loads and stores do not say that they touch memory: without it, ordinary accesses may move across them.
inline __attribute__((always_inline)) void barrier() { asm volatile("" : : : "memory"); }

// In place: 16 rows of sixteen 32-bit units.
inline __attribute__((always_inline)) void transpose(__m512i (&r)[16]) {
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

}  // namespace amx
}  // namespace batchllm
