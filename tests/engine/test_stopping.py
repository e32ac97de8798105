"""When a row ends, why, and what text it leaves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm.engine.stopping import Finish, Stopping
from batchllm.prompt import SamplingParams

WORDS = [
    b"",
    b"",
    b"",
    b"Hello",
    b" world",
    b"\n",
    b"\n\nQ",
    b": ",
    b"END",
    b"EN",
    b"D",
    b"!",
    b"\xf0\x9f",
    b"\xa6\x99",
]
EOS, END_OF_TURN, PAD, HELLO, WORLD, NEWLINE, NEWLINES_Q, COLON, END, EN, D, MARK, FRONT, BACK = range(len(WORDS))


def stopping(eos_ids: tuple[int, ...] = (EOS, END_OF_TURN)) -> Stopping:
    control_tokens = {"<eos>": EOS, "<|im_end|>": END_OF_TURN, "<pad>": PAD}
    return Stopping(eos_ids=eos_ids, token_bytes=WORDS, control_tokens=control_tokens)


def run(
    rules: Stopping, params: SamplingParams, token_ids: list[int], *, preempt_at: int | None = None
) -> tuple[int, Finish]:
    """Feed one row until it ends: how many tokens it took, and how it ended."""
    slot = 4
    rules.add(slot, params)
    for num_tokens, token_id in enumerate(token_ids, start=1):
        if num_tokens - 1 == preempt_at:
            rules.remove(slot)
            slot = 9
            rules.add(slot, params, token_ids[: num_tokens - 1])
        if rules.finished_mask(np.array([slot]), np.array([token_id]), np.array([num_tokens]))[0]:
            finish = rules.finish(slot, token_ids[:num_tokens])
            rules.remove(slot)
            return num_tokens, finish
    raise AssertionError("the row did not end")


@pytest.mark.parametrize(
    ("params", "token_ids", "num_tokens", "finish"),
    [
        (SamplingParams(), [HELLO, EOS, WORLD], 2, Finish("eos", None, "Hello")),
        (SamplingParams(), [HELLO, END_OF_TURN, WORLD], 2, Finish("eos", None, "Hello")),
        (SamplingParams(), [EOS], 1, Finish("eos", None, "")),
        (SamplingParams(stop_token_ids=(WORLD, 3000)), [HELLO, WORLD], 2, Finish("stop", str(WORLD), "Hello")),
        (SamplingParams(stop=("D!", "END")), [HELLO, EN, D, MARK], 3, Finish("stop", "END", "Hello")),
        (SamplingParams(stop=("\n\nQ: ",)), [HELLO, NEWLINES_Q, COLON], 3, Finish("stop", "\n\nQ: ", "Hello")),
        (SamplingParams(stop=("l",)), [HELLO, EOS], 1, Finish("stop", "l", "He")),
        (SamplingParams(max_tokens=2), [HELLO, WORLD, MARK], 2, Finish("length", None, "Hello world")),
        (SamplingParams(max_tokens=1), [EOS], 1, Finish("eos", None, "")),
        (SamplingParams(max_tokens=1, stop=("Hello",)), [HELLO], 1, Finish("stop", "Hello", "")),
        (SamplingParams(max_tokens=1, stop_token_ids=(HELLO,)), [HELLO], 1, Finish("stop", str(HELLO), "")),
        (SamplingParams(stop_token_ids=(EOS,)), [EOS], 1, Finish("eos", None, "")),
        (SamplingParams(stop=("\U0001f999",)), [HELLO, FRONT, BACK], 3, Finish("stop", "\U0001f999", "Hello")),
        (SamplingParams(max_tokens=2), [HELLO, FRONT, BACK], 2, Finish("length", None, "Hello")),
        (SamplingParams(), [HELLO, FRONT, EOS], 3, Finish("eos", None, "Hello\ufffd")),
    ],
)
def test_a_row_ends_at_its_first_reason_and_its_text_stops_before_it(
    params: SamplingParams, token_ids: list[int], num_tokens: int, finish: Finish
) -> None:
    assert run(stopping(), params, token_ids) == (num_tokens, finish)


def test_every_declared_eos_id_ends_a_row() -> None:
    for token_id in (2, 0):
        assert run(stopping(eos_ids=(2, 0)), SamplingParams(), [HELLO, token_id])[1].finish_reason == "eos"


def test_ignore_eos_lets_every_eos_id_pass_but_not_a_stop_id_or_string() -> None:
    ignoring = SamplingParams(ignore_eos=True, max_tokens=4)
    assert run(stopping(), ignoring, [EOS, HELLO, END_OF_TURN, WORLD]) == (4, Finish("length", None, "Hello world"))
    own = SamplingParams(ignore_eos=True, stop_token_ids=(END_OF_TURN,))
    assert run(stopping(), own, [EOS, HELLO, END_OF_TURN]) == (3, Finish("stop", str(END_OF_TURN), "Hello"))
    assert run(stopping(), SamplingParams(ignore_eos=True, stop=("D",)), [EOS, D]) == (2, Finish("stop", "D", ""))


def test_a_stop_string_that_names_a_control_token_ends_at_it() -> None:
    params = SamplingParams(stop=("<pad>", "END"), max_tokens=9)
    assert run(stopping(), params, [HELLO, PAD]) == (2, Finish("stop", "<pad>", "Hello"))
    assert run(stopping(), params, [HELLO, END]) == (2, Finish("stop", "END", "Hello"))
    assert stopping().ending_ids(params) == (EOS, END_OF_TURN, PAD)


def test_min_tokens_holds_back_every_reason_but_length() -> None:
    params = SamplingParams(min_tokens=3, max_tokens=5, stop=("END",), stop_token_ids=(WORLD,))
    assert run(stopping(), params, [END, WORLD, EOS, MARK, EOS]) == (5, Finish("eos", None, "END world!"))
    assert run(stopping(), params, [HELLO, MARK, EN, D]) == (4, Finish("stop", "END", "Hello!"))
    assert run(stopping(), params, [HELLO, MARK, END, D, D]) == (5, Finish("length", None, "Hello!ENDDD"))
    short = SamplingParams(min_tokens=3, max_tokens=2, stop=("END",))
    assert run(stopping(), short, [HELLO, END]) == (2, Finish("length", None, "HelloEND"))


def test_ending_ids_are_those_that_min_tokens_must_forbid() -> None:
    rules = stopping()
    assert rules.ending_ids(SamplingParams(stop_token_ids=(WORLD,))) == (EOS, END_OF_TURN, WORLD)
    assert rules.ending_ids(SamplingParams(stop_token_ids=(WORLD,), ignore_eos=True)) == (WORLD,)


def test_of_several_stop_strings_the_first_to_end_counts_whatever_the_order_or_tokens() -> None:
    for stops in (("world!", "wor", "o w"), ("wor", "o w", "world!")):
        params = SamplingParams(stop=stops)
        assert run(stopping(), params, [HELLO, WORLD, MARK])[1] == Finish("stop", "o w", "Hell")
    longest = SamplingParams(stop=("D", "ND", "END"))
    assert run(stopping(), longest, [MARK, END])[1] == Finish("stop", "END", "!")


def test_a_batch_of_different_rules_ends_each_row_by_its_own() -> None:
    rules = stopping()
    rows = [
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, ignore_eos=True),
        SamplingParams(max_tokens=2),
        SamplingParams(max_tokens=9, stop_token_ids=(HELLO, END, COLON)),
        SamplingParams(max_tokens=9, stop=("Hello",)),
        SamplingParams(max_tokens=9, min_tokens=2),
    ]
    slots = np.array([7, 0, 3, 12, 5, 1])
    for slot, params in zip(slots, rows, strict=True):
        rules.add(int(slot), params)
    twos = np.full(6, 2)
    assert rules.finished_mask(slots, np.full(6, HELLO), twos - 1).tolist() == [False, False, False, True, True, False]
    assert rules.finished_mask(slots[:3], np.full(3, EOS), twos[:3]).tolist() == [True, False, True]
    assert rules.finished_mask(slots[5:], np.array([EOS]), np.array([2])).tolist() == [False]
    assert rules.finished_mask(slots[5:], np.array([EOS]), np.array([3])).tolist() == [True]


def test_a_slot_used_again_carries_nothing_over() -> None:
    rules = stopping()
    rules.add(0, SamplingParams(stop=("END",), stop_token_ids=(HELLO, WORLD), max_tokens=2))
    assert not rules.finished_mask(np.array([0]), np.array([EN]), np.array([1]))[0]
    rules.remove(0)
    rules.add(0, SamplingParams(stop=("END",), max_tokens=50))
    for num_tokens, token_id in enumerate([D, HELLO, WORLD], start=1):
        assert not rules.finished_mask(np.array([0]), np.array([token_id]), np.array([num_tokens]))[0]


@settings(max_examples=150, deadline=None)
@given(
    token_ids=st.lists(
        st.sampled_from([HELLO, WORLD, NEWLINE, NEWLINES_Q, EN, D, FRONT, BACK]), min_size=1, max_size=25
    ),
    stops=st.lists(
        st.sampled_from(["END", "ND", "\n\n", "\nQ", "Hello world", "\U0001f999", "DEN", "o", "QHe"]),
        min_size=1,
        max_size=4,
    ),
    min_tokens=st.integers(0, 6),
    preempt_at=st.integers(0, 25),
)
def test_stop_strings_over_any_token_borders_end_where_a_search_of_the_whole_text_says(
    token_ids: list[int], stops: list[str], min_tokens: int, preempt_at: int
) -> None:
    patterns = [stop.encode() for stop in stops]
    data = [WORDS[token_id] for token_id in token_ids]
    early = len(b"".join(data[:min_tokens]))
    whole = b"".join(data)
    ends = [
        (end, end - len(pattern))
        for pattern in patterns
        for end in range(len(pattern), len(whole) + 1)
        if end > early and whole[end - len(pattern) : end] == pattern
    ]
    params = SamplingParams(stop=tuple(stops), min_tokens=min_tokens, max_tokens=len(token_ids))
    num_tokens, finish = run(stopping(), params, token_ids, preempt_at=preempt_at)
    if not ends:
        assert (num_tokens, finish.finish_reason) == (len(token_ids), "length")
        return
    end, start = min(ends)
    assert finish == Finish("stop", whole[start:end].decode(), whole[:start].decode("utf-8", "replace"))
    assert len(b"".join(data[: num_tokens - 1])) < end <= len(b"".join(data[:num_tokens]))


def test_an_error_free_cut_in_a_thai_paragraph_keeps_every_character_before_it() -> None:
    text = "ภาษาไทยไม่มีช่องว่างระหว่างคำ"
    rules = Stopping(eos_ids=(), token_bytes=[bytes([value]) for value in range(256)], control_tokens={})
    token_ids = list(text.encode())
    for max_tokens in range(1, len(token_ids) + 1):
        _, finish = run(rules, SamplingParams(max_tokens=max_tokens), token_ids)
        assert finish == Finish("length", None, text[: max_tokens // 3])
