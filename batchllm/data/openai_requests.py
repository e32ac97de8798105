"""The lines of an OpenAI batch file: what each asks for, or why it cannot be run.

A line is `{"custom_id": …, "method": "POST", "url": …, "body": …}`; what its body may hold stands in `openai_bodies`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic import ValidationError

from batchllm.data.openai_bodies import CHAT_URL, COMPLETIONS_URL, SERVICE_DEFAULTS, ChatBody, CompletionsBody
from batchllm.data.phrases import describe
from batchllm.data.sections import SamplingSection


@dataclass(frozen=True, slots=True)
class Request:
    """One line. `error` says why it cannot be run; else there are either `messages` or a `prompt`.

    `sampling`: the fields of `SamplingParams` that the line sets. `line` counts from 1.
    """

    line: int
    custom_id: str | None
    url: str | None = None
    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    sampling: Mapping[str, Any] | None = None
    error: str | None = None


def parse_line(data: bytes, *, line: int) -> Request:
    """What one line asks for. Whatever the bytes are, the result is a request; it may be one with an error."""
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        return Request(line, None, error=f"line {line}: not valid UTF-8 at byte {error.start}")
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        return Request(line, None, error=f"line {line}: not valid JSON: {reason}")
    if not isinstance(value, dict):
        return Request(line, None, error=f"line {line}: must be an object, not {_kind(value)}")
    custom_id = value.get("custom_id")
    has_id = isinstance(custom_id, str) and _is_text(custom_id)
    url, body = value.get("url"), value.get("body")
    model = body.get("model") if isinstance(body, dict) else None
    known = Request(
        line,
        custom_id if has_id else None,
        url=url if isinstance(url, str) and _is_text(url) else None,
        model=model if isinstance(model, str) and _is_text(model) else None,
    )
    try:
        if not has_id:
            raise ValueError(f"custom_id {'is missing' if custom_id is None else 'must be text'}")
        if value.get("method", "POST") != "POST":
            raise ValueError(f"method {_short(value['method'])} is not supported; only POST is")
        if not isinstance(url, str) or url not in SERVICE_DEFAULTS:
            what = "is missing" if url is None else f"{_short(url)} is not supported"
            raise ValueError(f"url {what}; write {CHAT_URL} or {COMPLETIONS_URL}")
        if not isinstance(body, dict):
            raise ValueError(f"body {'is missing' if body is None else f'must be an object, not {_kind(body)}'}")
        return _with_body(known, body)
    except ValueError as error:
        return _refuse(known, str(error))


def _with_body(request: Request, body: dict[str, Any]) -> Request:
    """Raises ValueError naming the key that is wrong."""
    kind: type[ChatBody] | type[CompletionsBody] = ChatBody if request.url == CHAT_URL else CompletionsBody
    try:
        parsed = kind.model_validate(body)
        sampling = parsed.sampling()
        # The limits of sampling stand in one place.
        limited = {name: value for name, value in sampling.items() if name != "grammar"}
        SamplingSection.model_validate({"max_tokens": 1 << 24, **limited})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "extra_forbidden":
            raise ValueError(f"{_key(first['loc'])} is not known here") from None
        raise ValueError(f"{_key(first['loc'])}: {describe(first)}") from None
    messages = None
    prompt = parsed.prompt if isinstance(parsed, CompletionsBody) else None
    if isinstance(parsed, ChatBody):
        messages = [
            # What newer models call developer, chat templates call system.
            {
                "role": "system" if one.role == "developer" else one.role,
                "content": one.content,
                **({} if one.name is None else {"name": one.name}),
            }
            for one in parsed.messages
        ]
    return Request(
        request.line,
        request.custom_id,
        url=request.url,
        model=request.model,
        messages=messages,
        prompt=prompt,
        sampling=sampling,
    )


def _refuse(request: Request, reason: str) -> Request:
    return Request(
        request.line,
        request.custom_id,
        url=request.url,
        model=request.model,
        error=f"line {request.line}: {' '.join(reason.split())}",
    )


def refuse_repeated(request: Request, *, first_line: int) -> Request:
    """The request as one that cannot be run, since an earlier line has its `custom_id`."""
    return _refuse(request, f"custom_id {_short(request.custom_id)} stands on line {first_line} already")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _key(location: tuple[int | str, ...]) -> str:
    """Where in the body; pydantic's own names of the members of a union are no keys."""
    parts = [str(part) for part in location if part not in ("str", "list[str]", "int", "float", "value", "column")]
    return ".".join(["body", *parts])


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names = {list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number", dict: "an object"}
    return names[type(value)]


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _is_text(text: str) -> bool:
    """Whether the text has a UTF-8 form: JSON can spell halves of surrogate pairs."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)
