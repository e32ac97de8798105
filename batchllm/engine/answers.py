"""From hidden rows to completions: the next token of each row, and whether its sequence ends with it."""

from __future__ import annotations

import time

import llguidance
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

_INFINITIES = {
    torch.bfloat16: (torch.int16, np.uint16, 0x7F80, 0xFF80),
    torch.float32: (torch.int32, np.uint32, 0x7F800000, 0xFF800000),
}
"""Integers of a number's size, signed and not, and the bits of infinity and its negative: behind them lie NaN only."""


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
        grammar_tokens: llguidance.LLTokenizer | None = None,
    ) -> None:
        """`table`, `records` and `metrics` are the engine's: tokens are read there, first tokens and counts noted. `grammar_tokens`: see
        `GrammarMasks`.
        """
        vocab_size = decoder.config.vocab_size
        self.sampler = Sampler(vocab_size=vocab_size, device=decoder.device, job_seed=seed)
        self._stopping = Stopping(
            eos_ids=sorted(vocabulary.eos_ids),
            token_bytes=vocabulary.token_bytes,
            control_tokens=vocabulary.special_tokens,
        )
        self._grammars = GrammarMasks(
            vocabulary=vocabulary, vocab_size=vocab_size, max_sequences=table.max_sequences, tokens=grammar_tokens
        )
        self._can_force = np.zeros(table.max_sequences, dtype=bool)
        """By slot: whether a token that is the only one allowed is the next one, whatever the logits say and nobody asks for them."""
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
        params = record.params
        if params.grammar is not None:
            self._grammars.add(slot, params.grammar, output_ids=output.tolist())
        # A bias or `min_tokens` may forbid even that token: the sampler says so.
        self._can_force[slot] = params.logprobs is None and not params.logit_bias and params.min_tokens == 0

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
        if self.sampler.all_greedy(slots, positions) and _all_finite(hidden):
            return Sampled(self._decoder.argmax(hidden).cpu().numpy())
        token_ids = self._forced(slots, wait=True)
        bad_rows: dict[int, str] = {}
        logprobs: dict[int, LogprobEntry] = {}
        to_sample = np.flatnonzero(token_ids < 0)
        for start in range(0, to_sample.size, _MAX_LOGIT_ROWS):
            part = to_sample[start : start + _MAX_LOGIT_ROWS]
            logits = self._decoder.logits(hidden[torch.from_numpy(part).to(hidden.device)])
            allowed = self._grammars.allowed(slots[part])
            sampled = self.sampler.sample(logits, slots[part], positions[part], allowed)
            token_ids[part] = sampled.token_ids
            for place, reason in sampled.bad_rows.items():
                row = int(part[place])
                bad_rows[row] = self._grammars.failure(int(slots[row])) or reason
            logprobs |= {int(part[place]): entry for place, entry in sampled.logprobs.items()}
        return Sampled(token_ids, bad_rows, logprobs)

    @property
    def may_force(self) -> bool:
        """Whether `forced` may have a token for any row: a running one has a grammar."""
        return self._grammars.any_running

    def forced(self, slots: np.ndarray) -> np.ndarray:
        """int64 `[num_rows]`: the next token of each row whose grammar is known already to leave it no other, else -1."""
        return self._forced(slots, wait=False)

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
        ended, complete = token_ids < 0, np.zeros(slots.size, dtype=bool)
        # A step takes tens of such operations, each at the price of a cold cache: what has no rows to work on is left out.
        good = np.flatnonzero(~ended) if sampled.bad_rows else slice(None)
        good_slots, good_ids = slots[good], token_ids[good]
        self._metrics.generated_tokens += good_slots.size
        self.sampler.append(good_slots, good_ids)
        num_tokens = table.prompt_length[slots] + positions + ~ended
        ended[good] = self._stopping.finished_mask(good_slots, good_ids, positions[good] + 1)
        if self._grammars.any_running:
            complete[good] = self._grammars.accept(good_slots, good_ids)
            ended |= complete
        ended |= num_tokens >= table.max_tokens[slots]
        self._grammars.prepare(slots[~ended])
        places = np.flatnonzero(ended)
        table.num_tokens[slots[places]] = num_tokens[places]
        completions = [
            self._complete(
                int(slots[place]), now, error=sampled.bad_rows.get(int(place)), is_whole=bool(complete[place])
            )
            for place in places
        ]
        return ended, completions

    def _forced(self, slots: np.ndarray, *, wait: bool) -> np.ndarray:
        token_ids = self._grammars.forced(slots, wait=wait)
        token_ids[~self._can_force[slots]] = -1
        return token_ids

    def _complete(self, slot: int, now: float, *, error: str | None, is_whole: bool) -> Completion:
        table = self._table
        token_ids = table.tokens[slot, table.prompt_length[slot] : table.num_tokens[slot]].tolist()
        finish = None if error is not None else self._stopping.finish(slot, token_ids, is_whole=is_whole)
        return self._records.complete(
            int(table.position[slot]), now=now, token_ids=token_ids, finish=finish, error=error
        )


def _all_finite(hidden: torch.Tensor) -> bool:
    """Whether no row has a NaN or an infinity. On a CPU by the bits, on one core: between two products the other ones sleep."""
    if hidden.device.type != "cpu":
        return bool(hidden.sum().isfinite())
    signed, unsigned, infinity, negative = _INFINITIES[hidden.dtype]
    bits = hidden.view(signed).numpy()
    return bool(bits.max(initial=0) < infinity and bits.view(unsigned).max(initial=0) < negative)
