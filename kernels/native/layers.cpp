// A forward pass in the order of kernels/layers.py: all layers up to the last one's attention, and what follows it. Compiled for any processor.
#include "native.h"

namespace batchllm {
namespace {

bool is_plain(const PackedWeight& packed, int32_t data_type) { return packed.weight_type == data_type; }

// Whether rows can go through all products at once: plain weights, whole tiles.
bool end_goes_through(const LayerWeights& layer, int32_t data_type) {
  return is_plain(layer.output, data_type) && is_plain(layer.gate_up, data_type) && is_plain(layer.down, data_type) && layer.gate_up.gated;
}
bool start_goes_through(const LayerWeights& layer, int32_t data_type, int32_t head_dim) {
  return is_plain(layer.qkv, data_type) && head_dim % 16 == 0;
}

// What happens to rows between two attentions, or behind the last one. `attended`: what the attention gave; `query`: where the next one's go;
// `normed`, `gated` and `wide`: see LayersCall.
struct RowsBetween {
  const PathTable& table;
  void (*linear)(const LinearCall&);
  void* residual;
  int64_t num_rows, size;
  float eps;
  int32_t data_type;
  const void* attended;
  void* query;
  void* normed;
  void* gated;
  void* wide;

  LinearCall product(const PackedWeight& packed, const void* x, void* out, LinearEnd end) const {
    LinearCall product = {};
    product.x = x, product.weight = packed.weight, product.bias = packed.bias, product.out = out;
    product.num_rows = num_rows, product.in_size = product.x_stride = packed.in_size, product.out_size = packed.out_size;
    product.out_stride = end == kSiluMul ? packed.out_size / 2 : packed.out_size;
    product.data_type = data_type, product.weight_type = packed.weight_type, product.end = end;
    return product;
  }

  void norm(const void* weight, void* out) const {
    table.rms_norm(residual, weight, nullptr, out, num_rows, size, eps, data_type);
  }

  // `ending`: null before the first layer; `starting`: null behind the last one. `rope`: of the layer that starts.
  void run(const LayerWeights* ending, const LayerWeights* starting, const RopeTarget& rope) const {
    if ((ending != nullptr && !end_goes_through(*ending, data_type)) ||
        (starting != nullptr && !start_goes_through(*starting, data_type, rope.head_dim))) {
      if (ending != nullptr) end_in_turn(*ending);
      if (starting != nullptr) start_in_turn(*starting, rope);
      return;
    }
    BetweenAttentionCall all = {};
    all.residual = residual, all.num_rows = num_rows, all.size = size, all.eps = eps, all.data_type = data_type;
    if (ending != nullptr) {
      all.output = product(ending->output, attended, nullptr, kAdd);
      all.feed_forward_norm = ending->feed_forward_norm;
      all.gate_up = product(ending->gate_up, nullptr, nullptr, kSiluMul);
      all.down = product(ending->down, nullptr, nullptr, kAdd);
    }
    if (starting != nullptr) {
      all.attention_norm = starting->attention_norm;
      all.qkv = product(starting->qkv, nullptr, query, kRopeWriteKv);
      all.qkv.rope = rope;
    }
    table.between_attention(all);
  }

  void end_in_turn(const LayerWeights& layer) const {
    linear(product(layer.output, attended, residual, kAdd));
    norm(layer.feed_forward_norm, normed);
    if (layer.gate_up.gated) {
      linear(product(layer.gate_up, normed, gated, kSiluMul));
    } else {
      linear(product(layer.gate_up, normed, wide, kStore));
      table.silu_mul(wide, gated, num_rows, layer.down.in_size, data_type);
    }
    linear(product(layer.down, gated, residual, kAdd));
  }

  void start_in_turn(const LayerWeights& layer, const RopeTarget& rope) const {
    norm(layer.attention_norm, normed);
    if (rope.head_dim % 16 == 0) {
      LinearCall turned = product(layer.qkv, normed, query, kRopeWriteKv);
      turned.rope = rope;
      return linear(turned);
    }
    linear(product(layer.qkv, normed, wide, kStore));
    table.rope_write_kv(wide, query, num_rows, data_type, rope);
  }
};

// Whether [0, num_rows) are the chosen ones, in order.
bool are_all(const int64_t* rows, int64_t num_chosen, int64_t num_rows) {
  if (num_chosen != num_rows) return false;
  for (int64_t i = 0; i < num_rows; ++i)
    if (rows[i] != i) return false;
  return true;
}

}  // namespace

void to_last_attention(const LayersCall& call, const PathTable& table, void (*linear)(const LinearCall&)) {
  if (call.num_rows == 0) return;
  const RowsBetween between = {table, linear, call.residual, call.num_rows, call.size, call.eps, call.data_type,
                               call.attended, call.query, call.normed, call.gated, call.wide};
  RopeTarget rope = call.rope;
  AttentionCall attention = call.attention;
  attention.units = table.attention_units(attention, &attention.num_units);  // the same for each layer
  for (int64_t number = 0; number < call.num_layers; ++number) {
    rope.kv = static_cast<char*>(call.rope.kv) + number * call.layer_bytes;
    between.run(number > 0 ? &call.layers[number - 1] : nullptr, &call.layers[number], rope);
    if (number == call.num_layers - 1 && call.num_last_items >= 0) {
      if (call.num_last_items == 0) return;
      attention.items = call.last_items, attention.num_items = call.num_last_items;
      attention.units = table.attention_units(attention, &attention.num_units);
    }
    attention.kv = rope.kv;
    table.attention(attention);
  }
}

bool after_last_attention(const LastRowsCall& call, const PathTable& table, void (*linear)(const LinearCall&)) {
  for (int64_t i = 0; i < call.num_chosen; ++i)
    if (call.rows[i] < 0 || call.rows[i] >= call.num_rows) return false;
  if (call.num_chosen == 0) return true;
  RowsBetween between = {table, linear, call.residual, call.num_chosen, call.size, call.eps, call.data_type,
                         call.attended, nullptr, call.normed, call.gated, call.wide};
  if (!are_all(call.rows, call.num_chosen, call.num_rows)) {
    const auto choose = [&](const void* from, void* to, int64_t num_bytes) {
      copy_whole(static_cast<char*>(to), num_bytes, nullptr, static_cast<const char*>(from), num_bytes, call.rows, call.num_chosen, num_bytes);
    };
    const int64_t number_bytes = call.data_type == kBFloat16 ? 2 : 4;
    const int64_t row_bytes = call.size * number_bytes, attended_bytes = call.end->output.in_size * number_bytes;
    const int64_t residual_bytes = (call.num_chosen * row_bytes + 63) / 64 * 64;
    char* chosen = static_cast<char*>(scratch(kScratchChosen, residual_bytes + call.num_chosen * attended_bytes));
    choose(call.residual, chosen, row_bytes);
    choose(call.attended, chosen + residual_bytes, attended_bytes);
    between.residual = chosen, between.attended = chosen + residual_bytes;
  }
  between.run(call.end, nullptr, {});
  between.norm(call.norm, call.out);
  return true;
}

}  // namespace batchllm
