"""Tokenised prompts staged on disk: however many rows there are, memory holds 24 bytes of each.

`tokens.bin` is int32 little endian, prompt after prompt in the order of arrival; four small arrays say where each lies.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from batchllm.prompt import Prompt, SamplingParams

_TOKEN = np.dtype("<i4")


class PromptStore:
    """Owns one folder: appended first, then `finish`ed and read from any thread.

    After `finish`: `row_index` int64, `sample_index` int32, `offset` int64 (in tokens), `length` int32 and
    `sampling_id` int32, each `[num_prompts]`, and `sampling`, the distinct `SamplingParams`. A row that asks for `n`
    samples is `n` prompts over the same tokens: whoever plans or runs them sees duplicates and needs no more. Prompts are read with `pread`, not `mmap`, so that
    resident memory does not grow with the batch. Disk errors are raised as OSError.
    """

    def __init__(self, folder: Path | str) -> None:
        """Creates the folder's files, which must not exist."""
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.folder / "tokens.bin", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.sampling: list[SamplingParams] = []
        self.row_index = np.zeros(0, dtype=np.int64)
        self.sample_index = np.zeros(0, dtype=np.int32)
        self.offset = np.zeros(0, dtype=np.int64)
        self.length = np.zeros(0, dtype=np.int32)
        self.sampling_id = np.zeros(0, dtype=np.int32)
        self.num_prompts = 0
        self.num_tokens = 0
        self._last_row = -1
        self._ids: dict[SamplingParams, int] = {}
        self._batches: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def intern_sampling(self, params: SamplingParams) -> int:
        """The number under which equal params are kept once."""
        number = self._ids.get(params)
        if number is None:
            number = self._ids[params] = len(self.sampling)
            self.sampling.append(params)
        return number

    def append_batch(
        self, *, row_index: np.ndarray, lengths: np.ndarray, tokens: np.ndarray, sampling_ids: np.ndarray
    ) -> None:
        """Adds prompts. `tokens`: int32, the prompts one after the other; the other arrays have one entry a prompt.

        `row_index` rises, from call to call too, so that a row can be found by search.
        """
        num_prompts = len(row_index)
        assert len(lengths) == len(sampling_ids) == num_prompts and int(lengths.sum()) == len(tokens)
        assert int(lengths.min(initial=1)) > 0, "an empty prompt cannot be run"
        if num_prompts == 0:
            return
        assert bool((np.diff(row_index, prepend=self._last_row) > 0).all()), "rows are staged in the order of the input"
        self._last_row = int(row_index[-1])
        data = np.ascontiguousarray(tokens, dtype=_TOKEN).data.cast("B")
        start, written = self.num_tokens * _TOKEN.itemsize, 0
        while written < len(data):
            written += os.pwrite(self._fd, data[written:], start + written)
        self._batches.append((row_index.astype(np.int64), lengths.astype(np.int32), sampling_ids.astype(np.int32)))
        self.num_prompts += num_prompts
        self.num_tokens += len(tokens)

    def finish(self) -> None:
        """Ends appending: the arrays are complete."""
        columns = list(zip(*self._batches, strict=True)) if self._batches else [(), (), ()]
        self.row_index = np.concatenate([*columns[0], self.row_index])
        self.length = np.concatenate([*columns[1], self.length])
        self.sampling_id = np.concatenate([*columns[2], self.sampling_id])
        self.offset = np.cumsum(self.length, dtype=np.int64) - self.length
        self._batches = []
        self._repeat_samples()

    def _repeat_samples(self) -> None:
        num_samples = np.array([params.n for params in self.sampling], dtype=np.int64)[self.sampling_id]
        last = np.cumsum(num_samples)
        self.num_prompts = int(num_samples.sum())
        self.sample_index = (np.arange(self.num_prompts) - np.repeat(last - num_samples, num_samples)).astype(np.int32)
        self.row_index = np.repeat(self.row_index, num_samples)
        self.offset = np.repeat(self.offset, num_samples)
        self.length = np.repeat(self.length, num_samples)
        self.sampling_id = np.repeat(self.sampling_id, num_samples)

    def tokens(self, index: int) -> np.ndarray:
        """int32 `[length]`: the tokens of prompt `index` (its place in the store, not its row)."""
        return self._read(int(self.offset[index]), int(self.length[index]))

    def first_of_row(self, row_index: int) -> int:
        """The store's number of a row's first prompt. Raises KeyError for a row that has none."""
        place = int(np.searchsorted(self.row_index, row_index))
        if place == len(self.row_index) or int(self.row_index[place]) != row_index:
            raise KeyError(row_index)
        return place

    def prompt(self, index: int) -> Prompt:
        """Prompt `index` as the engine takes it."""
        sampling = self.sampling[int(self.sampling_id[index])]
        return Prompt(row_index=int(self.row_index[index]), token_ids=self.tokens(index), sampling=sampling)

    def _read(self, offset: int, num_tokens: int) -> np.ndarray:
        tokens = np.empty(num_tokens, dtype=_TOKEN)
        view, done = tokens.data.cast("B"), 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done:]], offset * _TOKEN.itemsize + done)
            if count == 0:
                raise OSError(f"{self.folder / 'tokens.bin'}: the staged prompts are cut short")
            done += count
        return tokens

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
