"""The lines of an OpenAI batch file: what each asks for, or why it cannot be run.

A line is `{"custom_id": …, "method": "POST", "url": …, "body": …}`; its body is that of `/v1/chat/completions` or
`/v1/completions`. What a body may hold stands in the models below: a key that would change the answer and cannot be
honoured is refused by name; one that only concerns the service (`user`, `metadata`) is taken and ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from batchllm.data.sections import SamplingSection, describe

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
SERVICE_DEFAULTS: dict[str, dict[str, object]] = {
    # Without a limit a chat answer may fill the context; the engine cuts at what the model has.
    CHAT_URL: {"temperature": 1.0, "max_tokens": 1 << 24},
    COMPLETIONS_URL: {"temperature": 1.0, "max_tokens": 16},
}


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


def _refused(value: object) -> object:
    # Absent, null and "off" ask for nothing; the models' defaults are not validated.
    if value in (None, False) or value == [] or value == "none":
        return None
    raise ValueError("is not supported here")


def _plain_text_format(value: object) -> object:
    if value is None or value == {"type": "text"}:
        return None
    raise ValueError('is not supported here, except {"type": "text"}')


Refused = Annotated[None, BeforeValidator(_refused)]
# A whole number may be written 1.0, as in JavaScript; text is no number.
_Whole = Annotated[
    int, BeforeValidator(lambda value: int(value) if type(value) is float and value.is_integer() else value)
]


# Keys that bodies and `SamplingParams` have in common.
_SAMPLING_KEYS = (
    "max_tokens",
    "temperature",
    "top_p",
    "n",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "top_k",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
)


class _Body(BaseModel):
    """What both kinds of bodies hold. Sampling values are only typed here; `SamplingSection` has their limits."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    model: str
    max_tokens: _Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: _Whole | None = None
    stop: str | list[str] | None = None
    seed: _Whole | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # Extensions that open servers take in the same files.
    top_k: _Whole | None = None
    min_p: float | None = None
    min_tokens: _Whole | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: Refused = None
    stream_options: Refused = None
    # Of no effect on the answer.
    user: object = None

    def sampling(self) -> dict[str, Any]:
        """Field of `SamplingParams` → value, for those that the body sets."""
        return {name: value for name in _SAMPLING_KEYS if (value := getattr(self, name)) is not None}


def _text_content(value: object) -> object:
    """The text of a message: a string, or parts of type text."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be text or a list of parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise ValueError(f"a part of type {kind!r} is not supported here; only text is")
        texts.append(part[kind])
    return "".join(texts)


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text_content)]
    name: str | None = None
    tool_calls: Refused = None
    function_call: Refused = None
    refusal: Refused = None
    audio: Refused = None


class _ChatBody(_Body):
    messages: Annotated[list[_Message], Field(min_length=1)]
    max_completion_tokens: _Whole | None = None
    logprobs: bool | None = None
    top_logprobs: _Whole | None = None
    tools: Refused = None
    tool_choice: Refused = None
    functions: Refused = None
    function_call: Refused = None
    audio: Refused = None
    prediction: Refused = None
    web_search_options: Refused = None
    reasoning_effort: Refused = None
    modalities: Annotated[object, BeforeValidator(lambda value: _refused(None if value == ["text"] else value))] = None
    response_format: Annotated[None, BeforeValidator(_plain_text_format)] = None
    # Of no effect on the answer.
    parallel_tool_calls: object = None
    metadata: object = None
    store: object = None
    service_tier: object = None
    safety_identifier: object = None
    prompt_cache_key: object = None

    @model_validator(mode="after")
    def _consistent(self) -> _ChatBody:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    def sampling(self) -> dict[str, Any]:
        values = super().sampling()
        if self.max_completion_tokens is not None:
            values["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
        return values


def _one_prompt(value: object) -> object:
    """A prompt, or a list that holds just one."""
    if isinstance(value, list):
        if len(value) != 1:
            raise ValueError("must be one text; write a line for each prompt")
        value = value[0]
    if not isinstance(value, str):
        raise ValueError("must be text; token ids are not supported here")
    return value


class _CompletionsBody(_Body):
    prompt: Annotated[str, BeforeValidator(_one_prompt)]
    logprobs: _Whole | None = None
    echo: Refused = None
    suffix: Annotated[object, BeforeValidator(lambda value: _refused(None if value == "" else value))] = None
    best_of: _Whole | None = None

    @model_validator(mode="after")
    def _consistent(self) -> _CompletionsBody:
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of is not supported here beyond n")
        return self

    def sampling(self) -> dict[str, Any]:
        values = super().sampling()
        if self.logprobs is not None:
            values["logprobs"] = self.logprobs
        return values


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
    kind: type[_ChatBody] | type[_CompletionsBody] = _ChatBody if request.url == CHAT_URL else _CompletionsBody
    try:
        parsed = kind.model_validate(body)
        sampling = parsed.sampling()
        # The limits of sampling stand in one place.
        SamplingSection.model_validate({"max_tokens": 1 << 24, **sampling})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "extra_forbidden":
            raise ValueError(f"{_key(first['loc'])} is not known here") from None
        raise ValueError(f"{_key(first['loc'])}: {describe(first)}") from None
    messages = None
    prompt = parsed.prompt if isinstance(parsed, _CompletionsBody) else None
    if isinstance(parsed, _ChatBody):
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
