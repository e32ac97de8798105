"""Entries for cron and systemd, and the crontab that they are put into."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchllm.errors import JobError
from batchllm.nightly.crontab import with_entry, without_entry
from batchllm.nightly.schedule import cron_entry, cron_marker, scheduled_job, systemd_units

JOB = Path("/jobs/a b/100%.yaml")
REPOSITORY = Path(__file__).resolve().parents[2]


def entry_of(
    monkeypatch: pytest.MonkeyPatch, *run_options: str, job_file: Path = JOB, at: str = "2:05", **environment: str
) -> str:
    for name in [name for name in os.environ if name.startswith(("BATCHLLM_", "HF_", "PYTHONPATH"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATCHLLM_HOME", "/home/50% off")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return cron_entry(scheduled_job(job_file, name="a / b", at=at, run_options=run_options, log=None))


def as_cron_runs_it(line: str) -> list[str]:
    """The words of the command after cron and the shell have read the line."""
    minute, hour, *stars, command = line.split(" ", 5)
    assert (minute, hour, stars) == ("5", "2", ["*", "*", "*"])
    assert "%" not in command.replace(r"\%", "")
    return shlex.split(command.replace(r"\%", "%"))


def test_a_cron_entry_has_absolute_paths_its_environment_and_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    marker, line = entry_of(monkeypatch, "--max-error-rate", "5%", HF_HOME="/hub").splitlines()
    assert marker == "# batchllm schedule: /jobs/a b/100%.yaml"
    words = as_cron_runs_it(line)
    assert words[0] == "env" and "BATCHLLM_HOME=/home/50% off" in words and "HF_HOME=/hub" in words
    path = next(word for word in words if word.startswith("PATH="))
    assert path.split("=")[1].split(":")[0] == str(Path(sys.executable).parent) and path.endswith(
        ":/usr/bin:/sbin:/bin"
    )
    start = words.index(sys.executable)
    assert words[start + 1 : start + 7] == ["-m", "batchllm", "run", str(JOB), "--max-error-rate", "5%"]
    assert words[start + 7 :] == [">>/home/50% off/logs/a-b.log", "2>&1"]


def test_a_time_of_no_day_a_line_break_and_a_line_too_long_for_cron_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for at in ("24:00", "2:60", "noon", ""):
        with pytest.raises(JobError, match="write a time of day such as 02:30"):
            entry_of(monkeypatch, at=at)
    with pytest.raises(JobError, match="control character"):
        entry_of(monkeypatch, job_file=Path("/a\nb.yaml"))
    with pytest.raises(JobError, match="cron takes no more than 990"):
        entry_of(monkeypatch, job_file=Path("/" + "long/" * 200 + "a.yaml"))
    with pytest.raises(JobError, match="is not Unicode text"):
        entry_of(monkeypatch, HF_HOME=os.fsdecode(b"/caf\xe9"))


def test_systemd_units_quote_percent_dollar_and_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHLLM_HOME", "/home/50% off")
    options = ("--set", 'name=a"b\\c', "--set", "seed=$HOME")
    text = systemd_units(scheduled_job(JOB, name="a / b", at="02:05", run_options=options, log=Path("/log 1%")))
    assert 'Environment="BATCHLLM_HOME=/home/50%% off"\n' in text
    assert '"-m" "batchllm" "run" "/jobs/a b/100%%.yaml" "--set" "name=a\\"b\\\\c" "--set" "seed=$$HOME"\n' in text
    assert "StandardOutput=append:/log 1%%\n" in text and "OnCalendar=*-*-* 02:05:00\n" in text
    assert "enable --now batchllm-a-b.timer" in text


_LINES = st.lists(
    st.sampled_from(
        [
            "MAILTO=me",
            "# batchllm schedule: /other.yaml",
            "0 1 * * * env A=1 python -m batchllm run /other.yaml >>/log 2>&1",
            "*/5 * * * * date +\\%F",
            "",
            "# é",
        ]
    ),
    max_size=6,
)


@given(before=_LINES, after=_LINES, ends=st.booleans())
def test_an_entry_is_put_in_once_replaced_in_place_and_taken_out_and_all_other_lines_stay(
    before: list[str], after: list[str], ends: bool
) -> None:
    other = "\n".join([*before, *after]) + ("\n" if ends else "")
    first, second = (f"{cron_marker(JOB)}\n{minute} 2 * * * env X=1 python -m batchllm run y\n" for minute in (5, 6))
    once = with_entry(other, job_file=JOB, entry=first)
    complete = other if other.endswith("\n") or not other else f"{other}\n"
    assert once == complete + first
    assert with_entry(once, job_file=JOB, entry=first) == once
    assert with_entry(once, job_file=JOB, entry=second) == complete + second
    assert without_entry(once, job_file=JOB) == complete
    lines = "".join(f"{line}\n" for line in before), "".join(f"{line}\n" for line in after)
    assert with_entry(lines[0] + first + lines[1], job_file=JOB, entry=second) == lines[0] + second + lines[1]
    assert without_entry(other, job_file=JOB) == other


def test_a_line_that_a_person_put_below_the_marker_stays() -> None:
    text = f"{cron_marker(JOB)}\n0 1 * * * date\n"
    assert without_entry(text, job_file=JOB) == "0 1 * * * date\n"


def test_every_spelling_of_a_jobs_path_finds_its_entry_and_a_link_to_the_file_is_another_job(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    job = tmp_path / "real" / "job.yaml"
    job.touch()
    (tmp_path / "job.yaml").symlink_to("real/job.yaml")
    entry = f"{cron_marker(job)}\n5 2 * * * env X=1 python -m batchllm run {job}\n"
    spellings = ["real/job.yaml", "real/../real/./job.yaml", "link/job.yaml", "real//job.yaml"]
    for spelling in [*(tmp_path / spelling for spelling in spellings), Path(os.path.relpath(job))]:
        assert without_entry(entry, job_file=spelling) == "", spelling
        assert with_entry(entry, job_file=spelling, entry="new\n") == "new\n", spelling
        old = f"# batchllm schedule: {spelling.absolute()}\n5 2 * * * env X=1 python -m batchllm run {job}\n"
        assert without_entry(old, job_file=job) == "", spelling
    assert without_entry(entry, job_file=tmp_path / "job.yaml") == entry


def test_install_and_remove_change_the_real_crontab_and_nothing_else_in_it(
    private_cron: list[str], tmp_path: Path, tiny_model: Path
) -> None:
    job = tmp_path / "50% job.yaml"
    job.write_text(
        f"name: t\nmodel: {tiny_model}\ninput: {{path: x.parquet}}\nprompt: {{template: x}}\noutput: {{path: out}}\n"
    )
    other = "# mine\n5 5 * * * date +\\%F\n"
    tool = f"{sys.executable} -m batchllm schedule {shlex.quote(str(job))}"
    script = (
        f"printf %s {shlex.quote(other)} | crontab -; {tool} --at 02:30 --install; {tool} --at 03:40 --install; "
        f"crontab -l; echo ===; {tool} --remove; {tool} --remove; crontab -l"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "BATCHLLM_HOME": str(tmp_path / "home")}
    ended = subprocess.run([*private_cron, script], check=True, capture_output=True, text=True, env=environment)
    installed, removed = ended.stdout.split("===\n")
    assert removed == other
    marker, line = installed.removeprefix(other).splitlines()
    assert installed.startswith(other) and marker == cron_marker(job) and line.startswith("40 3 * * * env ")
    assert r"/50\% job.yaml" in line and (tmp_path / "home/logs").is_dir()
    assert "taken out of your crontab" in ended.stderr and "was not in your crontab" in ended.stderr
