"""From token ids to text, without loss: a token is bytes, and text is decoded once, from the joined bytes.

No token is decoded alone: a character may lie over several tokens. Nothing is cleaned up: spaces stay as they were
generated.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


def join_tokens(token_bytes: Sequence[bytes], token_ids: Sequence[int]) -> bytes:
    """The bytes of the tokens. Control tokens have none, nor have ids past the table (a model's padded head)."""
    num_tokens = len(token_bytes)
    return b"".join([token_bytes[token_id] for token_id in token_ids if token_id < num_tokens])


def decode_text(data: bytes, *, is_cut: bool) -> str:
    """`data` as text. Bytes that are no UTF-8 become U+FFFD, one for each maximal part of a character; no surrogates.

    `is_cut`: generation stopped for its length, so that the last character may be incomplete: its bytes are dropped,
    and no character before it is lost. Otherwise an unfinished character is the model's own doing and shows as
    U+FFFD.
    """
    return codecs.utf_8_decode(data, "replace", not is_cut)[0]
