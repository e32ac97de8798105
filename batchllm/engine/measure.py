"""Measures what steps cost on this machine for a model's shape, with weights of random numbers: no weight is read.

A model's layers are alike, so a few of them are built, enough that they do not fit into a cache, and their time is scaled to all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from batchllm.engine.pool import KvShape, make_pool
from batchllm.kernels.attention import AttentionPlan
from batchllm.models.config import ModelConfig
from batchllm.models.decoder import Decoder
from batchllm.models.weights import canonical_shapes
from batchllm.ops import select_kernels
from batchllm.planner.rates import ObservedRates

_LAYERS_BYTES = 256 << 20
"""Weights that no cache holds."""

_BLOCK_SIZE = 16
_SHORT_CONTEXT, _LONG_CONTEXT = 32, 768
_REPEATS, _ENOUGH_S = 5, 0.5
"""The middle one of five passes, or of fewer where they take long: a run does not have the machine's best moments either."""

_PREFILL_ROWS = 512


class _RandomWeights:
    """Tensors of the right shape. One random tile is repeated: only the time of the products counts."""

    def __init__(self, config: ModelConfig) -> None:
        self._shapes = canonical_shapes(config)
        self._tile = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        shape = self._shapes[name]
        size = int(np.prod(shape))
        return self._tile.to(dtype).repeat(-(-size // self._tile.numel()))[:size].reshape(shape).clone()


@dataclass(frozen=True, slots=True)
class _Load:
    """One forward pass: `num_rows` rows of each of `num_sequences` sequences that already hold `context` tokens."""

    num_sequences: int
    num_rows: int
    context: int


def measure_rates(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_sequences: int,
    int8_parts: frozenset[str] = frozenset(),
) -> ObservedRates:
    """Times a few forward passes (a second or two on a CPU). `generated_share` is 1: nothing is known of the rows yet."""
    layer_bytes = dtype.itemsize * sum(
        int(np.prod(shape))
        for name, shape in canonical_shapes(replace(config, num_layers=1)).items()
        if "layers." in name
    )
    num_layers = min(config.num_layers, max(2, -(-_LAYERS_BYTES // layer_bytes)))
    few = replace(config, num_layers=num_layers, max_context=max(_LONG_CONTEXT, _PREFILL_ROWS) + _BLOCK_SIZE)
    decoder = Decoder(
        few,
        _RandomWeights(few),
        dtype=dtype,
        device=device,
        kernels=select_kernels(device, head_dim=config.head_dim),
        fingerprint="",
        int8_parts=int8_parts,
    )
    bench = _Bench(decoder, max_sequences=max_sequences, layer_scale=config.num_layers / num_layers)
    batches = sorted({1, min(8, max_sequences), min(64, max_sequences), max_sequences})
    decode = {batch: bench.seconds(_Load(batch, 1, _SHORT_CONTEXT)) for batch in batches}
    prefill_s = bench.seconds(_Load(1, _PREFILL_ROWS, 0))
    wide = min(64, max_sequences)
    reading_s = max(bench.seconds(_Load(wide, 1, _LONG_CONTEXT)) - decode[wide], 1e-9)
    kv_bytes = wide * (_LONG_CONTEXT - _SHORT_CONTEXT) * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return ObservedRates(
        prefill_tokens_per_s=_PREFILL_ROWS / prefill_s,
        decode_step_s=tuple(decode.items()),
        kv_read_bytes_per_s=kv_bytes * dtype.itemsize / reading_s,
        generated_share=1.0,
    )


class _Bench:
    """A pool and the passes over it. What the pool holds does not matter, so all sequences read the same blocks."""

    def __init__(self, decoder: Decoder, *, max_sequences: int, layer_scale: float) -> None:
        self._decoder = decoder
        self._layer_scale = layer_scale
        self._num_blocks = -(-decoder.config.max_context // _BLOCK_SIZE) * max(1, min(max_sequences, 8))
        config = decoder.config
        shape = KvShape(config.num_layers, config.num_kv_heads, config.head_dim, decoder.dtype)
        self._kv = make_pool(shape, num_blocks=self._num_blocks, block_size=_BLOCK_SIZE, device=decoder.device)
        self._kv.zero_()

    def seconds(self, load: _Load) -> float:
        """The middle one of a few passes, scaled to all layers, sampling included."""
        run = self._pass(load)
        run()
        times = [run()]
        while len(times) < _REPEATS and sum(map(sum, times)) < _ENOUGH_S:
            times.append(run())
        layers_s, head_s = sorted(times, key=sum)[len(times) // 2]
        return layers_s * self._layer_scale + head_s

    def _pass(self, load: _Load) -> Callable[[], tuple[float, float]]:
        device, decoder = self._decoder.device, self._decoder
        blocks_each = -(-(load.context + load.num_rows) // _BLOCK_SIZE)
        numbers = np.arange(load.num_sequences * blocks_each, dtype=np.int32) % self._num_blocks
        table = numbers.reshape(load.num_sequences, blocks_each)
        offsets = np.tile(np.arange(load.context, load.context + load.num_rows), load.num_sequences)
        owner = np.repeat(np.arange(load.num_sequences), load.num_rows)
        slots = table[owner, offsets // _BLOCK_SIZE].astype(np.int64) * _BLOCK_SIZE + offsets % _BLOCK_SIZE
        end = load.context + load.num_rows
        items = [[n * load.num_rows, load.num_rows, 0, end, n, -1] for n in range(load.num_sequences)]
        nothing = torch.empty(0, dtype=torch.int32, device=device)
        plan = AttentionPlan(
            positions=torch.tensor(offsets, dtype=torch.int32, device=device),
            block_table=torch.tensor(table, device=device),
            items=torch.tensor(items, dtype=torch.int32, device=device),
            merge_rows=nothing,
            merge_start=torch.zeros(1, dtype=torch.int32, device=device),
            merge_partials=nothing,
            num_partials=0,
        )
        token_ids = torch.tensor(offsets % decoder.config.vocab_size, dtype=torch.int64, device=device)
        kv_slots = torch.tensor(slots, device=device)
        last_rows = torch.arange(1, load.num_sequences + 1, device=device) * load.num_rows - 1

        def run() -> tuple[float, float]:
            began = time.perf_counter()
            hidden = decoder.forward(token_ids, plan.positions, kv_slots, plan, self._kv, last_rows)
            self._wait()
            between = time.perf_counter()
            decoder.argmax(hidden).cpu()
            return between - began, time.perf_counter() - between

        return run

    def _wait(self) -> None:
        if self._decoder.device.type == "cuda":
            torch.cuda.synchronize()
