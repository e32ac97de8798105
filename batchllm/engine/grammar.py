"""Which tokens each row may take next, where its completion must fit a grammar.

The masks for the next token depend on the token just sampled. They are computed on other threads from that moment on,
while the next step is scheduled and the model runs, and are waited for only when that step is sampled.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Sequence
from typing import Protocol

import llguidance
import llguidance.numpy
import numpy as np
import torch

from batchllm.engine.sampling import AllowedTokens
from batchllm.errors import ModelError
from batchllm.prompt import Grammar


class GrammarVocabulary(Protocol):
    """What grammars ask of a tokenizer."""

    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def token_bytes(self) -> Sequence[bytes]: ...

    def encode_batch(self, texts: Sequence[str], *, allow_special: bool = True) -> list[np.ndarray]: ...


class GrammarMasks:
    """The grammars of the running rows, by slot (as in `Sampler`), and their masks. Owns its threads until `close`.

    A row's state is a function of its grammar and its tokens so far, so a preempted row is simply added again. Costs
    nothing until a row with a grammar is added.
    """

    def __init__(self, *, vocabulary: GrammarVocabulary, vocab_size: int, max_sequences: int) -> None:
        """`vocab_size`: of the model's logits, which may exceed the tokenizer's."""
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._has_grammar = np.zeros(max_sequences, dtype=bool)
        self._bits = np.zeros((max_sequences, -(-vocab_size // 32)), dtype=np.int32)
        self._matchers: dict[int, llguidance.LLMatcher] = {}
        self._failures: dict[int, str] = {}
        self._compiled: dict[Grammar, llguidance.LLMatcher] = {}
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._workers: llguidance.LLExecutor | None = None
        # One thread that hands out work keeps the order: a slot's later mask cannot be overwritten by an earlier one.
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._pending: list[concurrent.futures.Future[None]] = []

    def add(self, slot: int, grammar: Grammar, *, output_ids: Sequence[int]) -> None:
        """Start a row in a free slot and its first mask. After a preemption `output_ids` are the tokens it has generated already."""
        assert not self._has_grammar[slot], f"slot {slot} is in use"
        if grammar not in self._compiled:
            self._compiled[grammar] = llguidance.LLMatcher(self._prepared_tokenizer(), grammar.text, log_level=0)
        matcher = self._compiled[grammar].deep_copy()
        if output_ids:
            matcher.consume_tokens(list(output_ids))
        self._has_grammar[slot] = True
        self._matchers[slot] = matcher
        self.prepare(np.array([slot]))

    def remove(self, slot: int) -> None:
        """Free a slot, whether or not its row has a grammar."""
        if self._has_grammar[slot]:
            self._has_grammar[slot] = False
            del self._matchers[slot]
            self._failures.pop(slot, None)

    def any(self, slots: np.ndarray) -> bool:
        """Whether a row in `slots` has a grammar."""
        return bool(self._has_grammar[slots].any())

    def allowed(self, slots: np.ndarray) -> AllowedTokens | None:
        """The masks of the rows in `slots`, waiting for those under way. None where no row has a grammar."""
        rows = np.flatnonzero(self._has_grammar[slots])
        if not len(rows):
            return None
        self._wait()
        return AllowedTokens(rows=rows, bits=torch.from_numpy(self._bits[slots[rows]]))

    def accept(self, slots: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """Takes the token just sampled for each of the distinct `slots`; bool `[num_rows]`: rows that are complete.

        A row is complete when its grammar takes nothing more. One that may end or go on is not; an EOS ends it.
        """
        complete = np.zeros(len(slots), dtype=bool)
        rows = np.flatnonzero(self._has_grammar[slots])
        if not len(rows):
            return complete
        self._wait()
        for row in rows.tolist():
            matcher = self._matchers[int(slots[row])]
            matcher.consume_token(int(token_ids[row]))
            complete[row] = matcher.is_stopped() and not matcher.is_error()
        return complete

    def prepare(self, slots: np.ndarray) -> None:
        """Begins the masks of the next token for those of `slots` that have a grammar; returns at once."""
        chosen = [(self._matchers[slot], slot) for slot in slots[self._has_grammar[slots]].tolist()]
        if chosen:
            if self._thread is None or self._workers is None:
                self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
                # The model needs the cores more: masks of 100 rows are a few milliseconds on one.
                self._workers = llguidance.LLExecutor(max(1, (os.cpu_count() or 1) // 4))
            self._pending.append(self._thread.submit(self._compute, self._workers, chosen))

    def failure(self, slot: int) -> str | None:
        """Why the grammar of a row could not go on, if so; its mask then allows nothing."""
        return self._failures.get(slot)

    def close(self) -> None:
        """Ends the threads."""
        if self._thread is not None:
            self._thread.shutdown()

    def _compute(self, workers: llguidance.LLExecutor, chosen: list[tuple[llguidance.LLMatcher, int]]) -> None:
        llguidance.numpy.fill_next_token_bitmask_par(workers, chosen, self._bits)
        for matcher, slot in chosen:
            if matcher.is_error():
                # In error the library allows EOS, which would pass a broken text for a whole one.
                self._bits[slot] = 0
                self._failures[slot] = f"the output's grammar failed: {matcher.get_error().splitlines()[0]}"

    def _wait(self) -> None:
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def _prepared_tokenizer(self) -> llguidance.LLTokenizer:
        if self._tokenizer is None:
            eos_ids = sorted(self._vocabulary.eos_ids)
            if not eos_ids:
                raise ModelError(
                    "the model declares no EOS token, so a completion with a schema, choice or regex could not end"
                )
            tokens = _Tokens(self._vocabulary, vocab_size=self._vocab_size)
            self._tokenizer = llguidance.LLTokenizer(tokens, eos_token=eos_ids)  # type: ignore[arg-type]
        return self._tokenizer


class _Tokens:
    """A vocabulary in the form that llguidance reads: the bytes of each id, and how a forced text falls into tokens."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: GrammarVocabulary, *, vocab_size: int) -> None:
        known = list(vocabulary.token_bytes)[:vocab_size]
        self.eos_token_id = min(vocabulary.eos_ids)
        self.tokens = known + [b""] * (vocab_size - len(known))
        # Without bytes it is a control token or none at all: no text leads to it.
        self.special_token_ids = [token_id for token_id, data in enumerate(self.tokens) if not data]
        for token_id in self.special_token_ids:
            self.tokens[token_id] = b"<%d>" % token_id
        self._encode = vocabulary.encode_batch
        self._bytes = known
        self._ids = {data: token_id for token_id, data in enumerate(known) if data}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str | bytes) -> list[int]:
        """The model's own tokens of a text that the grammar forces; where those are other bytes, the longest ones that fit."""
        data = text.encode() if isinstance(text, str) else text
        ids: list[int] = self._encode([data.decode("utf-8", "replace")], allow_special=False)[0].tolist()
        if b"".join(self._bytes[token_id] for token_id in ids) == data:
            return ids
        ids, start = [], 0
        while start < len(data):
            for stop in range(min(len(data), start + self._longest), start, -1):
                if data[start:stop] in self._ids:
                    ids.append(self._ids[data[start:stop]])
                    start = stop
                    break
            else:
                # No token for this byte: the mask says so, whatever is answered here.
                break
        return ids
