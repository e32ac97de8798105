"""How many rows of a run carry an error, and whether that is more than the user allows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batchllm.data.results import query


class ErrorCount:
    """The rows with an error, against the share of all rows that may carry one."""

    def __init__(self, *, rate: float, num_rows: int, num_failed: int) -> None:
        """`num_failed`: rows that earlier runs left with an error."""
        self._rate = rate
        self._num_rows = num_rows
        self._num_before = num_failed
        # A row with several samples may fail more than once.
        self._failed: set[int] = set()

    def add(self, row_index: int) -> None:
        self._failed.add(row_index)

    @property
    def is_too_high(self) -> bool:
        """Whether the rate is exceeded even if every other row completes."""
        # The quotient of whole numbers is rounded as the rate was read: 29 of 100 is 0.29, but 0.29 * 100 is less than 29.
        return (self._num_before + len(self._failed)) / self._num_rows > self._rate

    @property
    def reason(self) -> str | None:
        """Why the run gives up, in a line; None where it does not."""
        if not self.is_too_high:
            return None
        num_failed = self._num_before + len(self._failed)
        return (
            f"{num_failed} of {self._num_rows} rows carry an error ({num_failed / self._num_rows:.1%}), more than the "
            f"{self._rate * 100:.4g}% that --max-error-rate allows; what is done is kept, --retry-errors runs the failed rows again"
        )


@dataclass(frozen=True, slots=True)
class AnsweredRows:
    """Input rows in visible parts: those without an error, and those of which a sample carries one."""

    completed: int = 0
    failed: int = 0


def answered_rows(folder: Path, *, below: int) -> AnsweredRows:
    """The rows with an index under `below` that earlier runs left, read from their parts: some 60 ms where there are few."""
    counts = query(
        "select count(*) filter (not failed) as completed, count(*) filter (failed) as failed "
        "from (select bool_or(error is not null) as failed from completions "
        f"where row_index < {below} group by row_index)",
        folder,
    ).to_pylist()[0]
    return AnsweredRows(completed=counts["completed"], failed=counts["failed"])
