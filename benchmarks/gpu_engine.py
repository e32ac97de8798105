"""The whole engine with random weights at the shapes of known models: output tokens a second over a batch.

The workloads: 256 prompts of 1,024 tokens with 1,024 to generate, and the mix of lengths 100 to 1024 drawn with seed 0
that makes 133,966 tokens of output. Prompts share nothing, so only kernels, scheduling and launch overhead count.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from batchllm.engine.engine import Engine, EngineConfig
from batchllm.models.config import ModelConfig, RopeConfig
from batchllm.models.decoder import Decoder
from batchllm.models.weights import canonical_shapes
from batchllm.ops import Kernels
from batchllm.planner.plan import make_plan
from batchllm.planner.store import PromptStore
from batchllm.prompt import Completion, SamplingParams

BLOCK_SIZE = 16
MAX_PROMPT_TOKEN = 10_000


@dataclass(frozen=True, slots=True)
class Workload:
    """`lengths`: (prompt tokens, tokens to generate) of each prompt."""

    name: str
    lengths: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class EngineResult:
    name: str
    output_tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """Tensors of `config`'s shapes, drawn on `device` when they are read: norms are 1, all else is small."""

    config: ModelConfig
    device: torch.device

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        shape = canonical_shapes(self.config)[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=self.device)
        return torch.empty(shape, dtype=dtype, device=self.device).normal_(std=0.02)


@dataclass(frozen=True, slots=True)
class NumberedVocabulary:
    """Token ids without text: nothing stops a sequence but its length."""

    token_bytes: tuple[bytes, ...]
    eos_ids: frozenset[int] = frozenset()

    @property
    def special_tokens(self) -> dict[str, int]:
        return {}


def model_config(name: str, **sizes: int) -> ModelConfig:
    """A Llama-family config of the given sizes."""
    theta = RopeConfig(theta=500_000.0)
    return ModelConfig(
        architecture=name,
        max_context=2048,
        rms_eps=1e-5,
        rope=theta,
        tied_embeddings=False,
        qkv_bias=False,
        bos_id=None,
        eos_ids=frozenset(),
        **sizes,
    )


def models() -> Iterator[ModelConfig]:
    """Shapes only: Qwen3's norms of queries and keys, a hundredth of its work, are not in this decoder."""
    yield model_config(
        "Llama-3-8B",
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=128256,
    )
    yield model_config(
        "Qwen3-0.6B",
        hidden_size=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=151936,
    )


def workloads() -> tuple[Workload, Workload]:
    draw = random.Random(0)
    prompts = []
    for _ in range(256):
        prompts.append(draw.randint(100, 1024))
        # The published mix draws each prompt's tokens between its lengths.
        for _ in range(prompts[-1]):
            draw.randint(0, MAX_PROMPT_TOKEN)
    mix = tuple((prompt, draw.randint(100, 1024)) for prompt in prompts)
    assert sum(output for _, output in mix) == 133_966
    return Workload("256 x 1024/1024", ((1024, 1024),) * 256), Workload("mix of 133,966", mix)


def run_workload(
    workload: Workload, decoder: Decoder, *, num_blocks: int, max_step_tokens: int, max_sequences: int
) -> tuple[EngineResult, dict[int, list[int]]]:
    """Greedy completions of all prompts; the clock runs from the first step to the last token. RuntimeError for a row lost."""
    draw = np.random.default_rng(0)
    lengths = np.array([prompt for prompt, _ in workload.lengths], dtype=np.int32)
    tokens = draw.integers(0, min(MAX_PROMPT_TOKEN, decoder.config.vocab_size), int(lengths.sum()), dtype=np.int32)
    with tempfile.TemporaryDirectory() as folder:
        store = PromptStore(Path(folder) / "prompts")
        outputs = [
            SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True) for _, output in workload.lengths
        ]
        store.append_batch(
            row_index=np.arange(len(lengths), dtype=np.int64),
            lengths=lengths,
            tokens=tokens,
            sampling_ids=np.array([store.intern_sampling(params) for params in outputs], dtype=np.int32),
        )
        store.finish()
        engine = Engine(
            decoder=decoder,
            vocabulary=NumberedVocabulary(token_bytes=(b"x",) * decoder.config.vocab_size),
            store=store,
            plan=make_plan(store, prefix_sharing=False),
            config=EngineConfig(
                block_size=BLOCK_SIZE,
                num_blocks=num_blocks,
                max_step_tokens=max_step_tokens,
                max_sequences=max_sequences,
                runs_ahead=decoder.kernels.name == "triton",
            ),
            seed=0,
            started_at=time.monotonic(),
        )
        answers: dict[int, list[int]] = {}

        def deliver(completions: list[Completion]) -> None:
            for completion in completions:
                if completion.error is not None:
                    raise RuntimeError(f"prompt {completion.row_index}: {completion.error}")
                answers[completion.row_index] = completion.token_ids

        started = time.monotonic()
        engine.run(deliver=deliver)
        seconds = time.monotonic() - started
    output_tokens = sum(len(answer) for answer in answers.values())
    asked = sum(output for _, output in workload.lengths)
    if output_tokens != asked:
        raise RuntimeError(f"{workload.name}: {output_tokens} tokens came of {asked}")
    return EngineResult(f"{decoder.config.architecture}, {workload.name}", output_tokens, seconds), answers


def run_models(kernels: Kernels, *, max_sequences: int = 256) -> Iterator[EngineResult]:
    """Every model with every workload on the first CUDA device; the pool takes what the weights leave, less a tenth."""
    device = torch.device("cuda")
    for config in models():
        weights = RandomWeights(config=config, device=device)
        decoder = Decoder(
            config, weights, dtype=torch.bfloat16, device=device, kernels=kernels, fingerprint="random weights"
        )
        warm_up = Workload("warm-up", ((64, 8),) * 16)
        run_workload(warm_up, decoder, num_blocks=256, max_step_tokens=1024, max_sequences=16)
        for workload in workloads():
            torch.cuda.empty_cache()
            free_bytes, _ = torch.cuda.mem_get_info(device)
            wanted = sum(-(-(prompt + output) // BLOCK_SIZE) for prompt, output in workload.lengths)
            fitting = int(0.9 * free_bytes) // (decoder.kv_bytes_per_token * BLOCK_SIZE)
            result, _ = run_workload(
                workload,
                decoder,
                num_blocks=min(wanted, fitting),
                max_step_tokens=8192,
                max_sequences=max_sequences,
            )
            yield result
        del decoder, weights


def tiny_answers(kernels: Kernels, device: torch.device) -> dict[int, list[int]]:
    """A few float32 prompts through a small model: every set of kernels gives the same tokens."""
    torch.manual_seed(0)
    config = model_config(
        "tiny",
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=96,
        vocab_size=300,
    )
    # Drawn on the CPU, so that every device gets the same weights.
    weights = RandomWeights(config=config, device=torch.device("cpu"))
    decoder = Decoder(
        config, weights, dtype=torch.float32, device=device, kernels=kernels, fingerprint="random weights"
    )
    workload = Workload("tiny", ((5, 3), (17, 2), (40, 4)))
    return run_workload(workload, decoder, num_blocks=16, max_step_tokens=24, max_sequences=3)[1]
