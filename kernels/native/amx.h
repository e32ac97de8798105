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

}  // namespace amx
}  // namespace batchllm
