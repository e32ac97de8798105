"""`--max-error-rate`: the share of rows that may fail before a run gives up."""

from __future__ import annotations

import math

from batchllm.errors import JobError


def parse_error_rate(text: str) -> float:
    """`5%` or `0.05`: a share from 0 to 1. Raises JobError for other texts."""
    number, is_percent = text.strip(), text.strip().endswith("%")
    try:
        rate = float(number.removesuffix("%")) / (100 if is_percent else 1)
    except ValueError:
        rate = math.nan
    if not 0 <= rate <= 1:
        raise JobError(f"--max-error-rate {text}: write a share of the rows such as 5% or 0.05")
    return rate
