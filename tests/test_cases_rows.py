"""Faults that batch engines have had, row by row, each through a whole run: order, ids, reasons, text, numbers, files with odd names."""

from __future__ import annotations

import codecs
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from batchllm.models.source import ModelSource
from batchllm.models.tokenizer import load_tokenizer

REPOSITORY = Path(__file__).resolve().parents[1]
WriteJob = Callable[..., Path]


def read_rows(folder: Path) -> list[dict[str, Any]]:
    files = [str(path) for path in sorted(folder.glob("part-*.parquet"))]
    rows = [row for path in files for row in pq.read_table(path).to_pylist()]
    return sorted(rows, key=lambda row: (row["row_index"], row["sample_index"]))


def run_rows(commands: Any, job: Path, *options: str, code: int = 0) -> list[dict[str, Any]]:
    result = commands.run("run", job, *options, folder=job.parent)
    assert result.code == code, result.stderr
    return read_rows(job.parent / "out")


def test_each_row_answers_its_own_prompt_whatever_the_order_of_the_input(
    commands: Any, write_job: WriteJob, tmp_path: Path
) -> None:
    count = 300
    columns = {
        "key": [str(row) for row in range(count)],
        "text": [f"{row % 13} " * (1 + row * 7 % 60) + str(row) for row in range(count)],
        "most": [1 + row * 11 % 17 for row in range(count)],
    }
    settings = {"input": {"id": "key", "keep": ["text"]}, "sampling": {"max_tokens": {"column": "most"}}}
    rows = run_rows(commands, write_job(tmp_path / "forward", columns, **settings))
    turned = {name: values[::-1] for name, values in columns.items()}
    back = run_rows(commands, write_job(tmp_path / "back", turned, **settings))
    assert [row["row_index"] for row in rows] == list(range(count))
    assert [row["id"] for row in rows] == columns["key"]
    assert [row["text"] for row in rows] == columns["text"]
    says = [(row["id"], row["completion"], row["completion_tokens"]) for row in rows]
    assert says == [(row["id"], row["completion"], row["completion_tokens"]) for row in back[::-1]]
    assert len({row["completion"] for row in rows}) > 100


def test_rows_with_one_id_or_none_and_with_one_prompt_all_stay(
    commands: Any, write_job: WriteJob, tmp_path: Path
) -> None:
    columns = {"nr": pa.array([7, 7, None, 8]), "text": ["same", "same", "same", "other"]}
    rows = run_rows(commands, write_job(tmp_path, columns, input={"id": "nr"}))
    assert [(row["row_index"], row["id"]) for row in rows] == [(0, 7), (1, 7), (2, None), (3, 8)]
    assert rows[0]["completion"] == rows[1]["completion"] == rows[2]["completion"]


def test_each_reason_to_end_is_told_apart_and_counts_and_texts_agree_with_the_ids(
    commands: Any, write_job: WriteJob, chat_model: Path, tmp_path: Path
) -> None:
    pipeline = Tokenizer.from_file(str(chat_model / "tokenizer.json"))
    eos, letter, other = (pipeline.token_to_id(text) for text in ("<|im_end|>", "x", "Q"))
    # A bias beyond every logit says which token comes.
    biases = [
        {eos: 900.0},
        {letter: 900.0},
        {letter: 900.0},
        {letter: 900.0},
        {eos: 900.0, letter: 800.0},
        {other: 900.0},
    ]
    columns = {
        "text": ["any"] * 6,
        "bias": pa.array([list(bias.items()) for bias in biases], type=pa.map_(pa.int64(), pa.float64())),
        "stop_ids": pa.array([[], [letter], [], [], [], []], type=pa.list_(pa.int64())),
        "stops": pa.array([[], [], ["xxx"], [], [], []], type=pa.list_(pa.string())),
        "least": [0, 0, 0, 0, 3, 0],
        "ignore": [False, False, False, False, False, True],
    }
    sampling = {
        "max_tokens": 6,
        "min_tokens": {"column": "least"},
        "logit_bias": {"column": "bias"},
        "stop_token_ids": {"column": "stop_ids"},
        "stop": {"column": "stops"},
        "ignore_eos": {"column": "ignore"},
    }
    rows = run_rows(commands, write_job(tmp_path, columns, sampling=sampling, output={"token_ids": True}))
    found = [(row["finish_reason"], row["completion"], row["token_ids"]) for row in rows]
    assert found == [
        ("eos", "", [eos]),
        ("stop", "", [letter]),
        ("stop", "", [letter] * 3),
        ("length", "xxxxxx", [letter] * 6),
        ("eos", "xxx", [letter] * 3 + [eos]),
        ("length", "QQQQQQ", [other] * 6),
    ]
    assert [row["completion_tokens"] for row in rows] == [len(row["token_ids"]) for row in rows]
    assert "xxx" in rows[2]["stop_reason"] and rows[3]["stop_reason"] is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_cut_inside_a_character_leaves_nothing_of_itself_in_the_completion(
    commands: Any, write_job: WriteJob, chat_model: Path, tmp_path: Path, side: str
) -> None:
    tokenizer = load_tokenizer(ModelSource("huggingface", chat_model, "tiny"))
    texts = ["\N{LLAMA}" * 9, "ภาษาไทย" * 3, "e" + "\N{LLAMA}" * 9, "ee" + "\N{LLAMA}" * 9, "eee" + "\N{LLAMA}" * 9]
    prompt = {"raw": True, "truncate": side, "max_prompt_tokens": 7}
    job = write_job(tmp_path, {"text": texts}, prompt=prompt, sampling={"ignore_eos": True}, output={"token_ids": True})
    for row in run_rows(commands, job):
        assert row["prompt_tokens"] == 7 and len(row["token_ids"]) == 8
        exact = tokenizer.decode_bytes(row["token_ids"])
        # At max_tokens a character that is not whole yet is left out; before, bytes that are no text are shown.
        assert row["completion"] == codecs.getincrementaldecoder("utf-8")("replace").decode(exact)
        assert "\N{LLAMA}" not in row["completion"] and "ภ" not in row["completion"]


def test_logprobs_are_finite_or_null_and_go_through_duckdb_and_json(
    commands: Any, write_job: WriteJob, tmp_path: Path
) -> None:
    sampling = {"max_tokens": 5, "temperature": 1.0, "top_k": 1, "top_p": 0.3, "logprobs": 5}
    job = write_job(tmp_path, {"text": [f"row {row}" for row in range(20)]}, sampling=sampling)
    rows = run_rows(commands, job)
    for row in rows:
        assert [len(entry["top"]) for entry in row["logprobs"]] == [5] * row["completion_tokens"]
        assert all(math.isfinite(entry["logprob"]) and entry["logprob"] <= 0 for entry in row["logprobs"])
    sql = "select avg(e.logprob) as mean, min(e.logprob) as least from (select unnest(logprobs) as e from completions)"
    listed = commands.run("query", sql, job, "--json", folder=tmp_path)
    (found,) = json.loads(listed.stdout)
    assert math.isfinite(found["mean"]) and found["least"] <= found["mean"]
    whole = commands.run("query", "select logprobs from completions", job, "--json", folder=tmp_path)
    assert len(json.loads(whole.stdout, parse_constant=pytest.fail)) == 20


def test_a_job_seed_gives_every_row_its_own_noise_and_a_rows_seed_is_its_own(
    commands: Any, write_job: WriteJob, tmp_path: Path
) -> None:
    sampling = {"max_tokens": 3, "temperature": 1.5, "ignore_eos": True}
    columns = {"text": ["one prompt"] * 60, "own": [3] * 60}
    rows = run_rows(commands, write_job(tmp_path / "a", columns, sampling=sampling))
    assert len({row["completion"] for row in rows}) > 40
    again = run_rows(commands, write_job(tmp_path / "b", columns, sampling=sampling))
    assert [row["completion"] for row in again] == [row["completion"] for row in rows]
    sampling["seed"] = {"column": "own"}
    assert (
        len({row["completion"] for row in run_rows(commands, write_job(tmp_path / "c", columns, sampling=sampling))})
        == 1
    )


def test_chat_rows_have_the_ids_of_transformers_and_raw_rows_no_added_token(
    commands: Any, write_job: WriteJob, chat_model: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(chat_model))
    texts = ["The engine reads.", "x != y and a.b", "ภาษาไทย \N{LLAMA}", "  two  spaces\n"]
    system = "You answer."
    job = write_job(tmp_path / "chat", {"text": texts}, prompt={"system": system})
    for text, row in zip(texts, run_rows(commands, job), strict=True):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        ids = theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=True)
        assert row["prompt_tokens"] == len(ids["input_ids"])
    raw = run_rows(commands, write_job(tmp_path / "raw", {"text": texts}, prompt={"raw": True}))
    lengths = [len(theirs(text, add_special_tokens=False)["input_ids"]) for text in texts]
    assert [row["prompt_tokens"] for row in raw] == lengths


BAD_LINES = ["[1, 2, 3]", '"hello"', "null", '{"text": ', "{text: 1}"]


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_line_of_json_lines_that_is_no_object_is_one_line_that_names_it(
    commands: Any, write_job: WriteJob, tmp_path: Path, line: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{{"text": "good"}}\n{line}\n{{"text": "good"}}\n')
    job = write_job(tmp_path, input={"path": "rows.jsonl"})
    result = commands.run("run", job, folder=tmp_path)
    assert result.code in (2, 3) and "Traceback" not in result.stderr
    lines = [text for text in result.stderr.splitlines() if not text.startswith("tiny: ")]
    assert len(lines) == (1 if result.code == 2 else 0), result.stderr


def test_json_lines_with_a_bom_blank_lines_and_no_last_newline_are_read(
    commands: Any, write_job: WriteJob, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\n\n{"text": "two"}\n\n{"text": "three"}')
    rows = run_rows(commands, write_job(tmp_path, input={"path": "rows.jsonl", "keep": ["text"]}))
    assert [row["text"] for row in rows] == ["one", "two", "three"]


def test_a_pickle_among_the_weights_is_never_opened(
    commands: Any, write_job: WriteJob, make_chat_model: Callable[..., Path], tmp_path: Path
) -> None:
    # Spelled out: a pickle of the first protocol that makes a folder when it is opened.
    model, trace = make_chat_model(), tmp_path / "trace"
    pickled = f"cposix\nmkdir\n(V{trace}\ntR.".encode()
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth", "training_args.bin"):
        (model / name).write_bytes(pickled)
    job = write_job(tmp_path, {"text": ["one"]}, model=str(model))
    assert len(run_rows(commands, job)) == 1
    (model / "model.safetensors").unlink()
    result = commands.run("run", job, "--set", "output.path=other", folder=tmp_path)
    assert result.code == 2 and "only pickled weights" in result.stderr
    result = commands.run("run", job, "--set", f"model={model}/model.pt", folder=tmp_path)
    assert result.code == 2 and "never opened" in result.stderr
    assert not trace.exists()


def test_a_model_whose_weights_are_cut_off_is_one_line(
    commands: Any, write_job: WriteJob, make_chat_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_chat_model()
    weights = (model / "model.safetensors").read_bytes()
    job = write_job(tmp_path, {"text": ["one"]}, model=str(model))
    for size in (0, 5, len(weights) // 2, len(weights) - 1):
        (model / "model.safetensors").write_bytes(weights[:size])
        result = commands.run("run", job, folder=tmp_path)
        lines = [line for line in result.stderr.splitlines() if not line.startswith("tiny: ")]
        assert result.code == 2 and len(lines) == 1 and "not a whole safetensors file" in lines[0], result.stderr


def test_a_head_size_that_the_native_kernels_do_not_take_runs_on_the_reference(
    commands: Any, write_job: WriteJob, make_chat_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_chat_model(hidden_size=48)
    job = write_job(tmp_path, {"text": ["one", "two"]}, model=str(model))
    result = commands.run("run", job, "--json", folder=tmp_path)
    assert result.code == 0 and json.loads(result.stdout)["kernels"] == "reference"
    asked = commands.run(
        "run", job, "--set", "output.path=b", folder=tmp_path, environment={"BATCHLLM_KERNELS": "native"}
    )
    assert asked.code == 2 and "BATCHLLM_KERNELS=native: " in asked.stderr and "Traceback" not in asked.stderr


def test_a_long_prompt_makes_logits_for_its_last_position_only(
    commands: Any, write_job: WriteJob, make_chat_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = str(make_chat_model(vocab_size=49152, max_context=8192))
    peaks = []
    for length in (100, 8000):
        prompt = {"raw": True, "truncate": "right", "max_prompt_tokens": length}
        job = write_job(tmp_path / str(length), {"text": ["0 1 2 3 " * 8000]}, model=model, prompt=prompt)
        result = commands.run("run", job, folder=tmp_path)
        assert result.code == 0, result.stderr
        assert read_rows(tmp_path / str(length) / "out")[0]["prompt_tokens"] == length
        peaks.append(result.peak_kib)
    assert peaks[1] - peaks[0] < 400 * 1024


@pytest.mark.parametrize("name", ["it's", "a [1] b", "st*r?", 'quo"te', "ümläut 日本", "#{{x}}", " space "])
def test_folders_with_odd_names_are_written_resumed_and_queried(
    commands: Any, write_job: WriteJob, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    rows = {"text": ["one", "two", "three"]}
    job = write_job(folder, rows)
    assert len(run_rows(commands, job, "--limit", "1")) == 1
    assert len(run_rows(commands, job)) == 3
    listed = commands.run("query", "select count(*) as n from completions", job, "--json", folder=tmp_path)
    assert listed.code == 0 and json.loads(listed.stdout) == [{"n": 3}], listed.stderr
    (folder / "rows.csv").write_text("text\none\ntwo\n")
    result = commands.run("run", job, "--set", "input.path=rows.csv", "--set", "output.path=csv", folder=tmp_path)
    assert result.code == 0, result.stderr


def test_a_reader_that_goes_away_gets_no_traceback(commands: Any, write_job: WriteJob, tmp_path: Path) -> None:
    job = write_job(tmp_path, {"text": [f"row {row}" for row in range(300)]}, sampling={"max_tokens": 1})
    run_rows(commands, job)
    script = "from batchllm.cli.main import main; main()"
    command = [sys.executable, "-c", script, "query", "select * from completions", str(job)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    os.close(writer)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr


@pytest.mark.parametrize("limit_bytes", [500, 3_000, 15_000, 40_000])
def test_a_disk_that_is_full_at_any_stage_is_one_line_and_a_resume_does_the_rest(
    commands: Any, write_job: WriteJob, tmp_path: Path, limit_bytes: int
) -> None:
    """The query's rows, the staged prompts, their sort, the kept cells, the part: whichever grows too large first."""
    texts = [f"{row} " + "".join(chr(97 + (row * place * place) % 26) for place in range(200)) for row in range(120)]
    job = write_job(tmp_path, {"text": texts}, input={"path": None, "sql": "from 'rows.parquet'", "keep": ["text"]})
    result = commands.run("run", job, folder=tmp_path, file_limit_bytes=limit_bytes)
    lines = [line for line in result.stderr.splitlines() if not line.startswith("tiny: ")]
    assert result.code == 1 and len(lines) == 1 and lines[0].startswith("batchllm: "), result.stderr
    # The lock and the record of the run; no part, whole or torn, and nothing staged.
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {".lock", ".runs"}
    assert len(run_rows(commands, job)) == 120
