"""Writes the embedded model for the peers: the same weights in each engine's own format.

    python benchmarks/peers/export_model.py [--folder FOLDER]

The embedded model is a GGUF file of SmolLM2-135M-Instruct whose weights are quantised (Q4_1, the embedding Q8_0). They are dequantised to
float32 once and rounded to bfloat16 once, as batchllm does when it loads them, and written as

- `huggingface/`: config.json, model.safetensors in bf16, tokenizer: for vLLM, transformers and OpenVINO's converter;
- `model-bf16.gguf` and `model-q8_0.gguf`: for llama.cpp. Norms stay float32 in both.

So in bf16 every engine computes with the same numbers. The quantised forms are each engine's own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file

from batchllm.models.config import ModelConfig
from batchllm.models.gguf_config import gguf_config
from batchllm.models.gguf_file import read_gguf
from batchllm.models.gguf_tokenizer import gguf_tokenizer
from batchllm.models.gguf_weights import GgufWeights
from batchllm.models.registry import resolve_model
from batchllm.models.weights import canonical_shapes

MODEL = "smollm2-135m"
DEFAULT_FOLDER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "batchllm-peers" / "model"
_NAMES = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "lm_head": "lm_head.weight"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def write_huggingface(source: Path, folder: Path) -> None:
    """The model of the GGUF file `source` as a Hugging Face folder in bfloat16."""
    file = read_gguf(source)
    config = gguf_config(file)
    weights = GgufWeights(file, config)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {_huggingface_name(name): weights.read(name, torch.bfloat16) for name in canonical_shapes(config)}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    pipeline, declared = gguf_tokenizer(source)
    pipeline.save(str(folder / "tokenizer.json"))
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": pipeline.id_to_token(declared.bos_id),
        "eos_token": pipeline.id_to_token(declared.eos_id),
        "pad_token": pipeline.id_to_token(declared.eos_id),
        "unk_token": pipeline.id_to_token(file.metadata["tokenizer.ggml.unknown_token_id"]),
        "model_max_length": config.max_context,
        "clean_up_tokenization_spaces": False,
        "chat_template": declared.chat_template,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer)
    _write_json(folder / "config.json", _huggingface_config(config, eos_id=declared.eos_id))
    generation = {"bos_token_id": config.bos_id, "eos_token_id": declared.eos_id, "pad_token_id": declared.eos_id}
    _write_json(folder / "generation_config.json", generation)


def _huggingface_name(canonical: str) -> str:
    if canonical in _NAMES:
        return _NAMES[canonical]
    _, layer, part = canonical.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"


def _huggingface_config(config: ModelConfig, *, eos_id: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope.theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": eos_id,
        "torch_dtype": "bfloat16",
    }


def _write_json(path: Path, values: dict[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_gguf(source: Path, target: Path, kind: gguf.GGMLQuantizationType) -> None:
    """A copy of the GGUF file `source` with every matrix as `kind`; vectors stay as they are.

    Weights go through bfloat16 in either case, so that a quantised copy is one of the numbers that all engines share.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, arch=_text(reader.get_field("general.architecture")))
    for field in reader.fields.values():
        # The writer sets these itself.
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        value_type = field.types[0]
        sub_type = field.types[-1] if value_type == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), value_type, sub_type=sub_type)
    is_bf16 = kind == gguf.GGMLQuantizationType.BF16
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16 if is_bf16 else gguf.LlamaFileType.MOSTLY_Q8_0)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values.astype(np.float32), raw_dtype=gguf.GGMLQuantizationType.F32)
            continue
        rounded = torch.from_numpy(np.ascontiguousarray(values)).bfloat16().float().numpy()
        writer.add_tensor(tensor.name, quantize(rounded, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _text(field: gguf.ReaderField | None) -> str:
    assert field is not None
    return str(field.contents())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    options = parser.parse_args()
    source = resolve_model(MODEL, base_folder=Path.cwd()).path
    write_huggingface(source, options.folder / "huggingface")
    write_gguf(source, options.folder / "model-bf16.gguf", gguf.GGMLQuantizationType.BF16)
    write_gguf(source, options.folder / "model-q8_0.gguf", gguf.GGMLQuantizationType.Q8_0)
    for path in sorted(options.folder.rglob("*")):
        if path.is_file():
            print(f"{path} {path.stat().st_size}", file=sys.stderr)


if __name__ == "__main__":
    main()
