// Attention over work items: the walk over units, chunks and tiles, the fold of chunks and the merge of partials. kernels/attention.py
// states the arithmetic. How one chunk is multiplied is an engine's business; an engine has
//
//   using Number                                       the type of query, keys, values and output
//   static size_t scratch_bytes(head_dim)
//   Engine(call, scratch)
//   static bool forks(call)                            whether it takes units with a front, whose rows go on alone behind it
//   void start_unit(unit)                              what follows is for its columns
//   void pack_query(tile, pointers, num_columns)       the tile's columns: head_dim numbers at each pointer
//   void pack_chunk(chunk, ahead)                      the chunk's keys and values
//   void multiply(tile, visible, num_columns, result, ahead)
//                                                      one chunk of one or two tiles: column c sees its first visible[c] positions
//
// Both call ahead.ask() as they go along, so that the memory is at work while they compute.
//
// A column is one (row, head) pair; all columns of a unit read the same keys. Maxima are kept times scale * log2(e), so that weights
// are powers of two.
#pragma once

#include <utility>

#include "vector.h"

namespace batchllm {
namespace BATCHLLM_PATH {

inline constexpr float kLog2E = 1.44269504f;

constexpr int round_up(int a, int b) { return (a + b - 1) / b * b; }

// a [columns, width]: sums of p v; m, l [columns].
struct Partials {
  float* a;
  float* m;
  float* l;
};

// Where up to kChunk positions of one KV head lie: rows of head_dim numbers.
template <class T>
struct Chunk {
  int count;
  int64_t to_values;  // from a position's key to its value, in numbers
  const T* const* keys;

  const T* value(int i) const { return keys[i] + to_values; }
};

// What a unit reads of one chunk: `together` by all its columns, and in a unit with a front what each row goes on to read alone.
template <class T>
struct UnitChunk {
  Chunk<T> together;
  int num_apart, num_positions;
  Chunk<T> apart[kPairColumns];
  const T* keys[kChunk + kPairColumns * (kChunk - kStep)];  // of `num_positions`, one chunk behind the other
};

// The chunk that is read next. Blocks lie anywhere, so the processor cannot guess it: its lines are asked for a few at a time, all
// through the work on this one, since a burst of them would hold up everything behind it. Positions of kRuns blocks take turns: within a
// page the processor reads ahead of what it is asked for, and that is faster than asking, where asking does not follow too soon.
template <class T>
struct Ahead {
  const UnitChunk<T>* chunk;
  int row_bytes;
  int first = 0, row = 0, run = 0;  // position first + run * kRun + row is asked for next
  int rate = 0, owed = 0;  // positions asked for in a share of the time, and those owed from the last ones, in parts of kWhole
  static constexpr int kWhole = 256;
  static constexpr int kRun = 16, kRuns = 6;

  // `num_shares` are left of this chunk's time, over which all of the next one is to be asked for.
  BATCHLLM_INLINE void spread(int num_shares) { rate = int(int64_t(chunk->num_positions) * kWhole / num_shares) + 1; }

  BATCHLLM_INLINE void ask_shares(int num_shares) {
    owed += num_shares * rate;
    ask(owed / kWhole);
    owed %= kWhole;
  }

  BATCHLLM_INLINE void ask(int num_rows) {
    for (const int count = chunk->num_positions; num_rows > 0 && first < count; --num_rows) {
      const char* key = reinterpret_cast<const char*>(chunk->keys[first + run * kRun + row]);
      for (int b = 0; b < row_bytes; b += 64) {
        __builtin_prefetch(key + b, 0, 2);
        __builtin_prefetch(key + chunk->together.to_values * int64_t(sizeof(T)) + b, 0, 2);
      }
      if (++run < kRuns && first + run * kRun + row < count) continue;
      run = 0;
      if (++row < kRun && first + row < count) continue;
      row = 0, first += kRuns * kRun;
    }
  }

  BATCHLLM_INLINE void ask_rest() { ask(chunk->num_positions); }
};

BATCHLLM_INLINE void copy_partial(const Partials& to, int64_t i, const Partials& from, int64_t j, int width) {
  for (int d = 0; d < width; d += 16) store(to.a + i * width + d, load(from.a + j * width + d));
  to.m[i] = from.m[j], to.l[i] = from.l[j];
}

// The one formula for neighbouring spans, for 16 columns at once; columns from `num_columns` on and those not in `active` stay.
BATCHLLM_INLINE void fold(const Partials& left, const Partials& right, const int32_t* active, int num_columns, int width) {
  float weights[2][16];
  const Vec left_m = load(left.m), right_m = load(right.m);
  const Vec m = maximum(left_m, right_m);
  const Vec left_weight = exp2_negative(left_m - m), right_weight = exp2_negative(right_m - m);
  store(weights[0], left_weight), store(weights[1], right_weight);
  float new_m[16], new_l[16];
  store(new_m, m);
  store(new_l, fma(load(left.l), left_weight, load(right.l) * right_weight));
  for (int c = 0; c < num_columns; ++c) {
    if (active[c] <= 0) continue;
    left.m[c] = new_m[c], left.l[c] = new_l[c];
    const Vec l = broadcast(weights[0][c]), r = broadcast(weights[1][c]);
    float* a = left.a + c * width;
    for (int d = 0; d < width; d += 16) store(a + d, fma(load(a + d), l, load(right.a + c * width + d) * r));
  }
}

template <class T>
BATCHLLM_INLINE void write_output(T* out, const float* a, float l, int head_dim) {
  const Vec factor = broadcast(1 / l);
  for (int d = 0; d < head_dim; d += 16) store_some(out + d, load(a + d) * factor, head_dim - d);
}

// Positions [start, stop) as query row `row` reads them; their pointers are written to `keys`.
template <class T>
Chunk<T> find_positions(const AttentionCall& call, int kv_head, int row, int start, int stop, const T** keys) {
  const int32_t* table = call.block_table + int64_t(call.tables[row]) * call.max_blocks;
  const int64_t head_size = int64_t(call.block_size) * call.head_dim;
  const T* head = static_cast<const T*>(call.kv) + kv_head * head_size;
  const int count = stop > start ? stop - start : 0;
  const int32_t* block = table + start / call.block_size;
  int first = start % call.block_size;
  for (int i = 0; i < count; ++block, first = 0) {
    const T* base = head + *block * call.block_stride + int64_t(first) * call.head_dim;
    const int end = i + call.block_size - first < count ? i + call.block_size - first : count;
    for (; i < end; ++i, base += call.head_dim) keys[i] = base;
  }
  return {count, call.num_kv_heads * head_size, keys};
}

// The part of the unit's span that starts at `start`; empty behind its end.
template <class T>
void find_chunk(const AttentionCall& call, const AttentionUnit& unit, int start, UnitChunk<T>* chunk) {
  const int group = call.num_heads / call.num_kv_heads, row = unit.item->row_start + unit.column_start / group;
  const int length = unit.front > 0 ? unit.front : kChunk;
  chunk->together = find_positions<T>(call, unit.kv_head, row, start, start + length < unit.kv_stop ? start + length : unit.kv_stop, chunk->keys);
  chunk->num_positions = chunk->together.count;
  chunk->num_apart = unit.front > 0 ? unit.num_columns / group : 0;
  for (int r = 0; r < chunk->num_apart; ++r) {
    const int last = call.positions[row + r] + 1;
    const T** keys = chunk->keys + chunk->num_positions;
    chunk->apart[r] = find_positions<T>(call, unit.kv_head, row + r, start + unit.front, last < unit.kv_stop ? last : unit.kv_stop, keys);
    chunk->num_positions += chunk->apart[r].count;
  }
}

// `chunk` is the first one of `unit` on entry and that of `next_unit` on return; `next_unit` is null where there is no next one.
template <class Engine, class T>
void run_unit(const AttentionCall& call, const AttentionUnit& unit, const AttentionUnit* next_unit, const Partials& partials, Engine& engine,
              float* state, UnitChunk<T>*& chunk, UnitChunk<T>*& next_chunk) {
  const WorkItem& item = *unit.item;
  const int head_dim = call.head_dim, width = round_up(head_dim, 16), group = call.num_heads / call.num_kv_heads;
  const int num_tiles = (unit.num_columns + kTileColumns - 1) / kTileColumns;
  const Partials running = {state, state + kUnitColumns * width, state + kUnitColumns * (width + 1)};
  float* scratch_partial = state + kUnitColumns * (width + 2);
  const Partials chunk_partial = {scratch_partial, scratch_partial + kPairColumns * width, scratch_partial + kPairColumns * (width + 1)};

  int64_t column_head[kUnitColumns];  // row * num_heads + head
  int32_t column_position[kUnitColumns];
  const T* pointers[kTileColumns];
  engine.start_unit(unit);
  for (int t = 0; t < num_tiles; ++t) {
    const int first = t * kTileColumns, count = unit.num_columns - first < kTileColumns ? unit.num_columns - first : kTileColumns;
    for (int c = 0; c < count; ++c) {
      const int column = unit.column_start + first + c, row = item.row_start + column / group;
      column_head[first + c] = int64_t(row) * call.num_heads + unit.kv_head * group + column % group;
      column_position[first + c] = call.positions[row];
      pointers[c] = static_cast<const T*>(call.query) + column_head[first + c] * head_dim;
    }
    engine.pack_query(t, pointers, count);
  }

  const bool folds = item.kv_start == 0;
  for (int start = item.kv_start; start < unit.kv_stop; start += kChunk) {
    next_chunk->num_positions = 0;
    if (start + kChunk < unit.kv_stop) {
      find_chunk(call, unit, start + kChunk, next_chunk);
    } else if (next_unit != nullptr) {
      find_chunk(call, *next_unit, next_unit->item->kv_start, next_chunk);
    }
    Ahead<T> ahead = {next_chunk, head_dim * int(sizeof(T))};
    const int count = unit.kv_stop - start < kChunk ? unit.kv_stop - start : kChunk;
    engine.pack_chunk(*chunk, ahead);
    for (int first = 0; first < unit.num_columns; first += kPairColumns) {
      const int columns = unit.num_columns - first < kPairColumns ? unit.num_columns - first : kPairColumns;
      int32_t visible[kPairColumns] = {};
      bool any = false;
      for (int c = 0; c < columns; ++c) {
        const int seen = column_position[first + c] - start + 1;
        visible[c] = seen < 0 ? 0 : seen < count ? seen : count;
        any |= visible[c] > 0;
      }
      if (!any) continue;
      const Partials pair_running = {running.a + int64_t(first) * width, running.m + first, running.l + first};
      const bool is_first = folds && start == 0;  // every row sees position 0
      const Partials& target = is_first ? pair_running : chunk_partial;
      engine.multiply(first / kTileColumns, visible, columns, target, ahead);
      if (is_first) continue;
      if (folds) {
        for (int c = 0; c < columns; c += kTileColumns) {
          const Partials left = {pair_running.a + c * width, pair_running.m + c, pair_running.l + c};
          const Partials right = {chunk_partial.a + c * width, chunk_partial.m + c, chunk_partial.l + c};
          fold(left, right, visible + c, columns - c < kTileColumns ? columns - c : kTileColumns, width);
        }
        continue;
      }
      for (int c = 0; c < columns; ++c) {
        if (visible[c] == 0) continue;
        const int row_in_item = (unit.column_start + first + c) / group, head = int(column_head[first + c] % call.num_heads);
        const int64_t number = item.partial + int64_t((start - item.kv_start) / kChunk) * item.num_rows + row_in_item;
        copy_partial(partials, number * call.num_heads + head, chunk_partial, c, width);
      }
    }
    ahead.ask_rest();
    std::swap(chunk, next_chunk);
  }
  if (!folds) return;
  for (int i = 0; i < unit.num_columns; ++i) {
    if (item.partial < 0) {
      write_output(static_cast<T*>(call.out) + column_head[i] * head_dim, running.a + int64_t(i) * width, running.l[i], head_dim);
    } else {
      const int64_t number = item.partial + (unit.column_start + i) / group;
      copy_partial(partials, number * call.num_heads + column_head[i] % call.num_heads, running, i, width);
    }
  }
}

// Left fold of each listed row's partials, 16 heads at a time.
template <class T>
void merge_row(const AttentionCall& call, const Partials& partials, int64_t index, float* state) {
  const int head_dim = call.head_dim, width = round_up(head_dim, 16);
  const Partials running = {state, state + kTileColumns * width, state + kTileColumns * (width + 1)};
  int32_t all[kTileColumns];
  for (int c = 0; c < kTileColumns; ++c) all[c] = 1;
  for (int head = 0; head < call.num_heads; head += kTileColumns) {
    const int columns = call.num_heads - head < kTileColumns ? call.num_heads - head : kTileColumns;
    for (int k = call.merge_start[index]; k < call.merge_start[index + 1]; ++k) {
      const int64_t at = int64_t(call.merge_partials[k]) * call.num_heads + head;
      const Partials part = {partials.a + at * width, partials.m + at, partials.l + at};
      if (k == call.merge_start[index]) {
        for (int c = 0; c < columns; ++c) copy_partial(running, c, part, c, width);
      } else {
        fold(running, part, all, columns, width);
      }
    }
    T* out = static_cast<T*>(call.out) + (int64_t(call.merge_rows[index]) * call.num_heads + head) * head_dim;
    for (int c = 0; c < columns; ++c) write_output(out + c * head_dim, running.a + c * width, running.l[c], head_dim);
  }
}

// Zeros for the rows that no item has. Nearly always there are none, and zeros for all rows cost as much as some items do.
template <class T>
void clear_rows_without_item(const AttentionCall& call) {
  auto* has_item = static_cast<bool*>(scratch(kScratchRows, call.num_rows));
  std::memset(has_item, 0, call.num_rows);
  const auto* items = reinterpret_cast<const WorkItem*>(call.items);
  for (int64_t i = 0; i < call.num_items; ++i) std::memset(has_item + items[i].row_start, 1, items[i].num_rows);
  const int64_t row_size = int64_t(call.num_heads) * call.head_dim;
  for (int64_t row = 0; row < call.num_rows; ++row)
    if (!has_item[row]) std::memset(static_cast<T*>(call.out) + row * row_size, 0, sizeof(T) * row_size);
}

template <class Engine>
const AttentionUnit* units_for(const AttentionCall& call, int64_t* num_units) {
  return attention_units(call, Engine::forks(call), num_units);
}

// How many units from `first` on one of `threads` takes at once. A block's keys and values under one head are half a page where heads are narrow, and
// what the processor reads ahead of them belongs to the next head: who has a unit that only reads goes on to the item's other KV heads, which
// follow it, as long as there is enough left for everybody.
inline int64_t units_together(const AttentionCall& call, const AttentionUnit* units, int64_t num_units, int64_t first, int threads) {
  const int64_t heads = call.num_kv_heads;
  if (num_units - first < 4 * threads * heads || units[first].num_columns > kTileColumns) return 1;
  return heads - first % heads;
}

template <class Engine>
void run_attention(const AttentionCall& call) {
  using T = typename Engine::Number;
  const int width = round_up(call.head_dim, 16);
  const int64_t num_parts = call.num_partials * call.num_heads;
  // fold() loads 16 maxima and sums at a time: 16 numbers behind each array are read, never used.
  float* memory = static_cast<float*>(scratch(kScratchPartials, sizeof(float) * (num_parts * (width + 2) + 32)));
  const Partials partials = {memory, memory + num_parts * width, memory + num_parts * (width + 1) + 16};
  clear_rows_without_item<T>(call);
  int64_t num_units = call.num_units;
  const AttentionUnit* units = call.units != nullptr ? call.units : units_for<Engine>(call, &num_units);
  const size_t state_floats = (kUnitColumns + kPairColumns) * (width + 2);
  const int threads = num_threads();
  int64_t num_taken = 0;  // units that threads have taken, each one before it needs it
#pragma omp parallel if (num_units + call.num_merge_rows > 1)
  {
    float* state = static_cast<float*>(scratch(kScratchThread, sizeof(float) * state_floats + Engine::scratch_bytes(call.head_dim)));
    Engine engine(call, reinterpret_cast<char*>(state + state_floats));
    UnitChunk<T> chunks[2];
    UnitChunk<T>*chunk = &chunks[0], *next_chunk = &chunks[1];
    int64_t taken_until = 0;
    const auto take = [&](int64_t last) {
      if (last + 1 < taken_until) return last + 1;
      int64_t first = __atomic_load_n(&num_taken, __ATOMIC_RELAXED);
      do {
        taken_until = first + units_together(call, units, num_units, first, threads);
      } while (!__atomic_compare_exchange_n(&num_taken, &first, taken_until, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
      return first;
    };
    int64_t taken = take(-1);
    if (taken < num_units) find_chunk(call, units[taken], units[taken].item->kv_start, chunk);
    while (taken < num_units) {
      const int64_t next = take(taken);
      run_unit(call, units[taken], next < num_units ? &units[next] : nullptr, partials, engine, state, chunk, next_chunk);
      taken = next;
    }
    if (call.num_merge_rows > 0) {
#pragma omp barrier
    }
#pragma omp for schedule(dynamic, 8) nowait
    for (int64_t i = 0; i < call.num_merge_rows; ++i) merge_row<T>(call, partials, i, state);
  }
}

}  // namespace BATCHLLM_PATH
}  // namespace batchllm
