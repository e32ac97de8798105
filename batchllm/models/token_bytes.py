"""Which bytes each token stands for, from a `tokenizers` description: the exact inverse that its own decoder only
approximates.

Two spellings exist. Byte level (GPT-2): each byte is one printable character. SentencePiece: U+2581 for a space, <0x0A>
for a byte.
"""

from __future__ import annotations

import re
from typing import Any

from batchllm.errors import ModelError

_SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


def token_bytes(description: dict[str, Any], vocabulary: dict[str, int], *, vocab_size: int) -> list[bytes]:
    """[vocab_size], b"" for ids that are no token. `description` is the parsed tokenizer.json, `vocabulary` with added
    tokens.

    Raises ModelError for a model or decoder whose bytes are not known here.
    """
    model = description["model"]
    if model["type"] not in ("BPE", "Unigram"):
        raise ModelError(f"tokenizer: model {model['type']} is not supported; BPE and Unigram are")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise ModelError(f"tokenizer: {key} {model[key]!r} is not supported")
    steps = _decoder_steps(description)
    kinds = {step["type"] for step in steps}
    table = [b""] * vocab_size
    if "ByteLevel" in kinds:
        for text, token_id in vocabulary.items():
            table[token_id] = _byte_level(text)
    elif kinds and kinds <= _SENTENCEPIECE_STEPS:
        for text, token_id in vocabulary.items():
            byte = _BYTE.fullmatch(text) if "ByteFallback" in kinds else None
            table[token_id] = bytes([int(byte[1], 16)]) if byte else text.replace(_SPACE, " ").encode()
    else:
        raise ModelError(f"tokenizer: decoder {', '.join(sorted(kinds)) or 'none'} is not supported")
    for token in description["added_tokens"]:
        # Added tokens are spelled as they are, whatever the vocabulary's alphabet.
        table[token["id"]] = token["content"].encode()
    return table


def strips_leading_space(description: dict[str, Any]) -> bool:
    """Whether the decoder takes one space off the start of a text."""
    for step in _decoder_steps(description):
        if step["type"] == "Strip" and step.get("content") == " " and step.get("start", 0) > 0:
            return True
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return True
    return False


def byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling: printable Latin-1 stands for itself, the other bytes for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_OUTSIDE = 0xFFFF
_LATIN1 = dict.fromkeys(range(256), _OUTSIDE) | {ord(character): byte for character, byte in byte_alphabet().items()}


def _byte_level(text: str) -> bytes:
    try:
        return text.translate(_LATIN1).encode("latin-1")
    except UnicodeEncodeError:
        # Not spelled in the alphabet.
        return text.encode()


def _decoder_steps(description: dict[str, Any]) -> list[dict[str, Any]]:
    decoder = description.get("decoder")
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
