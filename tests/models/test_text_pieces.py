"""Texts that begin alike, tokenised piece by piece: the same tokens as each by itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers

from batchllm.models.declared_tokens import DeclaredTokens
from batchllm.models.source import ModelSource
from batchllm.models.text_pieces import _WORD_PATTERNS, can_cut, cut_texts
from batchllm.models.tokenizer import Tokenizer, load_tokenizer

WORDS = (
    "the quick brown fox jumps over a lazy dog of thirty-two characters ",
    "Der Fluß, né à Œuvre; слово и 東京 und ",
    "it's I'LL  we've   don't",
    "2026-11-30 12345 7 8,9 ",
    "\n",
    "\r\n\r\n ",
    "\t x",
    " ",
    "   ",
    "\u00a0",
    "\u3000",
    "e\u0301 \u0301a ",
    "\U0001f999 ",
    "<|im_start|>",
    "<|im_end|> ",
    "...!? ",
    "x",
)
texts = st.lists(
    st.lists(st.sampled_from(WORDS), max_size=8).map("".join)
    | st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40),
    min_size=2,
    max_size=12,
)
shared_start = st.lists(st.sampled_from(WORDS), max_size=6).map("".join)


def trained(pre_tokenizer: Any, normalizer: Any = None) -> tokenizers.Tokenizer:
    pipeline = tokenizers.Tokenizer(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        pipeline.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pipeline.train_from_iterator(["".join(WORDS) * 2, "the dog of the fox", "12 123 1234 12345"], trainer)
    return pipeline


def by_words(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PIPELINES = {
    "gpt2": trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "digits": trained(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    ),
    **{
        f"pattern {number}": trained(by_words(pattern), normalizers.NFC())
        for number, pattern in enumerate(sorted(_WORD_PATTERNS))
    },
}


def described(pipeline: tokenizers.Tokenizer) -> dict[str, Any]:
    description: dict[str, Any] = json.loads(pipeline.to_str())
    return description


def encoded(pipeline: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in pipeline.encode_batch_fast(texts, add_special_tokens=False)]


@pytest.mark.parametrize("name", PIPELINES)
@settings(max_examples=150, deadline=None)
@given(start=shared_start, ends=texts)
@example(
    start="a word and ", ends=["more of the same text for all of them 1 2", "more of the same text for all of them 1"]
)
def test_pieces_give_the_tokens_of_the_whole_texts(name: str, start: str, ends: list[str]) -> None:
    pipeline = PIPELINES[name]
    assert can_cut(described(pipeline))
    whole = [start + end for end in ends]
    cut = cut_texts(whole)
    assert ["".join(cut.pieces[number] for number in numbers) for numbers in cut.of_text] == whole
    pieces = encoded(pipeline, cut.pieces)
    assert [[i for number in numbers for i in pieces[number]] for numbers in cut.of_text] == encoded(pipeline, whole)


def test_what_texts_share_is_one_piece_and_each_has_its_own_end() -> None:
    document = "A document of some length, which every question is asked about. "
    cut = cut_texts([document + question for question in ("Who wrote it?", "What is it about?", "When?")] + ["Other"])
    assert cut.pieces.count(document[:-1]) == 1
    assert sorted(cut.pieces[numbers[-1]] for numbers in cut.of_text) == [
        " What is it about?",
        " When?",
        " Who wrote it?",
        "Other",
    ]


def test_a_shorter_start_stays_a_piece_for_those_that_share_it_only() -> None:
    start, more = "Read what follows with great care, then answer.", " " + "a" * 40 + " of one"
    cut = cut_texts([start + end for end in (" 1", " 2", more + " x", more + " y", more + " z")])
    assert [len(numbers) for numbers in cut.of_text] == [2, 2, 3, 3, 3]
    # The last word before a text goes on otherwise is not known to end there.
    assert cut.pieces[:2] == [start.removesuffix(" answer."), " answer. 1"]
    assert cut.pieces[3:5] == [" answer." + more.removesuffix(" one"), " one x"] and len(cut.pieces) == 2 + 5


def test_embedded_model_tokenises_shared_texts_as_each_by_itself(embedded_model: ModelSource) -> None:
    tokenizer = load_tokenizer(embedded_model)
    start = "".join(WORDS[:4]) * 5
    whole = [start + word + other for word in WORDS for other in WORDS]
    alone = [tokenizer.encode_batch([text])[0].tolist() for text in whole]
    assert [ids.tolist() for ids in tokenizer.encode_batch(whole)] == alone


def with_token(**options: Any) -> dict[str, Any]:
    pipeline = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    pipeline.add_special_tokens([AddedToken("<|x|>", **options)])
    return described(pipeline)


def test_a_tokenizer_whose_words_may_lie_across_a_space_is_not_cut() -> None:
    assert can_cut(with_token())
    assert not can_cut(with_token(rstrip=True))
    assert not can_cut(with_token(lstrip=True))
    assert not can_cut(described(trained(pre_tokenizers.ByteLevel(add_prefix_space=True))))
    assert not can_cut(described(trained(pre_tokenizers.Metaspace())))
    assert not can_cut(described(trained(by_words(r"\w+|\W+"))))
    assert not can_cut(described(trained(pre_tokenizers.Digits(True))))
    assert not can_cut(described(trained(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFKC())))
    named = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    named.add_tokens(["two words"])
    assert not can_cut(described(named))


def test_texts_without_a_place_to_cut_stay_whole() -> None:
    cut = cut_texts(["a" * 200 + "b", "a" * 200 + "c", ""])
    assert cut.of_text == [[1], [2], [0]] and cut.pieces == ["", "a" * 200 + "b", "a" * 200 + "c"]


def test_a_tokenizer_that_cannot_be_cut_gives_the_same_tokens() -> None:
    pipeline = trained(pre_tokenizers.Metaspace())
    # Its decoder decides what bytes its tokens stand for.
    pipeline.decoder = tokenizers.decoders.Metaspace()
    declared = DeclaredTokens(
        bos_id=None, add_bos=False, eos_id=None, eos_ids=frozenset(), chat_template=None, vocab_size=600
    )
    tokenizer = Tokenizer(pipeline, declared)
    start = "the quick brown fox jumps over the lazy dog and "
    both = [start + "the fox", start + "a dog"]
    assert [ids.tolist() for ids in tokenizer.encode_batch(both)] == encoded(pipeline, both)
