"""Bytes to text: exact over token borders, valid UTF-8 at any cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm.engine.detokenize import decode_text, join_tokens

SINGLE_BYTES = [bytes([value]) for value in range(256)]
TEXTS = [
    "\U0001f999 llama \U0001f469\u200d\U0001f4bb",
    "ภาษาไทยไม่มีช่องว่างระหว่างคำ",
    "తెలుగు",
    "x != y and a . b ? don 't  two  spaces\n\ttab ",
    "\ufeffbyte order mark, \ufffd itself, and \x00",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_that_falls_into_single_bytes_comes_back_exactly(text: str) -> None:
    assert decode_text(join_tokens(SINGLE_BYTES, list(text.encode())), is_cut=True) == text
    assert decode_text(join_tokens(SINGLE_BYTES, list(text.encode())), is_cut=False) == text


@pytest.mark.parametrize("text", TEXTS)
def test_a_cut_at_any_byte_loses_no_character_before_it(text: str) -> None:
    data = text.encode()
    for num_bytes in range(len(data) + 1):
        whole = [end for end in range(len(text) + 1) if len(text[:end].encode()) <= num_bytes]
        assert decode_text(data[:num_bytes], is_cut=True) == text[: whole[-1]]


def test_an_unfinished_character_before_the_models_own_end_is_shown_once() -> None:
    assert decode_text("a\U0001f999".encode()[:-1], is_cut=False) == "a\ufffd"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a\xffb", "a\ufffdb"),
        (b"a\xf0\x9f\xa6b", "a\ufffdb"),  # three bytes of a character: one maximal part
        (b"\xf0\x9f\xf0\x9f\xa6\x99", "\ufffd\U0001f999"),
        (b"\xc0\xaf", "\ufffd\ufffd"),  # an overlong slash
        (b"\xed\xa0\x80x", "\ufffd\ufffd\ufffdx"),  # a surrogate
        (b"\x80\x80", "\ufffd\ufffd"),
    ],
)
def test_bytes_that_are_no_utf8_become_one_mark_for_each_maximal_part(data: bytes, text: str) -> None:
    assert decode_text(data, is_cut=True) == text


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=40), is_cut=st.booleans())
def test_any_bytes_become_text_that_utf8_can_hold(data: bytes, is_cut: bool) -> None:
    text = decode_text(data, is_cut=is_cut)
    assert decode_text(text.encode(), is_cut=is_cut) == text
    assert data.decode("utf-8", "replace").startswith(text)


def test_ids_past_the_table_have_no_text() -> None:
    assert join_tokens([b"a", b"", b"b"], [0, 1, 7, 2]) == b"ab"
