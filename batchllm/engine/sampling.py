"""The sampler: logits of a step in, one token per row out, mixed settings in one batch, each row as if alone.

Order of operations, the same for each row:

1. Log-probabilities, where asked for: of the model's own distribution, before anything below.
2. Repetition penalty (prompt and output tokens: positive logits are divided by it, negative ones multiplied), then
   `frequency_penalty * count` and `presence_penalty` are subtracted (output tokens only).
3. Logit bias is added. Ids that `min_tokens` forbids so far, and those that `AllowedTokens` leaves out, become -inf.
4. Temperature up to `GREEDY_TEMPERATURE`: the best token, the lowest id of equals. Above it: temperature, top-k,
   top-p, min-p, and a draw from what is left (`filters`) with the row's random number for this position
   (`random_streams`).

Per step the work in Python is a fixed number of array operations; only rows that ask for log-probabilities cost a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from batchllm.engine.filters import DrawRows, draw, leading_ids
from batchllm.engine.penalties import SeenTokens, TokenOffsets
from batchllm.engine.random_streams import stream_key, uniforms
from batchllm.kernels.sampling import SamplingBatch
from batchllm.prompt import SamplingParams

GREEDY_TEMPERATURE = 1e-3
"""Temperatures up to this are greedy: only tokens within some 0.01 nat could differ, less than bf16 rounds by."""

LOGPROB_FLOOR = -1e4
"""Lowest log-probability that is reported, in nats, so that averages and JSON stay finite."""

_CHUNK_ELEMENTS = 1 << 23
"""Logits that are drawn from at once: bounds the memory of sums and rankings, and changes no row."""

_COLUMNS = np.dtype(
    [
        ("is_used", np.bool_),
        ("is_free", np.bool_),  # nothing but temperature and filters once min_tokens is over
        ("has_seen", np.bool_),  # uses a penalty
        ("has_offsets", np.bool_),
        ("min_tokens", np.int64),  # 0 where no id ends the row
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("repetition", np.float64),
        ("presence", np.float64),
        ("frequency", np.float64),
        ("key", np.uint64),
        ("num_logprobs", np.int64),  # -1: none
    ]
)

LogprobEntry = tuple[int, float, tuple[tuple[int, float], ...]]
"""(token id, its log-probability, ((alternative id, log-probability), ...) best first), as in `Completion.logprobs`."""


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """What some rows may take: `rows` int64 `[n]`, places in the batch; `ids`, for each the tokens that it may take, int64.

    `is_open` bool `[n]`: rows whose `ids` are those that it may not take. Of a vocabulary few tokens are in one of both as a rule.
    """

    rows: np.ndarray
    ids: list[np.ndarray]
    is_open: np.ndarray


@dataclass(frozen=True, slots=True)
class Sampled:
    """One step's tokens: `token_ids` int64 `[num_rows]`, -1 in bad rows.

    `bad_rows` names, by place in the batch, the rows that could not be sampled and why: each is an error row, its
    neighbours are not. `logprobs` has an entry for each good row that asks for them, by place in the batch.
    """

    token_ids: np.ndarray
    bad_rows: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, LogprobEntry] = field(default_factory=dict)

    def of(self, rows: np.ndarray) -> Sampled:
        """What was sampled for `rows`, which are places 0, 1, ... of the result."""
        if not self.bad_rows and not self.logprobs:
            return Sampled(self.token_ids[rows])
        places = {row: place for place, row in enumerate(rows.tolist())}
        return Sampled(
            self.token_ids[rows],
            {places[row]: reason for row, reason in self.bad_rows.items() if row in places},
            {places[row]: entry for row, entry in self.logprobs.items() if row in places},
        )


class Sampler:
    """Sampling state of the running rows, by slot. A slot is a small number that the engine gives a row while it runs.

    Owns no model and no sequence. Settings and tokens live on the host; only what a step reads goes to the device.
    """

    def __init__(self, *, vocab_size: int, device: torch.device, job_seed: int) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._job_seed = job_seed
        self._columns = np.zeros(0, dtype=_COLUMNS)
        self._num_counting = 0
        """Rows that use a penalty."""
        self._seen = SeenTokens()
        self._offsets = TokenOffsets()

    def add(
        self,
        slot: int,
        params: SamplingParams,
        *,
        row_index: int,
        sample_index: int,
        prompt_ids: np.ndarray,
        output_ids: np.ndarray | Sequence[int] = (),
        ending_ids: tuple[int, ...] = (),
    ) -> None:
        """Start a row in a free slot. After a preemption `output_ids` are the tokens it has generated already.

        `ending_ids`: every id that would end the row (`stopping.ending_ids`), forbidden before `min_tokens`.
        """
        if slot >= len(self._columns):
            grown = np.zeros(max(slot + 1, 2 * len(self._columns)), dtype=_COLUMNS)
            grown[: len(self._columns)] = self._columns
            self._columns = grown
        assert not self._columns["is_used"][slot], f"slot {slot} is in use"
        uses_repetition = params.repetition_penalty != 1.0
        has_seen = uses_repetition or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        min_tokens = params.min_tokens if ending_ids else 0
        is_greedy = params.temperature <= GREEDY_TEMPERATURE
        column = np.zeros((), dtype=_COLUMNS)
        column["is_used"] = True
        is_free = not params.logit_bias and params.logprobs is None and params.grammar is None
        column["is_free"] = not has_seen and is_free
        column["has_seen"] = has_seen
        column["has_offsets"] = bool(params.logit_bias) or min_tokens > 0
        column["min_tokens"] = min_tokens
        column["temperature"] = 0.0 if is_greedy else params.temperature
        column["top_k"] = min(params.top_k, self._vocab_size) if params.top_k > 0 else self._vocab_size
        column["top_p"] = params.top_p
        column["min_p"] = params.min_p
        column["repetition"] = params.repetition_penalty
        column["presence"] = params.presence_penalty
        column["frequency"] = params.frequency_penalty
        column["key"] = stream_key(
            job_seed=self._job_seed, row_seed=params.seed, row_index=row_index, sample_index=sample_index
        )
        column["num_logprobs"] = -1 if params.logprobs is None else min(params.logprobs, self._vocab_size)
        self._columns[slot] = column
        self._num_counting += has_seen
        if has_seen:
            # Presence and frequency look at the output only: then the prompt need not be kept.
            seen_prompt = prompt_ids if uses_repetition else np.zeros(0, dtype=np.int64)
            self._seen.add(slot, prompt_ids=seen_prompt, output_ids=np.asarray(output_ids, dtype=np.int64))
        if column["has_offsets"]:
            bias = {token_id: value for token_id, value in params.logit_bias if 0 <= token_id < self._vocab_size}
            masked_ids = tuple(token_id for token_id in ending_ids if 0 <= token_id < self._vocab_size)
            self._offsets.add(slot, logit_bias=bias, masked_ids=masked_ids, min_tokens=min_tokens)

    def remove(self, slot: int) -> None:
        """Free a slot: finished, failed or preempted. Nothing of the row stays in effect."""
        assert self._columns["is_used"][slot], f"slot {slot} is not in use"
        self._num_counting -= int(self._columns["has_seen"][slot])
        self._columns[slot] = np.zeros((), dtype=_COLUMNS)

    def append(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """Tell the penalties what was generated: one token for each of the distinct slots. Once per sampled token."""
        if not self._num_counting:
            return
        counting = self._columns["has_seen"][slots]
        self._seen.append(slots[counting], np.asarray(token_ids, dtype=np.int64)[counting])

    def all_greedy(self, slots: np.ndarray, positions: np.ndarray) -> bool:
        """Whether the argmax of the raw logits is all these rows need, so that the engine may skip the logits."""
        columns = self._columns[slots]
        return bool((_are_free(columns, positions) & (columns["temperature"] == 0.0)).all())

    def is_free(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """bool `[num_rows]`: rows whose tokens follow from the raw logits and `device_batch`, whatever was generated before."""
        return _are_free(self._columns[slots], positions)

    def device_batch(self, slots: np.ndarray, positions: np.ndarray) -> SamplingBatch | None:
        """What `kernels.sampling.sample` draws these rows with, on the host; None where all are greedy.

        It draws from other random numbers than `sample`, but from the same stream key and position.
        """
        columns = self._columns[slots]
        if not (columns["temperature"] > 0.0).any():
            return None
        return SamplingBatch(
            temperature=torch.from_numpy(columns["temperature"].astype(np.float32)),
            top_k=torch.from_numpy(columns["top_k"].astype(np.int32)),
            top_p=torch.from_numpy(columns["top_p"].astype(np.float32)),
            min_p=torch.from_numpy(columns["min_p"].astype(np.float32)),
            seed=torch.from_numpy(columns["key"].copy().view(np.int64)),
            stream=torch.zeros(len(slots), dtype=torch.int64),
            step=torch.from_numpy(positions.astype(np.int32)),
        )

    def sample(
        self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray, allowed: AllowedTokens | None = None
    ) -> Sampled:
        """One token per row. `logits` float32 `[num_rows, vocabulary]` is OVERWRITTEN.

        `slots` int64 `[num_rows]`; `positions` int64 `[num_rows]`: tokens generated so far, which is the
        place in the row's random stream. Logits that are NaN or infinite, or rows with no token left, end in
        `bad_rows`.
        """
        assert logits.dtype == torch.float32 and logits.shape == (len(slots), self._vocab_size), logits.shape
        columns = self._columns[slots]
        suspect = torch.nonzero(~logits.sum(dim=1).isfinite()).squeeze(1)  # one pass; a sum may overflow, so look again
        is_bad = torch.zeros(len(slots), dtype=torch.bool, device=logits.device)
        is_bad[suspect] = ~logits[suspect].isfinite().all(dim=1)
        bad_rows = _set_aside(logits, is_bad, why="the model gave logits that are not finite")

        wants_logprobs = np.flatnonzero(columns["num_logprobs"] >= 0)
        logprobs = torch.log_softmax(logits[self._to_device(wants_logprobs)], dim=1) if len(wants_logprobs) else None

        if self._edit(logits, slots=slots, positions=positions, columns=columns, allowed=allowed):
            no_token = ~logits.amax(dim=1).isfinite()
            bad_rows |= _set_aside(logits, no_token, why="the row's settings leave no token to sample")

        token_ids = self._choose(logits, positions=positions, columns=columns)
        host_ids = token_ids.cpu().numpy()
        entries: dict[int, LogprobEntry] = {}
        if logprobs is not None:
            entries = _logprob_entries(
                logprobs, rows=wants_logprobs, num_alternatives=columns["num_logprobs"], token_ids=host_ids
            )
        for row in bad_rows:
            host_ids[row] = -1
            entries.pop(row, None)
        return Sampled(token_ids=host_ids, bad_rows=bad_rows, logprobs=entries)

    def _to_device(self, values: np.ndarray, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.from_numpy(values.copy()).to(device=self._device, dtype=dtype)

    def _edit(
        self,
        logits: torch.Tensor,
        *,
        slots: np.ndarray,
        positions: np.ndarray,
        columns: np.ndarray,
        allowed: AllowedTokens | None,
    ) -> bool:
        """Steps 2 and 3, in place; whether any row was touched."""
        penalised = np.flatnonzero(columns["has_seen"])
        if len(penalised):
            seen = self._seen.entries(slots[penalised])
            owners = penalised[seen.rows]
            place = (self._to_device(owners), self._to_device(seen.token_ids))
            values = logits[place]
            repetition, presence, frequency = (
                self._to_device(columns[name][owners], torch.float32)
                for name in ("repetition", "presence", "frequency")
            )
            counts = self._to_device(seen.values, torch.float32)
            values = torch.where(values < 0, values * repetition, values / repetition)
            logits[place] = values - frequency * counts - presence * (counts > 0)
        shifted = np.flatnonzero(columns["has_offsets"])
        if len(shifted):
            offsets = self._offsets.entries(slots[shifted], positions[shifted])
            place = (self._to_device(shifted[offsets.rows]), self._to_device(offsets.token_ids))
            logits[place] = logits[place] + self._to_device(offsets.values, torch.float32)
        if allowed is not None and len(allowed.rows):
            self._forbid(logits, allowed)
        return bool(len(penalised) or len(shifted) or (allowed is not None and len(allowed.rows)))

    def _forbid(self, logits: torch.Tensor, allowed: AllowedTokens) -> None:
        """What rows may not take becomes -inf, in place."""
        sizes = np.array([ids.size for ids in allowed.ids])
        owners, ids = np.repeat(allowed.rows, sizes), np.concatenate(allowed.ids)
        is_open = np.repeat(allowed.is_open, sizes)
        closed = self._to_device(owners[~is_open]), self._to_device(ids[~is_open])
        kept = logits[closed]
        logits[self._to_device(allowed.rows[~allowed.is_open])] = -torch.inf
        logits[closed] = kept
        logits[self._to_device(owners[is_open]), self._to_device(ids[is_open])] = -torch.inf

    def _choose(self, logits: torch.Tensor, *, positions: np.ndarray, columns: np.ndarray) -> torch.Tensor:
        """Step 4: the token of each row, int64 `[num_rows]`."""
        drawing = np.flatnonzero(columns["temperature"] > 0.0)
        if not len(drawing):
            return logits.argmax(dim=1)
        token_ids = torch.empty(len(columns), dtype=torch.int64, device=logits.device)
        greedy = self._to_device(np.flatnonzero(columns["temperature"] == 0.0))
        if len(greedy):
            token_ids[greedy] = logits[greedy].argmax(dim=1)
        num_rows = max(1, _CHUNK_ELEMENTS // self._vocab_size)
        for start in range(0, len(drawing), num_rows):
            rows = drawing[start : start + num_rows]
            chosen = columns[rows]
            settings = DrawRows(
                temperature=self._to_device(chosen["temperature"], torch.float32),
                top_k=self._to_device(chosen["top_k"]),
                top_p=self._to_device(chosen["top_p"]),
                min_p=self._to_device(chosen["min_p"], torch.float32),
                uniform=self._to_device(uniforms(chosen["key"], positions[rows])),
            )
            place = self._to_device(rows)
            token_ids[place] = draw(logits if len(rows) == len(columns) else logits[place], settings)
        return token_ids


def _are_free(columns: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """`Sampler.is_free` of rows with these settings."""
    return columns["is_free"] & (positions >= columns["min_tokens"])


def _set_aside(logits: torch.Tensor, is_bad: torch.Tensor, *, why: str) -> dict[int, str]:
    """Blank the bad rows, so that nothing after meets their values, and name them."""
    if not bool(is_bad.any()):
        return {}
    logits[is_bad] = 0.0
    return {int(row): why for row in torch.nonzero(is_bad).squeeze(1).tolist()}


def _logprob_entries(
    logprobs: torch.Tensor, *, rows: np.ndarray, num_alternatives: np.ndarray, token_ids: np.ndarray
) -> dict[int, LogprobEntry]:
    """The log-probabilities of the sampled tokens and of each row's best alternatives, floored."""
    logprobs = logprobs.clamp(min=LOGPROB_FLOOR)
    places = torch.from_numpy(token_ids[rows]).to(logprobs.device)
    sampled = logprobs.gather(1, places[:, None]).squeeze(1).tolist()
    most = int(num_alternatives[rows].max())
    best_ids = leading_ids(logprobs, most) if most else torch.zeros((len(rows), 0), dtype=torch.int64)
    best = logprobs.gather(1, best_ids.to(logprobs.device)).tolist()
    entries: dict[int, LogprobEntry] = {}
    for place, (row, ids, values) in enumerate(zip(rows.tolist(), best_ids.tolist(), best, strict=True)):
        pairs = tuple(zip(ids, values, strict=True))[: int(num_alternatives[row])]
        entries[row] = (int(token_ids[row]), sampled[place], pairs)
    return entries
