// Units with a front on tile units: columns of rows that share the first positions of a chunk and read the rest each for itself. Both parts
// are multiplied as they lie, with the columns as the other operand.
#pragma once

#include "attention_amx.h"

namespace batchllm {
namespace BATCHLLM_PATH {

// A unit with a front: what its rows share is multiplied for all columns at once, what each goes on to read for its own. Each column's
// scores lie in a row as ever, and its sums run on from the front's, so they are those of the row alone.
inline void TileEngine::multiply_forked(int steps, const int32_t* visible, int num_columns, const Partials& result, Ahead<bf16>& ahead) {
  const int num_rows = unit_chunk_->num_apart, group = num_columns / num_rows, front = unit_chunk_->together.count;
  int apart_steps = 0;
  for (int row = 0; row < num_rows; ++row) apart_steps += (unit_chunk_->apart[row].count + kStep - 1) / kStep;
  ahead.spread(apart_steps * (2 * kAskApart + kAskWeighing) + front / kStep * (2 * kAskFront + kAskFrontValues) + num_columns * steps);
  configure(group <= kNarrow ? kNarrow : 16);
  for (int row = 0; row < num_rows; ++row) score_apart(row, group, front, ahead);
  configure(16);
  chunk_ = &unit_chunk_->together;
  score_front(num_columns, ahead);
  softmax<true>(visible, num_columns, steps, result, ahead);
  for (int start = 0; start < front; start += kStep) {
    pack_values(start, start / kStep);
    ahead.ask_shares(kAskFrontValues);
  }
  weigh_packed(front / kStep, num_columns, result.a);
  configure(group <= kNarrow ? kNarrow : 16);
  for (int row = 0; row < num_rows; ++row) weigh_apart(row, group, front, result.a, ahead);
}

// Scores of what one row reads alone, behind those of the front. Narrow tiles write a column too many, which the next row puts right.
inline void TileEngine::score_apart(int row, int group, int front, Ahead<bf16>& ahead) {
  chunk_ = &unit_chunk_->apart[row];
  const int num_tiles = (chunk_->count + 15) / 16;
  amx::barrier();
  for (int p = 0; p < num_tiles; ++p) {
    const bf16* rows = key_rows(16 * p);
    _tile_zero(0);
    for (int k = 0; k < depth_tiles_; ++k) {
      _tile_loadd(2, fork_query(k, group * row), 4 * kForkColumns);
      _tile_loadd(1, rows + 32 * k, 2 * head_dim_);
      _tile_dpbf16ps(0, 1, 2);
    }
    _tile_stored(0, turned_ + 16 * columns_ * p, 4 * columns_);
    amx::barrier();
    ahead.ask_shares(kAskApart);
  }
  float* to = scores_ + group * row * kScoreStride + front;
  for (int p = 0; p < num_tiles; ++p) {
    if (columns_ == kNarrow) {
      turn_narrow(turned_ + 16 * kNarrow * p, to + 16 * p);
    } else {
      turn_wide(turned_ + 256 * p, to + 16 * p, group);
    }
  }
}

// Scores of the front for one or two tiles of columns.
inline void TileEngine::score_front(int num_columns, Ahead<bf16>& ahead) const {
  const int num_tiles = chunk_->count / 16;
  const bool both = num_columns > kTileColumns;
  float* second = turned_ + kTileColumns * kChunk;
  amx::barrier();
  for (int p = 0; p < num_tiles; ++p) {
    const bf16* rows = key_rows(16 * p);
    _tile_zero(0);
    _tile_zero(3);
    for (int k = 0; k < depth_tiles_; ++k) {
      _tile_loadd(1, rows + 32 * k, 2 * head_dim_);
      _tile_loadd(2, fork_query(k, 0), 4 * kForkColumns);
      _tile_dpbf16ps(0, 1, 2);
      if (!both) continue;
      _tile_loadd(4, fork_query(k, kTileColumns), 4 * kForkColumns);
      _tile_dpbf16ps(3, 1, 4);
    }
    _tile_stored(0, turned_ + 256 * p, 64);
    if (both) _tile_stored(3, second + 256 * p, 64);
    amx::barrier();
    ahead.ask_shares(kAskFront);
  }
  for (int p = 0; p < num_tiles; ++p) {
    turn_wide(turned_ + 256 * p, scores_ + 16 * p, both ? kTileColumns : num_columns);
    if (both) turn_wide(second + 256 * p, scores_ + kTileColumns * kScoreStride + 16 * p, num_columns - kTileColumns);
  }
}

// The sums of a row's columns over the front, and on over what the row reads alone.
inline void TileEngine::weigh_apart(int row, int group, int front, float* a, Ahead<bf16>& ahead) {
  chunk_ = &unit_chunk_->apart[row];
  const int steps = (chunk_->count + kStep - 1) / kStep;
  const bf16* weights = weights_ + group * row * kWeightStride + front;
  for (int first = 0; first < head_dim_; first += 64)
    weigh_direct<true>(steps, first, group, weights, a + group * row * width_tiles_ * 16, ahead);
}

}  // namespace BATCHLLM_PATH
}  // namespace batchllm
