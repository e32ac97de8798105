"""`DeclaredTokens`: what a model's files say about its tokens, beside the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeclaredTokens:
    """`eos_ids`: the union of all sources; `eos_id`: the one that chat templates get. `chat_template`: Jinja source.

    `vocab_size`: the model's, which may exceed the tokenizer's.
    """

    bos_id: int | None
    add_bos: bool
    eos_id: int | None
    eos_ids: frozenset[int]
    chat_template: str | None
    vocab_size: int
