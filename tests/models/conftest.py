"""A paged driver, a dequantiser written apart from the loader, and reference models from `transformers`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from batchllm.kernels.attention import AttentionPlan
from batchllm.models.decoder import Decoder
from batchllm.models.source import ModelSource

BLOCK_SIZE = 16


class PagedDriver:
    """Runs sequences through a decoder with one block-table row each, blocks in shuffled order."""

    def __init__(self, decoder: Decoder, *, num_sequences: int, max_tokens: int) -> None:
        config = decoder.config
        per_sequence = -(-max_tokens // BLOCK_SIZE)
        generator = torch.Generator().manual_seed(1)
        self.table = torch.randperm(num_sequences * per_sequence, generator=generator).to(torch.int32)
        self.table = self.table.reshape(num_sequences, per_sequence)
        self.kv = torch.full(
            (num_sequences * per_sequence, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim),
            float("nan"),
            dtype=decoder.dtype,
        )
        self.decoder = decoder
        self.lengths = [0] * num_sequences

    def step(self, new_tokens: Sequence[Sequence[int]], *, num_sampled: int = 1) -> torch.Tensor:
        """Appends tokens to every sequence; hidden rows of the last `num_sampled` of each, sequence by sequence."""
        positions, tables, slots, items, sampled = [], [], [], [], []
        for number, tokens in enumerate(new_tokens):
            start, row = self.lengths[number], len(positions)
            stop = start + len(tokens)
            items.append([row, len(tokens), 0, stop, stop, -1])
            tables += [number] * len(tokens)
            for position in range(start, stop):
                positions.append(position)
                block = int(self.table[number, position // BLOCK_SIZE])
                slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
            sampled += range(row + len(tokens) - num_sampled, row + len(tokens))
            self.lengths[number] = stop
        nothing = torch.empty(0, dtype=torch.int32)
        plan = AttentionPlan(
            positions=torch.tensor(positions, dtype=torch.int32),
            tables=torch.tensor(tables, dtype=torch.int32),
            block_table=self.table,
            items=torch.tensor(items, dtype=torch.int32),
            merge_rows=nothing,
            merge_start=torch.zeros(1, dtype=torch.int32),
            merge_partials=nothing,
            num_partials=0,
        )
        flat = torch.tensor([token for tokens in new_tokens for token in tokens], dtype=torch.int64)
        return self.decoder.forward(
            flat, plan.positions, torch.tensor(slots), plan, self.kv, torch.tensor(sampled, dtype=torch.int64)
        )


@pytest.fixture(scope="session")
def make_driver() -> Callable[..., PagedDriver]:
    """The class itself: tests build one per decoder."""
    return PagedDriver


def oracle_dequantise(raw: bytes, kind: str, num_elements: int) -> np.ndarray:
    """Lane by lane from the definition: Q4_1 is d, m (f16) and 16 bytes; low nibbles are elements 0 to 15."""
    if kind == "F32":
        return np.frombuffer(raw, "<f4")
    out = np.empty(num_elements, np.float32)
    size = {"Q4_1": 20, "Q8_0": 34}[kind]
    blocks = np.frombuffer(raw, np.uint8).reshape(-1, size)
    scale = np.ascontiguousarray(blocks[:, 0:2]).view("<f2").astype(np.float32)[:, 0]
    lanes = out.reshape(-1, 32)
    for lane in range(32):
        if kind == "Q8_0":
            lanes[:, lane] = scale * blocks[:, 2 + lane].view(np.int8).astype(np.float32)
            continue
        minimum = np.ascontiguousarray(blocks[:, 2:4]).view("<f2").astype(np.float32)[:, 0]
        byte = blocks[:, 4 + lane % 16]
        nibble = byte & 15 if lane < 16 else byte >> 4
        lanes[:, lane] = scale * nibble.astype(np.float32) + minimum
    return out


@pytest.fixture(scope="session")
def oracle_tensors(embedded_model: ModelSource) -> dict[str, torch.Tensor]:
    """All tensors of the embedded model in float32, under the file's names and in the file's row order."""
    tensors = {}
    for tensor in gguf.GGUFReader(str(embedded_model.path)).tensors:
        values = oracle_dequantise(tensor.data.tobytes(), tensor.tensor_type.name, int(tensor.n_elements))
        shape = [int(size) for size in reversed(tensor.shape)]
        tensors[tensor.name] = torch.from_numpy(values.reshape(shape).copy())
    return tensors


def from_pairs(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """GGUF row 2 i + s of a head is row i + s * half of the original; indices, where the loader reshapes."""
    head_dim = weight.shape[0] // num_heads
    half = head_dim // 2
    rows = [head * head_dim + 2 * (row % half) + row // half for head in range(num_heads) for row in range(head_dim)]
    return weight[rows]


def to_pairs(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The inverse of `from_pairs`: what a converter to GGUF does to q and k of the llama architecture."""
    head_dim = weight.shape[0] // num_heads
    half = head_dim // 2
    rows = [head * head_dim + row // 2 + (row % 2) * half for head in range(num_heads) for row in range(head_dim)]
    return weight[rows]


@pytest.fixture(scope="session")
def reference_model(oracle_tensors: dict[str, torch.Tensor]) -> LlamaForCausalLM:
    """`transformers` with the embedded model's weights in float32."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {
        "model.embed_tokens.weight": oracle_tensors["token_embd.weight"],
        "lm_head.weight": oracle_tensors["token_embd.weight"],
        "model.norm.weight": oracle_tensors["output_norm.weight"],
    }
    for layer in range(30):
        for theirs, ours in names.items():
            weight = oracle_tensors[f"blk.{layer}.{theirs}.weight"]
            if theirs in ("attn_q", "attn_k"):
                weight = from_pairs(weight, 9 if theirs == "attn_q" else 3)
            state[f"model.layers.{layer}.{ours}.weight"] = weight
    model.load_state_dict(state, strict=True)
    return model.eval()


TINY = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 260,
    "max_position_embeddings": 512,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], PreTrainedModel]:
    """A small model with random weights of a named architecture, float32, wide enough that no two logits are close."""

    def make(name: str) -> PreTrainedModel:
        torch.manual_seed(7)
        if name == "llama2":
            model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**TINY, num_key_value_heads=4))
        elif name == "llama3":
            rope = dict(LLAMA3_ROPE)
            model = LlamaForCausalLM(LlamaConfig(**TINY, num_key_value_heads=2, rope_parameters=rope))
        elif name == "llama-linear":
            rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
            model = LlamaForCausalLM(LlamaConfig(**TINY, num_key_value_heads=2, rope_parameters=rope))
        elif name == "llama-tied":
            model = LlamaForCausalLM(LlamaConfig(**TINY, num_key_value_heads=1, tie_word_embeddings=True))
        elif name == "mistral":
            # A head size apart from hidden_size / num_heads, as Mistral Nemo has.
            model = MistralForCausalLM(MistralConfig(**TINY, num_key_value_heads=2, head_dim=24, sliding_window=None))
        elif name in ("qwen2", "qwen2-tied"):
            tied = name == "qwen2-tied"
            model = Qwen2ForCausalLM(Qwen2Config(**TINY, num_key_value_heads=2, tie_word_embeddings=tied))
        else:
            raise ValueError(name)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.normal_(std=0.3 if key.endswith("norm.weight") else 0.12)
                if key.endswith("norm.weight"):
                    parameter.add_(1.0)
        return model.eval()

    return make


@pytest.fixture(scope="session")
def save_tiny(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[[str], PreTrainedModel]
) -> Callable[..., Any]:
    """Writes a tiny model as a Hugging Face folder; extra options go to `save_pretrained`. Returns (model, source)."""

    def save(name: str, **options: Any) -> tuple[PreTrainedModel, ModelSource]:
        model = tiny_model(name)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder, **options)
        return model, ModelSource(kind="huggingface", path=folder, name=name)

    return save


@pytest.fixture
def edit_json() -> Callable[..., None]:
    """Sets keys of a JSON file; a value of `...` removes the key."""

    def edit(path: Path, **changes: Any) -> None:
        content = json.loads(path.read_text()) if path.exists() else {}
        content |= changes
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))

    return edit


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., None]:
    """Writes a tiny `transformers` model as GGUF as converters do, with changed metadata or tensors where asked."""

    def write(
        path: Path,
        model: PreTrainedModel,
        *,
        kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
        metadata: dict[str, Any] | None = None,
        tensors: dict[str, np.ndarray | None] | None = None,
    ) -> None:
        config = model.config
        architecture = "qwen2" if config.model_type == "qwen2" else "llama"
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        values: dict[str, Any] = {
            "block_count": config.num_hidden_layers,
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "feed_forward_length": config.intermediate_size,
            "attention.head_count": config.num_attention_heads,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "rope.dimension_count": head_dim,
            "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        }
        everything = {f"{architecture}.{key}": value for key, value in values.items()} | {
            "tokenizer.ggml.eos_token_id": 2
        }
        writer = gguf.GGUFWriter(str(path), architecture)
        for key, value in (everything | (metadata or {})).items():
            if value is None:
                continue
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        names = {
            "input_layernorm": "attn_norm",
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output",
            "post_attention_layernorm": "ffn_norm",
            "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        }
        top = {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
        }
        stored: dict[str, np.ndarray | None] = {}
        for key, parameter in model.state_dict().items():
            if key == "lm_head.weight" and config.tie_word_embeddings:
                continue
            weight = parameter.detach()
            if key in top:
                name = top[key]
            else:
                _, _, layer, rest = key.split(".", 3)
                part, _, ending = rest.rpartition(".")
                name = f"blk.{layer}.{names[part]}.{ending}"
                if architecture == "llama" and names[part] in ("attn_q", "attn_k"):
                    heads = config.num_attention_heads if names[part] == "attn_q" else config.num_key_value_heads
                    weight = to_pairs(weight, heads)
            stored[name] = weight.numpy()
        for name, values_ in (stored | (tensors or {})).items():
            if values_ is None:
                continue
            plain = values_.ndim == 1 or kind == gguf.GGMLQuantizationType.F32
            used = gguf.GGMLQuantizationType.F32 if plain else kind
            writer.add_tensor(name, gguf.quants.quantize(values_.astype(np.float32), used), raw_dtype=used)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return write
