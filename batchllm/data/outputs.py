"""The output folder of a run: its lock, what is done already, and the writer that turns completions into parts."""

from __future__ import annotations

import datetime
import os
import secrets
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa

from batchllm.data.completion_table import Cells, completion_table
from batchllm.data.lock import RunLock
from batchllm.data.parts import (
    PART_NAME,
    STAGING_PREFIX,
    check_fingerprint,
    clear_leftovers,
    drop_error_rows,
    part_name,
    read_done_rows,
    visible_parts,
    write_part,
)
from batchllm.errors import BatchLLMError, FolderError, write_error
from batchllm.prompt import Completion


def new_run_id(now: datetime.datetime) -> str:
    """A name for a run that begins `now`, in UTC: its second, its part of the second, and a number of its own. Names sort as runs begin."""
    return f"{now:%Y%m%dT%H%M%SZ}-{now.microsecond * 0x10000 // 1_000_000:04x}{secrets.token_hex(2)}"


class OutputFolder:
    """Owns the folder's lock and this run's staging folder until `close`; a context manager.

    Opening creates the folder, takes the lock and removes what killed runs left. Raises RunLockedError, FolderError, OutputError.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.run_id = new_run_id(datetime.datetime.now(datetime.UTC))
        self.staging = self.path / f"{STAGING_PREFIX}{self.run_id}"
        self.fingerprint: dict[str, object] = {}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(f"{self.path}: the output folder cannot be made", error) from None
        self._lock = RunLock(self.path)
        try:
            try:
                clear_leftovers(self.path)
                self.staging.mkdir()
            except OSError as error:
                raise write_error(f"{self.path}: the output folder cannot be prepared", error) from None
            for name in sorted(os.listdir(self.path)):
                if name.endswith(".parquet") and not name.startswith(".") and not PART_NAME.fullmatch(name):
                    raise FolderError(
                        f"{self.path}: holds {name}, which is no part of a run; choose another output.path"
                    )
        except BatchLLMError:
            self._lock.release()
            raise

    def resume(self, *, fingerprint: Mapping[str, object], num_rows: int) -> np.ndarray:
        """bool `[num_rows]`: the rows that need not run again. Raises FolderError naming a difference.

        `num_rows` counts the whole input (`Input.total_rows`), also where this run takes fewer.
        """
        self.fingerprint = dict(fingerprint)
        parts = visible_parts(self.path)
        for part in parts:
            check_fingerprint(part, expected=fingerprint)
        return read_done_rows(parts, num_rows=num_rows)

    def drop_error_rows(self, *, below: int) -> int:
        """Takes error rows with an index under `below` out of the parts; returns how many. Call it after `resume`."""
        return sum(drop_error_rows(part, below=below) for part in visible_parts(self.path))

    def next_part_number(self) -> int:
        """One above the highest visible part."""
        parts = visible_parts(self.path)
        match = PART_NAME.fullmatch(parts[-1].name) if parts else None
        return int(match[1]) + 1 if match else 0

    def close(self) -> None:
        """Removes the staging folder and gives the lock back; a second call does nothing."""
        shutil.rmtree(self.staging, ignore_errors=True)
        self._lock.release()

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def make_fingerprint(
    *, job: Mapping[str, object], input: Mapping[str, object], model: str, version: str
) -> dict[str, object]:
    """What a resume compares, by key, in the order in which differences are named."""
    return {**job, **{f"input data.{key}": value for key, value in input.items()}, "weights": model, "version": version}


@dataclass(frozen=True, slots=True)
class PartLimits:
    """When the rows at hand become a part. Rows wait `first_interval_s` at first, later twice as long, up to a most."""

    max_rows: int = 20_000
    max_bytes: int = 32 << 20
    first_interval_s: float = 5.0
    max_interval_s: float = 60.0


class OutputWriter:
    """Collects completions and writes them as parts on its own thread. `add`, `flush`, `close` from one other thread.

    A row is written once all its samples are there, so its samples share a part. A failure on the thread is raised by
    the next call; nothing is written after it.
    """

    def __init__(
        self,
        output: OutputFolder,
        *,
        schema: pa.Schema,
        kept: Cells,
        model: str,
        limits: PartLimits | None = None,
    ) -> None:
        """`schema` from `completion_schema`; `model` is the name that the rows carry."""
        self.rows_completed = 0
        """Input rows in the parts written so far, without an error; once closed, all."""
        self.rows_failed = 0
        self._output = output
        self._schema = schema
        self._kept = kept
        self._model = model
        self._limits = limits or PartLimits()
        self._number = output.next_part_number()
        self._interval_s = self._limits.first_interval_s
        self._pending: dict[int, dict[int, Completion]] = {}
        self._ready: list[Completion] = []
        self._ready_bytes = 0
        self._oldest = 0.0
        self._failure: BaseException | None = None
        self._writing = False
        self._flush_wanted = False
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="output-writer", daemon=True)
        self._thread.start()

    def add(self, completion: Completion, *, num_samples: int = 1) -> None:
        """Takes one finished sample of a row that has `num_samples`. Waits while the disk is far behind."""
        if num_samples == 1:
            self._add_ready([completion])
            return
        samples = self._pending.setdefault(completion.row_index, {})
        assert completion.sample_index not in samples, f"row {completion.row_index} gave a sample twice"
        samples[completion.sample_index] = completion
        if len(samples) == num_samples:
            self._add_ready(list(self._pending.pop(completion.row_index).values()))

    def add_error(self, row_index: int, message: str) -> None:
        """Writes the row as an error row; samples of it that came before are dropped."""
        self._pending.pop(row_index, None)
        self._add_ready([Completion(row_index=row_index, error=message)])

    def flush(self) -> None:
        """Returns once every complete row is in a visible part. Rows that lack samples stay."""
        with self._changed:
            self._flush_wanted = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._failure is not None or not (self._ready or self._writing))
            self._flush_wanted = False
        self._raise_failure()

    def close(self) -> None:
        """Flushes and ends the thread, also when flushing fails. A second call does nothing."""
        try:
            if not self._closing:
                self.flush()
        finally:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            self._thread.join()

    def __enter__(self) -> OutputWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes also after an error or an interrupt: rows that are complete are kept."""
        self.close()

    def _add_ready(self, completions: list[Completion]) -> None:
        size = sum(_size_bytes(completion) for completion in completions)
        with self._changed:
            assert not self._closing, "the writer is closed"
            self._changed.wait_for(lambda: self._failure is not None or self._ready_bytes < 2 * self._limits.max_bytes)
            if not self._ready:
                self._oldest = time.monotonic()
                self._changed.notify_all()
            self._ready.extend(completions)
            self._ready_bytes += size
            if self._is_full():
                self._changed.notify_all()
        self._raise_failure()

    def _is_full(self) -> bool:
        return len(self._ready) >= self._limits.max_rows or self._ready_bytes >= self._limits.max_bytes

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._writing = False
                    self._changed.notify_all()
                    self._wait_for_part()
                    if self._closing:
                        return
                    rows, self._ready, self._ready_bytes = self._ready, [], 0
                    self._writing = True
                self._write(rows)
        # Whatever ended the thread is reported to the thread that adds rows.
        except BaseException as error:  # noqa: BLE001
            with self._changed:
                self._failure = error
                self._writing = False
                self._changed.notify_all()

    def _wait_for_part(self) -> None:
        """Until rows are due by number, size, time or flush, or the writer closes. Holds the condition."""
        while not self._closing:
            if not self._ready:
                self._changed.wait()
                continue
            due_s = self._oldest + self._interval_s - time.monotonic()
            if self._flush_wanted or self._is_full():
                return
            if due_s <= 0:
                self._interval_s = min(2 * self._interval_s, self._limits.max_interval_s)
                return
            self._changed.wait(timeout=due_s)

    def _write(self, rows: list[Completion]) -> None:
        rows.sort(key=lambda row: (row.row_index, row.sample_index))
        path = self._output.path / part_name(self._number, run_id=self._output.run_id)
        table = completion_table(
            rows, schema=self._schema, kept=self._kept, run_id=self._output.run_id, model=self._model
        )
        write_part(table, path, fingerprint=self._output.fingerprint)
        self._number += 1
        failed = {row.row_index for row in rows if row.error is not None}
        self.rows_failed += len(failed)
        self.rows_completed += len({row.row_index for row in rows}) - len(failed)


def _size_bytes(completion: Completion) -> int:
    """About what the row holds in memory; alternatives of log-probabilities are Python objects and dear."""
    size = 512 + len(completion.text or "") + 32 * len(completion.token_ids)
    if completion.logprobs:
        size += sum(120 + 120 * len(entry[2]) for entry in completion.logprobs)
    return size
