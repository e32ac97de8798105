"""What a run came to, and the exit code that says so."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from batchllm.engine.tier_report import TierReport
from batchllm.errors import BatchLLMError, StoppedError
from batchllm.planner.roofline import Roofline


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What happened. Rows are input rows; tokens, rates and times are of this run only.

    `num_rows` of the input (or of `--limit`), `rows_before` answered by earlier runs, `rows_completed` and `rows_failed` of all that are
    answered now; a row of which one sample fails has failed. `too_many_errors` says why a run gave up. `unique_prompt_tokens`: the fewest
    that had to be computed; `computed_prompt_tokens`: those that were. `accepted_tokens` of `drafted_tokens` guessed ones were right. `roofline`: the share of what the machine can do; None where the
    steps took too little time to tell, or the run has not come to its end.
    """

    name: str
    run_id: str
    output: Path
    finished: bool
    num_rows: int
    rows_before: int
    rows_completed: int
    rows_failed: int
    wall_s: float
    load_s: float  # finding, checking and waiting for the model, and for the memory of its prompts' keys and values
    prompt_tokens: int
    unique_prompt_tokens: int
    computed_prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    output_tokens_per_s: float
    num_steps: int
    preemptions: int
    recomputed_tokens: int
    kv_peak_share: float
    kv_waste_share: float
    device: str
    dtype: str
    kernels: str
    model: str
    tiers: TierReport | None
    roofline: Roofline | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    too_many_errors: str | None = None

    @property
    def exit_code(self) -> int:
        """0: every row completed; 3: some carry errors; 1: none did, or more failed than were allowed; 130: stopped before the end."""
        if self.failure is not None:
            return BatchLLMError.exit_code
        if not self.finished:
            return StoppedError.exit_code
        return 3 if self.rows_failed else 0

    @property
    def failure(self) -> str | None:
        """Why the exit code is 1, in one line; None where it is another."""
        if self.too_many_errors is not None:
            return self.too_many_errors
        if self.finished and self.rows_failed and not self.rows_completed:
            return f"not one of {self.rows_failed:,} rows was completed; `select error from errors` says why to a batchllm query"
        return None


def summary_values(summary: RunSummary) -> dict[str, object]:
    """The summary by name, `exit_code` among it; paths are texts, so that it is plain JSON."""
    return {**dataclasses.asdict(summary), "output": str(summary.output), "exit_code": summary.exit_code}
