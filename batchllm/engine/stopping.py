"""When a row ends, why, and what text it leaves.

A row ends, in this order of precedence, at

- an EOS id of the model (any of those it declares), unless `ignore_eos`: `eos`;
- one of its own `stop_token_ids`, `ignore_eos` or not: `stop`, the reason is the id;
- a stop string: `stop`, the reason is the string. A stop string that is the text of a control token ends at that token;
- the end of its grammar, where nothing more may follow: `stop`, the reason is `schema`, `choice` or `regex`;
- `max_tokens`: `length`.

The token that ends a row counts as generated and is among its token ids; its text, and a stop string with all that
follows, is not in the text. Before `min_tokens` tokens nothing but `max_tokens` and the end of its grammar ends a row: the sampler
forbids `ending_ids`, and a stop string must end in the text of a later token.

Stop strings are searched in bytes, over token borders. Of several the one that ends first counts, and of those the
one that starts first: what a reader of the characters would see, however they fell into tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from batchllm.engine.detokenize import decode_text, join_tokens
from batchllm.prompt import SamplingParams

_COLUMNS = np.dtype(
    [
        ("is_used", np.bool_),
        ("ignore_eos", np.bool_),
        ("has_strings", np.bool_),
        ("min_tokens", np.int64),
        ("max_tokens", np.int64),
    ]
)
_NO_ID = -1


@dataclass(frozen=True, slots=True)
class Finish:
    """How a row ended: `eos`, `stop` or `length`; the id (in digits) or string that stopped it; its text."""

    finish_reason: str
    stop_reason: str | None
    text: str


@dataclass(slots=True)
class _StringSearch:
    """A row's stop strings and how far its bytes were searched. `match` is (first byte, number of the string)."""

    patterns: tuple[bytes, ...]
    tail: bytes = b""
    num_bytes: int = 0
    match: tuple[int, int] | None = None

    def feed(self, data: bytes, *, counts: bool) -> None:
        """Search the bytes of the next token; a string that ends in them is a match if `counts`."""
        window = self.tail + data
        first_byte = self.num_bytes - len(self.tail)
        if counts:
            found = []
            for number, pattern in enumerate(self.patterns):
                # Only what ends in the new bytes: what ended before was seen, or was too early to count.
                place = window.find(pattern, max(0, len(self.tail) + 1 - len(pattern)))
                if place >= 0:
                    found.append((place + len(pattern), place, number))
            if found:
                _, place, number = min(found)
                self.match = (first_byte + place, number)
        self.num_bytes += len(data)
        num_kept = max(map(len, self.patterns)) - 1
        self.tail = window[len(window) - min(num_kept, len(window)) :]


class Stopping:
    """The stop rules of the running rows, by slot (as in `Sampler`). Owns the text search of rows with stop strings.

    `eos_ids`: the union of all that the model declares. `token_bytes[id]`: a token's bytes, b"" for control tokens.
    `control_tokens`: text to id of the control tokens.
    """

    def __init__(
        self, *, eos_ids: Sequence[int], token_bytes: Sequence[bytes], control_tokens: Mapping[str, int]
    ) -> None:
        self._eos_ids = np.unique(np.asarray(eos_ids, dtype=np.int64))
        self._token_bytes = token_bytes
        self._control_tokens = control_tokens
        self._columns = np.zeros(0, dtype=_COLUMNS)
        self._stop_ids = np.full((0, 0), _NO_ID, dtype=np.int64)
        self._params: dict[int, SamplingParams] = {}
        self._searches: dict[int, _StringSearch] = {}

    def ending_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Every id that would end a row with these settings, ascending: what `min_tokens` forbids."""
        ids = set(self._own_stop_ids(params))
        if not params.ignore_eos:
            ids.update(self._eos_ids.tolist())
        return tuple(sorted(ids))

    def add(self, slot: int, params: SamplingParams, output_ids: Sequence[int] = ()) -> None:
        """Start a row in a free slot. After a preemption `output_ids` are the tokens it has generated already."""
        own_ids = self._own_stop_ids(params)
        if slot >= len(self._columns) or len(own_ids) > self._stop_ids.shape[1]:
            self._grow(num_slots=slot + 1, num_ids=len(own_ids))
        assert not self._columns["is_used"][slot], f"slot {slot} is in use"
        self._stop_ids[slot] = _NO_ID
        self._stop_ids[slot, : len(own_ids)] = own_ids
        strings = self._text_stops(params)
        self._columns[slot] = (True, params.ignore_eos, bool(strings), params.min_tokens, params.max_tokens)
        self._params[slot] = params
        if strings:
            self._searches[slot] = _StringSearch(patterns=tuple(string.encode() for string in strings))
            for num_tokens, token_id in enumerate(output_ids, start=1):
                self._feed(slot, token_id=int(token_id), num_tokens=num_tokens)

    def remove(self, slot: int) -> None:
        """Free a slot: finished, failed or preempted. Nothing of the row stays in effect."""
        assert self._columns["is_used"][slot], f"slot {slot} is not in use"
        self._columns[slot] = np.zeros((), dtype=_COLUMNS)
        del self._params[slot]
        self._searches.pop(slot, None)

    def finished_mask(self, slots: np.ndarray, token_ids: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Which rows end with the token just generated: bool `[num_rows]`. Call it once for each token of a row.

        `slots` distinct, `token_ids` the new tokens, `num_tokens` the generated tokens with the new one, each int64
        `[num_rows]`.
        """
        columns = self._columns[slots]
        is_late = num_tokens > columns["min_tokens"]
        ended = is_late & ~columns["ignore_eos"] & (token_ids[:, None] == self._eos_ids).any(axis=1)
        if self._stop_ids.shape[1]:
            ended |= is_late & (self._stop_ids[slots] == token_ids[:, None]).any(axis=1)
        if self._searches:
            for row in np.flatnonzero(columns["has_strings"] & ~ended).tolist():
                slot = int(slots[row])
                self._feed(slot, token_id=int(token_ids[row]), num_tokens=int(num_tokens[row]))
                ended[row] = self._searches[slot].match is not None
        return ended | (num_tokens >= columns["max_tokens"])

    def finish(self, slot: int, token_ids: Sequence[int], *, is_whole: bool = False) -> Finish:
        """Why a row ended, and its text, from all its generated tokens. The slot stays in use.

        `is_whole`: its grammar takes nothing more.
        """
        params = self._params[slot]
        last_id = int(token_ids[-1])
        if len(token_ids) > params.min_tokens:
            is_eos = not params.ignore_eos and bool((self._eos_ids == last_id).any())
            if is_eos or last_id in self._own_stop_ids(params):
                text = decode_text(join_tokens(self._token_bytes, token_ids[:-1]), is_cut=False)
                return Finish("eos", None, text) if is_eos else Finish("stop", self._name(params, last_id), text)
        data = join_tokens(self._token_bytes, token_ids)
        search = self._searches.get(slot)
        if search is not None and search.match is not None:
            first_byte, number = search.match
            return Finish("stop", self._text_stops(params)[number], decode_text(data[:first_byte], is_cut=False))
        if is_whole and params.grammar is not None:
            return Finish("stop", params.grammar.kind, decode_text(data, is_cut=False))
        return Finish("length", None, decode_text(data, is_cut=True))

    def _feed(self, slot: int, *, token_id: int, num_tokens: int) -> None:
        counts = num_tokens > int(self._columns["min_tokens"][slot])
        self._searches[slot].feed(join_tokens(self._token_bytes, (token_id,)), counts=counts)

    def _own_stop_ids(self, params: SamplingParams) -> list[int]:
        named = [self._control_tokens[string] for string in params.stop if string in self._control_tokens]
        return [*params.stop_token_ids, *named]

    def _text_stops(self, params: SamplingParams) -> tuple[str, ...]:
        assert "" not in params.stop, "an empty stop string"
        return tuple(string for string in params.stop if string not in self._control_tokens)

    def _name(self, params: SamplingParams, token_id: int) -> str:
        """What the user wrote: the id, or the control token's text."""
        if token_id in params.stop_token_ids:
            return str(token_id)
        return next(string for string in params.stop if self._control_tokens.get(string) == token_id)

    def _grow(self, *, num_slots: int, num_ids: int) -> None:
        size = max(num_slots, 2 * len(self._columns)) if num_slots > len(self._columns) else len(self._columns)
        columns = np.zeros(size, dtype=_COLUMNS)
        columns[: len(self._columns)] = self._columns
        stop_ids = np.full((size, max(num_ids, self._stop_ids.shape[1])), _NO_ID, dtype=np.int64)
        stop_ids[: len(self._columns), : self._stop_ids.shape[1]] = self._stop_ids
        self._columns, self._stop_ids = columns, stop_ids
