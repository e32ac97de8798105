"""The user's crontab: one marked entry per job file is put in, replaced or taken out; all other lines stay."""

from __future__ import annotations

import subprocess
from pathlib import Path

from batchllm.errors import ScheduleError
from batchllm.nightly.schedule import is_marker_of


def with_entry(crontab: str, *, job_file: Path, entry: str) -> str:
    """The crontab with the job's entry replaced where it stands, or added at the end."""
    lines, place = _without(crontab, job_file=job_file)
    if place is None:
        place = len(lines)
        if lines and not lines[-1].endswith("\n"):
            lines[-1] += "\n"
    return "".join([*lines[:place], entry, *lines[place:]])


def without_entry(crontab: str, *, job_file: Path) -> str:
    """The crontab without the job's entry; the same text where it has none."""
    return "".join(_without(crontab, job_file=job_file)[0])


def _without(crontab: str, *, job_file: Path) -> tuple[list[str], int | None]:
    """The other lines, and where the job's entry stood. Only a line that starts a run goes with its marker."""
    lines = crontab.splitlines(keepends=True)
    kept: list[str] = []
    place: int | None = None
    position = 0
    while position < len(lines):
        if is_marker_of(lines[position].rstrip("\r\n"), job_file=job_file):
            place = len(kept) if place is None else place
            position += 1
            if position < len(lines) and " -m batchllm run " in lines[position] and lines[position][0] != "#":
                position += 1
            continue
        kept.append(lines[position])
        position += 1
    return kept, place


def read_crontab() -> str:
    """The user's crontab, empty where there is none. Raises ScheduleError."""
    ended = _run("-l")
    if ended.returncode == 0:
        return ended.stdout.decode("utf-8", "surrogateescape")
    text = ended.stderr.decode("utf-8", "replace").strip()
    if "no crontab" in text.lower():
        return ""
    raise ScheduleError(f"crontab -l: {text.splitlines()[0] if text else f'exit code {ended.returncode}'}")


def write_crontab(text: str) -> None:
    """Puts `text` in the place of the user's crontab. Raises ScheduleError."""
    ended = _run("-", text.encode("utf-8", "surrogateescape"))
    if ended.returncode:
        reason = ended.stderr.decode("utf-8", "replace").strip().splitlines()
        raise ScheduleError(f"crontab: refused the entry: {reason[0] if reason else f'exit code {ended.returncode}'}")


def _run(argument: str, text: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["crontab", argument], input=text or b"", capture_output=True, timeout=60)
    except FileNotFoundError:
        raise ScheduleError(
            "the program crontab is not installed; install cron, or use the printed entry elsewhere"
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ScheduleError(f"crontab {argument}: {error}") from None
