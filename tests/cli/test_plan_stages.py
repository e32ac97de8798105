"""`batchllm plan` of a job with stages: each stage's figures, what is assumed of later ones, and the comparison with a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

Command = Callable[..., Any]
NUM_ROWS = 12


@pytest.fixture
def write_stages(tmp_path: Path, tiny_model: Path) -> Callable[..., Path]:
    """A function (tokens of the first stage, keys of the job) -> a job of a draft that every row goes on from."""

    def write(max_tokens: int, **changes: Any) -> Path:
        texts = [f"the engine reads row {number}" for number in range(NUM_ROWS)]
        pq.write_table(pa.table({"text": texts}), tmp_path / "rows.parquet")
        job: dict[str, Any] = {
            "name": "staged",
            "model": str(tiny_model),
            "input": {"path": "rows.parquet"},
            "stages": [
                {
                    "name": "draft",
                    "prompt": {"template": "Draft: {{ text }}"},
                    "sampling": {"max_tokens": max_tokens, "ignore_eos": True},
                },
                {
                    "name": "verdict",
                    "prompt": {"continue": True, "template": "Is it good?"},
                    "output": {"choice": ["yes", "no"]},
                },
            ],
            "output": {"path": "out"},
            "engine": {"device": "cpu", "dtype": "fp32"},
        }
        path = tmp_path / "job.yaml"
        path.write_text(json.dumps(job | changes))
        return path

    return write


def plan_of(batchllm: Command, *arguments: str | Path) -> Any:
    done = batchllm("plan", *arguments, "--json")
    assert done.exit_code == 0, done.err
    return json.loads(done.out)


def test_every_stage_is_planned_a_later_one_with_the_longest_completions_of_the_earlier(
    batchllm: Command, write_stages: Callable[..., Path]
) -> None:
    plan = plan_of(batchllm, write_stages(10))
    draft, verdict = plan["stages"]
    assert (draft["name"], draft["remarks"], draft["num_rows"]) == ("draft", [], NUM_ROWS)
    assert verdict["name"] == "verdict" and verdict["num_rows"] == NUM_ROWS
    assert "completions of draft as long as they may be (max_tokens" in verdict["remarks"][0]
    _draft, longer = plan_of(batchllm, write_stages(13))["stages"]
    assert longer["prompt_tokens"] - verdict["prompt_tokens"] == 3 * NUM_ROWS
    # The question that follows is the same for every row.
    added = verdict["prompt_tokens"] - draft["prompt_tokens"] - 10 * NUM_ROWS
    assert added > 0 and added % NUM_ROWS == 0
    assert plan["predicted_total_s"] == pytest.approx(draft["predicted_total_s"] + verdict["predicted_total_s"])
    text = batchllm("plan", write_stages(10)).out
    assert (
        text.startswith("stage draft\n") and "\nstage verdict\nassumed: " in text and "\nall stages: predicted " in text
    )


def test_what_the_tiers_give_back_is_not_counted_as_computed(
    batchllm: Command, write_stages: Callable[..., Path]
) -> None:
    _draft, without = plan_of(batchllm, write_stages(40))["stages"]
    assert "tiers would keep them, see engine.kv.host" in without["remarks"][1]
    engine = {"device": "cpu", "dtype": "fp32", "block_size": 4, "kv": {"host": "64MiB"}}
    job = write_stages(40, engine=engine)
    _draft, verdict = plan_of(batchllm, job)["stages"]
    assert "come back from the tiers" in verdict["remarks"][1]
    assert verdict["computed_prompt_tokens"] < without["computed_prompt_tokens"] / 2
    assert batchllm("run", job).exit_code == 0
    analysis = plan_of(batchllm, job, "--analyze")
    actual = {row["name"]: row["actual"] for row in analysis["stages"][1]["comparisons"]}
    assert actual["computed prompt tokens"] < without["computed_prompt_tokens"] / 2


def test_analyze_puts_every_stage_beside_its_plan_and_adds_them_up(
    batchllm: Command, write_stages: Callable[..., Path]
) -> None:
    job = write_stages(10)
    assert batchllm("run", job).exit_code == 0
    analysis = plan_of(batchllm, job, "--analyze")
    stages = {stage["name"]: {row["name"]: row for row in stage["comparisons"]} for stage in analysis["stages"]}
    assert list(stages) == ["draft", "verdict"]
    assert all(stage["computed prompt tokens"]["ratio"] == 1.0 for stage in stages.values())
    assert stages["draft"]["generated tokens"]["actual"] == 10 * NUM_ROWS
    total = {row["name"]: row for row in analysis["comparisons"]}
    for name in ("steps", "computed prompt tokens", "generated tokens", "total s"):
        assert total[name]["actual"] == pytest.approx(sum(stage[name]["actual"] for stage in stages.values()))
    assert total["peak live tokens"]["actual"] == max(stage["peak live tokens"]["actual"] for stage in stages.values())
    text = batchllm("plan", job, "--analyze").out
    assert "stage draft\n" in text and "all stages\n" in text
    # The next plan goes by what each stage generated: a label, not all that it might have.
    draft, verdict = plan_of(batchllm, job)["stages"]
    assert draft["expected_decode_tokens"] == draft["decode_tokens"] == 10 * NUM_ROWS
    assert verdict["expected_decode_tokens"] < verdict["decode_tokens"] / 4
