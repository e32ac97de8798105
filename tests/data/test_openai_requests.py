"""Lines of OpenAI batch files: what they ask for, and the one line that each bad one gets."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm.data.constraints import schema_grammar
from batchllm.data.openai_input import read_requests, spool_requests
from batchllm.data.openai_requests import Request, parse_line
from batchllm.errors import InputError

CHAT: dict[str, Any] = {"model": "gpt-x", "messages": [{"role": "user", "content": "Hi"}]}
PLAIN: dict[str, Any] = {"model": "gpt-x", "prompt": "Hi"}


def request(body: object, *, url: str = "/v1/chat/completions", **keys: object) -> Request:
    line = {"custom_id": "a", "method": "POST", "url": url, "body": body, **keys}
    return parse_line(json.dumps(line).encode(), line=7)


def chat(**keys: object) -> Request:
    return request({**CHAT, **keys})


def form(schema: object, **keys: object) -> Request:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **keys}})


def plain(**keys: object) -> Request:
    return request({**PLAIN, **keys}, url="/v1/completions")


def test_a_chat_line_gives_its_messages_and_its_sampling() -> None:
    found = chat(
        max_completion_tokens=5, temperature=0.5, top_p=0.9, n=2, stop="\n", seed=3, logprobs=True, top_logprobs=2,
        presence_penalty=1, frequency_penalty=-0.5, logit_bias={"5": -100}, user="u", metadata={"a": "b"}, stream=False,
        response_format={"type": "text"}, tools=[], tool_choice="none",
    )  # fmt: skip
    assert found.error is None and found.custom_id == "a" and found.model == "gpt-x"
    assert found.messages == [{"role": "user", "content": "Hi"}] and found.prompt is None
    assert found.sampling == {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 2,
        "stop": "\n",
        "seed": 3,
        "presence_penalty": 1.0,
        "frequency_penalty": -0.5,
        "logit_bias": {"5": -100.0},
        "logprobs": 2,
    }


def test_a_response_format_is_a_grammar_of_the_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for found, expected in (
        (form(schema, strict=True), schema),
        (chat(response_format={"type": "json_object"}), {"type": "object"}),
    ):
        assert found.error is None and found.sampling == {"grammar": asdict(schema_grammar(expected))}


def test_parts_of_text_are_joined_and_a_developer_speaks_as_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = request({**CHAT, "messages": [{"role": "developer", "content": parts, "name": "x"}]})
    assert found.messages == [{"role": "system", "content": "ab", "name": "x"}]


def test_a_completions_line_gives_its_prompt() -> None:
    assert plain().prompt == "Hi" and plain(prompt=["Hi"]).prompt == "Hi" and plain().messages is None
    assert plain(logprobs=3, max_tokens=2, suffix="", echo=False, best_of=1).sampling == {
        "max_tokens": 2,
        "logprobs": 3,
    }


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("[1,2,3]", "must be an object, not a list"),
        ('"hello"', "must be an object, not text"),
        ("null", "must be an object, not null"),
        ('""', "must be an object, not text"),
        ("true", "must be an object, not true or false"),
        ('{"body":"x"}', "custom_id is missing"),
        ('{"custom_id": 5}', "custom_id must be text"),
        (r'{"custom_id": "\ud800"}', "custom_id must be text"),
        ('{"custom_id": "a"}', "url is missing; write /v1/chat/completions or /v1/completions"),
        ('{"custom_id": "a", "url": "/v1/embeddings"}', 'url "/v1/embeddings" is not supported'),
        ('{"custom_id": "a", "url": ["x"]}', 'url ["x"] is not supported'),
        ('{"custom_id": "a", "method": "GET"}', 'method "GET" is not supported'),
        ('{"custom_id": "a", "url": "/v1/completions"}', "body is missing"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": "x"}', "body must be an object, not text"),
        ("{", "not valid JSON: "),
        ('{"custom_id": NaN}', "not valid JSON: NaN is no JSON"),
        ("[" * 100_000, "not valid JSON: nested too deeply"),
        ("1" * 10_000, "not valid JSON: "),
    ],
)
def test_a_line_that_is_no_request_says_so_with_its_number(data: str, message: str) -> None:
    found = parse_line(data.encode(), line=7)
    assert found.error is not None and found.error.startswith(f"line 7: {message}") and "\n" not in found.error


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (request({"messages": []}), "body.model: is missing"),
        (chat(messages=[]), "body.messages: "),
        (chat(messages=[{"role": "tool", "content": "x"}]), "body.messages.0.role: "),
        (chat(messages=[{"role": "user", "content": None}]), "body.messages.0.content: "),
        (
            chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
            "body.messages.0.content: a part of type 'image_url' is not supported here",
        ),
        (chat(stream=True), "body.stream: is not supported here"),
        (chat(tools=[{"type": "function"}]), "body.tools: is not supported here"),
        (chat(tool_choice="auto"), "body.tool_choice: is not supported here"),
        (chat(functions=[{}]), "body.functions: is not supported here"),
        (
            chat(response_format={"type": "xml"}),
            'body.response_format: must be {"type": "text"}, {"type": "json_object"} or ',
        ),
        (chat(response_format=[]), 'body.response_format: must be {"type": "text"}, '),
        (form({"type": "objet"}), "body.response_format: json_schema.schema: Invalid type: objet"),
        (form({"not": {}}), "body.response_format: json_schema.schema: Unimplemented keys: "),
        (form(None), "body.response_format: json_schema.schema is missing"),
        (form([1]), "body.response_format: json_schema.schema must be an object"),
        (form({}, strikt=True), "body.response_format: strikt is not known here"),
        (chat(temprature=1), "body.temprature is not known here"),
        (chat(temperature=-1), "body.temperature: must be at least 0"),
        (chat(temperature="1"), 'body.temperature: must be a number, not "1"'),
        (chat(max_tokens=0), "body.max_tokens: must be at least 1"),
        (chat(max_tokens=10**30), "body.max_tokens: must be at most 1000000000"),
        (chat(max_tokens=5, max_completion_tokens=6), "body: max_tokens and max_completion_tokens differ"),
        (chat(top_logprobs=2), "body: top_logprobs needs logprobs: true"),
        (chat(logit_bias={"x": 1}), "body.logit_bias: must map token ids to numbers"),
        (chat(n=2000), "body.n: must be at most 1024, not 2000"),
        (plain(prompt=[1, 2]), "body.prompt: must be one text"),
        (plain(prompt=["a", "b"]), "body.prompt: must be one text; write a line for each prompt"),
        (plain(prompt=[5]), "body.prompt: must be text; token ids are not supported here"),
        (plain(echo=True), "body.echo: is not supported here"),
        (plain(best_of=3), "body: best_of is not supported here beyond n"),
    ],
)
def test_a_body_that_cannot_be_honoured_is_refused_by_the_name_of_its_key(found: Request, message: str) -> None:
    assert found.error is not None and found.error.startswith(f"line 7: {message}"), found.error
    assert found.custom_id == "a" and found.messages is None and found.prompt is None


def test_blank_lines_are_no_requests_a_bom_is_no_text_and_a_second_custom_id_is_refused() -> None:
    line = json.dumps({"custom_id": "a", "url": "/v1/completions", "body": PLAIN}).encode()
    data = b"\xef\xbb\xbf" + line + b"\r\n\n  \n" + line + b"\n\xff\n" + line.replace(b'"a"', b'"b"')
    found = list(read_requests(io.BytesIO(data)))
    assert [(one.line, one.custom_id, one.error) for one in found] == [
        (1, "a", None),
        (4, "a", 'line 4: custom_id "a" stands on line 1 already'),
        (5, None, "line 5: not valid UTF-8 at byte 0"),
        (6, "b", None),
    ]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=40)
    | _JSON.map(lambda value: json.dumps(value).encode())
    | st.tuples(st.sampled_from(sorted({*CHAT, "n", "stop", "logit_bias", "logprobs"})), _JSON).map(
        lambda pair: json.dumps(
            {"custom_id": "a", "url": "/v1/chat/completions", "body": {**CHAT, pair[0]: pair[1]}}
        ).encode()
    )
)
def test_whatever_a_line_holds_it_becomes_a_request_or_one_line_of_error(data: bytes) -> None:
    found = parse_line(data, line=1)
    if found.error is None:
        assert found.messages
    else:
        assert found.error.startswith("line 1: ") and len(found.error.splitlines()) == 1


def test_a_file_that_is_not_there_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.jsonl: cannot be read: No such file"):
        spool_requests(tmp_path / "none.jsonl", target=tmp_path / "t.parquet", name="input.openai_batch")


def test_the_public_example_is_two_requests(shared_data: Callable[[str], Path]) -> None:
    with open(shared_data("vllm_samples/examples/openai_example_batch.jsonl"), "rb") as file:
        found = list(read_requests(file))
    assert [(one.custom_id, one.error) for one in found] == [("request-1", None), ("request-2", None)]
    assert [one.sampling for one in found] == [{"max_tokens": 1000}] * 2
