"""`--deadline`: the moment at which a run stops by itself, to go on the next night."""

from __future__ import annotations

import datetime
import re

from batchllm.errors import JobError

_TIME = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)(?::([0-5]\d))?")


def parse_deadline(text: str, *, now: datetime.datetime) -> datetime.datetime:
    """`06:00` is the next such local time, `2026-11-30T06:00` (with or without an offset) that moment; aware.

    `now` is aware, in local time. A local time that a clock change skips or repeats is taken as its first reading.
    Raises JobError for other texts and for a moment that has passed.
    """
    match = _TIME.fullmatch(text.strip())
    if match is not None:
        time = datetime.time(int(match[1]), int(match[2]), int(match[3] or 0))
        for days in (0, 1):
            # Made from a naive local time, so that a change of the clocks in the night is in it.
            moment = datetime.datetime.combine(now.date() + datetime.timedelta(days=days), time).astimezone()
            if moment > now:
                return moment
        raise AssertionError("a time of tomorrow lies ahead")
    try:
        # A moment without an offset is local.
        moment = datetime.datetime.fromisoformat(text.strip()).astimezone()
    except (ValueError, OverflowError):
        raise JobError(f"--deadline {text}: write a time such as 06:00, or a moment such as 2026-11-30T06:00") from None
    if moment <= now:
        raise JobError(f"--deadline {text}: this moment has passed")
    return moment
