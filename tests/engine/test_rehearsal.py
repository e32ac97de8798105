"""What a step takes beside the layers, rehearsed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from batchllm.data.constraints import choice_grammar
from batchllm.engine.decoder import kv_shape
from batchllm.engine.grammar_tokens import grammar_tokens, num_sampled
from batchllm.engine.pool import make_pool
from batchllm.engine.rehearsal import Form, beside_layers_s


@dataclass(frozen=True)
class Letters:
    """A token for each of 63 letters and pairs, and EOS 63."""

    eos_ids: frozenset[int] = frozenset({63})
    token_bytes: tuple[bytes, ...] = (
        *(bytes([97 + i]) for i in range(26)),
        *(bytes([97 + i, 97 + i]) for i in range(26)),
        *(bytes([48 + i]) for i in range(11)),
        b"",
    )
    special_tokens: Any = None

    def encode_batch(self, texts: Any, *, allow_special: bool = True) -> list[Any]:
        return [torch.tensor([self.token_bytes.index(letter.encode()) for letter in text]).numpy() for text in texts]


@pytest.fixture
def rehearse(stub_decoder: Callable[..., Any]) -> Callable[..., float]:
    decoder = stub_decoder()
    plain, logits = decoder.argmax, decoder.logits
    object.__setattr__(decoder, "argmax", lambda hidden: (time.sleep(0.01), plain(hidden))[1])

    def slow_logits(hidden: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03)
        return logits(hidden)

    def seconds(form: Form | None) -> float:
        kv = make_pool(kv_shape(decoder), num_blocks=40, block_size=16, device=decoder.device)
        object.__setattr__(decoder, "logits", logits if form is None else slow_logits)
        return beside_layers_s(decoder, kv=kv, num_blocks=40, block_size=16, num_sequences=5, form=form)

    return seconds


def test_a_step_takes_the_vocabularys_product_and_under_a_grammar_the_sampling_of_its_rows(
    rehearse: Callable[..., float],
) -> None:
    vocabulary = Letters()
    tokens = grammar_tokens(vocabulary, vocab_size=64)
    free = rehearse(None)
    assert 0.01 < free < 0.03
    assert rehearse(Form(choice_grammar(["abc", "xyz"]), vocabulary, tokens)) > free + 0.015


def test_tokens_of_labels_that_need_no_sampling_are_counted() -> None:
    vocabulary = Letters()
    tokens = grammar_tokens(vocabulary, vocab_size=64)
    labels = ["abc", "abd", "xyz"]
    texts = [ids.tolist() for ids in vocabulary.encode_batch(labels)]
    # The first letter, and the third of those that begin with the same two.
    assert num_sampled(choice_grammar(labels), texts, tokens=tokens) == [2, 2, 1]
