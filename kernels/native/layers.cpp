// All layers of a forward pass up to the last one's attention, in the order of kernels/layers.py. Compiled for any processor.
#include "native.h"

namespace batchllm {
namespace {

struct Operations {
  const LayersCall& call;
  const PathTable& table;
  void (*linear)(const LinearCall&);

  LinearCall product(const PackedWeight& packed, const void* x, void* out, LinearEnd end) const {
    LinearCall product = {};
    product.x = x, product.weight = packed.weight, product.bias = packed.bias, product.out = out;
    product.num_rows = call.num_rows, product.in_size = product.x_stride = packed.in_size, product.out_size = packed.out_size;
    product.out_stride = end == kSiluMul ? packed.out_size / 2 : packed.out_size;
    product.data_type = call.data_type, product.weight_type = packed.weight_type, product.end = end;
    return product;
  }

  void norm(const void* weight) const {
    table.rms_norm(call.residual, weight, nullptr, call.normed, call.num_rows, call.size, call.eps, call.data_type);
  }

  bool is_plain(const PackedWeight& packed) const { return packed.weight_type == call.data_type; }

  // Whether rows can go through all products between two attentions at once: plain weights, whole tiles.
  bool goes_through(const LayerWeights* ending, const LayerWeights& starting) const {
    if (!is_plain(starting.qkv) || call.rope.head_dim % 16 != 0) return false;
    return ending == nullptr ||
           (is_plain(ending->output) && is_plain(ending->gate_up) && is_plain(ending->down) && ending->gate_up.gated);
  }

  // `ending`: null before the first layer. `rope`: of the layer that starts.
  void between(const LayerWeights* ending, const LayerWeights& starting, const RopeTarget& rope) const {
    if (!goes_through(ending, starting)) {
      if (ending != nullptr) end_in_turn(*ending);
      return start_in_turn(starting, rope);
    }
    BetweenAttentionCall all = {};
    all.residual = call.residual, all.num_rows = call.num_rows, all.size = call.size, all.eps = call.eps, all.data_type = call.data_type;
    if (ending != nullptr) {
      all.output = product(ending->output, call.attended, nullptr, kAdd);
      all.feed_forward_norm = ending->feed_forward_norm;
      all.gate_up = product(ending->gate_up, nullptr, nullptr, kSiluMul);
      all.down = product(ending->down, nullptr, nullptr, kAdd);
    }
    all.attention_norm = starting.attention_norm;
    all.qkv = product(starting.qkv, nullptr, call.query, kRopeWriteKv);
    all.qkv.rope = rope;
    table.between_attention(all);
  }

  void end_in_turn(const LayerWeights& layer) const {
    linear(product(layer.output, call.attended, call.residual, kAdd));
    norm(layer.feed_forward_norm);
    if (layer.gate_up.gated) {
      linear(product(layer.gate_up, call.normed, call.gated, kSiluMul));
    } else {
      linear(product(layer.gate_up, call.normed, call.wide, kStore));
      table.silu_mul(call.wide, call.gated, call.num_rows, layer.down.in_size, call.data_type);
    }
    linear(product(layer.down, call.gated, call.residual, kAdd));
  }

  void start_in_turn(const LayerWeights& layer, const RopeTarget& rope) const {
    norm(layer.attention_norm);
    if (rope.head_dim % 16 == 0) {
      LinearCall turned = product(layer.qkv, call.normed, call.query, kRopeWriteKv);
      turned.rope = rope;
      return linear(turned);
    }
    linear(product(layer.qkv, call.normed, call.wide, kStore));
    table.rope_write_kv(call.wide, call.query, call.num_rows, call.data_type, rope);
  }
};

}  // namespace

void to_last_attention(const LayersCall& call, const PathTable& table, void (*linear)(const LinearCall&)) {
  if (call.num_rows == 0) return;
  const Operations operations = {call, table, linear};
  RopeTarget rope = call.rope;
  AttentionCall attention = call.attention;
  attention.units = table.attention_units(attention, &attention.num_units);  // the same for each layer
  for (int64_t number = 0; number < call.num_layers; ++number) {
    rope.kv = static_cast<char*>(call.rope.kv) + number * call.layer_bytes;
    operations.between(number > 0 ? &call.layers[number - 1] : nullptr, call.layers[number], rope);
    if (number == call.num_layers - 1 && !call.attends_last) return;
    attention.kv = rope.kv;
    table.attention(attention);
  }
}

}  // namespace batchllm
