// The feed-forward part of a layer: norm, gate and up with their product, down added to the residual stream. Each thread takes some rows
// through all of it: what it writes between the products stays in its second cache level, and no thread waits for another.
#pragma once

#include "linear.h"

namespace batchllm {
namespace BATCHLLM_PATH {

inline constexpr int64_t kPassRows = 256;  // rows that go through together: more would not stay, fewer would read the weights too often

// Numbers between rows of `size`: not a multiple of 512, so that rows can be multiplied as they lie.
inline int64_t gated_stride(int64_t size) { return size % 512 == 0 ? size + 32 : size; }

// All of `call` for its rows by one thread, `packed` [blocks] for those that cannot be read as they lie. [next, next_stop): as in Work.
template <class Multiplier>
void multiply_alone(const LinearCall& call, Multiplier& multiplier, float* y, char* packed, const char* next, const char* next_stop) {
  using T = typename Multiplier::Number;
  const bool reads_rows = Multiplier::reads_rows(call);
  const size_t block_bytes = Multiplier::block_bytes(call.in_size);
  const int64_t blocks = (call.num_rows + kBlockRows - 1) / kBlockRows;
  const auto rows_of = [&](int64_t b) { return int(call.num_rows - b * kBlockRows < kBlockRows ? call.num_rows - b * kBlockRows : kBlockRows); };
  for (int64_t b = 0; b < blocks; ++b)
    if (!reads_rows || rows_of(b) % 16 != 0)
      Multiplier::pack_block(static_cast<const T*>(call.x) + b * kBlockRows * call.x_stride, call.x_stride, rows_of(b), call.in_size,
                             packed + (reads_rows ? 0 : b) * block_bytes);
  const auto block_at = [&](int64_t b, int64_t* first_row, int* rows) -> typename Multiplier::Block {
    *first_row = b * kBlockRows;
    *rows = rows_of(b);
    if (reads_rows && *rows % 16 == 0) return Multiplier::rows_block(call, *first_row);
    return Multiplier::packed_block(packed + (reads_rows ? 0 : b) * block_bytes, call.in_size);
  };
  Work<Multiplier> work(call, multiplier, y, nullptr);
  const int64_t tiles = (call.out_size + 15) / 16;
  work.multiply(0, (tiles + work.group_tiles - 1) / work.group_tiles, 0, blocks, block_at, next, next_stop);
  work.beside.finish_rest();
}

template <class Multiplier>
void run_feed_forward(const FeedForwardCall& call) {
  using T = typename Multiplier::Number;
  LinearCall gate_up = call.gate_up, down = call.down;
  const int64_t num_rows = gate_up.num_rows, size = gate_up.in_size, stride = gated_stride(down.in_size);
  const int threads = num_threads();
  T* residual = static_cast<T*>(call.residual);
  gate_up.end = kSiluMul, gate_up.x_stride = size, gate_up.out_stride = stride;
  down.end = kAdd, down.x_stride = stride, down.out_stride = size;
  if (num_rows < Shares::kRangeRows * threads) {
    // Too few for each thread to read all weights: they share them.
    T* normed = static_cast<T*>(scratch(kScratchFeedForward, sizeof(T) * num_rows * (size + stride)));
    gate_up.x = normed, down.x = gate_up.out = normed + num_rows * size, down.out = residual;
    rms_norm_rows<T>(residual, call.norm_weight, nullptr, normed, num_rows, size, call.eps);
    run_linear<Multiplier>(gate_up);
    run_linear<Multiplier>(down);
    return;
  }
  const int64_t num_passes = (num_rows + threads * kPassRows - 1) / (threads * kPassRows) * threads;
  const int64_t pass_rows = ((num_rows + num_passes - 1) / num_passes + 15) / 16 * 16;
  const int64_t blocks = (pass_rows + kBlockRows - 1) / kBlockRows;
  const size_t packed_bytes = blocks * (Multiplier::block_bytes(size) > Multiplier::block_bytes(down.in_size) ? Multiplier::block_bytes(size)
                                                                                                             : Multiplier::block_bytes(down.in_size));
  gate_up.num_rows = down.num_rows = pass_rows;
  const size_t y_bytes = 2 * sizeof(float) * Work<Multiplier>::y_numbers(Multiplier::group_tiles(pass_rows));
  const size_t rows_bytes = (sizeof(T) * pass_rows * (size + stride) + 63) / 64 * 64;
#pragma omp parallel num_threads(threads)
  {
    Multiplier multiplier;
    char* memory = static_cast<char*>(scratch(kScratchThread, y_bytes + rows_bytes + packed_bytes));
    float* y = reinterpret_cast<float*>(memory);
    T* normed = reinterpret_cast<T*>(memory + y_bytes);
    char* packed = memory + y_bytes + rows_bytes;
#pragma omp for schedule(static) nowait
    for (int64_t pass = 0; pass < num_passes; ++pass) {
      const int64_t first_row = pass * pass_rows;
      const int64_t rows = num_rows - first_row < pass_rows ? num_rows - first_row : pass_rows;
      if (rows <= 0) continue;
      T* stream = residual + first_row * size;
      for (int64_t row = 0; row < rows; ++row)
        rms_norm_row<T>(stream + row * size, static_cast<const T*>(call.norm_weight), nullptr, normed + row * size, size, call.eps);
      LinearCall first = gate_up, second = down;
      first.num_rows = second.num_rows = rows;
      first.x = normed, second.x = first.out = normed + pass_rows * size, second.out = stream;
      multiply_alone(first, multiplier, y, packed, Multiplier::weight_tile(down, 0), Multiplier::weight_tile(down, 4));
      multiply_alone(second, multiplier, y, packed, Multiplier::weight_tile(gate_up, 0), Multiplier::weight_tile(gate_up, 8));
    }
  }
}

}  // namespace BATCHLLM_PATH
}  // namespace batchllm
