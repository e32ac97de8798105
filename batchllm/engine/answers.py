"""From hidden rows to completions: the next token of each row, and whether its sequence ends with it."""

from __future__ import annotations

import time

import numpy as np
import torch

from batchllm.engine.decoder import Decoder
from batchllm.engine.grammar import GrammarMasks
from batchllm.engine.metrics import RunMetrics
from batchllm.engine.protocols import Vocabulary
from batchllm.engine.records import Records
from batchllm.engine.sampling import LogprobEntry, Sampled, Sampler
from batchllm.engine.sequences import SequenceTable
from batchllm.engine.stopping import Stopping
from batchllm.prompt import Completion

_MAX_LOGIT_ROWS = 128
"""Rows whose logits exist at once: 25 MB for a vocabulary of 49,152."""


class Answers:
    """Owns what the sampler, the rules of stopping and the grammars know of the running sequences, by slot."""

    def __init__(
        self,
        *,
        decoder: Decoder,
        vocabulary: Vocabulary,
        table: SequenceTable,
        records: Records,
        metrics: RunMetrics,
        seed: int,
    ) -> None:
        """`table`, `records` and `metrics` are the engine's: tokens are read there, first tokens and counts noted."""
        vocab_size = decoder.config.vocab_size
        self.sampler = Sampler(vocab_size=vocab_size, device=decoder.device, job_seed=seed)
        self._stopping = Stopping(
            eos_ids=sorted(vocabulary.eos_ids),
            token_bytes=vocabulary.token_bytes,
            control_tokens=vocabulary.special_tokens,
        )
        self._grammars = GrammarMasks(vocabulary=vocabulary, vocab_size=vocab_size, max_sequences=table.max_sequences)
        self._decoder = decoder
        self._table = table
        self._records = records
        self._metrics = metrics

    def add(self, slot: int) -> None:
        """A sequence was admitted to `slot`, with the tokens that the table has of it."""
        table = self._table
        record = self._records[int(table.position[slot])]
        tokens = table.tokens[slot, : table.num_tokens[slot]]
        prompt, output = tokens[: record.prompt_tokens], tokens[record.prompt_tokens :]
        self.sampler.add(
            slot,
            record.params,
            row_index=record.row_index,
            sample_index=record.sample_index,
            prompt_ids=prompt,
            output_ids=output,
            ending_ids=self._stopping.ending_ids(record.params),
        )
        self._stopping.add(slot, record.params, output_ids=output.tolist())
        if record.params.grammar is not None:
            self._grammars.add(slot, record.params.grammar, output_ids=output.tolist())

    def remove(self, slot: int) -> None:
        """The sequence leaves its slot."""
        self.sampler.remove(slot)
        self._stopping.remove(slot)
        self._grammars.remove(slot)

    def close(self) -> None:
        """Ends the threads of grammars."""
        self._grammars.close()

    def choose(self, hidden: torch.Tensor, slots: np.ndarray, positions: np.ndarray) -> Sampled:
        """A token for each row, as if it stood alone; `positions`: tokens that its sequence has generated before it."""
        # The fused argmax would hide a NaN; the sampler names the row it is in.
        if self.sampler.all_greedy(slots, positions) and bool(hidden.sum(dtype=torch.float32).isfinite()):
            return Sampled(self._decoder.argmax(hidden).cpu().numpy())
        token_ids = np.zeros(slots.size, dtype=np.int64)
        bad_rows: dict[int, str] = {}
        logprobs: dict[int, LogprobEntry] = {}
        for start in range(0, slots.size, _MAX_LOGIT_ROWS):
            part = slice(start, start + _MAX_LOGIT_ROWS)
            allowed = self._grammars.allowed(slots[part])
            sampled = self.sampler.sample(self._decoder.logits(hidden[part]), slots[part], positions[part], allowed)
            token_ids[part] = sampled.token_ids
            for row, reason in sampled.bad_rows.items():
                bad_rows[start + row] = self._grammars.failure(int(slots[start + row])) or reason
            logprobs |= {start + row: entry for row, entry in sampled.logprobs.items()}
        return Sampled(token_ids, bad_rows, logprobs)

    def take(self, slots: np.ndarray, positions: np.ndarray, sampled: Sampled) -> tuple[np.ndarray, list[Completion]]:
        """Notes a token, `sampled`, of each of the distinct `slots`: the table has it already, and knows it.

        `positions` as for `choose`. bool `[num_rows]`, which sequences end with it, and their completions; they are the caller's to remove, and
        tokens that the table counts behind their last one are not theirs.
        """
        table, token_ids = self._table, sampled.token_ids
        now = time.monotonic()
        for slot in slots[positions == 0]:
            self._records[int(table.position[slot])].first_token_at = now
        for place, entry in sampled.logprobs.items():
            logprobs = self._records[int(table.position[slots[place]])].logprobs
            assert logprobs is not None
            logprobs.append(entry)
        good = token_ids >= 0
        self._metrics.generated_tokens += int(good.sum())
        self.sampler.append(slots[good], token_ids[good])
        ended, complete = ~good, np.zeros(slots.size, dtype=bool)
        ended[good] = self._stopping.finished_mask(slots[good], token_ids[good], positions[good] + 1)
        complete[good] = self._grammars.accept(slots[good], token_ids[good])
        num_tokens = table.prompt_length[slots] + positions + good
        ended |= complete | (num_tokens >= table.max_tokens[slots])
        self._grammars.prepare(slots[~ended])
        table.num_tokens[slots[ended]] = num_tokens[ended]
        completions = [
            self._complete(
                int(slots[place]), now, error=sampled.bad_rows.get(int(place)), is_whole=bool(complete[place])
            )
            for place in np.flatnonzero(ended)
        ]
        return ended, completions

    def _complete(self, slot: int, now: float, *, error: str | None, is_whole: bool) -> Completion:
        table = self._table
        token_ids = table.tokens[slot, table.prompt_length[slot] : table.num_tokens[slot]].tolist()
        finish = None if error is not None else self._stopping.finish(slot, token_ids, is_whole=is_whole)
        return self._records.complete(
            int(table.position[slot]), now=now, token_ids=token_ids, finish=finish, error=error
        )
