"""`Tokenizer`: text to ids and ids to bytes, the same for every source. Adds no BOS or EOS and loses no byte."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import numpy as np
import tokenizers
from tokenizers import AddedToken

from batchllm.errors import ModelError
from batchllm.models.config import MAX_VOCAB_SIZE
from batchllm.models.declared_tokens import DeclaredTokens
from batchllm.models.gguf_tokenizer import gguf_tokenizer
from batchllm.models.huggingface_tokenizer import huggingface_tokenizer
from batchllm.models.source import ModelSource
from batchllm.models.text_pieces import can_cut, cut_texts
from batchllm.models.token_bytes import strips_leading_space, token_bytes


class Tokenizer:
    """A `tokenizers` pipeline, the table of each token's bytes, and what the model declares about its special tokens.

    `token_bytes` [vocab_size]: the bytes that each id stands for, b"" for control tokens and for ids that are no token.
    A completion's text is their concatenation, so ids can be cut anywhere and the bytes decoded as UTF-8 later.
    `special_tokens`: control tokens by their text. `eos_ids`: the union of all that the model declares.
    `strips_leading_space`: encoding puts a space before a text (SentencePiece style), and `decode` takes it off again.
    `bos_token`, `eos_token`: their text, for chat templates.
    """

    def __init__(self, pipeline: tokenizers.Tokenizer, declared: DeclaredTokens) -> None:
        # A tokenizer.json may carry padding and truncation from training, which would change prompts.
        pipeline.no_padding()
        pipeline.no_truncation()
        description = json.loads(pipeline.to_str())
        vocabulary = pipeline.get_vocab(with_added_tokens=True)
        self.vocab_size = max(declared.vocab_size, max(vocabulary.values(), default=-1) + 1)
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ModelError(
                f"tokenizer: token id {self.vocab_size - 1} would make a vocabulary of {self.vocab_size}; at most {MAX_VOCAB_SIZE} are taken"
            )
        self.bos_id = declared.bos_id
        self.add_bos = declared.add_bos
        self.eos_ids = declared.eos_ids
        self.chat_template = declared.chat_template
        declared_ids = set(declared.eos_ids) | ({declared.bos_id} if declared.bos_id is not None else set())
        for token_id in declared_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ModelError(
                    f"tokenizer: BOS or EOS id {token_id} lies outside the vocabulary of {self.vocab_size}"
                )
        added = pipeline.get_added_tokens_decoder()
        self.special_tokens: dict[str, int] = {
            token.content: token_id
            for token_id, token in sorted(added.items())
            if token.special or token_id in declared_ids
        }
        _check_lengths(self.special_tokens)
        self.bos_token = None if self.bos_id is None else pipeline.id_to_token(self.bos_id)
        self.eos_token = None if declared.eos_id is None else pipeline.id_to_token(declared.eos_id)
        self.strips_leading_space = strips_leading_space(description)
        self.token_bytes: list[bytes] = token_bytes(description, vocabulary, vocab_size=self.vocab_size)
        for token_id in self.special_tokens.values():
            self.token_bytes[token_id] = b""
        self._can_cut = can_cut(description)
        self._with_special = pipeline
        self._without_special = _without_special(pipeline, self.special_tokens)
        # The unknown token is what a vocabulary without bytes gives for a strange character: no control.
        unknown = description["model"].get("unk_token")
        self._control = {i: text for text, i in self.special_tokens.items() if text != unknown}

    def encode_batch(self, texts: Sequence[str], *, allow_special: bool = True) -> list[np.ndarray]:
        """int32 [num_tokens] for each text, on all cores; no token is added. The texts must be valid Unicode.

        With `allow_special` the text of a control token becomes that token, as chat templates need. Without it such
        text is tokenised like any other, so that data cannot act as control.
        """
        if not allow_special:
            encoded = self._without_special.encode_batch_fast(list(texts), add_special_tokens=False)
            return [np.array(self._spelled_out(encoding.ids), dtype=np.int32) for encoding in encoded]
        if not self._can_cut or len(texts) < 2:
            return self._encode(texts)
        cut = cut_texts(texts)
        pieces = self._encode(cut.pieces)
        return [np.concatenate([pieces[number] for number in numbers]) for numbers in cut.of_text]

    def _encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._with_special.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encoded]

    def token_text(self, token_id: int) -> str:
        """A token as the vocabulary spells it; for messages."""
        return self._with_special.id_to_token(token_id) or ""

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes of a text; control tokens are skipped. May end in half a character."""
        data = b"".join([self.token_bytes[token_id] for token_id in ids])
        return data.removeprefix(b" ") if self.strips_leading_space else data

    def decode(self, ids: Iterable[int]) -> str:
        """The text, no space tidied away. Bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def _spelled_out(self, ids: list[int]) -> list[int]:
        """`ids`, with a control token that ordinary merges happen to give replaced by the tokens of its characters."""
        if self._control.keys().isdisjoint(ids):
            return ids
        plain: list[int] = []
        for token_id in ids:
            if token_id in self._control:
                characters = self._without_special.encode_batch_fast(
                    list(self._control[token_id]), add_special_tokens=False
                )
                plain.extend(i for encoding in characters for i in encoding.ids if i not in self._control)
            else:
                plain.append(token_id)
        return plain


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The model's tokenizer. Raises ModelError that names the setting it cannot reproduce."""
    if source.kind == "gguf":
        return Tokenizer(*gguf_tokenizer(source.path))
    return Tokenizer(*huggingface_tokenizer(source.path))


_LONGEST_SPECIAL_TOKEN = 256
"""Characters; what is kept of each to find it in texts grows with the square."""

_MOST_SPECIAL_SQUARES = 1 << 26
"""Of the lengths of all; 1,024 of the longest, or 70,000 of 30 characters."""


def _check_lengths(special_tokens: Iterable[str]) -> None:
    """Raises ModelError where control tokens are so long, or so many, that looking for them would take all memory."""
    lengths = [len(text) for text in special_tokens]
    longest = max(special_tokens, key=len, default="")
    if len(longest) > _LONGEST_SPECIAL_TOKEN:
        raise ModelError(
            f"tokenizer: special token {longest[:30]!r}… has {len(longest)} characters; at most {_LONGEST_SPECIAL_TOKEN} are taken"
        )
    if sum(length**2 for length in lengths) > _MOST_SPECIAL_SQUARES:
        raise ModelError(
            f"tokenizer: {len(lengths)} special tokens of {sum(lengths)} characters are too many to be looked for in texts"
        )


def _without_special(pipeline: tokenizers.Tokenizer, special_tokens: dict[str, int]) -> tokenizers.Tokenizer:
    """A second pipeline that sees no control token in a text; it shares the model. The switch is the pipeline's, not the call's."""
    second = tokenizers.Tokenizer(pipeline.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(pipeline, part)) is not None:
            setattr(second, part, value)
    second.add_tokens(
        [
            AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.content in special_tokens,
            )
            for _, token in sorted(pipeline.get_added_tokens_decoder().items())
        ]
    )
    second.encode_special_tokens = True
    return second
