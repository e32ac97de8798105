"""What int8 weights cost in quality on the embedded model: perplexity over natural text, and agreement of greedy tokens with float32.

    python benchmarks/quality.py [--windows 24] [--parts]

The text is the documentation inside Python, in windows of 512 tokens. `same_token`: the share of places of that text where the likeliest
next token is float32's. `kl`: mean divergence of the next token's distribution from float32's, in nats. `greedy_tokens`: how many of
64 greedily generated tokens are float32's before the first that differs, over prompts of 128 tokens. `--parts` rounds each of the decoder's
products alone and leaves each out in turn. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
import torch.nn.functional as F

from batchllm.engine.decoder import kv_shape
from batchllm.engine.pool import make_pool
from batchllm.kernels.attention import AttentionPlan
from batchllm.models.decoder import INT8_PARTS, PARTS, Decoder
from batchllm.models.loading import load_decoder
from batchllm.models.registry import resolve_model
from batchllm.models.source import ModelSource
from batchllm.models.tokenizer import load_tokenizer
from batchllm.ops import select_kernels

CPU = torch.device("cpu")
WINDOW_TOKENS, PROMPT_TOKENS, NUM_NEW, BLOCK_SIZE = 512, 128, 64, 16


class Reader:
    """Runs one sequence at a time through a decoder, over a pool of its own."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        num_blocks = WINDOW_TOKENS // BLOCK_SIZE
        self._kv = make_pool(kv_shape(decoder), num_blocks=num_blocks, block_size=BLOCK_SIZE, device=CPU)
        self._table = torch.arange(num_blocks, dtype=torch.int32)[None]

    def hidden(self, token_ids: torch.Tensor, *, first: int = 0) -> torch.Tensor:
        """Final rows of tokens at positions from `first` on; what is before them was read already."""
        end = first + len(token_ids)
        positions, nothing = torch.arange(first, end, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
        plan = AttentionPlan(
            positions=positions,
            tables=torch.zeros(len(token_ids), dtype=torch.int32),
            block_table=self._table,
            items=torch.tensor([[0, len(token_ids), 0, end, end, -1]], dtype=torch.int32),
            merge_rows=nothing,
            merge_start=torch.zeros(1, dtype=torch.int32),
            merge_partials=nothing,
            num_partials=0,
        )
        return self.decoder.forward(
            token_ids, positions, positions.long(), plan, self._kv, torch.arange(len(token_ids))
        )

    def log_probabilities(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Of each next token, float32 [tokens, vocabulary]."""
        return self.decoder.logits(self.hidden(token_ids)).log_softmax(dim=-1)

    def greedy(self, prompt: torch.Tensor) -> torch.Tensor:
        """The next `NUM_NEW` tokens."""
        found = [self.decoder.argmax(self.hidden(prompt)[-1:])]
        while len(found) < NUM_NEW:
            hidden = self.hidden(found[-1], first=len(prompt) + len(found) - 1)
            found.append(self.decoder.argmax(hidden))
        return torch.cat(found)


@dataclass(frozen=True, slots=True)
class Quality:
    """Of one way of holding weights, see the module's docstring."""

    perplexity: float
    same_token: float
    kl: float
    greedy_tokens: float


def measure(
    reader: Reader,
    windows: list[torch.Tensor],
    truths: list[torch.Tensor],
    continuations: list[tuple[torch.Tensor, torch.Tensor]],
) -> Quality:
    loss = same = divergence = 0.0
    for window, truth in zip(windows, truths, strict=True):
        found = reader.log_probabilities(window)[:-1]
        loss += float(F.nll_loss(found, window[1:]))
        same += float((found.argmax(dim=-1) == truth.argmax(dim=-1)).float().mean())
        divergence += float((truth.float().exp() * (truth.float() - found)).sum(dim=-1).mean())
    agreed = 0.0
    for prompt, tokens in continuations:
        # Along the reference's own tokens, the first that differs is where greedy decoding would leave them.
        hidden = reader.hidden(torch.cat([prompt, tokens[:-1]]))[-NUM_NEW:]
        differs = (reader.decoder.argmax(hidden) != tokens).nonzero()
        agreed += int(differs[0]) if len(differs) else NUM_NEW
    count = len(windows)
    return Quality(float(np.exp(loss / count)), same / count, divergence / count, agreed / len(continuations))


def ways(*, with_parts: bool) -> dict[str, tuple[torch.dtype, frozenset[str]]]:
    bf16 = torch.bfloat16
    found = {
        "bf16": (bf16, frozenset[str]()),
        "int8, all products": (bf16, PARTS),
        "int8, as engine.weights": (bf16, INT8_PARTS),
    }
    if with_parts:
        found |= {f"only {part}": (bf16, frozenset({part})) for part in sorted(PARTS)}
        found |= {f"all but {part}": (bf16, PARTS - {part}) for part in sorted(PARTS)}
    return found


def load(source: ModelSource, dtype: torch.dtype, parts: frozenset[str]) -> Reader:
    return Reader(load_decoder(source, dtype=dtype, device=CPU, kernels=select_kernels(CPU), int8_parts=parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--windows", type=int, default=24, help="of 512 tokens; as many prompts are continued")
    parser.add_argument("--parts", action="store_true", help="also each product alone, and all but each")
    options = parser.parse_args()
    source = resolve_model(options.model, base_folder=Path.cwd())
    texts = "\n\n".join(topics[name] for name in sorted(topics))
    token_ids = torch.from_numpy(np.concatenate(load_tokenizer(source).encode_batch([texts])).astype(np.int64))
    # Spread over all of the text.
    starts = np.linspace(0, len(token_ids) - WINDOW_TOKENS, options.windows, dtype=np.int64)
    windows = [token_ids[start : start + WINDOW_TOKENS] for start in starts]
    reference = load(source, torch.float32, frozenset())
    # Half precision keeps what is compared within a few GB.
    truths = [reference.log_probabilities(window)[:-1].half() for window in windows]
    losses = [float(F.nll_loss(truth.float(), window[1:])) for truth, window in zip(truths, windows, strict=True)]
    continuations = [(window[:PROMPT_TOKENS], reference.greedy(window[:PROMPT_TOKENS])) for window in windows]
    print(f"{len(windows)} windows; float32 perplexity {np.exp(np.mean(losses)):.3f}")
    results = {}
    for name, (dtype, parts) in ways(with_parts=options.parts).items():
        quality = measure(load(source, dtype, parts), windows, truths, continuations)
        results[name] = [round(value, 5) for value in (quality.perplexity, quality.same_token, quality.kl)]
        results[name].append(round(quality.greedy_tokens, 1))
        print(
            f"{name:26} perplexity {quality.perplexity:7.3f}  same token {quality.same_token:.4f}  "
            f"KL {quality.kl:.5f}  greedy tokens {quality.greedy_tokens:.1f} of {NUM_NEW}",
            flush=True,
        )
    print(json.dumps({"benchmark": "quality", "fp32_perplexity": round(float(np.exp(np.mean(losses))), 4), **results}))


if __name__ == "__main__":
    main()
