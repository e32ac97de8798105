// Cuts a step's attention into units for the threads. Compiled for any processor.
#include <algorithm>

#include "native.h"

namespace batchllm {

namespace {

// Keys and values of a unit that forks, at most: it reads all keys first, and so does the next one's asking; both fit the second cache level.
constexpr int64_t kForkBytes = 320 << 10;

// Columns of a wide unit whose heads are so large that more of their queries and sums would not stay in the second cache level.
constexpr int32_t kLeastWide = 256;

// The rows of an item that forks which one unit takes, or 1 where each is a unit of its own.
int32_t rows_of_fork(const AttentionCall& call, const WorkItem& item, int32_t front) {
  const int32_t number_bytes = call.data_type == kFloat32 ? 4 : 2;
  const int64_t most = kForkBytes / (2 * call.head_dim * number_bytes) - front, alone = item.kv_stop - item.kv_start - front;
  const int32_t rows = int32_t(std::min<int64_t>(kPairColumns / (call.num_heads / call.num_kv_heads), std::max<int64_t>(2, most / alone)));
  const int32_t shares = (item.num_rows + rows - 1) / rows;
  return (item.num_rows + shares - 1) / shares;
}

// Calls take(item, column_start, num_columns, front) for each share of the items' columns, at most `width` of them.
template <class Take>
void cut_items(const AttentionCall& call, bool forks, int32_t width, Take take) {
  const int32_t group = call.num_heads / call.num_kv_heads;
  const auto* items = reinterpret_cast<const WorkItem*>(call.items);
  for (int64_t i = 0; i < call.num_items; ++i) {
    const WorkItem& item = items[i];
    int32_t front = 0, rows = item.num_rows;  // rows: of a share of the item, before columns are counted
    if (item.shared_stop < item.kv_stop) {
      front = (item.shared_stop - item.kv_start) / kStep * kStep;
      rows = forks && front > 0 ? rows_of_fork(call, item, front) : 1;
      if (rows < 2) front = 0;
    }
    for (int32_t row = 0; row < item.num_rows; row += rows) {
      const int32_t stop = std::min(row + rows, item.num_rows) * group, shares = (stop - row * group + width - 1) / width;
      // Even shares, of whole pairs of tiles.
      const int32_t share = ((stop - row * group + shares - 1) / shares + kPairColumns - 1) / kPairColumns * kPairColumns;
      for (int32_t column = row * group; column < stop; column += share) take(item, column, std::min(share, stop - column), front);
    }
  }
}

// About what a chunk's columns take: packing it costs about as much as two tiles of them.
int64_t chunk_cost(int32_t num_columns, int32_t num_positions) {
  return int64_t((num_columns + kTileColumns - 1) / kTileColumns + 2) * std::max(0, num_positions);
}

}  // namespace

const AttentionUnit* attention_units(const AttentionCall& call, bool forks, int64_t* num_units) {
  const int32_t group = call.num_heads / call.num_kv_heads;
  auto units_of = [&](int32_t width) {
    int64_t total = 0;
    cut_items(call, forks, width, [&](const WorkItem&, int32_t, int32_t, int32_t) { total += call.num_kv_heads; });
    return total;
  };
  // Wide units pack a chunk for more columns, narrow ones are shared out more evenly.
  const int32_t wide = std::max(kUnitColumns * 64 / std::max(call.head_dim, 64) / kPairColumns * kPairColumns, kLeastWide);
  const int32_t width = units_of(wide) < 8 * num_threads() ? wide / 2 : wide;
  auto* units = static_cast<AttentionUnit*>(scratch(kScratchUnits, sizeof(AttentionUnit) * units_of(width)));
  AttentionUnit* next = units;
  cut_items(call, forks, width, [&](const WorkItem& item, int32_t column, int32_t count, int32_t front) {
    int32_t last = -1;
    int64_t cost = 0;
    for (int32_t row = column / group; row <= (column + count - 1) / group; ++row) {
      const int32_t position = call.positions[item.row_start + row];
      last = std::max(last, position);
      if (front > 0) cost += chunk_cost(group, std::min(item.kv_stop, position + 1) - item.kv_start - front);
    }
    const int32_t kv_stop = std::min(item.kv_stop, last + 1);
    cost += chunk_cost(count, front > 0 ? front : kv_stop - item.kv_start);
    for (int32_t head = 0; head < call.num_kv_heads; ++head) *next++ = {&item, head, column, count, kv_stop, front, cost};
  });
  *num_units = next - units;
  std::stable_sort(units, next, [](const AttentionUnit& a, const AttentionUnit& b) { return a.cost > b.cost; });
  return units;
}

}  // namespace batchllm
