// What the sources of the native kernels share: the calls that come in through the C interface, and one table of functions a path.
//
// A path is one instruction set. Its functions are compiled in a namespace of its own with its own compiler flags, and call no inline
// function or template of the standard library over types of other namespaces: the linker keeps one copy of those, and it may be the one
// with the wrong instructions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace batchllm {

using bf16 = uint16_t;

enum DataType : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };

inline constexpr int kChunk = 256;          // positions at which spans are cut, kernels/attention.py CHUNK
inline constexpr int kStep = 32;            // attention: positions that are summed in one step
inline constexpr int kTileColumns = 16;     // attention: (row, head) pairs of one tile
inline constexpr int kPairColumns = 2 * kTileColumns;  // attention: two tiles that are multiplied together, each key loaded once for both
inline constexpr int kUnitColumns = 640;    // attention: pairs that read one packed chunk, at most
inline constexpr int kBlockRows = 32;       // linear: rows of one block

// Fields as in kernels/attention.py AttentionPlan.
struct AttentionCall {
  const void* query;
  void* out;
  const void* kv;  // keys of the layer in block 0
  int64_t block_stride;  // in elements
  int64_t num_rows;
  int32_t data_type, num_heads, num_kv_heads, head_dim, block_size;
  const int32_t* positions;
  const int32_t* tables;
  const int32_t* block_table;
  int64_t max_blocks;
  const int32_t* items;
  int64_t num_items;
  const int32_t* merge_rows;
  const int32_t* merge_start;
  const int32_t* merge_partials;
  int64_t num_merge_rows;
  int64_t num_partials;
  float scale;
  const struct AttentionUnit* units;  // of these items, from the path's attention_units; null: the call makes them
  int64_t num_units;
};

struct WorkItem {
  int32_t row_start, num_rows, kv_start, kv_stop, shared_stop, partial;
};

// What one thread runs without interruption: some (row, head) columns of one item under one KV head, over all chunks of the item.
struct AttentionUnit {
  const WorkItem* item;
  int32_t kv_head, column_start, num_columns, kv_stop;  // kv_stop: behind the last position that one of the rows sees
  int32_t front;  // positions of its one chunk, a multiple of kStep, behind which each row reads alone; 0: its rows read the same blocks
  int64_t cost;
};

// Longest first. The units lie in the calling thread's scratch. `forks`: whether there may be units with a front; without, each row of an
// item whose rows go on alone is a unit of its own.
const AttentionUnit* attention_units(const AttentionCall& call, bool forks, int64_t* num_units);

enum LinearEnd : int32_t { kStore = 0, kAdd = 1, kSiluMul = 2, kRopeWriteKv = 3, kArgmax = 4, kStoreFloat = 5 };

struct RopeTarget {
  const float* cos_sin;  // [max_position, head_dim]
  const int32_t* positions;
  const int64_t* slots;
  void* kv;  // keys of the layer in block 0
  int64_t block_stride;
  int32_t num_heads, num_kv_heads, head_dim, block_size;
};

struct LinearCall {
  const void* x;  // [num_rows, in_size]
  const void* weight;  // packed, see linear.h and linear_int8.h
  const float* bias;  // [out_size] in the packed order, or null
  void* out;
  int64_t num_rows, in_size, out_size;
  int64_t x_stride, out_stride;  // elements between rows; out_stride: of the ends that write whole rows of T
  int32_t data_type, weight_type, end;  // weight_type: data_type, or kInt8
  RopeTarget rope;
};

// For all rows of `residual` [num_rows, size]: residual += output(attended), then residual += down(silu(gate) * up) of the normed rows, then
// queries, keys and values of the rows normed again. The products' `end`, strides and rows between them are left out. Without weight `output`,
// and all that ends a layer with it, is left out, and so is `qkv`, with all that begins one.
struct BetweenAttentionCall {
  void* residual;
  int64_t num_rows, size;
  float eps;
  int32_t data_type;
  LinearCall output;
  const void* feed_forward_norm;
  LinearCall gate_up, down;
  const void* attention_norm;
  LinearCall qkv;
};

// A product's weight as NativeLinear has it.
struct PackedWeight {
  const void* weight;
  const float* bias;
  int64_t in_size, out_size;
  int32_t weight_type, gated;
};

struct LayerWeights {
  const void* attention_norm;
  PackedWeight qkv, output;
  const void* feed_forward_norm;
  PackedWeight gate_up, down;
};
static_assert(sizeof(LayerWeights) == 4 * sizeof(PackedWeight) + 16 && sizeof(PackedWeight) == 40, "as layers.py lists them");

// All layers up to the last one's attention. `rope` and `attention` are the first layer's; the next one's keys lie `layer_bytes` further. The last
// one attends `last_items`, of which less than 0 stand for those of `attention`; where there are none the call ends before it. Rows of one
// operation for the next are `query` and `attended`, and, where rows do not go through all products between two attentions at once, `normed`,
// `gated` and `wide`: a product before it is gated or turned.
struct LayersCall {
  void* residual;
  int64_t num_rows, size;
  float eps;
  int32_t data_type;
  const LayerWeights* layers;
  int64_t num_layers;
  void* query;
  void* attended;
  void* normed;
  void* gated;
  void* wide;
  int64_t layer_bytes;
  RopeTarget rope;
  AttentionCall attention;
  const int32_t* last_items;
  int64_t num_last_items;
};

// What follows the last attention, for the rows `rows` [num_chosen] of `residual` and `attended`: `end`, and the final norm, to `out`. Where they
// are all rows, in order, `residual` itself changes, else copies do. `normed`, `gated`, `wide`: as in LayersCall, for the chosen rows.
struct LastRowsCall {
  void* residual;
  const void* attended;
  int64_t num_rows, size;
  float eps;
  int32_t data_type;
  const LayerWeights* end;
  const int64_t* rows;
  int64_t num_chosen;
  const void* norm;
  void* out;
  void* normed;
  void* gated;
  void* wide;
};

struct PathTable {
  void (*attention)(const AttentionCall&);
  const AttentionUnit* (*attention_units)(const AttentionCall&, int64_t* num_units);
  void (*linear)(const LinearCall&);
  void (*linear_int8)(const LinearCall&);
  void (*between_attention)(const BetweenAttentionCall&);
  void (*rms_norm)(const void* x, const void* weight, void* residual, void* out, int64_t num_rows, int64_t size, float eps,
                   int32_t data_type);
  void (*silu_mul)(const void* gate_up, void* out, int64_t num_rows, int64_t size, int32_t data_type);
  void (*rope_write_kv)(const void* qkv, void* query, int64_t num_rows, int32_t data_type, const RopeTarget& target);
};

extern const PathTable kPortableTable;
extern const PathTable kAvx2Table;
extern const PathTable kAvx512Table;
extern const PathTable kAmxTable;

// `linear` takes weights of any type.
void to_last_attention(const LayersCall& call, const PathTable& table, void (*linear)(const LinearCall&));
// Whether `rows` are rows: else nothing is done.
bool after_last_attention(const LastRowsCall& call, const PathTable& table, void (*linear)(const LinearCall&));

// Whole blocks of memory, on torch's threads where they are many; a null list of ids counts 0, 1, 2, ...
void copy_whole(char* to, int64_t to_stride, const int64_t* to_ids, const char* from, int64_t from_stride, const int64_t* from_ids,
                int64_t count, int64_t num_bytes);
// Rows `ids` of a plain packed weight of `num_outputs` rows, in words of 4 bytes, `row_words` of them a row. Whether all are rows: else nothing
// is done.
bool packed_rows(const uint32_t* weight, uint32_t* out, const int64_t* ids, int64_t num_ids, int64_t num_outputs, int64_t row_words);

// What the paths with dot products of int8 have of their own.
void linear_int8_avx2_vnni(const LinearCall& call);
void linear_int8_avx512_vnni(const LinearCall& call);

// 64-byte aligned memory of the calling thread that lives until the thread ends; one use a slot. Aborts when there is none left.
enum ScratchSlot { kScratchUnits, kScratchCall, kScratchRows, kScratchPartials, kScratchThread, kScratchBetween, kScratchChosen, kNumScratchSlots };
void* scratch(ScratchSlot slot, size_t num_bytes);

// Copies `num_bytes`, more than 240, and returns their XXH3 of 64 bits. On the calling thread alone.
uint64_t copy_checksum(void* to, const void* from, int64_t num_bytes, bool has_avx512);

// Kinds of blocks of 32 weights, the numbers of kernels/dequantise.py.
enum BlockKind : int32_t { kQ4_0 = 0, kQ4_1 = 1, kQ8_0 = 2, kNumBlockKinds = 3 };
// `num_blocks` blocks to float32 or bfloat16, on torch's threads.
void dequantise(const void* from, void* to, int64_t num_blocks, int kind, int data_type, bool has_avx2);

// Of torch's team; 1 where the caller is in a team already.
int num_threads();

}  // namespace batchllm
