"""Sorts token sequences that lie in a file, in bounded memory, and measures how much neighbours share.

The sequences stay on disk. Each round reads one window of tokens of every sequence that still ties with another, sorts
the windows as big-endian bytes below the number of their group, and keeps for the next round only the groups that tie
over the whole window. The fewer sequences are left, the wider the window, so a deep tie among few costs few rounds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import as_strided

TOKEN_BYTES = 4
MIN_WINDOW = 4
MAX_WINDOW = 4096
FIRST_WINDOW = 64
COMPARE_BYTES = 8 << 20
READ_BYTES = 4 << 20
# Reading through a hole up to this size is cheaper than another system call and the Python around it.
HOLE_TOKENS = 16 << 10


@dataclass(frozen=True, slots=True)
class SortedSequences:
    """Sequences in token order; a prefix of another comes before it, equal ones by index.

    `order` int64 `[N]`: sequence index at each sorted position. `lcp` int32 `[N]`: number of leading tokens shared with
    the previous position, 0 at the first; for a duplicate its whole length.
    """

    order: np.ndarray
    lcp: np.ndarray


def sort_sequences(
    tokens_path: Path, *, offset: np.ndarray, length: np.ndarray, window_bytes: int = 256 << 20
) -> SortedSequences:
    """Sorts the sequences `tokens[offset : offset + length]` of a file of little-endian int32 tokens, none negative.

    `offset` int64 `[N]` and `length` int32 `[N]` count tokens. `window_bytes` bounds the windows held at once; with the
    sort's own copies the peak is about three times that. Raises OSError if the file is cut short.
    """
    num_sequences = len(offset)
    order = np.arange(num_sequences, dtype=np.int64)
    lcp = np.zeros(num_sequences, dtype=np.int32)
    offset = np.asarray(offset, dtype=np.int64)
    length = np.asarray(length, dtype=np.int64)
    position = order.copy()
    group = np.zeros(num_sequences, dtype=np.uint32)
    depth = 0
    descriptor = os.open(tokens_path, os.O_RDONLY)
    try:
        while len(position) > 1:
            index = order[position]
            longest = int(length[index].max()) - depth
            window = max(1, min(longest, _window(len(position), window_bytes=window_bytes, depth=depth)))
            key = np.zeros((len(index), 1 + window), dtype=">u4")
            key[:, 0] = group
            _read_windows(descriptor, key, start=offset[index] + depth, count=length[index] - depth)
            rank = _argsort_bytes(key)
            index = index[rank]
            order[position] = index
            shared = _shared_with_previous(key, rank)
            lcp[position] = np.where(
                shared < 0, lcp[position], np.minimum(depth + shared, _neighbour_minimum(length[index]))
            )
            del key
            depth += window
            tied = shared == window
            position, group = _still_tied(position, tied=tied, longer=length[index] > depth)
    finally:
        os.close(descriptor)
    return SortedSequences(order=order, lcp=lcp)


def _window(num_sequences: int, *, window_bytes: int, depth: int) -> int:
    """Tokens per window: what the memory allows, narrow at first because most sequences part early."""
    fits = window_bytes // (TOKEN_BYTES * num_sequences) - 1
    return int(min(max(fits, MIN_WINDOW), FIRST_WINDOW if depth == 0 else MAX_WINDOW))


def _argsort_bytes(key: np.ndarray) -> np.ndarray:
    """Stable order of the rows of `key` (big-endian, contiguous) as byte strings."""
    return key.view(f"S{key.shape[1] * TOKEN_BYTES}").reshape(-1).argsort(kind="stable")


def _neighbour_minimum(length: np.ndarray) -> np.ndarray:
    return np.minimum(length, np.concatenate((length[:1], length[:-1])))


def _shared_with_previous(key: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Window tokens each ranked row shares with the row before it; -1 where that row is of another group."""
    num_rows, width = key.shape
    shared = np.full(num_rows, -1, dtype=np.int64)
    rows_at_once = max(1, COMPARE_BYTES // (width * TOKEN_BYTES))
    for begin in range(1, num_rows, rows_at_once):
        end = min(begin + rows_at_once, num_rows)
        rows = key[rank[begin - 1 : end]]
        differs = rows[1:] != rows[:-1]
        first = np.argmax(differs, axis=1)
        shared[begin:end] = np.where(differs[np.arange(end - begin), first], first, width) - 1
    return shared


def _still_tied(position: np.ndarray, *, tied: np.ndarray, longer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions, with group numbers, of the groups that tie over the whole window and in which a sequence goes on."""
    begin = np.flatnonzero(~tied)
    size = np.diff(np.append(begin, len(tied)))
    goes_on = np.logical_or.reduceat(longer, begin) & (size > 1)
    number = np.cumsum(goes_on, dtype=np.int64) - 1
    keep = np.repeat(goes_on, size)
    return position[keep], np.repeat(number, size)[keep].astype(np.uint32)


def _read_windows(descriptor: int, key: np.ndarray, *, start: np.ndarray, count: np.ndarray) -> None:
    """Fills `key[:, 1:]` with token + 1 of each window `[start, start + count)`, cut to the width; 0 past the end."""
    window = key.shape[1] - 1
    count = np.clip(count, 0, window)
    rows = np.argsort(start, kind="stable")
    rows = rows[count[rows] > 0]
    # A run spans less than a read and one window. The second window of slack lets a window reach past the last
    # sequence; what it finds there is cut below.
    tokens = np.zeros(READ_BYTES // TOKEN_BYTES + 2 * window, dtype="<i4")
    every = as_strided(
        tokens, shape=(len(tokens) - window, window), strides=(TOKEN_BYTES, TOKEN_BYTES), writeable=False
    )
    for chunk in _runs(start[rows], count[rows]):
        here = rows[chunk]
        first = int(start[here[0]])
        num_tokens = int((start[here] + count[here]).max()) - first
        _read_exactly(descriptor, tokens[:num_tokens], offset_bytes=first * TOKEN_BYTES)
        values = every[start[here] - first]
        values += 1
        short = np.flatnonzero(count[here] < window)
        if len(short):
            beyond = np.arange(window) >= count[here[short]][:, None]
            values[short] = np.where(beyond, 0, values[short])
        key[here, 1:] = values


def _runs(start: np.ndarray, count: np.ndarray) -> Iterator[slice]:
    """Cuts windows in file order into runs that one read of bounded size covers well."""
    if not len(start):
        return
    end = np.maximum.accumulate(start + count)
    hole = np.flatnonzero(start[1:] > end[:-1] + HOLE_TOKENS) + 1
    for begin, stop in zip(np.append(0, hole), np.append(hole, len(start)), strict=True):
        while begin < stop:
            limit = start[begin] + READ_BYTES // TOKEN_BYTES
            cut = min(max(int(np.searchsorted(start, limit)), begin + 1), stop)
            yield slice(begin, cut)
            begin = cut


def _read_exactly(descriptor: int, tokens: np.ndarray, *, offset_bytes: int) -> None:
    view = memoryview(tokens.data).cast("B")
    done = 0
    while done < len(view):
        got = os.preadv(descriptor, [view[done:]], offset_bytes + done)
        if got == 0:
            raise OSError(f"the staged prompts are cut short at byte {offset_bytes + done}")
        done += got
