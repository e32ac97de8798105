"""Texts that begin alike, cut where no token can lie across: what several of them share is tokenised once.

A cut is before one space between two characters that are none. The patterns that cut text into words before it is merged to tokens (see
`can_cut`) let a word begin with such a space and none go on over it, whatever lies farther off; and merges stay inside a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_LEAST_CHARACTERS = 32
"""A shorter piece costs as much by itself as it spares."""
_MOST_TRIES = 16
"""Spaces that are looked at for a cut: in some texts none of them lies between two such characters."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"{0}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{1}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD_PATTERNS = frozenset(_WORDS.format(_CONTRACTIONS, number) for number in (r"\p{N}{1,3}", r"\p{N}"))
"""Of Llama 3 and of Qwen 2; GPT-2's is part of `ByteLevel`."""


def can_cut(description: dict[str, Any]) -> bool:
    """Whether the tokenizer that `description`, a parsed tokenizer.json, tells of gives a text's tokens piece by piece. False where it is not known."""
    model, normalizer = description["model"], description.get("normalizer")
    if model["type"] != "BPE" or model.get("dropout"):
        return False
    # NFC joins no character with a space, nor over one.
    if normalizer is not None and normalizer["type"] != "NFC":
        return False
    for token in description["added_tokens"]:
        takes_spaces = token["lstrip"] or token["rstrip"] or token["single_word"]
        if takes_spaces or any(character.isspace() for character in token["content"]):
            return False
    steps = _steps(description.get("pre_tokenizer"))
    splits = [_splits_words(step) for step in steps]
    return None not in splits and True in splits


def _steps(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        return []
    if pre_tokenizer["type"] == "Sequence":
        return [step for part in pre_tokenizer["pretokenizers"] for step in _steps(part)]
    return [pre_tokenizer]


def _splits_words(step: dict[str, Any]) -> bool | None:
    """Whether a step of a pre-tokenizer splits before each space that `cut_texts` cuts at; None for one that is not known."""
    if step["type"] == "Digits":
        return False
    if step["type"] == "ByteLevel":
        return None if step["add_prefix_space"] else bool(step.get("use_regex", True))
    if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
        return True if step["pattern"].get("Regex") in _WORD_PATTERNS else None
    return None


@dataclass(frozen=True, slots=True)
class TextPieces:
    """Distinct `pieces`, and of each text the numbers of those that it is made of, in their order."""

    pieces: list[str]
    of_text: list[list[int]]


def cut_texts(texts: Sequence[str]) -> TextPieces:
    """Cuts texts where they part from others that begin alike, if that is not too early."""
    order = sorted(range(len(texts)), key=texts.__getitem__)
    pieces: list[str] = []
    of_text: list[list[int]] = [[] for _ in texts]
    shared: list[tuple[int, int]] = []  # (end, piece) of those that the text shares with the one before it
    for place, number in enumerate(order):
        text = texts[number]
        start = shared[-1][0] if shared else 0
        num_shared = _num_shared(text, texts[order[place + 1]]) if place + 1 < len(order) else 0
        cut = _last_cut(text[:num_shared], after=start + _LEAST_CHARACTERS)
        if cut is not None:
            shared.append((cut, len(pieces)))
            pieces.append(text[start:cut])
            start = cut
        of_text[number] = [piece for _, piece in shared] + [len(pieces)]
        pieces.append(text[start:])
        # The next text has the character behind each cut that it keeps.
        while shared and shared[-1][0] > num_shared - 2:
            shared.pop()
    return TextPieces(pieces, of_text)


def _last_cut(text: str, *, after: int) -> int | None:
    """The last place from `after` on to cut a text and all that go on from it."""
    at = len(text) - 1
    for _ in range(_MOST_TRIES):
        at = text.rfind(" ", after, max(at, 0))
        if at < 0:
            return None
        if _is_solid(text[at - 1]) and _is_solid(text[at + 1]):
            return at
    return None


def _is_solid(character: str) -> bool:
    return character.isalnum() or "!" <= character <= "~"


def _num_shared(text: str, other: str) -> int:
    """How many characters two texts have in common from their start."""
    low, high = 0, min(len(text), len(other))
    if text[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if text[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
