"""The bodies of `/v1/chat/completions` and `/v1/completions`: every key that is known, and what becomes of it.

A key that would change the answer and cannot be honoured is refused by name; one that only concerns the service
(`user`, `metadata`) is taken and ignored.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from batchllm.data.constraints import schema_grammar
from batchllm.prompt import Grammar

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
SERVICE_DEFAULTS: dict[str, dict[str, object]] = {
    # Without a limit a chat answer may fill the context; the engine cuts at what the model has.
    CHAT_URL: {"temperature": 1.0, "max_tokens": 1 << 24},
    COMPLETIONS_URL: {"temperature": 1.0, "max_tokens": 16},
}


def _refused(value: object) -> object:
    # Absent, null and "off" ask for nothing; the models' defaults are not validated.
    if value in (None, False) or value == [] or value == "none":
        return None
    raise ValueError("is not supported here")


@lru_cache(maxsize=256)
def _form_of(schema: str) -> Grammar:
    return schema_grammar(json.loads(schema))


def _answer_form(value: object) -> Grammar | None:
    """What `response_format` asks of an answer; None: free text."""
    if value is None or value == {"type": "text"}:
        return None
    if value == {"type": "json_object"}:
        return _form_of('{"type": "object"}')
    if (
        not isinstance(value, dict)
        or value.get("type") != "json_schema"
        or not isinstance(value.get("json_schema"), dict)
    ):
        raise ValueError(
            'must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {…}}'
        )
    unknown = [*value.keys() - {"type", "json_schema"}, *value["json_schema"].keys() - _FORM_KEYS]
    if unknown:
        raise ValueError(f"{sorted(unknown)[0]} is not known here")
    schema = value["json_schema"].get("schema")
    if not isinstance(schema, dict):
        raise ValueError(f"json_schema.schema {'is missing' if schema is None else 'must be an object'}")
    try:
        return _form_of(json.dumps(schema))
    except RecursionError:
        raise ValueError("json_schema.schema: is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"json_schema.schema: {error}") from None


# A form is always kept to, `strict` or not.
_FORM_KEYS = frozenset({"name", "description", "schema", "strict"})


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
        """Field of `SamplingParams` → value, plain JSON, for those that the body sets."""
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


class ChatBody(_Body):
    """The body of a chat: messages of text."""

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
    response_format: Annotated[Grammar | None, BeforeValidator(_answer_form)] = None
    # Of no effect on the answer.
    parallel_tool_calls: object = None
    metadata: object = None
    store: object = None
    service_tier: object = None
    safety_identifier: object = None
    prompt_cache_key: object = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatBody:
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
        if self.response_format is not None:
            values["grammar"] = asdict(self.response_format)
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


class CompletionsBody(_Body):
    """The body of a completion: one prompt."""

    prompt: Annotated[str, BeforeValidator(_one_prompt)]
    logprobs: _Whole | None = None
    echo: Refused = None
    suffix: Annotated[object, BeforeValidator(lambda value: _refused(None if value == "" else value))] = None
    best_of: _Whole | None = None

    @model_validator(mode="after")
    def _consistent(self) -> CompletionsBody:
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of is not supported here beyond n")
        return self

    def sampling(self) -> dict[str, Any]:
        values = super().sampling()
        if self.logprobs is not None:
            values["logprobs"] = self.logprobs
        return values
