"""The tokenizer of a GGUF file, rebuilt so that its ids equal the original's.

GGUF keeps vocabulary, merges and token types, and only the *name* of the rule that cuts text into words before merging.
A name whose rule is not written down here is refused: the wrong rule gives other ids without any error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from batchllm.errors import ModelError
from batchllm.models.declared_tokens import DeclaredTokens
from batchllm.models.gguf_config import gguf_config
from batchllm.models.gguf_file import GgufFile, read_gguf_once

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

# Words as the Llama 3 and Qwen 2 tokenizers cut them; they differ in how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = ("gpt-2", "smollm", "llama-bpe", "qwen2")


def gguf_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, DeclaredTokens]:
    """The pipeline and its declared tokens. Raises ModelError that names an unknown vocabulary or pre-tokenizer."""
    file = read_gguf_once(path)
    config = gguf_config(file)
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(
            f"{path}: tokenizer {kind!r} is not rebuilt from GGUF, only gpt2 (byte-level BPE) is; "
            "use the model's Hugging Face folder"
        )
    rule = file.metadata.get("tokenizer.ggml.pre")
    if rule not in _PRE_TOKENIZERS:
        raise ModelError(
            f"{path}: pre-tokenizer {rule!r} is not known, so its ids would be wrong; known: "
            f"{', '.join(_PRE_TOKENIZERS)}; use the model's Hugging Face folder"
        )
    pipeline = _pipeline(file, rule)
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{path}: tokenizer.chat_template is not a text")
    return pipeline, DeclaredTokens(
        bos_id=config.bos_id,
        # The Llama 3 rule means a BOS where the file says nothing.
        add_bos=config.bos_id is not None
        and bool(file.metadata.get("tokenizer.ggml.add_bos_token", rule == "llama-bpe")),
        eos_id=file.metadata.get("tokenizer.ggml.eos_token_id", min(config.eos_ids, default=None)),
        eos_ids=config.eos_ids,
        chat_template=template,
        vocab_size=config.vocab_size,
    )


def _pipeline(file: GgufFile, rule: str) -> tokenizers.Tokenizer:
    tokens = _strings(file, "tokenizer.ggml.tokens")
    kinds = file.metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    merges: list[tuple[str, str]] = []
    for merge in _strings(file, "tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise ModelError(f"{file.path}: tokenizer.ggml.merges: {merge!r} is not two tokens")
        merges.append((left, right))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ModelError(f"{file.path}: tokenizer.ggml.token_type does not fit {len(tokens)} tokens")
    vocabulary: dict[str, int] = {}
    for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind == _UNUSED:
            continue
        if vocabulary.setdefault(token, token_id) != token_id:
            raise ModelError(f"{file.path}: token {token!r} has the ids {vocabulary[token]} and {token_id}")
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule == "llama-bpe")
    # The library raises plain Exception for merges whose parts are no tokens.
    except Exception as error:
        raise ModelError(f"{file.path}: tokenizer.ggml.merges: {error}") from error
    pipeline = tokenizers.Tokenizer(model)
    if rule == "qwen2":
        pipeline.normalizer = normalizers.NFC()
    pipeline.pre_tokenizer = _pre_tokenizer(rule)
    pipeline.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            pipeline.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False)])
    return pipeline


def _pre_tokenizer(rule: str) -> pre_tokenizers.PreTokenizer:
    if rule == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rule == "smollm":
        # Each digit is cut off first: in "a  2" both spaces are one word, where GPT-2 alone gives the second to the 2.
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    words = _WORDS.format(digits="{1,3}" if rule == "llama-bpe" else "")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _strings(file: GgufFile, key: str) -> list[str]:
    value: Any = file.metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelError(f"{file.path}: {key} is missing or not a list of texts")
    return value
