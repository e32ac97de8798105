"""`--max-error-rate`: the share of rows that may fail before a run gives up."""

from __future__ import annotations

import math
from decimal import Decimal

from batchllm.errors import JobError


def parse_error_rate(text: str) -> float:
    """`5%` or `0.05`: a share from 0 to 1. Raises JobError for other texts."""
    number, is_percent = text.strip(), text.strip().endswith("%")
    try:
        # As the decimal number that it is: 0.7% is the number nearest to 0.007, which 0.7 / 100 is not.
        rate = float(Decimal(number.removesuffix("%")) / (100 if is_percent else 1))
    except (ValueError, ArithmeticError):
        rate = math.nan
    if not 0 <= rate <= 1:
        raise JobError(f"--max-error-rate {text}: write a share of the rows such as 5% or 0.05")
    return rate
