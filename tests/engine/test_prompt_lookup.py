"""Where the end of a text stands earlier in it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm.engine import prompt_lookup
from batchllm.engine.prompt_lookup import MOST_MATCHED, continuations, find_matches


def drafted(tokens: list[int], most: int) -> list[int]:
    row, num_tokens = np.array([tokens or [0]], dtype=np.int32), np.array([len(tokens)])
    place = find_matches(row, num_tokens).place
    counts = np.where(place >= 0, most, 0)
    return continuations(row, num_tokens=num_tokens, place=place, counts=counts).tolist()


def test_a_draft_is_what_followed_the_same_three_tokens_before() -> None:
    assert drafted([5, 1, 2, 3, 7, 8, 9, 1, 2, 3], most=3) == [7, 8, 9]
    assert drafted([5, 1, 2, 3, 7, 8, 9, 0, 2, 3], most=3) == [], "two tokens alone are no match"
    assert drafted([1, 2, 3], most=3) == []
    assert drafted([1, 2, 3, 7, 1, 2, 3], most=0) == []


def test_of_several_places_the_longest_match_counts_and_then_the_latest() -> None:
    assert drafted([9, 1, 2, 3, 7, 8, 1, 2, 3, 6, 9, 1, 2, 3], most=1) == [7]
    assert drafted([8, 1, 2, 3, 7, 5, 1, 2, 3, 6, 4, 1, 2, 3], most=1) == [6]


def test_a_text_that_repeats_itself_is_drafted_in_circles() -> None:
    assert drafted([4, 4, 4, 4], most=5) == [4, 4, 4, 4, 4]
    assert drafted([1, 2, 1, 2, 1, 2], most=5) == [1, 2, 1, 2, 1]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=40), st.integers(0, 6))
def test_a_draft_stands_in_the_text_behind_a_match_of_its_end(tokens: list[int], most: int) -> None:
    draft = drafted(tokens, most)
    if not draft:
        matches = [i for i in range(len(tokens) - 3) if tokens[i : i + 3] == tokens[-3:]]
        assert most == 0 or not matches
        return
    assert len(draft) == most
    whole = tokens + draft
    periods = range(1, len(tokens) - 2)
    assert any(
        all(whole[-1 - i] == whole[-1 - i - period] for i in range(most + 3))
        for period in periods
        if period + most + 3 <= len(whole)
    )


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=6))
def test_rows_are_searched_together_as_each_alone(texts: list[list[int]]) -> None:
    """What lies behind a row's tokens is of no row that is searched, and must not be found."""
    tokens = np.ones((len(texts), 40), dtype=np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    found = find_matches(tokens, np.array([len(text) for text in texts], dtype=np.int32))
    for row, text in enumerate(texts):
        best = (0, -1)
        for place in range(2, len(text) - 1):
            length = 0
            while length < MOST_MATCHED and length <= place and text[place - length] == text[-1 - length]:
                length += 1
            best = max(best, (length, place)) if length >= 3 else best
        assert (found.length[row], found.place[row]) == best


def test_rows_that_are_searched_a_few_at_a_time_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.random.default_rng(0).integers(0, 3, size=(50, 60)).astype(np.int32)
    num_tokens = np.full(50, 60)
    whole = find_matches(tokens, num_tokens)
    monkeypatch.setattr(prompt_lookup, "_TOKENS_AT_ONCE", 200)
    parts = find_matches(tokens, num_tokens)
    assert (whole.length >= 3).sum() > 30
    assert (parts.place.tolist(), parts.length.tolist()) == (whole.place.tolist(), whole.length.tolist())
