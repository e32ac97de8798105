"""Sorting token sequences out of core."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm.planner import sort
from batchllm.planner.sort import SortedSequences, _read_windows, sort_sequences


def sort_lists(folder: Path, sequences: list[list[int]], *, window_bytes: int = 256 << 20) -> SortedSequences:
    length = np.array([len(s) for s in sequences], dtype=np.int32)
    offset = np.concatenate(([0], np.cumsum(length[:-1], dtype=np.int64))).astype(np.int64)[: len(sequences)]
    path = folder / "tokens.bin"
    np.array([token for s in sequences for token in s], dtype="<i4").tofile(path)
    return sort_sequences(path, offset=offset, length=length, window_bytes=window_bytes)


def expected(sequences: list[list[int]]) -> tuple[list[int], list[int]]:
    order = sorted(range(len(sequences)), key=lambda i: (sequences[i], i))
    lcp = [0] * len(order)
    for p in range(1, len(order)):
        a, b = sequences[order[p - 1]], sequences[order[p]]
        while lcp[p] < min(len(a), len(b)) and a[lcp[p]] == b[lcp[p]]:
            lcp[p] += 1
    return order, lcp


trees = st.lists(
    st.lists(
        st.sampled_from([[0], [1], [2, 2, 2, 2], [255, 256, 0], [2**31 - 2] * 7, [5] * 16]), min_size=1, max_size=9
    ).map(lambda parts: [token for part in parts for token in part]),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(sequences=trees, window_bytes=st.sampled_from([16, 400, 4096]))
def test_order_and_shared_lengths_equal_those_of_sorted_lists(
    tmp_path_factory: pytest.TempPathFactory, sequences: list[list[int]], window_bytes: int
) -> None:
    result = sort_lists(tmp_path_factory.mktemp("sort"), sequences, window_bytes=window_bytes)
    order, lcp = expected(sequences)
    assert result.order.tolist() == order
    assert result.lcp.tolist() == lcp


def test_a_tie_of_ten_thousand_tokens_is_told_apart_by_the_last_one(tmp_path: Path) -> None:
    body = [7] * 10_000
    result = sort_lists(tmp_path, [[*body, 2], [*body, 1], body, [*body, 2]])
    assert result.order.tolist() == [2, 1, 0, 3]
    assert result.lcp.tolist() == [0, 10_000, 10_000, 10_001]


def test_token_zero_sorts_after_the_end_of_a_prefix(tmp_path: Path) -> None:
    result = sort_lists(tmp_path, [[3, 0, 0], [3, 0], [3]])
    assert result.order.tolist() == [2, 1, 0]
    assert result.lcp.tolist() == [0, 1, 2]


def test_sequences_far_apart_in_the_file_are_read_without_what_lies_between(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    with path.open("wb") as file:
        file.truncate(4 * 2_000_000_000)
        for offset, token in ((0, 9), (1_999_999_999, 4)):
            file.seek(4 * offset)
            file.write(np.array([token], dtype="<i4").tobytes())
    result = sort_sequences(path, offset=np.array([0, 1_999_999_999]), length=np.array([1, 1]))
    assert result.order.tolist() == [1, 0]


def test_sequences_over_the_same_tokens_are_duplicates_in_order(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.array([5, 6, 7, 1], dtype="<i4").tofile(path)
    result = sort_sequences(path, offset=np.array([0, 0, 3, 0]), length=np.array([3, 3, 1, 2]))
    assert result.order.tolist() == [2, 3, 0, 1]
    assert result.lcp.tolist() == [0, 0, 2, 3]


def test_a_truncated_token_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(10, dtype="<i4").tofile(path)
    with pytest.raises(OSError, match="cut short at byte 40"):
        sort_sequences(path, offset=np.array([0, 5]), length=np.array([5, 6]))


def test_a_window_is_no_wider_than_what_is_left_of_the_longest_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []

    def read_windows(descriptor: int, key: np.ndarray, *, start: np.ndarray, count: np.ndarray) -> None:
        widths.append(key.shape[1] - 1)
        _read_windows(descriptor, key, start=start, count=count)

    monkeypatch.setattr(sort, "_read_windows", read_windows)
    sort_lists(tmp_path, [[*range(100), end] for end in range(500)])
    assert widths == [sort.FIRST_WINDOW, 101 - sort.FIRST_WINDOW]
