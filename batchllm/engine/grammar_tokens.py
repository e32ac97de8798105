"""A vocabulary in the form that grammars take it: worked out once for a model, in some 0.1 s, and shared by its engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import llguidance
import numpy as np

from batchllm.errors import ModelError
from batchllm.prompt import Grammar


class GrammarVocabulary(Protocol):
    """What grammars ask of a tokenizer."""

    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def token_bytes(self) -> Sequence[bytes]: ...

    def encode_batch(self, texts: Sequence[str], *, allow_special: bool = True) -> list[np.ndarray]: ...


def grammar_tokens(vocabulary: GrammarVocabulary, *, vocab_size: int) -> llguidance.LLTokenizer:
    """`vocab_size`: of the model's logits, which may exceed the tokenizer's. Raises ModelError where no completion could end."""
    # One beyond the logits ends nothing.
    eos_ids = sorted(token_id for token_id in vocabulary.eos_ids if token_id < vocab_size)
    if not eos_ids:
        raise ModelError(
            "the model declares no EOS token that is in its vocabulary, so a completion with a schema, choice or regex could not end"
        )
    tokens = _Tokens(vocabulary, vocab_size=vocab_size, eos_token_id=eos_ids[0])
    return llguidance.LLTokenizer(tokens, eos_token=eos_ids)  # type: ignore[arg-type]


def num_sampled(grammar: Grammar, texts: Sequence[Sequence[int]], *, tokens: llguidance.LLTokenizer) -> list[int]:
    """How many tokens of each text, given by its tokens, the grammar does not force."""
    start = llguidance.LLMatcher(tokens, grammar.text, log_level=0)
    counts = []
    for token_ids in texts:
        matcher, count = start.deep_copy(), 0
        for token_id in token_ids:
            count += not matcher.compute_ff_tokens()
            matcher.consume_token(int(token_id))
        counts.append(count)
    return counts


class _Tokens:
    """The bytes of each id, and how a forced text falls into tokens."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: GrammarVocabulary, *, vocab_size: int, eos_token_id: int) -> None:
        known = list(vocabulary.token_bytes)[:vocab_size]
        self.eos_token_id = eos_token_id
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
        # A tokenizer may have tokens that the model has not.
        if max(ids, default=0) < len(self._bytes) and b"".join(self._bytes[token_id] for token_id in ids) == data:
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
