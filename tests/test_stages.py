"""Jobs of several stages: what a later stage sees, which tokens it reads, rows that fail on the way, and resuming."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchllm import Job, load_job, run
from batchllm.errors import InputError, JobError
from batchllm.models.registry import resolve_model
from batchllm.models.tokenizer import Tokenizer, load_tokenizer
from batchllm.run_progress import Observer

TEXTS = ["the engine", "a row of words", None, "the document", "an answer", "<|im_end|> as text"]
Stages = list[dict[str, Any]]
MakeJob = Callable[..., Job]


@pytest.fixture
def make_job(chat_model: Path) -> MakeJob:
    """A function (stages, changed sections) -> a job over the tiny model."""

    def make(stages: Stages, **sections: Any) -> Job:
        values: dict[str, Any] = {
            "model": str(chat_model),
            "sampling": {"max_tokens": 6, "temperature": 0.7},
            "output": {"token_ids": True},
            "engine": {"dtype": "fp32", "device": "cpu"},
        }
        return Job(stages=stages, **{**values, **sections})  # type: ignore[arg-type]

    return make


@pytest.fixture
def tokenizer(chat_model: Path) -> Tokenizer:
    return load_tokenizer(resolve_model(str(chat_model), base_folder=chat_model))


def draft_and_check(**changes: Any) -> Stages:
    return [
        {"name": "draft", "prompt": {"template": "Draft: {{ text }}"}},
        {"name": "check", "prompt": {"template": "Check {{ stages.draft }} of {{ text }}"}, **changes},
    ]


def rows_of(job: Job, texts: list[str | None] = TEXTS, **options: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (
        run(job, pa.table({"text": pa.array(texts, pa.string())}), **options).to_table().to_pylist()
    )
    return found


def single(
    make_job: MakeJob, texts: list[str | None], template: str = "{{ text }}", **sections: Any
) -> list[str | None]:
    """Completions of a job without stages."""
    job = make_job([], prompt={"template": template}, **sections)
    return [row["completion"] for row in rows_of(job, texts)]


def test_a_later_stage_says_what_a_job_of_its_own_over_the_earlier_completions_says(make_job: MakeJob) -> None:
    rows = rows_of(make_job(draft_and_check()))
    drafts = [row["completion_draft"] for row in rows]
    assert drafts == single(make_job, [text and f"Draft: {text}" for text in TEXTS])
    checks = [text and f"Check {draft} of {text}" for draft, text in zip(drafts, TEXTS, strict=True)]
    assert [row["completion"] for row in rows] == single(make_job, checks)
    assert len({row["completion"] for row in rows}) > 3


def test_a_row_that_fails_in_a_stage_is_an_error_row_that_names_it_and_keeps_what_came_before(
    make_job: MakeJob,
) -> None:
    stages = draft_and_check()
    stages.insert(1, {"name": "split", "prompt": {"template": "{{ text.split()[2] }} {{ stages['draft'] }}"}})
    rows = rows_of(make_job(stages))
    assert rows[2]["error"].startswith("stage draft: row 2: ") and rows[2]["completion_draft"] is None
    assert rows[0]["error"].startswith("stage split: row 0: prompt.template") and rows[0]["completion_draft"]
    assert rows[0]["completion_split"] is None and rows[0]["completion"] is None
    assert rows[1]["error"] is None and rows[1]["completion_split"]
    assert [row["row_index"] for row in rows] == list(range(6))


def conversation(**changes: Any) -> Stages:
    return [
        {"name": "first", "prompt": {"system": "Be brief.", "template": "Tell of {{ text }}"}, **changes},
        {"name": "second", "prompt": {"continue": True, "template": "Why, after {{ stages.first }}?"}},
        {"name": "third", "prompt": {"continue": True, "template": "And then?"}},
    ]


def turns(text: str, *answers: str) -> str:
    """The conversation's text up to the third turn, as the chat template writes it."""
    users = [f"Tell of {text}", f"Why, after {answers[0]}?", "And then?"]
    said = "<|im_start|>system\nBe brief.<|im_end|>\n"
    for user, answer in zip(users, (*answers, ""), strict=True):
        said += f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
    return said.removesuffix("<|im_end|>\n")


def test_a_conversation_goes_on_with_every_turn_in_the_prompt(make_job: MakeJob, tokenizer: Tokenizer) -> None:
    texts: list[str | None] = ["the engine", "a row of words", "the document"]
    rows = rows_of(make_job(conversation()), texts)
    raw = [
        turns(str(text), row["completion_first"], row["completion_second"])
        for text, row in zip(texts, rows, strict=True)
    ]
    # A random model's text falls into other tokens than those it chose: the prompt has those it chose.
    whole = [len(ids) for ids in tokenizer.encode_batch(raw)]
    assert all(row["prompt_tokens"] >= length for row, length in zip(rows, whole, strict=True))


def test_a_conversation_whose_tokens_are_canonical_equals_the_whole_prompt(make_job: MakeJob) -> None:
    texts: list[str | None] = ["the engine", "the document"]
    labels = {"choice": ["the engine reads", "a row"]}
    stages = conversation(output=labels)
    stages[1]["output"] = labels
    job = make_job(stages, sampling={"max_tokens": 30, "temperature": 0.7})
    rows = rows_of(job, texts)
    raw = [
        turns(str(text), row["completion_first"], row["completion_second"])
        for text, row in zip(texts, rows, strict=True)
    ]
    plain = make_job(
        [],
        prompt={"template": "{{ text }}", "raw": True, "allow_control_tokens": True},
        sampling={"max_tokens": 30, "temperature": 0.7},
    )
    whole = rows_of(plain, list(raw))
    assert [row["prompt_tokens"] for row in rows] == [row["prompt_tokens"] for row in whole]
    assert [row["token_ids"] for row in rows] == [row["token_ids"] for row in whole]


def test_control_text_of_a_cell_stays_text_in_a_conversation(make_job: MakeJob) -> None:
    plain, hostile = rows_of(make_job(conversation()), ["x", "<|im_end|>" * 10])
    assert plain["error"] is None and hostile["error"] is None
    assert hostile["prompt_tokens"] > plain["prompt_tokens"] + 40


def test_each_stage_has_its_own_constraint_and_sampling(make_job: MakeJob) -> None:
    stages = draft_and_check(output={"choice": ["yes", "no"]}, sampling={"n": 2, "max_tokens": 9, "temperature": 5.0})
    stages[0]["output"] = {"schema": {"type": "integer", "minimum": 0, "maximum": 9}}
    rows = rows_of(make_job(stages), ["a", "b", "c"])
    assert [(row["row_index"], row["sample_index"]) for row in rows] == [(r, s) for r in range(3) for s in range(2)]
    assert {row["completion"] for row in rows} <= {"yes", "no"}
    assert all(0 <= int(row["completion_draft"]) <= 9 for row in rows)


def test_a_run_that_is_stopped_between_stages_is_finished_by_the_next_with_the_same_rows(
    make_job: MakeJob, tmp_path: Path
) -> None:
    texts: list[str | None] = [f"row {number}" for number in range(12)]
    undisturbed = rows_of(make_job(draft_and_check()), texts)
    job = make_job(draft_and_check(), output={"path": str(tmp_path / "out"), "token_ids": True})
    notes: list[str] = []
    observer = Observer(note=notes.append, should_stop=lambda: any("stage check" in note for note in notes))
    table = pa.table({"text": texts})
    assert run(job, table, limit=4).summary.finished
    stopped = run(job, table, observer=observer).summary
    assert not stopped.finished and stopped.rows_completed == 4
    rows = run(job, table).to_table().to_pylist()
    says = ("completion_draft", "completion", "token_ids", "error")
    assert [[row[key] for key in says] for row in rows] == [[row[key] for key in says] for row in undisturbed]


def test_a_job_file_of_stages_runs_and_a_change_of_one_is_another_job(
    write_job: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_job(tmp_path, {"text": ["a", "b"]}, prompt=None, stages=draft_and_check())
    path.write_text(path.read_text().replace("prompt: null\n", ""))
    (tmp_path / "kind.json").write_text(json.dumps({"enum": ["x", "y"]}))
    job = load_job(
        path, overrides=['stages=[{name: a, prompt: {template: "{{ text }}"}, output: {schema: kind.json}}]']
    )
    assert {row["completion"] for row in run(job).to_table().to_pylist()} <= {'"x"', '"y"'}
    assert load_job(path).fingerprint_parts()["stages"] != job.fingerprint_parts()["stages"]


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ("[{name: a, prompt: {template: x, continue: true}}]", "stages.0.prompt: continue needs an earlier stage"),
        ("[{name: a, prompt: {template: '{{ stages.b }}'}}]", None),
        (
            "[{name: a, prompt: {template: x}}, {name: b, prompt: {template: '{{ stages.c }}'}}]",
            "stages.1.prompt.template: stages.c is no earlier stage; those are a",
        ),
        (
            "[{name: a, prompt: {template: x}}, {name: a, prompt: {template: x}}]",
            "stages.1.name: two stages are called a",
        ),
        (
            "[{name: tokens, prompt: {template: x}}, {name: b, prompt: {template: x}}]",
            "stages.0.name: tokens would make a second column completion_tokens",
        ),
        (
            "[{name: a, prompt: {template: x}, sampling: {n: 2}}, {name: b, prompt: {template: x}}]",
            "stages.0.sampling: n above 1 is for the last stage",
        ),
        (
            "[{name: a, prompt: {template: x, raw: true}}, {name: b, prompt: {template: x, continue: true}}]",
            "stages.1.prompt: continue needs a conversation, and stage a is raw",
        ),
        ("[{name: a, prompt: {}}]", "stages.0.prompt: needs exactly one of template and messages"),
        ("[{name: a b, prompt: {template: x}}]", "stages.0.name: "),
        ("[{name: a, promt: {template: x}}]", "stages.0.promt: unknown key; the nearest known key is prompt"),
        (
            "[{name: a, prompt: {template: x}, output: {regex: '('}}]",
            "stages.0.output.regex: not a valid regular expression",
        ),
    ],
)
def test_stages_that_do_not_fit_are_refused_by_key(
    write_job: Callable[..., Path], tmp_path: Path, stages: str, expected: str | None
) -> None:
    path = write_job(tmp_path, {"text": ["a"]})
    path.write_text(path.read_text().replace("prompt:\n  template: '{{ text }}'\n", ""))
    if expected is None:
        with pytest.raises(InputError, match="names column 'stages', which the input lacks"):
            run(load_job(path, overrides=[f"stages={stages}"]))
        return
    with pytest.raises(JobError) as caught:
        load_job(path, overrides=[f"stages={stages}"])
    assert expected in str(caught.value)


def test_a_token_that_the_model_does_not_have_is_refused_before_the_first_stage(make_job: MakeJob) -> None:
    says = "sampling.stop_token_ids: token 320 is beyond the model's vocabulary of 320"
    steps: list[object] = []
    stages = draft_and_check(sampling={"stop_token_ids": [320]})
    with pytest.raises(JobError, match=f"^stages.1.{says}"):
        rows_of(make_job(stages), observer=Observer(progress=steps.append))
    with pytest.raises(JobError, match=f"^{says}"):
        rows_of(make_job(draft_and_check(), sampling={"stop_token_ids": [320]}))
    assert steps == []


def test_a_prompt_or_a_constraint_beside_stages_is_refused(write_job: Callable[..., Path], tmp_path: Path) -> None:
    path = write_job(tmp_path, {"text": ["a"]}, stages=draft_and_check())
    with pytest.raises(JobError, match="prompt: has no place beside stages"):
        load_job(path)
    path.write_text(path.read_text().replace("prompt:\n  template: '{{ text }}'\n", ""))
    with pytest.raises(JobError, match="output: choice has no place beside stages"):
        load_job(path, overrides=["output.choice=[a]"])
    with pytest.raises(JobError, match="keep names completion_draft"):
        load_job(path, overrides=["input.keep=[Completion_Draft]"])
