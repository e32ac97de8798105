"""Numbers of a report as a person reads them; None is a dash."""

from __future__ import annotations

import datetime
import math

_NONE = "–"
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def number(value: float | None) -> str:
    """Whole numbers with separators, others with about three digits."""
    if value is None:
        return _NONE
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def share(value: float | None) -> str:
    """A share of one in percent."""
    return _NONE if value is None else f"{value:.1%}"


def duration(seconds: float | None) -> str:
    """Milliseconds, seconds, minutes or hours, whichever reads best."""
    if seconds is None:
        return _NONE
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def moment(value: datetime.datetime | None) -> str:
    """A point in time, to the second."""
    return _NONE if value is None else f"{value:%Y-%m-%d %H:%M:%S %Z}".strip()


def size(num_bytes: float | None) -> str:
    """Bytes in binary units."""
    if num_bytes is None:
        return _NONE
    power = min(int(math.log2(num_bytes) // 10), len(_UNITS) - 1) if num_bytes >= 1 else 0
    return f"{num_bytes / 1024**power:,.{1 if power else 0}f} {_UNITS[power]}"
