"""What a decoding step costs beside the model's layers, rehearsed with the engine itself: scheduling, sampling, books and grammars."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import llguidance
import numpy as np
import torch

from batchllm.engine.decoder import Decoder
from batchllm.engine.engine import Engine, EngineConfig
from batchllm.engine.protocols import Vocabulary
from batchllm.planner.plan import make_plan
from batchllm.planner.store import PromptStore
from batchllm.prompt import Grammar, SamplingParams

_NUM_STEPS = 6


@dataclass(frozen=True, slots=True)
class Form:
    """What completions must be: `tokens` are the vocabulary's, as `grammar_tokens` makes them."""

    grammar: Grammar
    vocabulary: Vocabulary
    tokens: llguidance.LLTokenizer


@dataclass(frozen=True, slots=True)
class _NoWords:
    """A vocabulary for tokens that nobody reads."""

    token_bytes: Sequence[bytes]
    eos_ids: frozenset[int] = frozenset()
    special_tokens: Mapping[str, int] = field(default_factory=dict)

    def encode_batch(self, texts: Sequence[str], *, allow_special: bool = True) -> list[np.ndarray]:
        raise AssertionError("no text is read")


def beside_layers_s(
    decoder: Decoder, *, kv: torch.Tensor, num_blocks: int, block_size: int, num_sequences: int, form: Form | None
) -> float:
    """Seconds of a step that decodes `num_sequences` rows over all but the model's layers, the vocabulary's product included.

    `decoder` may have few layers, and random weights: what rows say does not matter. `kv`: `num_blocks` free blocks of its shape. With `form`
    what sampling under it costs more than free sampling is added: what is worked out beside the layers in a run shows here in full, as it
    takes its core from them there.
    """
    bench = _Engines(decoder, kv=kv, num_blocks=num_blocks, block_size=block_size, num_sequences=num_sequences)
    free = bench.run(None)
    seconds = statistics.median(step.schedule_s + step.sample_s for step in free[1:])
    if form is None:
        return seconds
    sampled = [step.sample_s for step in bench.run(form) if 2 * step.num_rows >= num_sequences]
    return seconds + max(statistics.mean(sampled) - statistics.median(step.sample_s for step in free), 0.0)


@dataclass(frozen=True, slots=True)
class _Step:
    num_rows: int
    schedule_s: float
    sample_s: float


class _Engines:
    """Engines over the same decoder and blocks, one after the other, for a batch of prompts of one token."""

    def __init__(
        self, decoder: Decoder, *, kv: torch.Tensor, num_blocks: int, block_size: int, num_sequences: int
    ) -> None:
        self._decoder = decoder
        self._kv = kv
        self._num_sequences = num_sequences
        self._config = EngineConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            max_step_tokens=max(2 * num_sequences, 2),
            max_sequences=num_sequences,
        )

    def run(self, form: Form | None) -> list[_Step]:
        """A few steps, the first of which computes the prompts, or fewer where all rows end before."""
        with tempfile.TemporaryDirectory(prefix="batchllm-rehearsal-") as folder:
            store = self._stage(Path(folder) / "prompts", None if form is None else form.grammar)
            try:
                return self._steps(store, form)
            finally:
                store.close()

    def _stage(self, folder: Path, grammar: Grammar | None) -> PromptStore:
        number, store = self._num_sequences, PromptStore(folder)
        params = SamplingParams(max_tokens=_NUM_STEPS, temperature=0.0, ignore_eos=True, grammar=grammar)
        store.append_batch(
            row_index=np.arange(number),
            lengths=np.ones(number, dtype=np.int32),
            tokens=np.arange(number, dtype=np.int32) % self._decoder.config.vocab_size,
            sampling_ids=np.full(number, store.intern_sampling(params), dtype=np.int32),
        )
        store.finish()
        return store

    def _steps(self, store: PromptStore, form: Form | None) -> list[_Step]:
        vocabulary = _NoWords([b""] * self._decoder.config.vocab_size) if form is None else form.vocabulary
        engine = Engine(
            decoder=self._decoder,
            vocabulary=vocabulary,
            store=store,
            plan=make_plan(store, prefix_sharing=False),
            config=self._config,
            seed=0,
            started_at=time.monotonic(),
            kv=self._kv,
            grammar_tokens=None if form is None else form.tokens,
        )
        steps: list[_Step] = []
        try:
            while not engine.scheduler.done:
                metrics = engine.metrics
                before = metrics.schedule_s, metrics.sample_s
                num_rows = engine.scheduler.table.num_running or self._num_sequences
                engine.step()
                steps.append(_Step(num_rows, metrics.schedule_s - before[0], metrics.sample_s - before[1]))
        finally:
            engine.close()
        return steps
