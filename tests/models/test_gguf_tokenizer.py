"""Tokenizers out of GGUF metadata: each known pre-tokenizer, token types, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchllm.errors import ModelError
from batchllm.models.source import ModelSource
from batchllm.models.token_bytes import byte_alphabet
from batchllm.models.tokenizer import Tokenizer, load_tokenizer

ALPHABET = sorted(byte_alphabet(), key=lambda character: byte_alphabet()[character])
TOKENS = [*ALPHABET, "12", "123", "\u0120\u0120", "\u0120a", "ab", "abc"]
MERGES = ["1 2", "12 3", "\u0120 \u0120", "\u0120 a", "a b"]


@pytest.fixture
def rebuilt(
    tmp_path: Path, tiny_model: Callable[..., Any], write_gguf: Callable[..., None]
) -> Callable[..., Tokenizer]:
    def build(rule: str | None, **changes: Any) -> Tokenizer:
        tokens = [*TOKENS, "<|end|>", "<tool>", "[PAD]"]
        metadata = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": rule,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * len(TOKENS) + [3, 4, 5],
            "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.bos_token_id": 2,
        } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
        path = tmp_path / "tiny.gguf"
        model = tiny_model("llama2")
        rows = {"token_embd.weight": np.zeros((len(tokens), 64), np.float32)}
        write_gguf(path, model, metadata=metadata | {"llama.vocab_size": len(tokens)}, tensors=rows)
        return load_tokenizer(ModelSource(kind="gguf", path=path, name="tiny"))

    return build


def pieces(tokenizer: Tokenizer, text: str) -> list[bytes]:
    return [tokenizer.token_bytes[i] for i in tokenizer.encode_batch([text])[0]]


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        ("gpt-2", "1234", [b"123", b"4"]),
        ("gpt-2", "  a", [b" ", b" a"]),
        ("gpt-2", "1  2", [b"1", b" ", b" ", b"2"]),
        ("smollm", "123", [b"1", b"2", b"3"]),
        ("smollm", "1  2", [b"1", b"  ", b"2"]),
        ("llama-bpe", "1234", [b"123", b"4"]),
        ("llama-bpe", "1  2", [b"1", b" ", b" ", b"2"]),
        # The whole word is a token that no merge makes: Llama 3 takes it, the others cannot.
        ("llama-bpe", "abc", [b"abc"]),
        ("qwen2", "abc", [b"ab", b"c"]),
        ("qwen2", "123", [b"1", b"2", b"3"]),
        # Qwen 2 composes characters first.
        ("qwen2", "e\u0301", ["é".encode()[:1], "é".encode()[1:]]),
        ("llama-bpe", "e\u0301", [b"e", b"\xcc", b"\x81"]),
    ],
)
def test_a_text_is_cut_as_the_named_pre_tokenizer_cuts_it(
    rule: str, text: str, expected: list[bytes], rebuilt: Callable[..., Tokenizer]
) -> None:
    assert pieces(rebuilt(rule), text) == expected


def test_control_user_defined_and_unused_tokens_keep_their_ids_and_their_kinds(
    rebuilt: Callable[..., Tokenizer],
) -> None:
    tokenizer = rebuilt("llama-bpe")
    end = len(TOKENS)
    assert tokenizer.encode_batch(["a<|end|><tool>"])[0].tolist()[-2:] == [end, end + 1]
    assert tokenizer.special_tokens == {"<|end|>": end}
    assert tokenizer.token_bytes[end:] == [b"", b"<tool>", b""]
    assert tokenizer.decode(tokenizer.encode_batch(["[PAD]<|end|>"], allow_special=False)[0]) == "[PAD]<|end|>"
    assert end + 2 not in tokenizer.encode_batch(["[PAD]"])[0]
    assert tokenizer.vocab_size == end + 3


def test_the_llama3_rule_means_a_bos_unless_the_file_says_otherwise(rebuilt: Callable[..., Tokenizer]) -> None:
    assert rebuilt("llama-bpe").add_bos
    assert not rebuilt("llama-bpe", add_bos_token=False).add_bos
    assert not rebuilt("gpt-2").add_bos
    assert rebuilt("gpt-2", add_bos_token=True).add_bos


@pytest.mark.parametrize(
    ("rule", "changes", "message"),
    [
        ("tekken", {}, "pre-tokenizer 'tekken' is not known, so its ids would be wrong; known: gpt-2, smollm"),
        ("default", {}, "pre-tokenizer 'default' is not known"),
        (None, {}, "pre-tokenizer None is not known"),
        ("gpt-2", {"model": "llama"}, "tokenizer 'llama' is not rebuilt from GGUF"),
        ("gpt-2", {"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ("gpt-2", {"merges": ["a b", "a"]}, "tokenizer.ggml.merges: 'a' is not two tokens"),
        ("gpt-2", {"merges": ["a zz"]}, "tokenizer.ggml.merges: "),
        ("gpt-2", {"token_type": [1, 1]}, "token_type does not fit"),
        ("gpt-2", {"tokens": [*TOKENS, "ab", "x", "y"]}, "token 'ab' has the ids"),
        ("gpt-2", {"eos_token_id": "</s>"}, "tokenizer.ggml.eos_token_id is </s>, a token id is needed"),
        ("gpt-2", {"bos_token_id": 99999}, "BOS or EOS id 99999 lies outside the vocabulary"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_by_name(
    rule: str | None, changes: dict[str, Any], message: str, rebuilt: Callable[..., Tokenizer]
) -> None:
    with pytest.raises(ModelError, match=message):
        rebuilt(rule, **changes)
