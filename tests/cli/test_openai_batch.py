"""A batch file through the whole program: answers and errors as the service writes them, rebuilt from the parts."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchllm.data.results import query

WriteBatch = Callable[..., Path]
Command = Callable[..., Any]


def line(custom_id: str, *, prompt: str | None = None, **body: object) -> str:
    url = "/v1/chat/completions" if prompt is None else "/v1/completions"
    content = {"messages": [{"role": "user", "content": "the dog"}]} if prompt is None else {"prompt": prompt}
    return json.dumps({"custom_id": custom_id, "url": url, "body": {"model": "gpt-4o", **content, **body}})


@pytest.fixture
def write_batch(tmp_path: Path, tiny_model: Path) -> WriteBatch:
    def write(lines: list[str], *, more: str = "", output: str = "path: out") -> Path:
        (tmp_path / "requests.jsonl").write_text("\n".join(lines) + "\n")
        job = tmp_path / "job.yaml"
        job.write_text(
            f"name: t\nmodel: {tiny_model}\ninput: {{openai_batch: requests.jsonl}}\noutput: {{{output}}}\n"
            f"engine: {{device: cpu, dtype: fp32}}\n{more}"
        )
        return job

    return write


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_every_line_is_answered_once_in_its_order_and_bad_lines_stand_among_the_errors(
    batchllm: Command, write_batch: WriteBatch, tmp_path: Path
) -> None:
    lines = [
        line("chat", max_tokens=4, temperature=0),
        "[1,2,3]",
        '"hello"',
        "null",
        '""',
        '{"body":"x"}',
        "",
        line("text", prompt="the fox", max_tokens=3, n=2, seed=1),
        line("chat", max_tokens=4),
        line("tools", tools=[{"type": "function"}]),
        line("long", prompt="ab" * 600),
    ]
    ended = batchllm("run", write_batch(lines))
    assert ended.exit_code == 3, ended.err
    answers, errors = (read(tmp_path / "out" / f"batch_{name}.jsonl") for name in ("output", "errors"))
    assert [answer["custom_id"] for answer in answers] == ["chat", "text"]
    assert [(error["custom_id"], error["response"]) for error in errors] == [
        *[(None, None)] * 5, ("chat", None), ("tools", None), ("long", None)
    ]  # fmt: skip
    messages = [error["error"]["message"] for error in errors]
    assert messages[0] == "row 1: line 2: must be an object, not a list"
    assert messages[5] == 'row 7: line 9: custom_id "chat" stands on line 1 already'
    assert "body.tools: is not supported here" in messages[6] and "the limit is 511" in messages[7]
    chat, text = (answer["response"]["body"] for answer in answers)
    assert all(answer["error"] is None and answer["response"]["status_code"] == 200 for answer in answers)
    assert chat["object"] == "chat.completion" and text["object"] == "text_completion"
    (choice,) = chat["choices"]
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] in ("length", "stop")
    assert [one["index"] for one in text["choices"]] == [0, 1] and all("text" in one for one in text["choices"])
    rows = query("select * from completions where error is null order by row_index", tmp_path / "out").to_pylist()
    assert [row["completion"] for row in rows] == [
        choice["message"]["content"], *(one["text"] for one in text["choices"])
    ]  # fmt: skip
    assert text["usage"]["completion_tokens"] == sum(row["completion_tokens"] for row in rows[1:]) <= 6
    assert text["usage"]["total_tokens"] == text["usage"]["prompt_tokens"] + text["usage"]["completion_tokens"]
    assert {row["request_model"] for row in rows} == {"gpt-4o"} and rows[0]["request_line"] == 1


def test_a_batch_file_gives_what_the_same_prompts_give_in_an_ordinary_job(
    batchllm: Command, write_batch: WriteBatch, tmp_path: Path, tiny_model: Path
) -> None:
    lines = [line("a", max_tokens=6, temperature=0), line("b", prompt="the fox", max_tokens=6, temperature=0)]
    assert batchllm("run", write_batch(lines)).exit_code == 0
    for number, text in ((0, "the dog"), (1, "the fox")):
        (tmp_path / "plain.yaml").write_text(
            f"name: p\nmodel: {tiny_model}\ninput: {{sql: \"select '{text}' as text\"}}\noutput: {{path: plain{number}}}\n"
            f"prompt: {{template: '{{{{ text }}}}', raw: {'true' if number else 'false'}}}\nsampling: {{max_tokens: 6}}\n"
            "engine: {device: cpu, dtype: fp32}\n"
        )
        assert batchllm("run", tmp_path / "plain.yaml").exit_code == 0
        sql = "select completion, prompt_tokens from completions where row_index = {}"
        ours = query(sql.format(number), tmp_path / "out").to_pylist()
        assert ours == query(sql.format(0), tmp_path / f"plain{number}").to_pylist()


def test_a_line_overrides_the_job_and_the_job_overrides_the_services_defaults(
    batchllm: Command, write_batch: WriteBatch, tmp_path: Path
) -> None:
    lines = [
        line("a", prompt="x", ignore_eos=True),
        line("b", prompt="x", ignore_eos=True, max_tokens=2),
        line("c", ignore_eos=True),
    ]
    assert batchllm("run", write_batch(lines)).exit_code == 0
    counts = "select completion_tokens as n from completions order by row_index"
    default = query(counts, tmp_path / "out")["n"].to_pylist()
    # The service's 16 for completions; a chat goes on to the end of the context of 512.
    assert default[:2] == [16, 2] and default[2] > 480
    job = write_batch(lines, more="sampling: {max_tokens: 5}\n")
    assert batchllm("run", job, "--set", "output.path=out2").exit_code == 0
    assert query(counts, tmp_path / "out2")["n"].to_pylist() == [5, 2, 5]


def test_a_line_asks_for_the_form_of_its_own_answer_before_the_jobs(
    batchllm: Command, write_batch: WriteBatch, tmp_path: Path
) -> None:
    def form(schema: object) -> dict[str, object]:
        return {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}

    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "grade": {"enum": ["a", "b"]}},
        "required": ["ok", "grade"],
        "additionalProperties": False,
    }
    lines = [
        line("verdict", response_format=form(schema), max_tokens=60),
        line("bad", response_format=form({"type": "objet"})),
        line("object", response_format={"type": "json_object"}, max_tokens=5),
        line("job", max_tokens=20),
        line("text", prompt="the fox", max_tokens=20),
    ]
    ended = batchllm("run", write_batch(lines, output="path: out, choice: ['yes', 'no']"))
    assert ended.exit_code == 3, ended.err
    answers = {
        answer["custom_id"]: answer["response"]["body"]["choices"][0]
        for answer in read(tmp_path / "out" / "batch_output.jsonl")
    }
    verdict = json.loads(answers["verdict"]["message"]["content"])
    assert set(verdict) == {"ok", "grade"} and verdict["grade"] in ("a", "b") and isinstance(verdict["ok"], bool)
    assert answers["verdict"]["finish_reason"] == "stop"
    assert answers["object"]["message"]["content"].startswith("{")
    assert answers["job"]["message"]["content"] in ("yes", "no") and answers["text"]["text"] in ("yes", "no")
    (error,) = read(tmp_path / "out" / "batch_errors.jsonl")
    assert error["custom_id"] == "bad"
    assert error["error"]["message"] == "row 1: line 2: body.response_format: json_schema.schema: Invalid type: objet"


def changed_model(tiny_model: Path, folder: Path, **settings: object) -> Path:
    """A copy of the model whose tokenizer declares other things; None takes a setting out."""
    shutil.copytree(tiny_model, folder)
    path = folder / "tokenizer_config.json"
    values = {**json.loads(path.read_text()), **settings}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return folder


def test_a_model_without_a_chat_template_answers_completions_only(
    batchllm: Command, write_batch: WriteBatch, tmp_path: Path, tiny_model: Path
) -> None:
    model = changed_model(tiny_model, tmp_path / "plain_model", chat_template=None)
    job = write_batch([line("a"), line("b", prompt="the", max_tokens=2)])
    assert batchllm("run", job, "--set", f"model={model}").exit_code == 3
    assert [answer["custom_id"] for answer in read(tmp_path / "out/batch_output.jsonl")] == ["b"]
    (error,) = read(tmp_path / "out/batch_errors.jsonl")
    assert error["custom_id"] == "a" and "the model has no chat template" in error["error"]["message"]


def test_a_prompt_gets_the_models_bos_and_a_chat_does_not_and_control_tokens_in_either_are_text(
    batchllm: Command, write_batch: WriteBatch, tmp_path: Path, tiny_model: Path
) -> None:
    model = changed_model(tiny_model, tmp_path / "bos_model", add_bos_token=True, bos_token="<|im_start|>")
    lines = [
        line("chat", max_tokens=1),
        line("text", prompt="the", max_tokens=1),
        line("control", prompt="<|im_end|>", max_tokens=1),
    ]
    counts = []
    for number, options in enumerate([[], ["--set", f"model={model}"], ["--set", "prompt.allow_control_tokens=true"]]):
        output = f"out{number}"
        assert batchllm("run", write_batch(lines), "--set", f"output.path={output}", *options).exit_code == 0
        rows = query("select prompt_tokens as n from completions order by row_index", tmp_path / output)
        counts.append(rows["n"].to_pylist())
    plain, with_bos, with_control = counts
    assert [b - a for a, b in zip(plain, with_bos, strict=True)] == [0, 1, 1]
    assert plain[2] > 3 and with_control == [*plain[:2], 1]


def test_retried_errors_are_written_anew(batchllm: Command, write_batch: WriteBatch, tmp_path: Path) -> None:
    job = write_batch([line("short", prompt="a", max_tokens=2), line("long", prompt="a", max_tokens=300, seed=1)])
    assert batchllm("run", job, "--set", "engine.kv.device=64KiB").exit_code == 3
    assert [error["custom_id"] for error in read(tmp_path / "out/batch_errors.jsonl")] == ["long"]
    assert batchllm("run", job, "--retry-errors").exit_code == 0
    assert read(tmp_path / "out/batch_errors.jsonl") == []
    assert [one["custom_id"] for one in read(tmp_path / "out/batch_output.jsonl")] == ["short", "long"]


def test_whatever_is_wrong_with_a_request_its_line_is_named(
    batchllm: Command, write_batch: WriteBatch, tmp_path: Path
) -> None:
    lines = [
        "",
        line("empty", prompt=""),
        "",
        "",
        line("bias", logit_bias={"320": 5}),
        line("long", prompt="ab" * 600),
        line("good", prompt="a", max_tokens=2),
        line("large", prompt="a", max_tokens=300, seed=1),
    ]
    assert batchllm("run", write_batch(lines), "--set", "engine.kv.device=64KiB").exit_code == 3
    messages = [error["error"]["message"] for error in read(tmp_path / "out/batch_errors.jsonl")]
    assert messages[0] == "row 0: line 2: the prompt is empty: it has no tokens"
    assert messages[1] == (
        "row 1: line 5: logit_bias: token 320 is beyond the model's vocabulary of 320; name ids from 0 to 319"
    )
    assert messages[2].startswith("row 2: line 6: the prompt has ")
    assert messages[3].startswith("line 8: ") and len(messages) == 4
    errors = query("select error from errors order by row_index", tmp_path / "out")["error"].to_pylist()
    assert errors[:3] == messages[:3]


def test_logprobs_are_written_as_the_service_writes_them(
    batchllm: Command, write_batch: WriteBatch, tmp_path: Path
) -> None:
    lines = [
        line("chat", max_tokens=3, temperature=0, logprobs=True, top_logprobs=2, ignore_eos=True),
        line("text", prompt="the", max_tokens=3, temperature=0, logprobs=2, ignore_eos=True, logit_bias={"2": -100}),
        line("none", max_tokens=1),
    ]
    assert batchllm("run", write_batch(lines)).exit_code == 0
    chat, text, none = (
        answer["response"]["body"]["choices"][0] for answer in read(tmp_path / "out/batch_output.jsonl")
    )
    assert none["logprobs"] is None
    content = chat["logprobs"]["content"]
    assert len(content) == 3 and all(len(one["top_logprobs"]) == 2 for one in content)
    for one in content:
        assert math.isclose(one["logprob"], one["top_logprobs"][0]["logprob"], abs_tol=1e-6) and one["logprob"] <= 0
    assert (
        bytes(byte for one in content for byte in one["bytes"])
        .decode("utf-8", "replace")
        .startswith(chat["message"]["content"].rstrip("\ufffd"))
    )
    logprobs = text["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 3
    assert logprobs["text_offset"] == [0, len(logprobs["tokens"][0]), sum(map(len, logprobs["tokens"][:2]))]


def test_a_resume_rebuilds_the_files_and_a_second_build_gives_the_same_bytes(
    batchllm: Command, write_batch: WriteBatch, tmp_path: Path
) -> None:
    job = write_batch([line(f"r{number}", max_tokens=2) for number in range(6)] + ["null"])
    output, errors = tmp_path / "out/batch_output.jsonl", tmp_path / "out/batch_errors.jsonl"
    assert batchllm("run", job, "--limit", "2").exit_code == 0
    first = output.read_bytes().splitlines()
    assert len(first) == 2 and errors.read_bytes() == b""
    assert batchllm("run", job).exit_code == 3
    whole = (output.read_bytes(), errors.read_bytes())
    assert whole[0].splitlines()[:2] == first and len(whole[0].splitlines()) == 6
    stamp = output.stat().st_mtime_ns
    assert batchllm("run", job).exit_code == 3
    assert output.stat().st_mtime_ns == stamp
    output.unlink()
    assert batchllm("run", job).exit_code == 3
    assert (output.read_bytes(), errors.read_bytes()) == whole
    assert not list((tmp_path / "out").glob(".*.tmp"))
    assert pq.read_table(sorted((tmp_path / "out").glob("part-*.parquet"))).num_rows == 7


def test_files_follow_the_parts_whatever_the_clock_says(
    batchllm: Command, write_batch: WriteBatch, tmp_path: Path
) -> None:
    job = write_batch([line(f"r{number}", max_tokens=2) for number in range(3)])
    output = tmp_path / "out/batch_output.jsonl"
    assert batchllm("run", job, "--limit", "1").exit_code == 0
    late = output.stat().st_mtime + 7200  # the clock was two hours ahead
    for path in [output, tmp_path / "out/batch_errors.jsonl"]:
        os.utime(path, (late, late))
    assert batchllm("run", job).exit_code == 0
    assert [one["custom_id"] for one in read(output)] == ["r0", "r1", "r2"]


def test_a_part_that_is_gone_is_gone_from_the_files(batchllm: Command, write_batch: WriteBatch, tmp_path: Path) -> None:
    job = write_batch([line("good", max_tokens=2), "null", "[]"])
    assert batchllm("run", job, "--limit", "1").exit_code == 0
    assert batchllm("run", job).exit_code == 3
    errors = tmp_path / "out/batch_errors.jsonl"
    assert len(read(errors)) == 2
    (tmp_path / "out" / sorted(part.name for part in (tmp_path / "out").glob("part-*"))[-1]).unlink()
    assert batchllm("run", job, "--limit", "1").exit_code == 0
    assert read(errors) == []


@pytest.mark.parametrize("kept", ["batch_output.jsonl", "batch_errors.jsonl"])
def test_files_of_which_a_killed_run_replaced_one_are_made_again(
    batchllm: Command, write_batch: WriteBatch, tmp_path: Path, kept: str
) -> None:
    job = write_batch([line("good", max_tokens=2), "null"])
    assert batchllm("run", job).exit_code == 3
    out = tmp_path / "out"
    whole = {name: (out / name).read_bytes() for name in ("batch_output.jsonl", "batch_errors.jsonl")}
    for name in whole:
        if name != kept:
            (out / name).write_bytes(b"of other parts\n")
    assert batchllm("run", job).exit_code == 3
    assert {name: (out / name).read_bytes() for name in whole} == whole


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("prompt: {template: x}\n", "job.yaml:6: prompt: template has no place with input.openai_batch"),
        ("sampling: {n: {column: c}}\n", "job.yaml:6: sampling: n cannot name a column"),
    ],
)
def test_keys_that_have_no_meaning_beside_a_batch_file_are_refused(
    batchllm: Command, write_batch: WriteBatch, more: str, message: str
) -> None:
    ended = batchllm("run", write_batch([line("a")], more=more))
    assert ended.exit_code == 2 and message in ended.err and len(ended.err.splitlines()) == 1


def test_an_empty_file_is_an_input_error(batchllm: Command, write_batch: WriteBatch) -> None:
    ended = batchllm("run", write_batch(["", ""]))
    assert ended.exit_code == 2 and "requests.jsonl: the file has no requests" in ended.err


def test_a_file_without_end_is_an_input_error(batchllm: Command, write_batch: WriteBatch) -> None:
    ended = batchllm("run", write_batch(["", ""]), "--set", "input.openai_batch=/dev/zero")
    assert ended.exit_code == 2
    assert "input.openai_batch: /dev/zero: cannot be read: its line 1 has more than 268,435,456 bytes" in ended.err


def test_the_public_example_runs_unchanged(
    batchllm: Command, write_batch: WriteBatch, tmp_path: Path, shared_data: Callable[[str], Path]
) -> None:
    example = shared_data("vllm_samples/examples/openai_example_batch.jsonl")
    job = write_batch([])
    assert batchllm("run", job, "--set", f"input.openai_batch={example}").exit_code == 0
    answers = read(tmp_path / "out/batch_output.jsonl")
    assert [answer["custom_id"] for answer in answers] == ["request-1", "request-2"]
