"""Rows to tokens: templates, the model's chat template and the tokenizer, streamed into the prompt store.

Each prompt gets the tokens of its whole text, in batches on all cores. A row that cannot be run gives an error text instead.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from batchllm.data.cells import BadCell, carried_column, python_cells
from batchllm.data.constraint_section import row_choice
from batchllm.data.inputs import Input
from batchllm.data.kept import KeptRows
from batchllm.data.openai_bodies import SERVICE_DEFAULTS
from batchllm.data.openai_input import ERROR_COLUMN, SAMPLING_COLUMN
from batchllm.data.rendering import History, PromptRenderer, PromptTokenizer
from batchllm.data.sections import JobSections, SamplingSection, request_params
from batchllm.data.token_ids import beyond_vocabulary, wrong_token_id
from batchllm.errors import OutputError
from batchllm.planner.store import PromptStore
from batchllm.prompt import Grammar, SamplingParams

_MAX_SEEN = 100_000
_CHOICE = "output.choice"


@dataclass(frozen=True, slots=True)
class RowError:
    """A row that cannot be run, and why: names the row and, where there is one, the column."""

    row_index: int
    message: str


@dataclass(frozen=True, slots=True)
class Staging:
    """Where rows go: prompts to `store`, carried cells to `kept`. `done` rows (bool, from `resume`) are skipped."""

    store: PromptStore
    kept: KeptRows
    done: np.ndarray

    @classmethod
    def create(cls, folder: Path, *, input: Input, done: np.ndarray) -> Staging:
        """New files in `folder`. Raises OutputError when they cannot be made."""
        try:
            kept = KeptRows(folder, schema=pa.schema(list(input.carried)))
            return cls(store=PromptStore(folder / "prompts"), kept=kept, done=done)
        except OSError as error:
            raise OutputError(f"{folder}: prompts cannot be staged: {error.strerror}") from None

    def next_stage(self, folder: Path, *, done: np.ndarray) -> Staging:
        """Prompts of a later stage, in new files of `folder`, over the same cells; its store is closed by the caller."""
        try:
            return Staging(store=PromptStore(folder), kept=self.kept, done=done)
        except OSError as error:
            raise OutputError(f"{folder}: prompts cannot be staged: {error.strerror}") from None

    def close(self) -> None:
        """Closes the files."""
        self.store.close()
        self.kept.close()


def stage_prompts(
    job: JobSections,
    *,
    input: Input,
    tokenizer: PromptTokenizer,
    staging: Staging,
    max_context: int,
    vocab_size: int,
    should_stop: Callable[[], bool] = lambda: False,
    history: History | None = None,
) -> Iterator[RowError]:
    """Reads the input once, stages every row and finishes the store; yields the rows that cannot be run, as they come.

    `history` is given for a later stage, whose rows' cells are staged already.
    `should_stop` is asked for each batch of rows; when it says so, the rest stays unread and the store unfinished.
    `max_context`: tokens of the model's context; a prompt must leave room for one more. `vocab_size`: of the model; a row that names a
    token beyond it, or whose text is cut into one, is an error row (`check_token_ids` is for what the job names). The cells of a row are in
    `staging.kept` before its error is yielded. Raises InputError, JobError, ModelError, OutputError.
    """
    renderer = PromptRenderer(job, input=input, tokenizer=tokenizer, history=history)
    limit = max_context - 1 if job.prompt.max_prompt_tokens is None else job.prompt.max_prompt_tokens
    limit = min(limit, max_context - 1)
    interned = _Interned(staging.store, grammar=job.output.grammar(), vocab_size=vocab_size)
    sampling = (
        _RequestSampling(job.sampling, interned=interned)
        if input.holds_requests
        else _RowSampling(job.sampling, interned=interned, choice_column=job.output.choice_column)
    )
    row_index = 0
    try:
        for batch in input.batches():
            if should_stop():
                return
            rows = np.arange(row_index, row_index + batch.num_rows)
            todo = ~staging.done[row_index : row_index + batch.num_rows]
            row_index += batch.num_rows
            errors = {} if history is not None else _stage_carried(batch, input=input, kept=staging.kept)
            if todo.any():
                texts = renderer.render(batch, first_row=int(rows[0]), todo=todo, errors=errors)
                sampling_ids = sampling.ids(batch, todo=todo, errors=errors)
                _stage_tokens(
                    staging.store,
                    prompts=renderer.encode(texts),
                    rows=rows,
                    sampling_ids=sampling_ids,
                    cut=_Cut(limit, job.prompt.truncate),
                    errors=errors,
                    tokenizer=tokenizer,
                    vocab_size=vocab_size,
                )
            wrong = [place for place in sorted(errors) if todo[place]]
            lines = _request_lines(batch, wrong) if input.holds_requests else [""] * len(wrong)
            for place, line in zip(wrong, lines, strict=True):
                yield RowError(int(rows[place]), f"row {rows[place]}: {line}{errors[place]}")
        staging.store.finish()
    except OSError as error:
        raise OutputError(f"{staging.store.folder}: prompts cannot be staged: {error.strerror or error}") from None


def _stage_carried(batch: pa.RecordBatch, *, input: Input, kept: KeptRows) -> dict[int, str]:
    """Stages the id and kept cells; returns an error text by place in the batch."""
    errors: dict[int, str] = {}
    names = [input.id_column, *(field.name for field in input.carried[1:])]
    arrays = []
    for name, field in zip(names, input.carried, strict=True):
        if name is None:
            arrays.append(pa.nulls(batch.num_rows, field.type))
            continue
        array, bad = carried_column(batch.column(name), field)
        arrays.append(array)
        for place in np.flatnonzero(bad).tolist():
            errors.setdefault(place, f"column {name!r} is not valid UTF-8")
    kept.append(pa.RecordBatch.from_arrays(arrays, schema=kept.schema))
    return errors


def _request_lines(batch: pa.RecordBatch, places: Sequence[int]) -> list[str]:
    """What an error of each of these requests begins with: its line in the file, which the request's own errors have already."""
    lines, own = (
        batch.column(name).take(pa.array(places, pa.int64())).to_pylist() for name in ("request_line", ERROR_COLUMN)
    )
    return ["" if error is not None else f"line {line}: " for line, error in zip(lines, own, strict=True)]


@dataclass(frozen=True, slots=True)
class _Cut:
    limit: int
    side: str | bool


def _stage_tokens(
    store: PromptStore,
    *,
    prompts: dict[int, np.ndarray],
    rows: np.ndarray,
    sampling_ids: dict[int, int],
    cut: _Cut,
    errors: dict[int, str],
    tokenizer: PromptTokenizer,
    vocab_size: int,
) -> None:
    places: list[int] = []
    tokens: list[np.ndarray] = []
    for place, ids in prompts.items():
        if place in errors:
            continue
        if len(ids) == 0:
            errors[place] = "the prompt is empty: it has no tokens"
            continue
        if len(ids) > cut.limit:
            if cut.side is False:
                errors[place] = f"the prompt has {len(ids)} tokens, the limit is {cut.limit}"
                continue
            ids = ids[-cut.limit :] if cut.side == "left" else ids[: cut.limit]
        places.append(place)
        tokens.append(ids)
    # A tokenizer has tokens beyond the model's where someone added them there alone. That is rare, so one look at all rows comes first.
    if places and int(np.concatenate(tokens).max()) >= vocab_size:
        known = []
        for place, ids in zip(places, tokens, strict=True):
            beyond = ids[ids >= vocab_size]
            if len(beyond):
                text, what = (
                    tokenizer.token_text(int(beyond[0])),
                    beyond_vocabulary(int(beyond[0]), vocab_size=vocab_size),
                )
                errors[place] = f"the prompt holds {text!r}, a token of the tokenizer alone: {what}"
            else:
                known.append((place, ids))
        places, tokens = [place for place, _ in known], [ids for _, ids in known]
    if places:
        store.append_batch(
            row_index=rows[places],
            lengths=np.array([len(ids) for ids in tokens], dtype=np.int32),
            tokens=np.concatenate(tokens),
            sampling_ids=np.array([sampling_ids[place] for place in places], dtype=np.int32),
        )


class _Interned:
    """The sampling of rows as numbers of the store. `grammar`: of all rows that bring none of their own."""

    def __init__(self, store: PromptStore, *, grammar: Grammar | None, vocab_size: int) -> None:
        self._store = store
        self._grammar = grammar
        self._vocab_size = vocab_size

    def number(self, params: SamplingParams, *, grammar: Grammar | None = None, key: Callable[[str], str] = str) -> int:
        """Raises ValueError for a token that the model does not have; `key` is what a field is called there."""
        wrong = wrong_token_id(params, vocab_size=self._vocab_size)
        if wrong is not None:
            raise ValueError(f"{key(wrong[0])}: {wrong[1]}")
        return self._store.intern_sampling(dataclasses.replace(params, grammar=grammar or self._grammar))


class _RowSampling:
    """The sampling of each row as a number of the store; equal cells are checked once."""

    def __init__(self, section: SamplingSection, *, interned: _Interned, choice_column: str | None) -> None:
        """`choice_column` holds each row's labels, in the place of a grammar for all."""
        self._section = section
        self._interned = interned
        self._choice_column = choice_column
        self._columns = section.columns()
        if choice_column is not None:
            self._columns[_CHOICE] = choice_column
        self._seen: dict[str, int | str] = {}
        self._fixed = None if self._columns else interned.number(section.params())

    def ids(self, batch: pa.RecordBatch, *, todo: np.ndarray, errors: dict[int, str]) -> dict[int, int]:
        places = [place for place in np.flatnonzero(todo).tolist() if place not in errors]
        if self._fixed is not None:
            return dict.fromkeys(places, self._fixed)
        cells = {name: python_cells(batch.column(column), column=column) for name, column in self._columns.items()}
        found: dict[int, int] = {}
        for place in places:
            values = {name: column[place] for name, column in cells.items()}
            key = repr(values)
            if key not in self._seen:
                if len(self._seen) > _MAX_SEEN:
                    self._seen.clear()
                self._seen[key] = self._check(values)
            number = self._seen[key]
            if isinstance(number, str):
                errors[place] = number
            else:
                found[place] = number
        return found

    def _check(self, values: Mapping[str, object]) -> int | str:
        for value in values.values():
            if isinstance(value, BadCell):
                return str(value)
        try:
            grammar = None
            if self._choice_column is not None:
                grammar = row_choice(values[_CHOICE], column=self._choice_column)
            return self._interned.number(self._section.params(values), grammar=grammar, key=self._key)
        except ValueError as error:
            return str(error)

    def _key(self, field: str) -> str:
        return f"column {self._columns[field]!r} as sampling.{field}" if field in self._columns else f"sampling.{field}"


class _RequestSampling:
    """The sampling of each request of a batch file as a number of the store; equal ones are checked once."""

    def __init__(self, section: SamplingSection, *, interned: _Interned) -> None:
        self._section = section
        self._interned = interned
        self._seen: dict[tuple[str, str], int | str] = {}

    def ids(self, batch: pa.RecordBatch, *, todo: np.ndarray, errors: dict[int, str]) -> dict[int, int]:
        urls = batch.column("request_url").to_pylist()
        texts = batch.column(SAMPLING_COLUMN).to_pylist()
        found: dict[int, int] = {}
        for place in np.flatnonzero(todo).tolist():
            if place in errors:
                continue
            key = (urls[place], texts[place])
            if key not in self._seen:
                if len(self._seen) > _MAX_SEEN:
                    self._seen.clear()
                self._seen[key] = self._check(*key)
            number = self._seen[key]
            if isinstance(number, str):
                errors[place] = number
            else:
                found[place] = number
        return found

    def _check(self, url: str, text: str) -> int | str:
        values = json.loads(text)
        form = values.pop("grammar", None)
        try:
            params = request_params(self._section, defaults=SERVICE_DEFAULTS[url], values=values)
            return self._interned.number(params, grammar=None if form is None else Grammar(**form))
        except ValueError as error:
            return str(error)
