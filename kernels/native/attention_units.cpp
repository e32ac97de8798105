// Cuts a step's attention into units for the threads. Compiled for any processor.
#include <omp.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "native.h"

namespace batchllm {

AttentionUnit* attention_units(const AttentionCall& call, int64_t* num_units) {
  const int group = call.num_heads / call.num_kv_heads;
  const auto* items = reinterpret_cast<const WorkItem*>(call.items);
  auto units_of = [&](int32_t columns) {
    int64_t total = 0;
    for (int64_t i = 0; i < call.num_items; ++i)
      total += (int64_t(items[i].num_rows) * group + columns - 1) / columns * call.num_kv_heads;
    return total;
  };
  // Wide units pack a chunk for more columns, narrow ones are shared out more evenly.
  const int32_t width = units_of(kUnitColumns) < 16 * num_threads() ? kUnitColumns / 2 : kUnitColumns;
  const int64_t total = units_of(width);
  auto* units = static_cast<AttentionUnit*>(scratch(kScratchUnits, sizeof(AttentionUnit) * total));
  AttentionUnit* next = units;
  for (int64_t i = 0; i < call.num_items; ++i) {
    const WorkItem& item = items[i];
    const int32_t num_columns = item.num_rows * group;
    for (int32_t column = 0; column < num_columns; column += width) {
      const int32_t count = std::min(width, num_columns - column);
      int32_t last = -1;
      for (int32_t row = column / group; row <= (column + count - 1) / group; ++row)
        last = std::max(last, call.positions[item.row_start + row]);
      const int32_t kv_stop = std::min(item.kv_stop, last + 1);
      // Packing a chunk costs about as much as two tiles of columns.
      const int64_t tiles = (count + kTileColumns - 1) / kTileColumns + 2;
      for (int32_t head = 0; head < call.num_kv_heads; ++head)
        *next++ = {&item, head, column, count, kv_stop, tiles * std::max(0, kv_stop - item.kv_start)};
    }
  }
  *num_units = next - units;
  std::stable_sort(units, next, [](const AttentionUnit& a, const AttentionUnit& b) { return a.cost > b.cost; });
  return units;
}

int num_threads() { return omp_in_parallel() ? 1 : omp_get_max_threads(); }

namespace {
struct Slots {
  void* memory[kNumScratchSlots] = {};
  size_t size[kNumScratchSlots] = {};
  ~Slots() {
    for (void* m : memory) std::free(m);
  }
};
}  // namespace

void* scratch(ScratchSlot slot, size_t num_bytes) {
  static thread_local Slots slots;
  if (num_bytes > slots.size[slot]) {
    std::free(slots.memory[slot]);
    const size_t size = (num_bytes + num_bytes / 4 + 4095) / 4096 * 4096;
    slots.memory[slot] = std::aligned_alloc(4096, size);
    slots.size[slot] = size;
    if (slots.memory[slot] == nullptr) {
      std::fprintf(stderr, "batchllm: no memory for %zu bytes of scratch\n", size);
      std::abort();
    }
  }
  return slots.memory[slot];
}

}  // namespace batchllm
