"""The answers to an OpenAI batch file, as the service writes them: rebuilt from the parts, which stay the only truth.

`batch_output.jsonl` has a line for each request that was answered, `batch_errors.jsonl` one for each that could not
be run, both in the order of the requests. Ids and times come from what the parts hold, so that a second build gives
the same bytes.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import duckdb

from batchllm.data.openai_bodies import CHAT_URL
from batchllm.data.parts import visible_parts
from batchllm.data.places import BATCH_ERRORS_NAME, BATCH_OUTPUT_NAME, BATCH_RECORD_NAME
from batchllm.data.replaced_file import replace_file
from batchllm.data.results import view_statements
from batchllm.data.run_files import read_json
from batchllm.errors import OutputError

_MEMORY = "1GB"
_BATCH_ROWS = 1024
# The service's own stand-in for a token of probability 0.
_NO_LOGPROB = -9999.0


class AnswerTokens(Protocol):
    """What log-probabilities need of a tokenizer: the bytes of each id, and the control tokens by their text."""

    @property
    def token_bytes(self) -> Sequence[bytes]: ...
    @property
    def special_tokens(self) -> Mapping[str, int]: ...


@dataclass(frozen=True, slots=True)
class _TokenTexts:
    """Ids as text. `control`: id → text of the control tokens."""

    token_bytes: Sequence[bytes]
    control: Mapping[int, str]

    def text(self, token_id: int) -> str:
        return self.control.get(token_id) or self.token_bytes[token_id].decode("utf-8", "replace")

    def entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        data = self.control[token_id].encode() if token_id in self.control else self.token_bytes[token_id]
        value = _NO_LOGPROB if logprob is None else logprob
        return {"token": self.text(token_id), "logprob": value, "bytes": list(data)}


def write_batch_files(folder: Path, *, staging: Path, tokens: Callable[[], AnswerTokens]) -> None:
    """Replaces both files, unless they are those that were made of the parts that are there now. `tokens` is asked once, if a request wants them.

    Memory does not grow with the number of requests. Raises OutputError.
    """
    targets = (folder / BATCH_OUTPUT_NAME, folder / BATCH_ERRORS_NAME)
    parts = visible_parts(folder)
    record = folder / BATCH_RECORD_NAME
    if read_json(record) == _stamps([*parts, *targets]):
        return
    connection = duckdb.connect()
    try:
        connection.execute(f"SET memory_limit = '{_MEMORY}'")
        connection.execute("SET temp_directory = ?", [str(staging / "duckdb")])
        for statement in view_statements(folder):
            connection.execute(statement)
        if not parts:
            for target in targets:
                replace_file(target, [])
        else:
            lines = _Lines(tokens)
            failed = "row_index IN (SELECT row_index FROM errors)"
            replace_file(targets[0], map(lines.answer, _requests(connection, f"NOT {failed}")))
            replace_file(targets[1], map(lines.error, _requests(connection, failed)))
        replace_file(record, [json.dumps(_stamps([*parts, *targets])).encode()])
    except duckdb.Error as error:
        raise OutputError(f"{folder}: the batch files cannot be made: {str(error).splitlines()[0]}") from None
    finally:
        connection.close()


def _stamps(files: list[Path]) -> dict[str, list[int] | None]:
    """Size and moment of writing by name, None for a file that is not there. Compared for being the same, never for which came first:
    clocks are set back.
    """
    stamps: dict[str, list[int] | None] = {}
    for file in files:
        try:
            status = os.stat(file)
            stamps[file.name] = [status.st_size, status.st_mtime_ns]
        except FileNotFoundError:
            stamps[file.name] = None
    return stamps


def _requests(connection: duckdb.DuckDBPyConnection, condition: str) -> Iterator[list[dict[str, Any]]]:
    """The samples of one request after another."""
    reader = connection.sql(f"SELECT * FROM completions WHERE {condition}").to_arrow_reader(_BATCH_ROWS)
    rows = (row for batch in reader for row in batch.to_pylist())
    for _, samples in groupby(rows, key=lambda row: row["row_index"]):
        yield list(samples)


class _Lines:
    """Requests as lines of JSON; holds the tokenizer once it is needed."""

    def __init__(self, tokens: Callable[[], AnswerTokens]) -> None:
        self._load = tokens
        self._texts: _TokenTexts | None = None

    def answer(self, samples: list[dict[str, Any]]) -> bytes:
        first = samples[0]
        name = _name(first)
        is_chat = first["request_url"] == CHAT_URL
        completion_tokens = sum(sample["completion_tokens"] for sample in samples)
        body = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": _created(first["run_id"]),
            "model": first["model"],
            "choices": [self._choice(sample, is_chat=is_chat) for sample in samples],
            "usage": {
                "prompt_tokens": first["prompt_tokens"],
                "completion_tokens": completion_tokens,
                "total_tokens": first["prompt_tokens"] + completion_tokens,
                "prompt_tokens_details": {"cached_tokens": first["cached_tokens"]},
            },
            "system_fingerprint": None,
        }
        response = {"status_code": 200, "request_id": name, "body": body}
        return _line({"id": f"batch_req_{name}", "custom_id": first["id"], "response": response, "error": None})

    def error(self, samples: list[dict[str, Any]]) -> bytes:
        """No response: a reader that takes any body for an answer finds none."""
        first = next(sample for sample in samples if sample["error"] is not None)
        # An error of the engine names no line of its own; a reader of this file knows requests by it.
        line = f"line {first['request_line']}: "
        message = first["error"] if line in first["error"] else line + first["error"]
        error = {"code": "request_failed", "message": message}
        return _line({"id": f"batch_req_{_name(first)}", "custom_id": first["id"], "response": None, "error": error})

    def _choice(self, sample: dict[str, Any], *, is_chat: bool) -> dict[str, Any]:
        text = sample["completion"]
        choice: dict[str, Any] = {"index": sample["sample_index"]}
        if is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        choice["logprobs"] = self._logprobs(sample, is_chat=is_chat)
        choice["finish_reason"] = "length" if sample["finish_reason"] == "length" else "stop"
        return choice

    def _logprobs(self, sample: dict[str, Any], *, is_chat: bool) -> dict[str, Any] | None:
        entries = sample["logprobs"]
        if entries is None:
            return None
        if self._texts is None:
            tokens = self._load()
            control = {token_id: text for text, token_id in tokens.special_tokens.items()}
            self._texts = _TokenTexts(tokens.token_bytes, control)
        texts = self._texts
        # The control token that ended the answer is no part of it.
        if entries and sample["finish_reason"] != "length" and entries[-1]["token_id"] in texts.control:
            entries = entries[:-1]
        if is_chat:
            content = []
            for entry in entries:
                top = [texts.entry(one["token_id"], one["logprob"]) for one in entry["top"]]
                content.append({**texts.entry(entry["token_id"], entry["logprob"]), "top_logprobs": top})
            return {"content": content, "refusal": None}
        named = [texts.entry(entry["token_id"], entry["logprob"]) for entry in entries]
        offsets, position = [], 0
        for one in named:
            offsets.append(position)
            position += len(one["token"])
        top_by_text = []
        for entry in entries:
            top = [texts.entry(one["token_id"], one["logprob"]) for one in entry["top"]]
            top_by_text.append({one["token"]: one["logprob"] for one in top})
        return {
            "tokens": [one["token"] for one in named],
            "token_logprobs": [one["logprob"] for one in named],
            "top_logprobs": top_by_text,
            "text_offset": offsets,
        }


def _name(row: dict[str, Any]) -> str:
    return f"{row['run_id']}-{row['row_index']}"


def _created(run_id: str) -> int:
    """Seconds since 1970 at which the run started; a run's id begins with that moment."""
    moment = datetime.datetime.strptime(run_id.partition("-")[0], "%Y%m%dT%H%M%SZ")
    return int(moment.replace(tzinfo=datetime.UTC).timestamp())


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n"
