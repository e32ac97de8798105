"""What a run leaves beside its completions, as the command line makes it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from batchllm.data.run_files import RUN_COLUMNS, STEP_COLUMNS
from batchllm.data.run_folder import RunFolder, recorded_runs, runs_of_job
from batchllm.engine.metrics import STEP_COLUMNS as LOGGED_COLUMNS
from batchllm.job import load_job
from batchllm.planner.explanation import Explanation
from batchllm.planner.rates import ObservedRates
from batchllm.run_job import run_job
from batchllm.run_progress import Observer
from batchllm.run_summary import RunSummary


def output_of(job: Path, date: str = "2026-11-29") -> Path:
    return job.parent / "out" / date


def test_a_finished_run_leaves_job_versions_summary_plan_rates_and_steps(finished_job: Path) -> None:
    (run,) = recorded_runs(output_of(finished_job))
    # A report that somebody asked for lies there too.
    names = {path.name for path in run.path.iterdir()} - {"report.html"}
    assert names == {"job.yaml", "plan.json", "rates.json", "steps.parquet", "summary.json", "versions.json"}
    assert run.summary["status"] == "finished" and run.summary["exit_code"] == 3
    assert run.versions is not None and run.versions["kernels"] == run.summary["kernels"] != "none"
    job = yaml.safe_load((run.path / "job.yaml").read_text())
    assert job["date"] == "2026-11-29" and job["sampling"]["temperature"] == 0.0
    steps = pq.read_table(run.path / "steps.parquet")
    assert steps.num_rows == run.summary["num_steps"] and set(steps.schema.names) == {"step", *LOGGED_COLUMNS}


def test_the_recorded_plan_is_exact_and_the_rates_can_be_read_back(finished_job: Path) -> None:
    (run,) = recorded_runs(output_of(finished_job))
    assert run.plan is not None and run.rates is not None
    explanation = Explanation.from_json(run.plan["plans"][0]["explanation"])
    assert explanation.computed_prompt_tokens == run.summary["computed_prompt_tokens"]
    assert explanation.unique_prompt_tokens == run.summary["unique_prompt_tokens"]
    rates = ObservedRates.from_json(run.rates)
    assert rates.expected is not None and rates.expected.sampled_share == 1.0
    assert 0 < rates.expected.generated_share <= 1 and rates.prefill_tokens_per_s > 0


def test_runs_of_a_job_on_other_dates_are_found_beside_it(finished_job: Path) -> None:
    runs = runs_of_job(output_of(finished_job), name="tiny")
    assert [Path(run.summary["output"]).name for run in runs] == ["2026-11-28", "2026-11-29"]
    assert runs_of_job(output_of(finished_job), name="another") == []


def test_a_run_that_fails_says_so_in_its_folder(
    tmp_path: Path, write_job: Callable[..., Path], run_cli: Callable[..., object]
) -> None:
    job = write_job(
        tmp_path, [{"text": "a"}], prompt={"raw": True, "template": "{{ nothing }}"}, output={"path": "out"}
    )
    assert run_cli("run", job).returncode == 2  # type: ignore[attr-defined]
    (run,) = recorded_runs(tmp_path / "out")
    assert run.summary["status"] == "failed" and "nothing" in run.summary["error"]
    assert run.plan is None and run.steps is None


def test_a_second_run_of_a_complete_job_resumes_and_records_itself(
    tmp_path: Path, write_job: Callable[..., Path], run_cli: Callable[..., object]
) -> None:
    job = write_job(tmp_path, [{"text": "abc"}], output={"path": "out"})
    for _ in range(2):
        assert run_cli("run", job).returncode == 0  # type: ignore[attr-defined]
    first, second = recorded_runs(tmp_path / "out")
    assert (first.summary["rows_before"], second.summary["rows_before"]) == (0, 1)
    assert first.steps is not None and second.steps is None


def test_every_figure_of_a_summary_is_a_column_of_the_runs_view(finished_job: Path) -> None:
    (run,) = recorded_runs(output_of(finished_job))
    assert set(RunSummary.__dataclass_fields__) <= set(RUN_COLUMNS)
    assert set(run.summary) == set(RUN_COLUMNS)
    assert set(STEP_COLUMNS) == {"run_id", "step", *LOGGED_COLUMNS}
    assert json.loads((run.path / "summary.json").read_text())["num_rows"] == 40


def test_a_run_with_a_host_tier_logs_what_each_tier_held(
    tmp_path: Path, write_job: Callable[..., Path], run_cli: Callable[..., object]
) -> None:
    rows = [{"text": f"{number} " * 40} for number in range(12)]
    kv = {"device": "40KB", "host": "1MB"}
    job = write_job(
        tmp_path, rows, output={"path": "out"}, engine={"device": "cpu", "dtype": "fp32", "kv": kv, "max_sequences": 4}
    )
    assert run_cli("run", job).returncode == 0  # type: ignore[attr-defined]
    sql = "select tier, max(used_bytes) <= max(capacity_bytes) as fits, min(start_s) > 0 as later from tiers group by 1 order by 1"
    done = run_cli("query", sql, job, "--json")
    assert json.loads(done.stdout) == [  # type: ignore[attr-defined]
        {"tier": "device", "fits": True, "later": True},
        {"tier": "host", "fits": True, "later": True},
    ]
    assert run_cli("report", job).returncode == 0  # type: ignore[attr-defined]
    plan = run_cli("plan", job, "--json")
    tiers = json.loads(plan.stdout)["prediction"]["tiers"]  # type: ignore[attr-defined]
    assert [tier["name"] for tier in tiers] == ["device", "host"]


def test_a_run_that_is_stopped_says_so_and_keeps_its_steps(tmp_path: Path, write_job: Callable[..., Path]) -> None:
    rows = [{"text": "abc" * number} for number in range(1, 9)]
    job = load_job(write_job(tmp_path, rows, output={"path": "out"}, sampling={"max_tokens": 200, "ignore_eos": True}))
    asked: list[bool] = []

    def stop_after_some_steps() -> bool:
        asked.append(True)
        return len(asked) > 20

    summary = run_job(job, observer=Observer(should_stop=stop_after_some_steps))
    assert not summary.finished
    (run,) = recorded_runs(tmp_path / "out")
    assert (run.summary["status"], run.summary["exit_code"]) == ("stopped", 130)
    assert run.plan is not None and summary.num_steps == run.summary["num_steps"]


def test_a_run_that_was_killed_stays_running(tmp_path: Path) -> None:
    RunFolder(tmp_path, run_id="r", job={}, versions={}, name="n")
    (run,) = recorded_runs(tmp_path)
    assert (run.summary["status"], run.plan, run.rates, run.steps) == ("running", None, None, None)


def test_a_broken_run_folder_is_passed_over(tmp_path: Path) -> None:
    for name, content in (
        ("a", "{"),
        ("b", "[1]"),
        ("c", '{"run_id": "c", "name": "n", "status": "failed", "started": "2026-11-29T02:30:00+00:00"}'),
    ):
        (tmp_path / ".runs" / name).mkdir(parents=True)
        (tmp_path / ".runs" / name / "summary.json").write_text(content)
    (tmp_path / ".runs" / "d").write_text("a file")
    assert [run.run_id for run in recorded_runs(tmp_path)] == ["c"]


@pytest.mark.parametrize("command", ["run", "backfill"])
def test_a_run_that_is_complete_already_ends_without_importing_torch(finished_job: Path, command: str) -> None:
    folder = finished_job.parents[1] / f"complete-{command}"  # the model lies beside it, as it did
    shutil.copytree(finished_job.parent, folder)
    dates = ["--date", "2026-11-29"] if command == "run" else ["--from", "2026-11-28", "--to", "2026-11-29"]
    program = (
        "import sys\n"
        "from batchllm.cli.main import main\n"
        "try:\n    main()\n"
        "except SystemExit as ended:\n    print(ended.code, sorted({'torch', 'transformers'} & sys.modules.keys()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, command, str(folder / "job.yaml"), *dates],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    assert done.stdout.splitlines()[-1] == "3 []", done.stderr
    (summary,) = [run.summary for run in recorded_runs(folder / "out" / "2026-11-29")][1:]
    assert (summary["status"], summary["rows_before"], summary["device"]) == ("finished", 40, "none")
