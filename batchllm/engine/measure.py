"""Measures what steps cost on this machine for a model's shape, with weights of random numbers: no weight is read.

A step's time is taken apart as `planner/cost` puts it together: rows of prompts, decoding rows, what the engine does beside the layers, and
attention by itself, which is timed alone. A model's layers are alike, so a few of them are built, enough that they do not fit into a cache, and their time is scaled to all;
where a pass is bound by arithmetic, some of these do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from batchllm.engine.pool import KvShape, make_pool
from batchllm.engine.rehearsal import Form, beside_layers_s
from batchllm.kernels.attention import CHUNK, AttentionPlan, HeadShape
from batchllm.models.config import ModelConfig
from batchllm.models.decoder import Decoder
from batchllm.models.weights import canonical_shapes
from batchllm.ops import select_kernels
from batchllm.planner.rates import ObservedRates

_LAYERS_BYTES = 256 << 20
"""Weights that no cache holds."""

_PREFILL_LAYERS = 4
_BLOCK_SIZE = 16
_TILE_SIZE = 1 << 16
_ROUNDS, _ENOUGH_S = 4, 4.0
"""Each pass once a round, and its middle time counts: what disturbs the machine for a moment disturbs one round of each, not all rounds of one.
The first round finds memory, and counts where no other comes before there is enough."""

_PROMPT, _LONG_PROMPT = 256, 2048
"""Tokens of the prompts in a step of prompt rows, and of one whose attention shows in its time."""

_FEWEST_READERS, _READ_CONTEXT, _MOST_READ_BYTES = 16, 256, 512 << 20
"""Sequences that read as much each, no block twice: so many that they read what a run does, as far as caches make a difference."""

_SHARERS, _SHARED_CONTEXT = 64, 512
"""Sequences that read the same blocks together."""


Pass = Callable[[], float]
"""Runs something once and says how many seconds that took."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The most that a step of the engine may hold, and `held_tokens`, whose keys and values are in the pool at the peak of a run."""

    max_sequences: int
    max_tokens: int
    held_tokens: int


class _RandomWeights:
    """Tensors of the right shape, each in memory of its own. One random tile is repeated: only the time of the products counts."""

    def __init__(self, config: ModelConfig) -> None:
        self._shapes = canonical_shapes(config)
        self._tile = torch.randn(_TILE_SIZE, generator=torch.Generator().manual_seed(0)) * 0.02

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        shape = self._shapes[name]
        size = int(np.prod(shape))
        self._tile = self._tile.to(dtype)
        return self._tile.repeat(-(-size // _TILE_SIZE))[:size].reshape(shape)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Query rows: `num_rows` of each of `num_sequences` sequences that already hold `context` tokens, `shared` of them the same for all."""

    num_sequences: int
    num_rows: int = 1
    context: int = 0
    shared: int = 0

    @property
    def pairs(self) -> int:
        """Of a row and a token that it attends to."""
        each = self.num_rows * self.context + self.num_rows * (self.num_rows + 1) // 2
        return self.num_sequences * each


def measure_rates(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load: StepLoad,
    int8_parts: frozenset[str] = frozenset(),
    form: Form | None = None,
) -> ObservedRates:
    """Times a few forward passes (a second or two on a CPU). Nothing is known of what rows do then. `form`: what completions must be."""
    layer_bytes = dtype.itemsize * sum(
        int(np.prod(shape))
        for name, shape in canonical_shapes(replace(config, num_layers=1)).items()
        if "layers." in name
    )
    num_layers = min(config.num_layers, max(2, -(-_LAYERS_BYTES // layer_bytes)))
    few = replace(config, num_layers=num_layers, max_context=_LONG_PROMPT + _BLOCK_SIZE)
    decoder = Decoder(
        few,
        _RandomWeights(few),
        dtype=dtype,
        device=device,
        kernels=select_kernels(device, head_dim=config.head_dim),
        fingerprint="",
        int8_parts=int8_parts,
    )
    kv_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
    most_readers = max(_FEWEST_READERS, _MOST_READ_BYTES // (kv_bytes * _READ_CONTEXT))
    readers = min(max(_FEWEST_READERS, load.held_tokens // _READ_CONTEXT), most_readers)
    bench = _Bench(decoder, num_layers=config.num_layers, load=load, num_tokens=readers * _READ_CONTEXT)

    most = load.max_sequences
    batches = sorted({1, min(8, most), min(64, most), most})
    reading = _Rows(readers, context=_READ_CONTEXT - 1)
    sharing = _Rows(_SHARERS, context=_SHARED_CONTEXT, shared=_SHARED_CONTEXT)
    prompt = min(_PROMPT, load.max_tokens)
    prompts = _Rows(max(1, load.max_tokens // prompt), num_rows=prompt)
    long, short = _Rows(1, num_rows=_LONG_PROMPT), _Rows(_LONG_PROMPT // _PROMPT, num_rows=_PROMPT)
    seconds = _middle_of_rounds(
        {f"layers {batch}": bench.layers(_Rows(batch)) for batch in batches}
        | {f"beside {batch}": bench.beside_layers(batch, form) for batch in batches}
        | {
            "reading": bench.attention(reading),
            "sharing": bench.attention(sharing),
            "sharers": bench.attention(_Rows(_SHARERS)),
            "long": bench.attention(long),
            "short": bench.attention(short),
            "prompts": bench.prefill(prompts),
        }
    )
    decode = {batch: seconds[f"layers {batch}"] + seconds[f"beside {batch}"] for batch in batches}
    read_s = seconds["reading"] / reading.pairs
    spared = (_SHARERS - 1) * _SHARED_CONTEXT
    spared_s = max(seconds["sharing"] - seconds["sharers"] - _SHARED_CONTEXT * read_s, 0.0) / spared
    # What attention costs a row, whatever it attends to, is in both, and stays with the rows.
    pair_s = max(seconds["long"] - seconds["short"], 0.0) / (long.pairs - short.pairs)
    prefill_s = seconds["prompts"]
    row_s = max(prefill_s - prompts.pairs * pair_s, prefill_s / 2) / (prompts.num_sequences * prompts.num_rows)
    return ObservedRates(
        prefill_tokens_per_s=1 / row_s,
        prefill_pairs_per_s=1 / max(pair_s, 1e-15),
        decode_step_s=tuple(decode.items()),
        kv_found_bytes_per_s=kv_bytes / max(read_s, 1e-15),
        kv_read_bytes_per_s=kv_bytes / max(read_s, 1e-15),
        kv_spared_bytes_per_s=kv_bytes / max(spared_s, 1e-15),
        kv_first_write_bytes_per_s=bench.first_write_bytes_per_s,
        expected=None,
    )


class _Bench:
    """A pool and passes over it. What it holds does not matter; sequences read blocks of their own as far as there are some."""

    def __init__(self, decoder: Decoder, *, num_layers: int, load: StepLoad, num_tokens: int) -> None:
        """Times of `decoder` are scaled to `num_layers` layers. The pool has room for `num_tokens` and more."""
        self._decoder = decoder
        self._num_layers = num_layers
        config = decoder.config
        most_tokens = max(num_tokens, _LONG_PROMPT, load.max_tokens)
        self._num_blocks = max(-(-most_tokens // _BLOCK_SIZE), load.max_sequences)
        shape = KvShape.of(config, decoder.dtype)
        self._kv = make_pool(shape, num_blocks=self._num_blocks, block_size=_BLOCK_SIZE, device=decoder.device)
        self._wait()
        began = time.perf_counter()
        self._kv.zero_()
        self._wait()
        self.first_write_bytes_per_s = self._kv.untyped_storage().nbytes() / (time.perf_counter() - began)

    def layers(self, rows: _Rows) -> Pass:
        """The layers of a step that decodes, scaled to all of them. The pool goes through the caches before, as it does in a step before."""
        forward = self._forward(self._decoder, rows, sampled=_last_rows(rows))
        scale = self._num_layers / self._decoder.config.num_layers
        storage = self._kv.untyped_storage()
        pool = torch.empty(0, dtype=torch.int64, device=self._decoder.device)
        pool.set_(storage, 0, (storage.nbytes() // pool.itemsize,), (1,))

        def run() -> float:
            pool.sum()
            self._wait()
            return forward()[1] * scale

        return run

    def beside_layers(self, num_sequences: int, form: Form | None) -> Pass:
        """What else such a step takes: see `rehearsal`."""
        decoder = self._decoder.cut(1)
        return lambda: beside_layers_s(
            decoder,
            kv=self._kv,
            num_blocks=self._num_blocks,
            block_size=_BLOCK_SIZE,
            num_sequences=num_sequences,
            form=form,
        )

    def prefill(self, rows: _Rows) -> Pass:
        """The layers of a step of prompt rows, all of them to their end, behind another such step, which finds the memory."""
        decoder = self._decoder.cut(min(_PREFILL_LAYERS, self._decoder.config.num_layers))
        forward = self._forward(decoder, rows, sampled=np.arange(rows.num_sequences * rows.num_rows))
        scale = self._num_layers / decoder.config.num_layers

        def run() -> float:
            forward()
            return forward()[1] * scale

        return run

    def attention(self, rows: _Rows) -> Pass:
        """Attention alone, over all layers. Where it is bound by memory, the weights go through the caches before each pass, as they do between
        two steps.
        """
        decoder, config = self._decoder, self._decoder.config
        heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim, decoder.dtype)
        plan = decoder.kernels.schedule_attention(self._plan(rows), heads)
        generator = torch.Generator().manual_seed(0)
        shape = (rows.num_sequences * rows.num_rows, config.num_heads, config.head_dim)
        query = torch.randn(shape, generator=generator).to(decoder.device, decoder.dtype)
        is_prefill = rows.num_rows > 1
        num_layers = min(_PREFILL_LAYERS, config.num_layers) if is_prefill else config.num_layers
        between = self._forward(decoder, _Rows(1), sampled=np.zeros(1))

        def run() -> float:
            if not is_prefill:
                between()
            began = time.perf_counter()
            for layer in range(num_layers):
                decoder.kernels.attention(query, self._kv, layer=layer, plan=plan, scale=config.head_dim**-0.5)
            self._wait()
            return (time.perf_counter() - began) * self._num_layers / num_layers

        return run

    def _forward(
        self, decoder: Decoder, rows: _Rows, *, sampled: np.ndarray
    ) -> Callable[[], tuple[torch.Tensor, float]]:
        """A pass of the decoder's layers: the hidden rows `sampled`, and seconds."""
        device, plan = decoder.device, self._plan(rows)
        offsets = _offsets(rows)
        owner = np.repeat(np.arange(rows.num_sequences), rows.num_rows)
        blocks = self._table(rows)[owner, offsets // _BLOCK_SIZE].astype(np.int64)
        slots = torch.tensor(blocks * _BLOCK_SIZE + offsets % _BLOCK_SIZE, device=device)
        token_ids = torch.tensor(offsets % decoder.config.vocab_size, dtype=torch.int64, device=device)
        sample_rows = torch.tensor(sampled, dtype=torch.int64, device=device)

        def run() -> tuple[torch.Tensor, float]:
            began = time.perf_counter()
            hidden = decoder.forward(token_ids, plan.positions, slots, plan, self._kv, sample_rows)
            self._wait()
            return hidden, time.perf_counter() - began

        return run

    def _table(self, rows: _Rows) -> np.ndarray:
        """int32 [num_sequences, blocks of each]: the shared blocks, then each sequence's own."""
        num_shared = rows.shared // _BLOCK_SIZE
        num_own = -(-(rows.context + rows.num_rows) // _BLOCK_SIZE) - num_shared
        own = num_shared + np.arange(rows.num_sequences * num_own).reshape(rows.num_sequences, num_own)
        shared = np.broadcast_to(np.arange(num_shared), (rows.num_sequences, num_shared))
        return (np.concatenate([shared, own], axis=1) % self._num_blocks).astype(np.int32)

    def _plan(self, rows: _Rows) -> AttentionPlan:
        """As `engine/step` plans it: what is shared, in whole chunks, as one item, and one item for what each sequence reads alone."""
        number, end = rows.num_sequences, rows.context + rows.num_rows
        pieces = -(-(end - rows.shared) // CHUNK)
        assert rows.shared % CHUNK == 0 and (rows.num_rows == 1 or not rows.shared)
        items = [[n * rows.num_rows, rows.num_rows, rows.shared, end, end, -1] for n in range(number)]
        merged: list[int] = []
        if rows.shared:
            for n, item in enumerate(items):
                item[5] = number + n * pieces
                merged += [n, *range(item[5], item[5] + pieces)]
            items.insert(0, [0, number, 0, rows.shared, rows.shared, 0])
        num_merged = number if rows.shared else 0

        def tensor(values: Sequence[object] | np.ndarray) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self._decoder.device)

        return AttentionPlan(
            positions=tensor(_offsets(rows)),
            tables=tensor(np.repeat(np.arange(number), rows.num_rows)),
            block_table=tensor(np.ascontiguousarray(self._table(rows))),
            items=tensor(items),
            merge_rows=tensor(range(num_merged)),
            merge_start=tensor(range(0, num_merged * (pieces + 1) + 1, pieces + 1)),
            merge_partials=tensor(merged),
            num_partials=len(merged),
        )

    def _wait(self) -> None:
        if self._decoder.device.type == "cuda":
            torch.cuda.synchronize()


def _offsets(rows: _Rows) -> np.ndarray:
    """Positions of all rows."""
    return np.tile(np.arange(rows.context, rows.context + rows.num_rows), rows.num_sequences)


def _last_rows(rows: _Rows) -> np.ndarray:
    return np.arange(1, rows.num_sequences + 1) * rows.num_rows - 1


def _middle_of_rounds(passes: Mapping[str, Pass]) -> dict[str, float]:
    """Seconds of each pass, all of them once a round."""
    rounds: list[dict[str, float]] = []
    began = time.perf_counter()
    while len(rounds) < _ROUNDS and (not rounds or time.perf_counter() - began < _ENOUGH_S):
        rounds.append({name: run() for name, run in passes.items()})
    counted = rounds[1:] or rounds
    return {name: statistics.median(seconds[name] for seconds in counted) for name in passes}
