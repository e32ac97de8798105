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
//   static const char* weight_tile(call, tile)
//   static bool reads_rows(call)                            whether blocks of 16 or 32 rows need not be packed
//   static Block rows_block(call, first_row)
//   static int group_tiles(rows)                            tiles that it multiplies at once, never more for more rows
//   void multiply(block, rows, weight, in_size, num_tiles, y, beside)   y [32, 16 * num_tiles] float32
//   static void settle(block, row, weight, in_size, num_tiles, y)       one row of y that multiply() left in another form
//   static constexpr int kStepInputs
// and may call beside.ask() or beside.step() once for each kStepInputs inputs of two tiles: step() where other units than those that it keeps
// busy can finish the block before meanwhile.
#pragma once

#include <omp.h>

#include <cstring>

#include "elementwise.h"

namespace batchllm {
namespace BATCHLLM_PATH {

template <class T>
BATCHLLM_INLINE const char* plain_weight_tile(const LinearCall& call, int64_t tile) {
  const int64_t numbers = sizeof(T) == 2 ? (call.in_size + 31) / 32 * 32 : call.in_size;
  return static_cast<const char*>(call.weight) + tile * numbers * 16 * int64_t(sizeof(T));
}

struct Best {
  float value;
  int64_t index;
};

// What becomes of whole tiles of one row, `from` [16 * num_tiles]: added to `to`, or gated to half as many.
template <class T>
BATCHLLM_INLINE void add_tiles(const float* from, T* to, int num_tiles) {
  for (int i = 0; i < 16 * num_tiles; i += 16) store(to + i, load(to + i) + load(from + i));
}
template <class T>
BATCHLLM_INLINE void gate_tiles(const float* from, T* to, int num_tiles) {
  for (int i = 0; i < 16 * num_tiles; i += 32) store(to + i / 2, silu_for<T>(load(from + i)) * load(from + i + 16));
}

// The largest of `count` outputs of one row, of which `first` is the first, where it is more than `best` or as much and before it. `peak`: the
// largest of whole tiles of them by lane.
inline __attribute__((noinline)) void take_best(const float* from, int count, int64_t first, Vec peak, Best* best) {
  float value = maximum_lanes(peak);
  for (int i = count / 16 * 16; i < count; ++i) value = from[i] > value ? from[i] : value;
  int64_t index = 0;
  while (index < count - 1 && from[index] != value) ++index;
  if (from[index] != value) return;
  index += first;
  if (value > best->value || (value == best->value && index < best->index)) *best = {value, index};
}

// Nearly all outputs are less than the best one before them, and to see that takes half of finding the largest, or less.
BATCHLLM_INLINE void compare_outputs(const float* from, int count, int64_t first, Best* best) {
  Vec peak = broadcast(-__builtin_inff());
  // In this order what is no number is passed over.
  for (int i = 0; i + 16 <= count; i += 16) peak = maximum(load(from + i), peak);
  bool reaches = any_reaches(peak, broadcast(best->value));
  for (int i = count / 16 * 16; i < count; ++i) reaches |= from[i] >= best->value;
  if (__builtin_expect(reaches, false)) take_best(from, count, first, peak, best);
}

// What becomes of y [rows, 16 * num_tiles], whose first output is 16 * tile: written, added, gated, rotated or compared.
template <class T>
__attribute__((noinline)) void finish_rows(const LinearCall& call, float* y, int64_t first_row, int rows, int64_t tile, int num_tiles, Best* best) {
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
      T* to = static_cast<T*>(call.out) + row * call.out_stride + first;
      if (count == width) {
        for (int i = 0; i < width; i += 16) store(to + i, load(from + i));
      } else {
        copy_numbers(from, to, count);
      }
    } else if (call.end == kAdd) {
      T* to = static_cast<T*>(call.out) + row * call.out_stride + first;
      if (count == width) {
        add_tiles(from, to, num_tiles);
      } else {
        for (int i = 0; i < count; i += 16) store_some(to + i, load_some(to + i, count - i) + load(from + i), count - i);
      }
    } else if (call.end == kStoreFloat) {
      std::memcpy(static_cast<float*>(call.out) + row * call.out_size + first, from, sizeof(float) * size_t(count));
    } else if (call.end == kSiluMul) {
      gate_tiles(from, static_cast<T*>(call.out) + row * call.out_stride + first / 2, num_tiles);
    } else if (call.end == kRopeWriteKv) {
      place_head(from, static_cast<T*>(call.out), row, int(first / width), call.rope);
    } else {
      compare_outputs(from, count, first, &best[row]);
    }
  }
}

// Weights that are wanted soon.
struct Weights {
  const char* from = nullptr;
  const char* stop = nullptr;
};

// What goes on beside a block's products: the weights that are multiplied next are asked for, a few lines at a time, and the block before
// is finished, a few rows at a time. Tile units and the others work at once then.
template <class Multiplier>
struct Beside {
  using T = typename Multiplier::Number;
  static constexpr int kPages = 4, kPageBytes = 4096;

  const LinearCall& call;
  Best* best;
  Weights wanted;  // from the pages on whose turn it is
  int turn = 0, rounds = 0, step_rows = 0;
  // The block before.
  typename Multiplier::Block block = {};
  float* y = nullptr;
  int64_t first_row = 0, tile = 0;
  int num_tiles = 0, rows = 0, next = 0;
  // Of blocks as most are, a head or two whole tiles that are added, gated or compared, without bias: the next row, and where it goes.
  enum Quick : int32_t { kNotQuick, kAddPair, kGatePair, kComparePair, kHead } quick = kNotQuick;
  float* from = nullptr;
  T* to = nullptr;

  // What is asked for from now on, all of it within `num_steps`.
  void ask_for(const Weights& weights, int64_t num_steps) {
    const int64_t lines = (weights.stop - weights.from) / 64;
    wanted = weights, turn = 0, rounds = int((lines + kPages * num_steps - 1) / (kPages * num_steps));
  }

  // Pages take turns, as where attention reads ahead: a page's own prefetcher is faster than asking, if it is not caught up with. What lies
  // behind the last ones is mostly wanted next.
  BATCHLLM_INLINE void ask() {
    if (wanted.from >= wanted.stop) return;
    for (int i = 0; i < rounds; ++i, wanted.from += 64) {
      for (int page = 0; page < kPages; ++page) __builtin_prefetch(wanted.from + page * kPageBytes, 0, 2);
      if (++turn == kPageBytes / 64) turn = 0, wanted.from += (kPages - 1) * kPageBytes;
    }
  }

  BATCHLLM_INLINE void step() {
    ask();
    if (next >= rows) return;
    const int count = next + step_rows < rows ? step_rows : rows - next;
    if (quick == kAddPair) {
      finish_quickly(count, 2, [](const float* sums, T* out, int64_t) __attribute__((always_inline)) { add_tiles(sums, out, 2); });
    } else if (quick == kGatePair) {
      finish_quickly(count, 2, [](const float* sums, T* out, int64_t) __attribute__((always_inline)) { gate_tiles(sums, out, 2); });
    } else if (quick == kComparePair) {
      finish_quickly(count, 2, [&](const float* sums, T*, int64_t row) __attribute__((always_inline)) {
        compare_outputs(sums, 32, 16 * tile, &best[row]);
      });
    } else if (quick == kHead) {
      finish_quickly(count, num_tiles, [&](const float* sums, T* out, int64_t row) __attribute__((always_inline)) {
        place_head(sums, out, row, int(tile / num_tiles), call.rope);
      });
    } else {
      finish(count);
    }
  }

  // What finish(count) does: a call of that for a row or two costs as much as they do.
  template <class End>
  BATCHLLM_INLINE void finish_quickly(int count, int tiles, const End& end) {
    for (const int until = next + count; next < until; ++next, from += 16 * tiles, to += quick == kAddPair || quick == kGatePair ? call.out_stride : 0) {
      Multiplier::settle(block, next, Multiplier::weight_tile(call, tile), call.in_size, tiles, from);
      end(from, to, first_row + next);
    }
  }

  void finish(int count) {
    const int until = next + count < rows ? next + count : rows;
    const int width = 16 * num_tiles;
    const char* weight = Multiplier::weight_tile(call, tile);
    for (int row = next; row < until; ++row) Multiplier::settle(block, row, weight, call.in_size, num_tiles, y + row * width);
    finish_rows<T>(call, y + next * width, first_row + next, until - next, tile, num_tiles, best);
    next = until;
  }

  void finish_rest() {
    if (next < rows) finish(rows);
  }

  // From now on the block that was multiplied last is the one before. Its rows are spread over the steps of one like it.
  void follow(const typename Multiplier::Block& last, float* last_y, int64_t row, int num_rows, int64_t last_tile, int tiles) {
    block = last, y = last_y, first_row = row, rows = num_rows, tile = last_tile, num_tiles = tiles, next = 0;
    const int steps = int(call.in_size / Multiplier::kStepInputs) * (tiles + 1) / 2;
    step_rows = steps > 0 ? (num_rows + steps - 1) / steps : num_rows;
    quick = kNotQuick;
    if (call.bias != nullptr) return;
    from = last_y;
    to = static_cast<T*>(call.out);
    if (call.end == kRopeWriteKv) {
      quick = kHead;
    } else if (call.end == kSiluMul && tiles == 2) {
      quick = kGatePair, to += row * call.out_stride + 8 * last_tile;
    } else if (call.end == kArgmax && tiles == 2 && 16 * (last_tile + 2) <= call.out_size) {
      quick = kComparePair;
    } else if (call.end == kAdd && tiles == 2 && 16 * (last_tile + 2) <= call.out_size) {
      quick = kAddPair, to += row * call.out_stride + 16 * last_tile;
    }
  }
};

// Groups of tiles that pass a block of rows before the next one has its turn, of `num_groups`: a block stays in the first cache level
// meanwhile, and the weights in the second until all blocks had them. Few blocks are done before many weights have come. All panels are about
// as large, for the next one's weights are asked for during each.
inline int64_t panel_groups(int64_t num_groups, int64_t group_bytes, int64_t num_blocks) {
  const int64_t bytes = num_blocks < 8 ? num_blocks * (32 << 10) : 256 << 10;
  const int64_t most = bytes > group_bytes ? bytes / group_bytes : 1, num_panels = (num_groups + most - 1) / most;
  return (num_groups + num_panels - 1) / num_panels;
}

// How a product is shared out. With enough rows each thread has a range of them to itself: what it reads was mostly written by itself, by
// the same share of the operation before. Fewer rows are one range, and the threads share the weights. A range is cut into parts: rows
// that stay in the second cache level while weights pass, and weights small enough that a thread that is done can take some of another's.
struct Shares {
  static constexpr int kRangeRows = 160;  // fewer rows of its own cost a thread more for all the weights than they save
  static constexpr int kCounterStride = 8;  // one cache line each

  int64_t num_rows, blocks, row_parts, stay, groups, group_parts, part_groups;
  int num_ranges;
  int64_t* taken;  // [num_ranges * kCounterStride]: parts that threads have taken, each one before it needs it

  struct Part {
    int range = -1;
    int64_t number = 0;
  };

  int64_t range_start(int range) const {
    const int64_t row = (num_rows + 15) / 16 * range / num_ranges * 16;
    return row < num_rows ? row : num_rows;
  }
  int64_t first_row(int range, int64_t block) const { return range_start(range) + block * kBlockRows; }
  int rows_of(int range, int64_t block) const {
    const int64_t left = range_start(range + 1) - first_row(range, block);
    return int(left < kBlockRows ? left : kBlockRows);
  }

  Part take(int thread) const {
    for (int i = 0; i < num_ranges; ++i) {
      const int range = (thread + i) % num_ranges;
      const int64_t number = __atomic_fetch_add(&taken[range * kCounterStride], 1, __ATOMIC_RELAXED);
      if (number < row_parts * group_parts) return {range, number};
    }
    return {};
  }
};

inline Shares share_out(int64_t num_rows, int64_t groups, size_t block_bytes, int threads) {
  Shares shares = {};
  shares.num_rows = num_rows, shares.groups = groups;
  shares.num_ranges = num_rows >= Shares::kRangeRows * threads ? threads : 1;
  const int64_t halves = (num_rows + 15) / 16;
  shares.blocks = ((halves + shares.num_ranges - 1) / shares.num_ranges + 1) / 2;
  shares.stay = int64_t(1 << 20) / int64_t(block_bytes) > 1 ? int64_t(1 << 20) / int64_t(block_bytes) : 1;
  shares.row_parts = (shares.blocks + shares.stay - 1) / shares.stay;
  const int64_t wanted = shares.num_ranges > 1 ? 4 : 4 * threads;
  const int64_t parts = shares.row_parts >= wanted ? 1 : (wanted + shares.row_parts - 1) / shares.row_parts;
  shares.part_groups = (groups + parts - 1) / parts;
  shares.group_parts = (groups + shares.part_groups - 1) / shares.part_groups;
  return shares;
}

// One thread at a product: blocks of rows times groups of tiles.
template <class Multiplier>
struct Work {
  using Block = typename Multiplier::Block;

  const LinearCall& call;
  Multiplier& multiplier;
  float* y;  // [2, y_numbers(group_tiles)]: the block that is multiplied and the one before
  int group_tiles;
  Beside<Multiplier> beside;
  int turn = 0;

  static int group_tiles_of(const LinearCall& call) {
    return call.end == kRopeWriteKv ? call.rope.head_dim / 16 : Multiplier::group_tiles(call.num_rows);
  }
  static size_t y_numbers(int group_tiles) { return size_t(kBlockRows) * 16 * group_tiles; }

  Work(const LinearCall& call, Multiplier& multiplier, float* y, Best* best)
      : call(call), multiplier(multiplier), y(y), group_tiles(group_tiles_of(call)), beside{call, best} {}

  static int64_t num_groups(const LinearCall& call) { return ((call.out_size + 15) / 16 + group_tiles_of(call) - 1) / group_tiles_of(call); }
  static const char* weight_of(const LinearCall& call, int64_t group) {
    const int64_t tiles = (call.out_size + 15) / 16, tile = group * group_tiles_of(call);
    return Multiplier::weight_tile(call, tile < tiles ? tile : tiles);
  }
  // Of the first panel of groups [first, last), which `num_blocks` blocks pass.
  static Weights first_weights(const LinearCall& call, int64_t first, int64_t last, int64_t num_blocks) {
    const int64_t panel = panel_groups(last - first, weight_of(call, 1) - weight_of(call, 0), num_blocks);
    return {weight_of(call, first), weight_of(call, first + panel)};
  }

  const char* weight(int64_t group) const { return weight_of(call, group); }

  // Groups [first, last) for blocks [first_block, last_block). block_at(b, &first_row, &rows) says where block b is; one of no rows ends
  // them. `next`: weights that are wanted afterwards.
  template <class BlockAt>
  void multiply(int64_t first, int64_t last, int64_t first_block, int64_t last_block, const BlockAt& block_at, const Weights& next) {
    const int64_t num_blocks = last_block - first_block, tiles = (call.out_size + 15) / 16;
    const int64_t panel = panel_groups(last - first, weight(1) - weight(0), num_blocks);
    const int64_t group_steps = (call.in_size / Multiplier::kStepInputs + 1) * ((group_tiles + 1) / 2) * num_blocks;
    for (int64_t start = first; start < last; start += panel) {
      const int64_t stop = start + panel < last ? start + panel : last;
      const Weights following = {weight(stop), weight(stop + panel < last ? stop + panel : last)};
      beside.ask_for(stop < last ? following : next, (stop - start) * group_steps);
      for (int64_t b = first_block; b < last_block; ++b) {
        int64_t first_row = 0;
        int rows = 0;
        const Block block = block_at(b, &first_row, &rows);
        if (rows <= 0) break;
        for (int64_t group = start; group < stop; ++group) {
          const int64_t tile = group * group_tiles;
          const int num_tiles = int(tiles - tile < group_tiles ? tiles - tile : group_tiles);
          float* to = y + turn * y_numbers(group_tiles);
          turn ^= 1;
          multiplier.multiply(block, rows, weight(group), call.in_size, num_tiles, to, beside);
          beside.finish_rest();
          beside.follow(block, to, first_row, rows, tile, num_tiles);
        }
      }
    }
  }
};

template <class Multiplier>
void run_linear(const LinearCall& call) {
  using T = typename Multiplier::Number;
  if (call.num_rows == 0) return;
  const int group_tiles = Work<Multiplier>::group_tiles_of(call);
  const size_t block_bytes = Multiplier::block_bytes(call.in_size);
  const int threads = num_threads();
  Shares shares = share_out(call.num_rows, Work<Multiplier>::num_groups(call), block_bytes, threads);
  // Only the last block can be one that has to be packed because it is of an odd size.
  const bool reads_rows = Multiplier::reads_rows(call);
  const int64_t num_packed = !reads_rows ? shares.num_ranges * shares.blocks : call.num_rows % 16 != 0;
  const size_t best_bytes = call.end == kArgmax ? sizeof(Best) * threads * call.num_rows : 0;
  const size_t taken_bytes = sizeof(int64_t) * shares.num_ranges * Shares::kCounterStride;
  char* memory = static_cast<char*>(scratch(kScratchCall, block_bytes * num_packed + taken_bytes + best_bytes));
  char* packed = memory;
  shares.taken = reinterpret_cast<int64_t*>(memory + block_bytes * num_packed);
  std::memset(shares.taken, 0, taken_bytes);
  Best* best = reinterpret_cast<Best*>(memory + block_bytes * num_packed + taken_bytes);

  const int64_t num_products = call.num_rows * call.in_size * call.out_size;
  // Few rows are packed by each thread for itself: that costs less than to wait for each other.
  const bool packs_alone = num_packed <= 2;
#pragma omp parallel num_threads(threads) if (num_products > 1 << 17)
  {
    Multiplier multiplier;
    const size_t y_bytes = 2 * sizeof(float) * Work<Multiplier>::y_numbers(group_tiles);
    char* thread_memory = static_cast<char*>(scratch(kScratchThread, y_bytes + (packs_alone ? block_bytes * num_packed : 0)));
    char* thread_packed = packs_alone ? thread_memory + y_bytes : packed;
    Best* thread_best = best + omp_get_thread_num() * call.num_rows;
    if (call.end == kArgmax)
      for (int64_t i = 0; i < call.num_rows; ++i) thread_best[i] = {-__builtin_inff(), call.out_size};
    // Packed block `i`: all blocks range by range, or the last one alone.
    auto pack = [&](int64_t i) {
      const int range = reads_rows ? shares.num_ranges - 1 : int(i / shares.blocks);
      const int64_t block = reads_rows ? shares.blocks - 1 : i % shares.blocks;
      const int rows = shares.rows_of(range, block);
      if (rows > 0)
        Multiplier::pack_block(static_cast<const T*>(call.x) + shares.first_row(range, block) * call.x_stride, call.x_stride, rows,
                               call.in_size, thread_packed + i * block_bytes);
    };
    if (packs_alone) {
      for (int64_t i = 0; i < num_packed; ++i) pack(i);
    } else {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < num_packed; ++i) pack(i);
    }
    const int thread = omp_get_thread_num();
    Work<Multiplier> work(call, multiplier, reinterpret_cast<float*>(thread_memory), thread_best);
    Shares::Part part = shares.take(thread);
    while (part.range >= 0) {
      const Shares::Part next = shares.take(thread);
      const int64_t first_block = part.number / shares.group_parts * shares.stay;
      const int64_t last_block = first_block + shares.stay < shares.blocks ? first_block + shares.stay : shares.blocks;
      const int64_t first_group = part.number % shares.group_parts * shares.part_groups;
      const int64_t last_group = first_group + shares.part_groups < shares.groups ? first_group + shares.part_groups : shares.groups;
      const int64_t next_group = next.number % shares.group_parts * shares.part_groups;
      const int64_t next_stop = next_group + shares.part_groups < shares.groups ? next_group + shares.part_groups : shares.groups;
      const auto block_at = [&](int64_t b, int64_t* first_row, int* rows) -> typename Multiplier::Block {
        *rows = shares.rows_of(part.range, b);
        *first_row = shares.first_row(part.range, b);
        if (reads_rows && *rows % 16 == 0) return Multiplier::rows_block(call, *first_row);
        return Multiplier::packed_block(thread_packed + (reads_rows ? 0 : part.range * shares.blocks + b) * block_bytes, call.in_size);
      };
      work.multiply(first_group, last_group, first_block, last_block, block_at,
                    next.range >= 0 ? Work<Multiplier>::first_weights(call, next_group, next_stop, last_block - first_block) : Weights());
      part = next;
    }
    work.beside.finish_rest();
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
