"""Steps on a device that runs behind the host. What a step samples stays there, and the next step reads it there.

The host sees the tokens of a step once it has launched the next one. Until then it counts a token that it does not
know (0 stands for it), which is enough to plan: positions and blocks depend on how many tokens there are, not which.
So a sequence that a token ends is found one step late. By then it has a row in the step that runs; that row's token is
dropped, and its keys and values went to a block that was still the sequence's own.

Inputs of a step are packed into one pinned buffer and go over in one copy. Steps that only decode are padded to a few
batch sizes and computed from buffers that stay where they are, so that a CUDA graph can replay them: the first step of
a size runs as it is, the second is captured.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch

from batchllm.engine.decoder import Decoder
from batchllm.engine.step import PlanArrays, StepBatch
from batchllm.kernels.attention import AttentionPlan
from batchllm.kernels.sampling import SamplingBatch

_MAX_LOGIT_ROWS = 128
"""Rows whose logits exist at once: 78 MB for a vocabulary of 152,000."""

_MAX_PADDED_ROWS = 512
"""Steps with more rows are launched operation by operation: launching costs little beside them."""

_ALIGNMENT = 16
"""Bytes at whose multiples the packed arrays start: kernels may load 16 at once."""

Arrays = dict[str, np.ndarray]


def padded_count(count: int) -> int:
    """The size that `count` rows are padded to: a power of two up to 8, then the next multiple of 8, or up to an eighth more."""
    if count <= 8:
        return 1 << max(0, count - 1).bit_length()
    step = max(8, 1 << (count.bit_length() - 4))
    return -(-count // step) * step


@dataclass(slots=True)
class SampledAhead:
    """The tokens of one launched step. `token_ids` int64 [num_rows], in host memory, is whole once `arrived` has happened; -1: not finite.

    `is_live`: rows whose sequence still waits for the token.
    """

    slots: np.ndarray
    positions: np.ndarray
    token_ids: torch.Tensor
    arrived: torch.cuda.Event | None
    is_live: np.ndarray

    def wait(self) -> np.ndarray:
        """The tokens, once the device has got there."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.token_ids.numpy()

    def drop(self, slots: np.ndarray) -> np.ndarray:
        """No token is wanted for these `slots` any more; those of them that waited for one."""
        dropped = self.is_live & np.isin(self.slots, slots)
        self.is_live &= ~dropped
        return self.slots[dropped]


@dataclass(frozen=True, slots=True)
class _Inputs:
    """One step's inputs on the device. `ahead` int64 [num_rows]: the slot whose last token is the row's, -1 for `token_ids`' own.

    `sample_slots` int64: where the sampled tokens are kept. `sampling` None: all greedy.
    """

    token_ids: torch.Tensor
    ahead: torch.Tensor
    kv_slots: torch.Tensor
    sample_rows: torch.Tensor
    sample_slots: torch.Tensor
    plan: AttentionPlan
    sampling: SamplingBatch | None


class _Layout:
    """Arrays packed one behind the other, the same way on host and device."""

    def __init__(self, arrays: Arrays, *, num_partials: int) -> None:
        self._num_partials = num_partials
        self._parts: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        self.num_bytes = 0
        for name, values in arrays.items():
            self._parts[name] = (self.num_bytes, torch.from_numpy(values).dtype, values.shape)
            self.num_bytes += -(-values.nbytes // _ALIGNMENT) * _ALIGNMENT

    def pack(self, arrays: Arrays, buffer: np.ndarray) -> None:
        """Writes `arrays`, of the layout's own shapes, into `buffer` uint8."""
        for name, values in arrays.items():
            start = self._parts[name][0]
            buffer[start : start + values.nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    def unpack(self, buffer: torch.Tensor) -> _Inputs:
        """Views of `buffer` uint8 [num_bytes]."""
        views: dict[str, torch.Tensor] = {}
        for name, (start, dtype, shape) in self._parts.items():
            size = int(np.prod(shape)) * dtype.itemsize
            views[name] = buffer[start : start + size].view(dtype).view(shape)
        plan = AttentionPlan(
            **{name: views[name] for name in _PLAN_ARRAYS},
            num_partials=self._num_partials,
            last_items=views.get("last_items"),
        )
        sampling = SamplingBatch(**{name: views[name] for name in _SAMPLING_ARRAYS}) if "seed" in views else None
        return _Inputs(**{name: views[name] for name in _ROW_ARRAYS}, plan=plan, sampling=sampling)


_PLAN_ARRAYS = [field.name for field in fields(PlanArrays) if field.name not in ("num_partials", "last_items")]
_SAMPLING_ARRAYS = [field.name for field in fields(SamplingBatch)]
_ROW_ARRAYS = ["token_ids", "ahead", "kv_slots", "sample_rows", "sample_slots"]


class _PaddedStep:
    """Buffers of one padded size that stay where they are, and the graph over them once it is captured."""

    def __init__(self, layout: _Layout, device: torch.device) -> None:
        self.layout = layout
        self.buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        self.inputs = layout.unpack(self.buffer)
        self.num_runs = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.token_ids = torch.empty(0, dtype=torch.int64, device=device)


class DeviceSteps:
    """Launches steps of one engine on its device, in order. Owns the last token of each slot there, buffers and graphs.

    `ahead`: the tokens that the host has not taken yet.
    """

    def __init__(self, *, decoder: Decoder, kv: torch.Tensor, max_sequences: int) -> None:
        self._decoder = decoder
        self._kv = kv
        self._device = decoder.device
        self._is_cuda = decoder.device.type == "cuda"
        self._has_graphs = self._is_cuda and decoder.kernels.never_waits
        self._max_sequences = max_sequences
        # One more than there are slots, for what padding rows sample.
        self._last_ids = torch.zeros(max_sequences + 1, dtype=torch.int64, device=decoder.device)
        self._staging: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * 2
        self._num_staged = 0
        self._padded: dict[tuple[int, ...], _PaddedStep] = {}
        self._graph_pool = torch.cuda.graph_pool_handle() if self._has_graphs else None
        self.ahead: SampledAhead | None = None

    def launch(
        self,
        batch: StepBatch,
        *,
        row_slots: np.ndarray,
        positions: np.ndarray,
        sampling: SamplingBatch | None,
        wants_hidden: bool = False,
    ) -> tuple[SampledAhead, torch.Tensor | None]:
        """Launches a step: the tokens it samples, and its hidden rows where they are wanted.

        `row_slots` int64: the slots of the leading rows, which decode. `positions` int64: of the tokens to sample. `sampling`: of the sampled
        rows, on the host; None: all greedy.
        """
        num_rows, num_decode, num_samples = batch.token_ids.size, row_slots.size, batch.sample_slots.size
        is_late = np.zeros(self._max_sequences, dtype=bool)
        if self.ahead is not None:
            is_late[self.ahead.slots[self.ahead.is_live]] = True
        ahead = np.full(num_rows, -1, dtype=np.int64)
        ahead[:num_decode] = np.where(is_late[row_slots], row_slots, -1)
        arrays: Arrays = {
            "token_ids": batch.token_ids,
            "ahead": ahead,
            "kv_slots": batch.kv_slots,
            "sample_rows": batch.sample_rows,
            "sample_slots": batch.sample_slots,
            **{name: getattr(batch.plan, name) for name in _PLAN_ARRAYS},
        }
        if batch.plan.last_items is not None:
            arrays["last_items"] = batch.plan.last_items
        if sampling is not None:
            arrays |= {name: getattr(sampling, name).numpy() for name in _SAMPLING_ARRAYS}
        hidden = None
        if num_rows == num_decode == num_samples <= _MAX_PADDED_ROWS and not wants_hidden:
            token_ids = self._run_padded(arrays, batch.plan.num_partials)[:num_samples]
        else:
            layout = _Layout(arrays, num_partials=batch.plan.num_partials)
            buffer = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self._device)
            self._stage(layout, arrays, buffer)
            hidden, token_ids = self._compute(layout.unpack(buffer))
        host_ids = torch.empty(num_samples, dtype=torch.int64, pin_memory=self._is_cuda)
        host_ids.copy_(token_ids, non_blocking=True)
        arrived = None
        if self._is_cuda:
            arrived = torch.cuda.Event()
            arrived.record()
        is_live = np.ones(num_samples, dtype=bool)
        return SampledAhead(batch.sample_slots, positions, host_ids, arrived, is_live), hidden

    def _run_padded(self, arrays: Arrays, num_partials: int) -> torch.Tensor:
        arrays, num_partials = _pad(arrays, num_partials=num_partials, spare_slot=self._max_sequences)
        shapes = (arrays["token_ids"].size, arrays["block_table"].shape[1], len(arrays["items"]), num_partials)
        key = (*shapes, "seed" in arrays)
        step = self._padded.get(key)
        if step is None:
            step = self._padded[key] = _PaddedStep(_Layout(arrays, num_partials=num_partials), self._device)
        self._stage(step.layout, arrays, step.buffer)
        step.num_runs += 1
        if not self._has_graphs or step.num_runs == 1:
            return self._compute(step.inputs)[1]
        if step.graph is None:
            step.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(step.graph, pool=self._graph_pool):
                step.token_ids = self._compute(step.inputs)[1]
        step.graph.replay()
        return step.token_ids

    def _stage(self, layout: _Layout, arrays: Arrays, buffer: torch.Tensor) -> None:
        """Copies a step's arrays into `buffer` on the device, through one of two buffers on the host.

        The step before the last has ended when its tokens were taken, so its host buffer is free again.
        """
        turn = self._num_staged % 2
        if self._staging[turn].numel() < layout.num_bytes:
            self._staging[turn] = torch.empty(2 * layout.num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
        self._num_staged += 1
        packed = self._staging[turn][: layout.num_bytes]
        layout.pack(arrays, packed.numpy())
        buffer.copy_(packed, non_blocking=True)

    def _compute(self, inputs: _Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden rows and sampled tokens, kept in `last_ids` as well. Waits for nothing; the same work for the same shapes."""
        decoder = self._decoder
        token_ids = torch.where(inputs.ahead < 0, inputs.token_ids, self._last_ids[inputs.ahead.clamp(min=0)])
        hidden = decoder.forward(
            token_ids=token_ids,
            positions=inputs.plan.positions,
            slots=inputs.kv_slots,
            plan=inputs.plan,
            kv=self._kv,
            sample_rows=inputs.sample_rows,
        )
        is_finite = hidden.isfinite().all(dim=1)
        clean = hidden.masked_fill(~is_finite[:, None], 0.0)
        parts = [clean.new_empty(0, dtype=torch.int64)]
        for start in range(0, len(clean), _MAX_LOGIT_ROWS):
            part = slice(start, start + _MAX_LOGIT_ROWS)
            if inputs.sampling is None:
                parts.append(decoder.argmax(clean[part]))
            else:
                settings = SamplingBatch(**{name: getattr(inputs.sampling, name)[part] for name in _SAMPLING_ARRAYS})
                parts.append(decoder.kernels.sample(decoder.logits(clean[part]), settings))
        sampled = torch.cat(parts)
        self._last_ids[inputs.sample_slots] = sampled
        return hidden, torch.where(is_finite, sampled, -1)


def _pad(arrays: Arrays, *, num_partials: int, spare_slot: int) -> tuple[Arrays, int]:
    """The arrays of a decoding step at one of few shapes, and the padded number of partials.

    A padding row reads token 0 at position 0, is in no item, writes no KV and samples into `spare_slot`.
    """
    num_rows = padded_count(arrays["token_ids"].size)
    num_partials = 1 << max(num_rows, num_partials).bit_length()
    fill = {"kv_slots": -1, "ahead": -1, "sample_slots": spare_slot, "block_table": -1, "top_p": 1}
    padded = {name: _grow(values, num_rows, fill.get(name, 0)) for name, values in arrays.items()}
    width = 1 << max(0, arrays["block_table"].shape[1] - 1).bit_length()
    padded["block_table"] = np.pad(
        padded["block_table"], ((0, 0), (0, width - padded["block_table"].shape[1])), constant_values=-1
    )
    padded["sample_rows"] = np.arange(num_rows, dtype=np.int64)
    padded["items"] = _grow(arrays["items"], padded_count(max(len(arrays["items"]), num_rows + num_rows // 8)), 0)
    padded["merge_start"] = _grow(arrays["merge_start"], num_rows + 1, int(arrays["merge_start"][-1]))
    padded["merge_partials"] = _grow(arrays["merge_partials"], num_partials, 0)
    return padded, num_partials


def _grow(values: np.ndarray, length: int, fill: int) -> np.ndarray:
    if len(values) >= length:
        return values
    grown = np.full((length, *values.shape[1:]), fill, dtype=values.dtype)
    grown[: len(values)] = values
    return grown
