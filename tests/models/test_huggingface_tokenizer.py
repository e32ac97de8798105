"""Tokenizers of Hugging Face folders: byte level, SentencePiece style, and what the configs declare."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from batchllm.errors import ModelError
from batchllm.models.source import ModelSource
from batchllm.models.tokenizer import load_tokenizer

TEXTS = ["the cat sat on the mat, the cat!", "x != y .", " leading", "two  spaces", "zażółć \U0001f999\n\ttab", ""]


def byte_level() -> tokenizers.Tokenizer:
    pipeline = tokenizers.Tokenizer(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    pipeline.train_from_iterator(["the cat sat on the mat"] * 20, trainer)
    pipeline.add_special_tokens([AddedToken("<|bos|>", normalized=False), AddedToken("<|end|>", normalized=False)])
    pipeline.add_tokens([AddedToken("<think>", normalized=False), AddedToken("é é", normalized=False)])
    return pipeline


def sentencepiece() -> tokenizers.Tokenizer:
    """As the Llama 2 conversion: U+2581 for spaces, one put before each text, bytes for what the vocabulary lacks."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", *"abcehmnorstx!=.y,", "th", "the", "\u2581the", "at", "cat", "\u2581cat"]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("a", "t"), ("c", "at"), ("\u2581", "cat")]
    vocabulary = {word: index for index, word in enumerate(words)}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    pipeline = tokenizers.Tokenizer(model)
    pipeline.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    pipeline.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pipeline.add_special_tokens([AddedToken(word, normalized=False) for word in ("<unk>", "<s>", "</s>")])
    pipeline.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return pipeline


def folder_with(
    folder: Path, pipeline: tokenizers.Tokenizer | None, *, config: dict[str, Any] | None = None, **files: Any
) -> ModelSource:
    sizes = {
        "model_type": "llama",
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 300,
        "max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(sizes | (config or {})))
    if pipeline is not None:
        pipeline.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return ModelSource(kind="huggingface", path=folder, name="tiny")


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_every_text_survives_encoding_and_decoding(make: Callable[[], tokenizers.Tokenizer], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_with(tmp_path, make()))
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert tokenizer.decode(ids) == text
        assert ids.tolist() == make().encode(text, add_special_tokens=False).ids


def test_sentencepiece_bytes_and_spaces_are_exact_and_only_the_first_space_is_taken_off(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_with(tmp_path, sentencepiece()))
    pipeline = sentencepiece()
    newline, space_the = pipeline.token_to_id("<0x0A>"), pipeline.token_to_id("\u2581the")
    assert tokenizer.token_bytes[newline] == b"\n"
    assert tokenizer.token_bytes[space_the] == b" the"
    assert tokenizer.strips_leading_space
    assert (
        tokenizer.decode([space_the, space_the, newline]) == "the the\n" == pipeline.decode([space_the] * 2 + [newline])
    )
    assert tokenizer.decode_bytes([pipeline.token_to_id("<0xF0>")]) == b"\xf0"


def test_a_metaspace_decoder_is_read_like_the_older_spelling(tmp_path: Path) -> None:
    pipeline = sentencepiece()
    pipeline.normalizer = None
    pipeline.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    pipeline.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = load_tokenizer(folder_with(tmp_path, pipeline))
    assert not tokenizer.strips_leading_space
    assert tokenizer.decode(tokenizer.encode_batch(["the cat"])[0]) == " the cat"


def test_added_tokens_are_spelled_literally_and_control_tokens_are_empty(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_with(tmp_path, byte_level()))
    ids = tokenizer.encode_batch(["<|bos|><think>é é<|end|>"])[0].tolist()
    assert len(ids) == 4
    assert tokenizer.decode(ids) == "<think>é é"
    assert set(tokenizer.special_tokens) == {"<|bos|>", "<|end|>"}
    refused = tokenizer.encode_batch(["<|bos|><think>"], allow_special=False)[0].tolist()
    assert tokenizer.decode(refused) == "<|bos|><think>"
    assert ids[0] not in refused and ids[1] in refused


def test_a_control_token_that_plain_merges_would_give_is_spelled_out(tmp_path: Path) -> None:
    pipeline = sentencepiece()
    pipeline.add_special_tokens([AddedToken("cat", normalized=False)])
    tokenizer = load_tokenizer(folder_with(tmp_path, pipeline))
    control = tokenizer.special_tokens["cat"]
    assert control in tokenizer.encode_batch(["mcat"])[0]
    assert control not in tokenizer.encode_batch(["mcat"], allow_special=False)[0]


def test_eos_ids_are_the_union_of_all_sources(tmp_path: Path) -> None:
    pipeline = byte_level()
    end = pipeline.token_to_id("<|end|>")
    source = folder_with(
        tmp_path,
        pipeline,
        config={"eos_token_id": 5},
        generation_config={"eos_token_id": [7, 0]},
        tokenizer_config={"eos_token": {"content": "<|end|>"}},
    )
    tokenizer = load_tokenizer(source)
    assert tokenizer.eos_ids == frozenset({0, 5, 7, end})
    assert tokenizer.eos_token == "<|end|>"


@pytest.mark.parametrize(
    ("settings", "expected"), [({}, True), ({"add_bos_token": False}, False), ({"add_bos_token": True}, True)]
)
def test_a_bos_is_wanted_as_the_config_says_or_else_the_post_processor(
    settings: dict[str, Any], expected: bool, tmp_path: Path
) -> None:
    source = folder_with(tmp_path, sentencepiece(), tokenizer_config={"bos_token": "<s>"} | settings)
    tokenizer = load_tokenizer(source)
    assert (tokenizer.bos_id, tokenizer.bos_token, tokenizer.add_bos) == (1, "<s>", expected)
    assert 1 not in tokenizer.encode_batch(["the cat"])[0]


def test_padding_and_truncation_left_over_from_training_change_no_prompt(tmp_path: Path) -> None:
    pipeline = byte_level()
    pipeline.enable_truncation(4)
    pipeline.enable_padding(length=64)
    tokenizer = load_tokenizer(folder_with(tmp_path, pipeline))
    assert tokenizer.decode(tokenizer.encode_batch(["the cat sat on the mat"])[0]) == "the cat sat on the mat"
    assert len(tokenizer.encode_batch(["a"], allow_special=False)[0]) == 1


def test_the_chat_template_file_wins_over_the_config(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    source = folder_with(tmp_path, byte_level(), tokenizer_config={"chat_template": named})
    assert load_tokenizer(source).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert load_tokenizer(source).chat_template == "J"


def test_ids_that_only_the_model_has_decode_to_nothing(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_with(tmp_path, byte_level(), config={"vocab_size": 500}))
    assert tokenizer.vocab_size == len(tokenizer.token_bytes) == 500
    assert tokenizer.decode([499]) == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no tokenizer.json"),
        ("{}", "tokenizer.json: cannot be read"),
        ("\x00\xff", "tokenizer.json: cannot be read"),
    ],
)
def test_a_missing_or_broken_tokenizer_is_one_line(content: str | None, message: str, tmp_path: Path) -> None:
    source = folder_with(tmp_path, None)
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(source)
    assert "\n" not in str(caught.value)


def test_a_model_whose_bytes_are_not_known_is_refused_by_name(tmp_path: Path) -> None:
    pipeline = tokenizers.Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    with pytest.raises(ModelError, match="model WordPiece is not supported"):
        load_tokenizer(folder_with(tmp_path, pipeline))
    pipeline = byte_level()
    pipeline.decoder = decoders.BPEDecoder()
    with pytest.raises(ModelError, match="decoder BPEDecoder is not supported"):
        load_tokenizer(folder_with(tmp_path, pipeline))


def with_id(token_id: int) -> tokenizers.Tokenizer:
    description = json.loads(byte_level().to_str())
    description["model"]["vocab"]["far"] = token_id
    return tokenizers.Tokenizer.from_str(json.dumps(description))


def with_special(*texts: str) -> tokenizers.Tokenizer:
    pipeline = byte_level()
    pipeline.add_special_tokens([AddedToken(text, normalized=False) for text in texts])
    return pipeline


@pytest.mark.parametrize(
    ("make", "config", "message"),
    [
        (
            lambda: with_id(1 << 22),
            {},
            "token id 4194304 would make a vocabulary of 4194305; at most 4194304 are taken",
        ),
        (byte_level, {"vocab_size": (1 << 31) - 1}, "vocab_size is 2147483647; 1 to 4194304 are taken"),
        (lambda: with_special("x" * 257), {}, "special token 'x{30}'… has 257 characters; at most 256 are taken"),
        (
            lambda: with_special(*(f"{number:0250}" for number in range(1100))),
            {},
            "1102 special tokens of 275014 characters are too many",
        ),
    ],
)
def test_small_files_that_ask_for_all_memory_are_refused(
    make: Callable[[], tokenizers.Tokenizer], config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        load_tokenizer(folder_with(tmp_path, make(), config=config))


def test_the_longest_special_token_is_taken(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_with(tmp_path, with_special("x" * 256)))
    (ids,) = tokenizer.encode_batch(["a" + "x" * 256])
    assert ids[1:].tolist() == [tokenizer.special_tokens["x" * 256]]


def test_an_eos_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="EOS id 300 lies outside the vocabulary of 300"):
        load_tokenizer(folder_with(tmp_path, byte_level(), config={"eos_token_id": 300}))
