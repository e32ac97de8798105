// y = x W^T + b over packed weights, with a fused end. Each output is one sum over ascending input index, so a row's bits do not depend on
// how many rows there are, nor on threads.
//
// Packed weights are tiles of 16 outputs: float32 [tiles, in_size, 16]; bf16 [tiles, pairs, 16, 2] where pair k holds inputs 2k and 2k + 1
// and inputs are padded with zeros to a multiple of 32. That is what the tile units multiply with, and the vector units can read it too.
// The end kSiluMul wants tiles of gate and up in turn.
//
// A multiplier works on blocks of up to 32 rows; it has
//   using Number
//   using Block                                             where a block's rows are
//   static size_t block_bytes(in_size)                      a packed block of rows
//   static void pack_block(x, x_stride, rows, in_size, to)
//   static Block packed_block(packed, in_size)
//   static bool reads_rows(call)                            whether blocks of 16 or 32 rows need not be packed
//   static Block rows_block(call, first_row)
//   void multiply(block, rows, weight, in_size, num_tiles, y, ahead)   y [32, 16 * num_tiles] float32
// and calls ahead.ask() once for each 32 inputs of two tiles.
#pragma once

#include <omp.h>

#include <cstring>

#include "elementwise.h"

namespace batchllm {
namespace BATCHLLM_PATH {

template <class T>
BATCHLLM_INLINE const char* weight_tile(const LinearCall& call, int64_t tile) {
  const int64_t numbers = sizeof(T) == 2 ? (call.in_size + 31) / 32 * 32 : call.in_size;
  return static_cast<const char*>(call.weight) + tile * numbers * 16 * int64_t(sizeof(T));
}

// The weights that are multiplied next, asked for a few lines at a time.
struct WeightsAhead {
  const char* at = nullptr;
  const char* stop = nullptr;
  int lines = 0;

  BATCHLLM_INLINE void ask() {
    for (int i = 0; i < lines && at < stop; ++i, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

struct Best {
  float value;
  int64_t index;
};

// What becomes of y [rows, 16 * num_tiles], whose first output is 16 * tile: written, added, gated, rotated or compared.
template <class T>
void finish_block(const LinearCall& call, float* y, int64_t first_row, int rows, int64_t tile, int num_tiles, Best* best) {
  const int width = 16 * num_tiles;
  const int64_t first = 16 * tile;
  if (call.bias != nullptr)
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < width; i += 16) store(y + r * width + i, load(y + r * width + i) + load(call.bias + first + i));
  const int count = int(call.out_size - first < width ? call.out_size - first : width);
  for (int r = 0; r < rows; ++r) {
    const float* from = y + r * width;
    const int64_t row = first_row + r;
    if (call.end == kStore) {
      T* to = static_cast<T*>(call.out) + row * call.out_size + first;
      if (count == width) {
        for (int i = 0; i < width; i += 16) store(to + i, load(from + i));
      } else {
        copy_numbers(from, to, count);
      }
    } else if (call.end == kAdd) {
      T* to = static_cast<T*>(call.out) + row * call.out_size + first;
      if (count == width) {
        for (int i = 0; i < width; i += 16) store(to + i, load(to + i) + load(from + i));
      } else {
        for (int i = 0; i < count; i += 16) store_some(to + i, load_some(to + i, count - i) + load(from + i), count - i);
      }
    } else if (call.end == kStoreFloat) {
      std::memcpy(static_cast<float*>(call.out) + row * call.out_size + first, from, sizeof(float) * size_t(count));
    } else if (call.end == kSiluMul) {
      T* to = static_cast<T*>(call.out) + row * (call.out_size / 2) + first / 2;
      for (int i = 0; i < width; i += 32) store(to + i / 2, silu(load(from + i)) * load(from + i + 16));
    } else if (call.end == kRopeWriteKv) {
      place_head(from, static_cast<T*>(call.out), row, int(first / width), call.rope);
    } else {
      Vec peak = broadcast(-__builtin_inff());
      for (int i = 0; i + 16 <= count; i += 16) peak = maximum(peak, load(from + i));
      float value = maximum_lanes(peak);
      for (int i = count / 16 * 16; i < count; ++i) value = from[i] > value ? from[i] : value;
      Best& row_best = best[row];
      if (value < row_best.value) continue;
      int64_t index = 0;
      while (index < count - 1 && from[index] != value) ++index;
      index += first;
      if (value > row_best.value || index < row_best.index) row_best = {value, index};
    }
  }
}

template <class Multiplier>
void run_linear(const LinearCall& call) {
  using T = typename Multiplier::Number;
  if (call.num_rows == 0) return;
  const int64_t tiles = (call.out_size + 15) / 16;
  const int group_tiles = call.end == kRopeWriteKv ? call.rope.head_dim / 16 : 4;
  const int64_t groups = (tiles + group_tiles - 1) / group_tiles;
  const int64_t blocks = (call.num_rows + kBlockRows - 1) / kBlockRows;
  const size_t block_bytes = Multiplier::block_bytes(call.in_size);
  const int threads = num_threads();
  const size_t best_bytes = call.end == kArgmax ? sizeof(Best) * threads * call.num_rows : 0;
  char* packed = static_cast<char*>(scratch(kScratchCall, block_bytes * blocks + best_bytes));
  Best* best = reinterpret_cast<Best*>(packed + block_bytes * blocks);

  // Rows that stay in the second cache level while the weights pass; pieces of the weights small enough to share out evenly.
  const int64_t stay = int64_t(1 << 20) / int64_t(block_bytes) > 1 ? int64_t(1 << 20) / int64_t(block_bytes) : 1;
  const int64_t row_parts = (blocks + stay - 1) / stay;
  const int64_t wanted = row_parts >= 4 * threads ? 1 : (4 * threads + row_parts - 1) / row_parts;
  const int64_t part_groups = (groups + wanted - 1) / wanted;
  const int64_t group_parts = (groups + part_groups - 1) / part_groups;
  const int64_t num_parts = row_parts * group_parts;
  const int64_t work = call.num_rows * call.in_size * call.out_size;
  auto rows_of = [&](int64_t b) { return int(call.num_rows - b * kBlockRows < kBlockRows ? call.num_rows - b * kBlockRows : kBlockRows); };
  // A block of odd size is the last one. Few rows are packed by each thread for itself: that costs less than to wait for each other.
  const bool reads_rows = Multiplier::reads_rows(call);
  const int64_t first_packed = !reads_rows ? 0 : call.num_rows % 16 == 0 ? blocks : blocks - 1;
  const bool packs_alone = blocks - first_packed <= 2;
  int64_t num_taken = 0;  // parts that threads have taken, each one before it needs it
#pragma omp parallel num_threads(threads) if (work > 1 << 17)
  {
    Multiplier multiplier;
    const size_t y_bytes = sizeof(float) * kBlockRows * 16 * kMaxGroupTiles;
    char* memory = static_cast<char*>(scratch(kScratchThread, y_bytes + (packs_alone ? block_bytes * (blocks - first_packed) : 0)));
    float* y = reinterpret_cast<float*>(memory);
    char* thread_packed = packs_alone ? memory + y_bytes : packed;
    Best* thread_best = best + omp_get_thread_num() * call.num_rows;
    if (call.end == kArgmax)
      for (int64_t i = 0; i < call.num_rows; ++i) thread_best[i] = {-__builtin_inff(), call.out_size};
    auto pack = [&](int64_t b) {
      Multiplier::pack_block(static_cast<const T*>(call.x) + b * kBlockRows * call.x_stride, call.x_stride, rows_of(b), call.in_size,
                             thread_packed + (b - first_packed) * block_bytes);
    };
    if (packs_alone) {
      for (int64_t b = first_packed; b < blocks; ++b) pack(b);
    } else {
#pragma omp for schedule(static)
      for (int64_t b = first_packed; b < blocks; ++b) pack(b);
    }
    auto first_weight = [&](int64_t part) { return weight_tile<T>(call, part % group_parts * part_groups * group_tiles); };
    int64_t part = __atomic_fetch_add(&num_taken, 1, __ATOMIC_RELAXED);
    while (part < num_parts) {
      const int64_t next_part = __atomic_fetch_add(&num_taken, 1, __ATOMIC_RELAXED);
      const int64_t first_block = part / group_parts * stay, first_group = part % group_parts * part_groups;
      const int64_t last_block = first_block + stay < blocks ? first_block + stay : blocks;
      const int64_t last_group = first_group + part_groups < groups ? first_group + part_groups : groups;
      for (int64_t g = first_group; g < last_group; ++g) {
        const int64_t tile = g * group_tiles;
        const int num_tiles = int(tiles - tile < group_tiles ? tiles - tile : group_tiles);
        WeightsAhead ahead;
        if (g + 1 < last_group || next_part < num_parts) {
          ahead.at = g + 1 < last_group ? weight_tile<T>(call, tile + group_tiles) : first_weight(next_part);
          ahead.stop = ahead.at + (weight_tile<T>(call, group_tiles) - weight_tile<T>(call, 0));
          ahead.lines = int((32 + last_block - first_block - 1) / (last_block - first_block));
        }
        for (int64_t b = first_block; b < last_block; ++b) {
          const int rows = rows_of(b);
          const typename Multiplier::Block block = b < first_packed ? Multiplier::rows_block(call, b * kBlockRows)
                                                                    : Multiplier::packed_block(thread_packed + (b - first_packed) * block_bytes, call.in_size);
          multiplier.multiply(block, rows, weight_tile<T>(call, tile), call.in_size, num_tiles, y, ahead);
          finish_block<T>(call, y, b * kBlockRows, rows, tile, num_tiles, thread_best);
        }
      }
      part = next_part;
    }
    if (call.end == kArgmax) {
      const int team = omp_get_num_threads();
#pragma omp barrier
#pragma omp for schedule(static) nowait
      for (int64_t row = 0; row < call.num_rows; ++row) {
        Best winner = best[row];
        for (int t = 1; t < team; ++t) {
          const Best& other = best[t * call.num_rows + row];
          if (other.value > winner.value || (other.value == winner.value && other.index < winner.index)) winner = other;
        }
        static_cast<int64_t*>(call.out)[row] = winner.index < call.out_size ? winner.index : 0;
      }
    }
  }
}

}  // namespace BATCHLLM_PATH
}  // namespace batchllm
