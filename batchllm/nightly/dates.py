"""A job on several dates: where their rows may not lie in one folder."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from batchllm.errors import JobError
from batchllm.job import Job, load_job


def same_output(job_file: Path) -> str:
    """What is wrong where two dates share an output folder, and what to do."""
    return f"{job_file}: output.path is the same for two dates; write {{{{ date }}}} into it"


def check_outputs_apart(job: Job, *, job_file: Path, overrides: Sequence[str]) -> None:
    """Raises JobError where the next date reads other rows than the job does and would look for their completions in the same folder."""
    following = load_job(job_file, overrides=overrides, date=job.date + datetime.timedelta(days=1))
    if following.output.path == job.output.path and following.input != job.input:
        raise JobError(same_output(job_file))


def resumed_job(
    job: Job, *, job_file: Path, overrides: Sequence[str], recorded: datetime.date
) -> tuple[Job, str | None]:
    """The job under the date `recorded` of the rows in its folder, and why it is an error if all of these are done.

    A run that was cut short goes on with its date and its input. Where it is finished, and `job` reads another input, going on would be a
    run that reads nothing and says that all is well, every night.
    """
    earlier = load_job(job_file, overrides=overrides, date=recorded)
    if earlier.input == job.input:
        return earlier, None
    return earlier, (
        f"{same_output(job_file)}; {job.output.path} holds the finished run of {recorded}, and {job.date} reads another input"
    )
