// y = x W^T + b over int8 weights and rows that are rounded to int8 on the way in. Meaning: kernels/linear.py. The products are whole
// numbers summed without rounding, and what follows is one order of float operations, so all paths give the same sums bit for bit.
//
// Packed weights are tiles of 16 outputs: float32 scales [16]; int32 [16], each output's sum of weights times 128; int8
// [padded inputs / 4, 16, 4] where inputs are padded with zeros to a multiple of 64. Tile units and vector units read the same form.
//
// A multiplier works on blocks of 32 rows; it has
//   static size_t block_bytes(in_size)                      a packed block: float32 scales [32], then rows
//   static void pack_block<T>(x, x_stride, rows, in_size, to)
//   void multiply(block, rows, weight, in_size, num_tiles, y)   y [32, 16 * num_tiles] float32
#pragma once

#include "linear.h"

namespace batchllm {
namespace BATCHLLM_PATH {

inline constexpr int kInt8Rows = 32;  // rows of one block
inline constexpr size_t kInt8ScaleBytes = kInt8Rows * sizeof(float);
inline constexpr int64_t kInt8HeaderBytes = 128;  // scales and sums in front of a tile's weights

BATCHLLM_INLINE int64_t int8_padded(int64_t in_size) { return (in_size + 63) / 64 * 64; }
BATCHLLM_INLINE int64_t int8_tile_bytes(int64_t in_size) { return kInt8HeaderBytes + 16 * int8_padded(in_size); }

// Sixteen whole numbers of at most 127 as int8, as uint8 raised by 128, or as int16.
#if defined(__AVX512F__)
BATCHLLM_INLINE void store_rounded(int8_t* to, Vec a) { _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v))); }
BATCHLLM_INLINE void store_rounded(uint8_t* to, Vec a) {
  _mm_storeu_si128((__m128i*)to, _mm_xor_si128(_mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)), _mm_set1_epi8(char(0x80))));
}
BATCHLLM_INLINE void store_rounded(int16_t* to, Vec a) {
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a.v)));
}
#elif defined(__AVX2__)
BATCHLLM_INLINE __m256i rounded_words(Vec a) {
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(a.lo.v), _mm256_cvtps_epi32(a.hi.v)), 0xd8);
}
BATCHLLM_INLINE void store_rounded(int16_t* to, Vec a) { _mm256_storeu_si256((__m256i*)to, rounded_words(a)); }
BATCHLLM_INLINE void store_rounded(uint8_t* to, Vec a) {
  const __m256i words = rounded_words(a);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128((__m128i*)to, _mm_xor_si128(bytes, _mm_set1_epi8(char(0x80))));
}
#else
BATCHLLM_INLINE void store_rounded(int16_t* to, Vec a) {
  float numbers[16];
  store(numbers, nearest(a));
  for (int i = 0; i < 16; ++i) to[i] = int16_t(numbers[i]);
}
#endif

// The largest magnitude as the bits of a float, which are in the order of the numbers; above those of infinity for what is none.
BATCHLLM_INLINE uint32_t largest_bits(const bf16* x, int64_t size) {
  int16_t largest = 0;
  for (int64_t i = 0; i < size; ++i) {
    const int16_t bits = int16_t(x[i] & 0x7fff);
    largest = bits > largest ? bits : largest;
  }
  return uint32_t(largest) << 16;
}
BATCHLLM_INLINE uint32_t largest_bits(const float* x, int64_t size) {
  int32_t largest = 0;
  for (int64_t i = 0; i < size; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return uint32_t(largest);
}

// Rounds a row to at most 127 in magnitude, pieces of 64 numbers `piece_stride` apart, and returns what one unit is worth. A row with
// a number that is not finite becomes zeros worth no number, so that all its outputs say so.
template <class T, class To>
BATCHLLM_INLINE float quantise_row(const T* x, int64_t in_size, To* to, int64_t piece_stride) {
  const uint32_t bits = largest_bits(x, in_size);
  const bool is_finite = bits < 0x7f800000u;
  float largest;
  std::memcpy(&largest, &bits, sizeof(largest));
  largest = largest > 1e-30f ? largest : 1e-30f;
  const Vec factor = broadcast(127.0f / largest), zero = broadcast(0.0f);
  for (int64_t piece = 0; 64 * piece < in_size; ++piece) {
    To* target = to + piece * piece_stride;
    const T* from = x + 64 * piece;
    const int64_t count = in_size - 64 * piece;
    for (int i = 0; i < 64; i += 16)
      store_rounded(target + i, is_finite && i < count ? load_some(from + i, count - i < 16 ? int(count - i) : 16) * factor : zero);
  }
  return is_finite ? largest / 127.0f : __builtin_nanf("");
}

template <class Multiplier, class T>
void run_linear_int8(const LinearCall& call) {
  if (call.num_rows == 0) return;
  const int64_t tiles = (call.out_size + 15) / 16, tile_bytes = int8_tile_bytes(call.in_size);
  const int group_tiles = call.end == kRopeWriteKv ? call.rope.head_dim / 16 : 4;
  const int64_t groups = (tiles + group_tiles - 1) / group_tiles;
  const int64_t blocks = (call.num_rows + kInt8Rows - 1) / kInt8Rows;
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
  const int64_t work = call.num_rows * call.in_size * call.out_size;
  // Few rows are packed by each thread for itself: that costs less than to wait for each other.
  const bool packs_alone = blocks <= 2;
#pragma omp parallel num_threads(threads) if (work > 1 << 18)
  {
    Multiplier multiplier;
    const size_t y_bytes = sizeof(float) * kInt8Rows * 16 * kMaxGroupTiles;
    char* memory = static_cast<char*>(scratch(kScratchThread, y_bytes + (packs_alone ? block_bytes * blocks : 0)));
    float* y = reinterpret_cast<float*>(memory);
    char* thread_packed = packs_alone ? memory + y_bytes : packed;
    Best* thread_best = best + omp_get_thread_num() * call.num_rows;
    if (call.end == kArgmax)
      for (int64_t i = 0; i < call.num_rows; ++i) thread_best[i] = {-__builtin_inff(), call.out_size};
    auto rows_of = [&](int64_t b) { return int(call.num_rows - b * kInt8Rows < kInt8Rows ? call.num_rows - b * kInt8Rows : kInt8Rows); };
    auto pack = [&](int64_t b) {
      Multiplier::pack_block(static_cast<const T*>(call.x) + b * kInt8Rows * call.x_stride, call.x_stride, rows_of(b), call.in_size,
                             thread_packed + b * block_bytes);
    };
    if (packs_alone) {
      for (int64_t b = 0; b < blocks; ++b) pack(b);
    } else {
#pragma omp for schedule(static)
      for (int64_t b = 0; b < blocks; ++b) pack(b);
    }
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t part = 0; part < row_parts * group_parts; ++part) {
      const int64_t first_block = part / group_parts * stay, first_group = part % group_parts * part_groups;
      const int64_t last_block = first_block + stay < blocks ? first_block + stay : blocks;
      const int64_t last_group = first_group + part_groups < groups ? first_group + part_groups : groups;
      for (int64_t g = first_group; g < last_group; ++g) {
        const int64_t tile = g * group_tiles;
        const int num_tiles = int(tiles - tile < group_tiles ? tiles - tile : group_tiles);
        const char* weight = static_cast<const char*>(call.weight) + tile * tile_bytes;
        for (int64_t b = first_block; b < last_block; ++b) {
          multiplier.multiply(thread_packed + b * block_bytes, rows_of(b), weight, call.in_size, num_tiles, y);
          finish_block<T>(call, y, b * kInt8Rows, rows_of(b), tile, num_tiles, thread_best);
        }
      }
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

template <class Multiplier>
void linear_int8_by_type(const LinearCall& call) {
  if (call.data_type == kBFloat16) return run_linear_int8<Multiplier, bf16>(call);
  run_linear_int8<Multiplier, float>(call);
}

}  // namespace BATCHLLM_PATH
}  // namespace batchllm
