"""`batchllm plan`: exact figures, advice that is computed, nothing written, and the comparison with a run."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Cli = Callable[..., subprocess.CompletedProcess[str]]
WriteJob = Callable[..., Path]
DATE = ("--date", "2026-11-29")


def test_the_plan_of_a_byte_model_is_exact(tmp_path: Path, write_job: WriteJob, run_cli: Cli) -> None:
    job = write_job(tmp_path, [{"text": "shared head " + letter} for letter in "abcd"] + [{"text": None}])
    plan = json.loads(run_cli("plan", job, "--json").stdout)
    assert (plan["num_rows"], plan["num_error_rows"], plan["prompt_tokens"]) == (4, 1, 4 * 13)
    assert plan["unique_prompt_tokens"] == 12 + 4 and plan["reuse_ceiling"] == pytest.approx(1 - 16 / 52)
    assert plan["decode_tokens"] == 4 * 8
    assert plan["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 4
    assert plan["biggest_nodes"][0]["text"] == "shared head "
    assert plan["predicted_total_s"] > 0 and "measurement" in plan["rates_from"]


def test_labels_are_expected_to_be_as_long_as_the_longest(tmp_path: Path, write_job: WriteJob, run_cli: Cli) -> None:
    output = {"path": "out/{{ date }}", "choice": ["a", "bcd"]}
    job = write_job(tmp_path, [{"text": letter} for letter in "abcd"], output=output)
    plan = json.loads(run_cli("plan", job, "--json").stdout)
    # One token a byte: three of the eight that a row may generate.
    assert (plan["decode_tokens"], plan["expected_decode_tokens"]) == (4 * 8, 4 * 3)
    # Behind its first letter nothing of a label is left open, so a row decodes for one step, not three.
    assert plan["num_steps"] == 1


def test_a_plan_goes_by_the_tokens_that_the_last_run_had_to_sample(
    tmp_path: Path, write_job: WriteJob, run_cli: Cli
) -> None:
    """Of eight letters one is open, so a row takes steps for its first one, for that one, and for the one behind it."""
    output = {"path": "out/{{ date }}", "regex": "yyyyyy[ab]y"}
    job = write_job(tmp_path, [{"text": letter} for letter in "abcdefghij"], output=output, engine={"max_sequences": 1})
    before = json.loads(run_cli("plan", job, "--json").stdout)
    assert run_cli("run", job, *DATE).returncode == 0
    after = json.loads(run_cli("plan", job, "--json").stdout)
    assert before["expected_decode_tokens"] == after["expected_decode_tokens"] == 10 * 8
    assert (before["num_steps"], after["num_steps"]) == (80, 30) and "earlier run" in after["rates_from"]


def test_a_batch_whose_lengths_are_certain_is_planned_and_run_to_end_together(
    tmp_path: Path, write_job: WriteJob, run_cli: Cli
) -> None:
    """192 rows, of which the longest takes 64 tokens and all together 2,028, not quite 32 times as many."""
    lengths = [64] * 6 + [32] * 12 + [16] * 36 + [8] * 68 + [2] * 70
    rows = [{"text": f"{number:03d} row", "length": length} for number, length in enumerate(lengths)]
    sampling = {"max_tokens": {"column": "length"}, "ignore_eos": True}
    job = write_job(tmp_path, rows[::-1], sampling=sampling, engine={"device": "cpu", "dtype": "fp32"})
    plan = json.loads(run_cli("plan", job, "--json").stdout)
    assert (plan["max_sequences"], plan["ends_together"], plan["num_steps"]) == (32, True, 64)
    assert plan["tail_share"] < 0.05
    assert "at once          32, the longest first: so all end together" in run_cli("plan", job).stdout
    assert run_cli("run", job, *DATE, "--set", "engine.speculation=off").returncode == 0
    comparisons = json.loads(run_cli("plan", job, *DATE, "--analyze", "--json").stdout)["comparisons"]
    steps = next(row for row in comparisons if row["name"] == "steps")
    # A row that goes on behind a block being written waits a step.
    assert (steps["predicted"], steps["actual"]) == (64, pytest.approx(66, abs=2))
    # A stop string may end a row at any token.
    sampling |= {"stop": ["x"]}
    job = write_job(tmp_path, rows, sampling=sampling, engine={"device": "cpu", "dtype": "fp32"})
    plan = json.loads(run_cli("plan", job, "--json").stdout)
    assert (plan["max_sequences"], plan["ends_together"]) == (192, False)


def test_planning_writes_nothing_and_leaves_no_temporary_folder(
    tmp_path: Path, write_job: WriteJob, run_cli: Cli
) -> None:
    job = write_job(tmp_path, [{"text": "a"}])
    before = sorted(os.listdir(tmp_path))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = run_cli("plan", job, TMPDIR=str(scratch))
    assert done.returncode == 0 and "reuse ceiling" in done.stdout
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "scratch"]) and list(scratch.iterdir()) == []


def test_a_question_before_its_document_is_advised_to_move_with_the_true_saving(
    tmp_path: Path, write_job: WriteJob, run_cli: Cli
) -> None:
    rows = [{"q": f"{number:02d} what?", "doc": "the document " * 12} for number in range(20)]
    job = write_job(tmp_path, rows, prompt={"raw": True, "template": "Q: {{ q }}\n\n{{ doc }}\n\nA:"})
    plan = json.loads(run_cli("plan", job, "--json").stdout)
    (advice,) = [line for line in plan["advice"] if line.startswith("moving")]
    assert advice.startswith("moving {{ q }} behind {{ doc }} would cut computed prompt tokens by ")
    moved = write_job(tmp_path, rows, prompt={"raw": True, "template": "{{ doc }}\n\nQ: {{ q }}\n\nA:"})
    better = json.loads(run_cli("plan", moved, "--json").stdout)
    assert f"({plan['unique_prompt_tokens']:,} to {better['unique_prompt_tokens']:,})" in advice
    assert not [line for line in better["advice"] if line.startswith("moving")]


def test_a_plan_after_a_run_goes_by_what_the_run_observed(finished_job: Path, run_cli: Cli) -> None:
    plan = json.loads(run_cli("plan", finished_job, *DATE, "--json").stdout)
    assert "earlier run" in plan["rates_from"]
    assert 0 < plan["expected_decode_tokens"] <= plan["decode_tokens"] == 39 * 8


def test_analyze_puts_exact_token_counts_and_times_beside_the_prediction(finished_job: Path, run_cli: Cli) -> None:
    analysis = json.loads(run_cli("plan", finished_job, *DATE, "--analyze", "--json").stdout)
    rows = {row["name"]: row for row in analysis["comparisons"]}
    assert rows["computed prompt tokens"]["ratio"] == 1.0
    # The night before had the same rows, so that the expected share of tokens is what came.
    assert rows["generated tokens"]["ratio"] == pytest.approx(1.0, abs=0.1)
    assert rows["total s"]["actual"] == pytest.approx(rows["prefill s"]["actual"] + rows["decode s"]["actual"])
    text = run_cli("plan", finished_job, *DATE, "--analyze").stdout
    assert "actual/predicted" in text and "finished" in text


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--analyze", "--date", "2001-01-01"), "records no run"),
        (("--analyze", "--limit", "1"), "--limit is for a plan"),
        (("--set", "modle=x"), "modle"),
    ],
)
def test_wrong_usage_is_one_line_and_ends_with_2(
    finished_job: Path, run_cli: Cli, arguments: tuple[str, ...], reason: str
) -> None:
    done = run_cli("plan", finished_job, *arguments)
    assert done.returncode == 2 and reason in done.stderr and "Traceback" not in done.stderr
