"""From a batch of rows to token ids: the job's templates, the model's chat template, and the tokenizer."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jinja2
import numpy as np
import pyarrow as pa

from batchllm.data.cells import BadCell, python_cells
from batchllm.data.control_tokens import ControlTokens, Segment, free_plane, unshield
from batchllm.data.earlier import STAGES_COLUMN
from batchllm.data.inputs import Input
from batchllm.data.openai_input import ERROR_COLUMN, REQUEST_COLUMN
from batchllm.data.sections import JobSections, PromptSection
from batchllm.data.templates import compile_chat_template, compile_template, null_cell, template_columns
from batchllm.errors import JobError, ModelError


class PromptTokenizer(Protocol):
    """What is needed of a model's tokenizer; `batchllm.models.tokenizer.Tokenizer` is one."""

    bos_id: int | None
    add_bos: bool
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    special_tokens: dict[str, int]

    def encode_batch(self, texts: Sequence[str], *, allow_special: bool = True) -> list[np.ndarray]: ...
    def token_text(self, token_id: int) -> str: ...


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The final text of a row. `plane` is set where data was shielded (see `control_tokens`).

    `is_raw`: no chat template was used, so a BOS that the model wants is not in it.
    `prefix`: tokens that stand before those of the text, where a conversation goes on.
    """

    text: str
    plane: int | None
    is_raw: bool = False
    prefix: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class History:
    """What came before a stage: the jobs and names of the earlier stages, the previous one last.

    `spoken`: the tokens of a row's previous prompt and completion, int32; None where these are not exactly its text.
    """

    jobs: tuple[JobSections, ...]
    names: tuple[str, ...]
    spoken: Callable[[int], np.ndarray | None]

    def before(self) -> History | None:
        """What came before the previous stage. Its tokens lie within those of the previous stage and are not asked for."""
        if len(self.jobs) == 1:
            return None
        return History(self.jobs[:-1], self.names[:-1], lambda row_index: None)


@dataclass(frozen=True, slots=True)
class _RowTemplate:
    """A template of the job. `writes_control`: its own words hold control strings, which are meant."""

    key: str
    source: str
    template: jinja2.Template
    writes_control: bool


class _Row:
    """One row while it is rendered: its cells, and the plane that its shielded texts share."""

    def __init__(self, cells: dict[str, Any], *, sources: list[str]) -> None:
        self.cells = cells
        self.plane: int | None = None
        self._sources = sources

    def free_plane(self) -> int:
        """The plane to move characters to. Raises BadCell when the row leaves none free."""
        plane = self.plane or free_plane([list(self.cells.values()), self._sources])
        if plane is None:
            raise BadCell("the row holds text of control tokens and private-use characters of both planes")
        return plane


class PromptRenderer:
    """The templates of a job, compiled, and the model's chat template. Raises JobError or ModelError when made."""

    def __init__(
        self, job: JobSections, *, input: Input, tokenizer: PromptTokenizer, history: History | None = None
    ) -> None:
        prompt = job.prompt
        self._history = history
        self._previous: PromptRenderer | None = None
        if prompt.continues:
            assert history is not None
            self._previous = PromptRenderer(
                history.jobs[-1], input=input, tokenizer=tokenizer, history=history.before()
            )
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._date = job.date
        # Nothing is kept from being control where the job allows it.
        self._control = ControlTokens({} if prompt.allow_control_tokens else tokenizer.special_tokens)
        self._template = self._compiled(prompt.template, key="prompt.template")
        self._system = self._compiled(prompt.system, key="prompt.system")
        self._sources = [text for text in (prompt.template, prompt.system) if text is not None]
        self._holds_requests = input.holds_requests
        self._columns = (
            [ERROR_COLUMN, REQUEST_COLUMN] if input.holds_requests else _rendered_columns(prompt, input=input)
        )
        if self._previous is not None:
            self._sources += self._previous._sources
            self._columns = list(dict.fromkeys([*self._columns, *self._previous._columns, STAGES_COLUMN]))
        self._chat: jinja2.Template | None = None
        self._names: dict[str, str] = {}
        # Requests may all be raw prompts, which a model without a chat template can run.
        if not prompt.raw and not (input.holds_requests and tokenizer.chat_template is None):
            self._chat = _compiled_chat(tokenizer, date=job.date)
            named = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
            # Where its text is no control token, writing it would not give the token.
            self._names = {
                name: text if text is not None and text in tokenizer.special_tokens else ""
                for name, text in named.items()
            }

    def _compiled(self, text: str | None, *, key: str) -> _RowTemplate | None:
        if text is None:
            return None
        try:
            template = compile_template(text)
        except ValueError as error:
            raise JobError(f"{key}: {error}") from None
        writes_control = self._control.num_matches(text) > 0
        return _RowTemplate(key=key, source=text, template=template, writes_control=writes_control)

    def render(
        self, batch: pa.RecordBatch, *, first_row: int = 0, todo: np.ndarray, errors: dict[int, str]
    ) -> dict[int, RenderedPrompt]:
        """The final text of each row of `todo` that has no error yet, by place in the batch; adds to `errors`.

        `first_row`: row index of the first row of the batch.
        """
        columns = {name: python_cells(batch.column(name), column=name) for name in self._columns}
        found: dict[int, RenderedPrompt] = {}
        for place in np.flatnonzero(todo).tolist():
            if place in errors:
                continue
            try:
                cells = {name: column[place] for name, column in columns.items()}
                rendered = self._render_row(cells, row_index=first_row + place)
                rendered.text.encode("utf-8")
                found[place] = rendered
            except BadCell as error:
                errors[place] = str(error)
            except UnicodeEncodeError as error:
                errors[place] = f"the prompt is no text at character {error.start}: {error.reason}"
        return found

    def _render_row(self, cells: dict[str, Any], *, row_index: int) -> RenderedPrompt:
        for value in cells.values():
            if isinstance(value, BadCell):
                raise value
        row = _Row(cells, sources=self._sources)
        raw = self._raw_text(row)
        if raw is not None:
            return RenderedPrompt(raw, row.plane, is_raw=True)
        messages = self._conversation(row)
        text = self._chat_text(messages)
        if self._previous is not None and self._history is not None and row.plane is None:
            # The model reads on where it stopped: the tokens that it wrote, not those that their text would be cut into.
            spoken = self._history.spoken(row_index)
            head = self._chat_text(messages[:-2]) + messages[-2]["content"]
            if spoken is not None and text.startswith(head):
                return RenderedPrompt(text[len(head) :], None, prefix=spoken)
        return RenderedPrompt(text, row.plane)

    def _raw_text(self, row: _Row) -> str | None:
        """The prompt of a row that takes no chat template; None for a conversation."""
        if not self._holds_requests:
            return self._user_text(row) if self._chat is None else None
        request = _request(row.cells)
        if "messages" not in request:
            return str(self._shielded(request["prompt"], row))
        if self._chat is None:
            raise BadCell("the model has no chat template; only /v1/completions can be run with it")
        return None

    def _user_text(self, row: _Row) -> str:
        assert self._template is not None
        text = self._fill(self._template, row)
        if not text:
            raise BadCell("the prompt is empty: prompt.template gave no text")
        return text

    def _conversation(self, row: _Row) -> list[dict[str, Any]]:
        """The messages of a row, shielded."""
        if self._previous is not None and self._history is not None:
            answer = self._shielded(row.cells[STAGES_COLUMN][self._history.names[-1]], row)
            said = {"role": "assistant", "content": answer}
            return [*self._previous._conversation(row), said, {"role": "user", "content": self._user_text(row)}]
        messages: list[dict[str, Any]]
        if self._holds_requests:
            messages = self._shielded(_request(row.cells)["messages"], row)
        elif self._template is not None:
            messages = [{"role": "user", "content": self._user_text(row)}]
        else:
            assert self._prompt.messages is not None
            column = self._prompt.messages
            messages = [
                {key: self._shielded(part, row) for key, part in message.items()}
                for message in _messages(row.cells[column], column=column)
            ]
        if self._system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._fill(self._system, row)})
        return messages

    def _chat_text(self, messages: list[dict[str, Any]]) -> str:
        assert self._chat is not None
        try:
            return self._chat.render(messages=messages, add_generation_prompt=True, **self._names)
        # A template can raise anything that Python can; whatever it is, only this row is lost.
        except Exception as error:  # noqa: BLE001
            raise BadCell(f"the model's chat template: {_reason(error)}") from None

    def _fill(self, template: _RowTemplate, row: _Row) -> str:
        """The template's text for a row, shielded where cells could form a control string."""
        text = self._fill_plain(template, row.cells)
        if not template.writes_control:
            return str(self._shielded(text, row))
        # The same row with every cell out of the way: what is control then was written by the template.
        plane = row.free_plane()
        cells = {name: self._control.shield_cells(value, plane=plane) for name, value in row.cells.items()}
        shielded = self._fill_plain(template, cells)
        is_clean = self._control.num_matches(shielded) == self._control.num_matches(text)
        if is_clean and not self._control.is_open(text):
            return text
        if unshield(shielded, plane=plane) != text:
            raise BadCell(f"{template.key}: a cell holds text of control tokens that the template changes or compares")
        row.plane = plane
        return shielded

    def _fill_plain(self, template: _RowTemplate, cells: dict[str, Any]) -> str:
        values = {name: null_cell(name) if value is None else value for name, value in cells.items()}
        try:
            return template.template.render({"date": self._date, "row": values, **values})
        # A template can raise anything that Python can; whatever it is, only this row is lost.
        except Exception as error:  # noqa: BLE001
            raise BadCell(f"{template.key}: {_reason(error)}") from None

    def _shielded(self, value: Any, row: _Row) -> Any:
        """Text of which every character is data."""
        if isinstance(value, str):
            if self._control.may_form(value):
                row.plane = row.free_plane()
                return self._control.shield_text(value, plane=row.plane)
            return value
        if isinstance(value, list):
            return [self._shielded(item, row) for item in value]
        if isinstance(value, dict):
            return {self._shielded(key, row): self._shielded(item, row) for key, item in value.items()}
        return value

    def encode(self, texts: dict[int, RenderedPrompt]) -> dict[int, np.ndarray]:
        """int32 tokens by place. Plain prompts go to the tokenizer whole; those with shielded data in segments."""
        plain = {place: rendered.text for place, rendered in texts.items() if rendered.plane is None}
        found = dict(zip(plain, self._tokenizer.encode_batch(list(plain.values())), strict=True)) if plain else {}
        segments = {
            place: self._control.segments(rendered.text, plane=rendered.plane)
            for place, rendered in texts.items()
            if rendered.plane is not None
        }
        if segments:
            found |= self._encode_segments(segments)
            # The store finds a row by search: its rows only rise, shielded ones among the others.
            found = {place: found[place] for place in texts}
        for place, rendered in texts.items():
            if rendered.prefix is not None:
                found[place] = np.concatenate([rendered.prefix, found[place]])
        bos_id = self._tokenizer.bos_id
        if self._tokenizer.add_bos and bos_id is not None:
            found = {place: _with_bos(ids, bos_id) if texts[place].is_raw else ids for place, ids in found.items()}
        return found

    def _encode_segments(self, segments: dict[int, list[Segment]]) -> dict[int, np.ndarray]:
        texts = [piece.text for pieces in segments.values() for piece in pieces if piece.token_id is None]
        encoded = iter(self._tokenizer.encode_batch(texts, allow_special=False))
        found: dict[int, np.ndarray] = {}
        for place, pieces in segments.items():
            parts = [
                next(encoded) if piece.token_id is None else np.array([piece.token_id], dtype=np.int32)
                for piece in pieces
            ]
            found[place] = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
        return found


def _with_bos(ids: np.ndarray, bos_id: int) -> np.ndarray:
    """BOS once: a raw template may have written it itself. An empty text stays empty, it is an error row."""
    if len(ids) == 0 or ids[0] == bos_id:
        return ids
    return np.concatenate([np.array([bos_id], dtype=np.int32), ids])


def _request(cells: dict[str, Any]) -> dict[str, Any]:
    """`messages` or `prompt` of a batch file's line. Raises BadCell for a line that cannot be run."""
    if cells[ERROR_COLUMN] is not None:
        raise BadCell(cells[ERROR_COLUMN])
    request: dict[str, Any] = json.loads(cells[REQUEST_COLUMN])
    return request


def _messages(value: Any, *, column: str) -> list[dict[str, Any]]:
    """A conversation cell as the chat template takes it; absent fields of a message are left out."""
    if value is None:
        raise BadCell(f"column {column!r} is null")
    if not value:
        raise BadCell(f"column {column!r} holds no message")
    messages = []
    for number, message in enumerate(value):
        if message is None or not message.get("role") or message.get("content") is None:
            raise BadCell(f"column {column!r}: message {number} lacks a role or a content")
        messages.append({key: part for key, part in message.items() if part is not None})
    return messages


def _rendered_columns(prompt: PromptSection, *, input: Input) -> list[str]:
    names = list(input.schema.names)
    wanted = {prompt.messages} if prompt.messages is not None else set()
    for text in (prompt.template, prompt.system):
        if text is not None:
            wanted |= set(template_columns(text, columns=names))
    return [name for name in names if name in wanted]


def _compiled_chat(tokenizer: PromptTokenizer, *, date: datetime.date) -> jinja2.Template:
    if tokenizer.chat_template is None:
        raise ModelError("the model has no chat template; set prompt.raw: true to send the template's text as it is")
    try:
        return compile_chat_template(tokenizer.chat_template, date=date)
    except ValueError as error:
        raise ModelError(f"the model's chat template: {error}") from None


_LONGEST_REASON = 1000
"""Characters: a message may hold a cell whole."""


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0][:_LONGEST_REASON] if lines else type(error).__name__
    return text if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {text}"
