"""Text from data is data: a control-token string in a cell is encoded as plain text, not as the token.

Where no such string could come from a row's cells, its prompt is encoded whole. Otherwise data is *shielded* before
the chat template sees it: characters are moved to a private-use plane, so that no match of a control string in the
final text involves data. What then still matches was written by the templates. The text is cut at those matches, the
characters are moved back, and the pieces between are encoded with control tokens switched off. Cutting there changes
no merges, since a tokenizer itself splits a text at its control tokens first. Shielded text keeps its length and its
blanks, so that slices and `trim` in templates do what they did.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Two planes, since a cell may hold private-use characters itself.
_PLANES = (0xF0000, 0x100000)
_PLANE_SIZE = 0xFFFE
_CHARACTERS = {plane: re.compile(f"[{chr(plane)}-{chr(plane + _PLANE_SIZE - 1)}]") for plane in _PLANES}


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a prompt: a control token of a template (`token_id`), or text in which nothing is control."""

    text: str
    token_id: int | None


class ControlTokens:
    """The control strings of a model, prepared for looking them up in texts."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        names = sorted((name for name in special_tokens if name), key=len, reverse=True)
        self._ids = dict(special_tokens)
        # With no control string the pattern is one that matches nothing.
        self._pattern = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._prefixes = tuple(sorted({name[:end] for name in names for end in range(1, len(name))}))
        self._suffixes = tuple(sorted({name[start:] for name in names for start in range(1, len(name))}))
        self._edges = frozenset(character for name in names for character in (name[0], name[-1]))
        self._longest = len(names[0]) if names else 0
        # One text to look in: the pieces of all names would take the cube of their lengths.
        self._between = next(one for one in map(chr, range(sys.maxunicode)) if not any(one in name for name in names))
        self._names = self._between.join(names)

    def num_matches(self, text: str) -> int:
        """How many control strings a tokenizer would find in the text."""
        return sum(1 for _ in self._pattern.finditer(text))

    def is_open(self, text: str) -> bool:
        """Whether the text's ends could complete a control string with what stands beside them."""
        return text.endswith(self._prefixes) or text.startswith(self._suffixes)

    def may_form(self, text: str) -> bool:
        """Whether the text holds a control string or is open to one."""
        return self._pattern.search(text) is not None or self.is_open(text)

    def shield_text(self, text: str, *, plane: int) -> str:
        """Moves the control strings inside the text, and what at its ends could be a part of one."""
        before = ""
        while before != text:
            before, text = text, self._pattern.sub(lambda match: _moved(match[0], plane), text)
        for prefix in self._prefixes:
            if text.endswith(prefix):
                text = text[: -len(prefix)] + _moved(prefix, plane)
        for suffix in self._suffixes:
            if text.startswith(suffix):
                text = _moved(suffix, plane) + text[len(suffix) :]
        return text

    def shield_cells(self, value: Any, *, plane: int) -> Any:
        """Moves, in all text of a value, every character with which a control string can start or end.

        For templates that write control strings themselves: no string can then be formed with the help of a cell,
        however the template joins cells and its own words.
        """
        if isinstance(value, str):
            if len(value) <= self._longest and self._between not in value and value in self._names:
                return _moved(value, plane)
            return "".join(_moved(one, plane) if one in self._edges else one for one in value)
        if isinstance(value, list):
            return [self.shield_cells(item, plane=plane) for item in value]
        if isinstance(value, dict):
            return {key: self.shield_cells(item, plane=plane) for key, item in value.items()}
        return value

    def segments(self, shielded: str, *, plane: int) -> list[Segment]:
        """The final text cut at the control strings that templates wrote, with the data's characters moved back."""
        pieces: list[Segment] = []
        position = 0
        for match in self._pattern.finditer(shielded):
            if match.start() > position:
                pieces.append(Segment(unshield(shielded[position : match.start()], plane=plane), None))
            pieces.append(Segment(match[0], self._ids[match[0]]))
            position = match.end()
        if position < len(shielded):
            pieces.append(Segment(unshield(shielded[position:], plane=plane), None))
        return pieces


def unshield(text: str, *, plane: int) -> str:
    """Moves the characters back."""
    return _CHARACTERS[plane].sub(lambda match: chr(ord(match[0]) - plane), text)


def free_plane(value: Any) -> int | None:
    """A private-use plane that no text in the value uses; None where both are used."""
    return next((plane for plane in _PLANES if not _uses(value, plane)), None)


def _moved(text: str, plane: int) -> str:
    return "".join(chr(plane + ord(one)) if ord(one) < _PLANE_SIZE else one for one in text)


def _uses(value: Any, plane: int) -> bool:
    if isinstance(value, str):
        return _CHARACTERS[plane].search(value) is not None
    if isinstance(value, list):
        return any(_uses(item, plane) for item in value)
    if isinstance(value, dict):
        return any(_uses(key, plane) or _uses(item, plane) for key, item in value.items())
    return False
