"""A job at a time of day: as an entry of a crontab, or as systemd units. Only texts are made here."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from batchllm.errors import JobError
from batchllm.models.registry import cache_home

_TIME = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")
_STANDARD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What a run depends on beside its job file; a scheduler starts it with none of the user's environment.
_CARRIED = re.compile(
    r"BATCHLLM_\w+|HF_HOME|HF_HUB_\w+|LD_LIBRARY_PATH|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|PYTHONPATH|TZ"
)
_MAX_CRON_CHARACTERS = 990
_UNIT_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class ScheduledJob:
    """What is to be started and when: local time, `command` with absolute paths, its environment, its log file."""

    job_file: Path
    name: str
    hour: int
    minute: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path


def scheduled_job(
    job_file: Path, *, name: str, at: str, run_options: tuple[str, ...], log: Path | None
) -> ScheduledJob:
    """`at` is a time such as `02:30`; `run_options` go to `batchllm run`; `log` None is a file in the cache folder.

    Raises JobError for another time, and for paths that an entry of one line cannot hold.
    """
    match = _TIME.fullmatch(at.strip())
    if match is None:
        raise JobError(f"--at {at}: write a time of day such as 02:30")
    job_file = Path(os.path.abspath(job_file))
    log = log.absolute() if log is not None else cache_home().absolute() / "logs" / f"{_plain(name)}.log"
    environment = {key: value for key, value in sorted(os.environ.items()) if _CARRIED.fullmatch(key)}
    environment["BATCHLLM_HOME"] = str(cache_home().absolute())
    environment["PATH"] = f"{Path(sys.executable).parent}:{_STANDARD_PATH}"
    command = (sys.executable, "-m", "batchllm", "run", str(job_file), *run_options)
    for text in (*command, *environment.values(), str(log)):
        if any(ord(character) < 32 for character in text):
            raise JobError(f"schedule: {text!r} holds a control character, which no entry can hold")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise JobError(f"schedule: {text!r} is not Unicode text, and an entry is")
    return ScheduledJob(
        job_file=job_file,
        name=name,
        hour=int(match[1]),
        minute=int(match[2]),
        command=command,
        environment=environment,
        log=log,
    )


_MARKER = "# batchllm schedule: "


def cron_marker(job_file: Path) -> str:
    """The comment above a job's entry, by which it is found again."""
    return f"{_MARKER}{os.path.abspath(job_file)}"


def is_marker_of(line: str, *, job_file: Path) -> bool:
    """Whether a line of a crontab is the job's marker, however its folder is written there and here.

    A link to a job file is a job of its own: its relative paths are taken from where the link lies.
    """
    if not line.startswith(_MARKER):
        return False
    marked = Path(line.removeprefix(_MARKER))
    return os.path.abspath(marked) == os.path.abspath(job_file) or _place(marked) == _place(job_file)


def _place(job_file: Path) -> Path:
    return job_file.parent.resolve() / job_file.name


def cron_entry(scheduled: ScheduledJob) -> str:
    """Two lines: the marker and the entry. Raises JobError where cron would cut the entry off.

    The environment stands in the entry's own line, so that it holds for no other entry. cron takes `%` for a line
    break unless a backslash stands before it, whatever the quotes.
    """
    variables = [f"{key}={shlex.quote(value)}" for key, value in scheduled.environment.items()]
    command = " ".join(shlex.quote(argument) for argument in scheduled.command)
    line = f"env {' '.join(variables)} {command} >>{shlex.quote(str(scheduled.log))} 2>&1".replace("%", r"\%")
    if len(line.encode()) > _MAX_CRON_CHARACTERS:
        raise JobError(
            f"schedule: the command has {len(line.encode())} characters, cron takes no more than {_MAX_CRON_CHARACTERS}; "
            "use --as systemd, shorter paths, or fewer environment variables"
        )
    return f"{cron_marker(scheduled.job_file)}\n{scheduled.minute} {scheduled.hour} * * * {line}\n"


def systemd_units(scheduled: ScheduledJob) -> str:
    """A service and a timer of the user, with the commands that install them as comments above."""
    unit = f"batchllm-{_plain(scheduled.name)}"
    folder = "~/.config/systemd/user"
    variables = "\n".join(
        f"Environment={_systemd_quoted(f'{key}={value}')}" for key, value in scheduled.environment.items()
    )
    # Expansion of variables is a matter of commands only.
    command = " ".join(_systemd_quoted(argument).replace("$", "$$") for argument in scheduled.command)
    return f"""\
# Save the two units, then: systemctl --user daemon-reload && systemctl --user enable --now {unit}.timer
# To run it while you are logged out: loginctl enable-linger

# {folder}/{unit}.service
[Unit]
Description=batchllm job {_one_line(scheduled.name)}

[Service]
Type=oneshot
{variables}
ExecStart={command}
StandardOutput=append:{str(scheduled.log).replace("%", "%%")}
StandardError=inherit
TimeoutStopSec=300

# {folder}/{unit}.timer
[Unit]
Description=batchllm job {_one_line(scheduled.name)} at {scheduled.hour:02d}:{scheduled.minute:02d}

[Timer]
OnCalendar=*-*-* {scheduled.hour:02d}:{scheduled.minute:02d}:00
Persistent=true

[Install]
WantedBy=timers.target
"""


def _plain(name: str) -> str:
    return _UNIT_NAME.sub("-", name).strip("-.") or "job"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("%", "%%")


def _systemd_quoted(text: str) -> str:
    escaped = text.replace("\\", r"\\").replace('"', r"\"").replace("%", "%%")
    return f'"{escaped}"'
