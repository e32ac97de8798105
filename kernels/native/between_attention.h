// What happens to rows between a layer's attention and the next one's: output projection, feed-forward part, norm, queries, keys and values.
// Each thread takes some rows through all of it: what it writes between the products stays in its second cache level, and no thread waits for
// another.
#pragma once

#include "linear.h"

namespace batchllm {
namespace BATCHLLM_PATH {

inline constexpr int64_t kPassRows = 256;  // rows that go through together: more would not stay, fewer would read the weights too often
inline constexpr int64_t kOwnRows = 96;     // fewer rows of its own cost a thread more for all the weights than they save

// Numbers between rows of `size`: not a multiple of 512, so that rows can be multiplied as they lie.
inline int64_t gated_stride(int64_t size) { return size % 512 == 0 ? size + 32 : size; }

// All of `call` for its rows by one thread, `packed` [blocks] for those that cannot be read as they lie. `next`: as in Work.
template <class Multiplier>
void multiply_alone(const LinearCall& call, Multiplier& multiplier, float* y, char* packed, const Weights& next) {
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
  work.multiply(0, Work<Multiplier>::num_groups(call), 0, blocks, block_at, next);
  work.beside.finish_rest();
}

// The products of a call in the order in which rows go through them.
template <class Multiplier>
struct RowProducts {
  LinearCall calls[4];
  Weights first_weights[4];
  int count = 0;

  void add(const LinearCall& call) {
    first_weights[count] = Work<Multiplier>::first_weights(call, 0, Work<Multiplier>::num_groups(call), (call.num_rows + kBlockRows - 1) / kBlockRows);
    calls[count++] = call;
  }

  // The first weights that are wanted after product `i`, of this pass or of the next; the last pass may have fewer rows than it is counted for.
  Weights next(int i) const { return first_weights[(i + 1) % count]; }

  size_t packed_bytes(int64_t blocks) const {
    size_t most = 0;
    for (int i = 0; i < count; ++i) {
      const size_t bytes = blocks * Multiplier::block_bytes(calls[i].in_size);
      most = bytes > most ? bytes : most;
    }
    return most;
  }

  // The last pass may have so few rows that more tiles are multiplied at once.
  size_t y_bytes() const {
    int most = Multiplier::group_tiles(1);
    for (int i = 0; i < count; ++i) {
      const int tiles = Work<Multiplier>::group_tiles_of(calls[i]);
      most = tiles > most ? tiles : most;
    }
    return 2 * sizeof(float) * Work<Multiplier>::y_numbers(most);
  }
};

// `call` for its rows from `first_row` on alone, `num_rows` of them.
template <class T>
LinearCall rows_of_call(LinearCall call, int64_t first_row, int64_t num_rows) {
  call.num_rows = num_rows;
  if (call.x != nullptr) call.x = static_cast<const T*>(call.x) + first_row * call.x_stride;
  if (call.end == kRopeWriteKv) {
    call.out = static_cast<T*>(call.out) + first_row * call.rope.num_heads * call.rope.head_dim;
    call.rope.positions += first_row, call.rope.slots += first_row;
  } else if (call.out != nullptr) {
    call.out = static_cast<T*>(call.out) + first_row * call.out_stride;
  }
  return call;
}

// Passes of rows, as many for each thread: neighbours, so that rows stay in one core's caches from operation to operation. Who has done its own
// takes another's, which is late: its core had other things to do.
class PassShares {
 public:
  PassShares(int64_t num_passes, int threads) : each_(num_passes / threads), threads_(threads) {
    taken_ = static_cast<int64_t*>(scratch(kScratchBetween, sizeof(int64_t) * kStride * threads));
    std::memset(taken_, 0, sizeof(int64_t) * kStride * threads);
  }

  // The calling thread's next pass, or one that does not exist.
  int64_t take() {
    for (int i = 0; i < threads_; ++i) {
      const int owner = (omp_get_thread_num() + i) % threads_;
      const int64_t number = __atomic_fetch_add(&taken_[owner * kStride], 1, __ATOMIC_RELAXED);
      if (number < each_) return owner * each_ + number;
    }
    return each_ * threads_;
  }

 private:
  static constexpr int kStride = 8;  // a cache line
  int64_t each_;
  int threads_;
  int64_t* taken_;
};

template <class Multiplier>
void run_between_attention(const BetweenAttentionCall& call) {
  using T = typename Multiplier::Number;
  LinearCall output = call.output, gate_up = call.gate_up, down = call.down, qkv = call.qkv;
  const bool ends = output.weight != nullptr, starts = qkv.weight != nullptr;
  const int64_t num_rows = call.num_rows, size = call.size, stride = ends ? gated_stride(down.in_size) : 0;
  const int threads = num_threads();
  T* residual = static_cast<T*>(call.residual);
  output.end = down.end = kAdd, gate_up.end = kSiluMul, qkv.end = kRopeWriteKv;
  output.out = down.out = residual, output.out_stride = down.out_stride = size;
  gate_up.x_stride = qkv.x_stride = size, gate_up.out_stride = down.x_stride = stride;
  if (num_rows < kOwnRows * threads) {
    // Too few for each thread to read all weights: they share them.
    T* normed = static_cast<T*>(scratch(kScratchBetween, sizeof(T) * num_rows * (size + stride)));
    gate_up.x = qkv.x = normed, down.x = gate_up.out = normed + num_rows * size;
    if (ends) {
      run_linear<Multiplier>(output);
      rms_norm_rows<T>(residual, call.feed_forward_norm, nullptr, normed, num_rows, size, call.eps);
      run_linear<Multiplier>(gate_up);
      run_linear<Multiplier>(down);
    }
    if (starts) {
      rms_norm_rows<T>(residual, call.attention_norm, nullptr, normed, num_rows, size, call.eps);
      run_linear<Multiplier>(qkv);
    }
    return;
  }
  const int64_t num_passes = (num_rows + threads * kPassRows - 1) / (threads * kPassRows) * threads;
  const int64_t pass_rows = ((num_rows + num_passes - 1) / num_passes + 15) / 16 * 16;
  output.num_rows = gate_up.num_rows = down.num_rows = qkv.num_rows = pass_rows;
  RowProducts<Multiplier> products;
  if (ends) products.add(output), products.add(gate_up), products.add(down);
  if (starts) products.add(qkv);
  const size_t y_bytes = products.y_bytes();
  const size_t rows_bytes = (sizeof(T) * pass_rows * (size + stride) + 63) / 64 * 64;
  const size_t packed_bytes = products.packed_bytes((pass_rows + kBlockRows - 1) / kBlockRows);
  PassShares shares(num_passes, threads);
#pragma omp parallel num_threads(threads)
  {
    Multiplier multiplier;
    char* memory = static_cast<char*>(scratch(kScratchThread, y_bytes + rows_bytes + packed_bytes));
    float* y = reinterpret_cast<float*>(memory);
    T* normed = reinterpret_cast<T*>(memory + y_bytes);
    T* gated = normed + pass_rows * size;
    char* packed = memory + y_bytes + rows_bytes;
    for (int64_t pass = shares.take(); pass < num_passes; pass = shares.take()) {
      const int64_t first_row = pass * pass_rows;
      const int64_t rows = num_rows - first_row < pass_rows ? num_rows - first_row : pass_rows;
      if (rows <= 0) continue;
      T* stream = residual + first_row * size;
      int number = 0;
      const auto norm = [&](const void* weight) {
        for (int64_t row = 0; row < rows; ++row)
          rms_norm_row<T>(stream + row * size, static_cast<const T*>(weight), nullptr, normed + row * size, size, call.eps);
      };
      const auto multiply = [&](const LinearCall& product) {
        multiply_alone(product, multiplier, y, packed, products.next(number));
        ++number;
      };
      if (ends) {
        multiply(rows_of_call<T>(output, first_row, rows));
        norm(call.feed_forward_norm);
        LinearCall first = gate_up, second = down;
        first.num_rows = second.num_rows = rows;
        first.x = normed, second.x = first.out = gated, second.out = stream;
        multiply(first);
        multiply(second);
      }
      if (starts) {
        norm(call.attention_norm);
        LinearCall last = rows_of_call<T>(qkv, first_row, rows);
        last.x = normed;
        multiply(last);
      }
    }
  }
}

}  // namespace BATCHLLM_PATH
}  // namespace batchllm
