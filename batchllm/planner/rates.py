"""Rates that a run showed by itself, fitted to its step log, and their form on disk."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from batchllm.planner.cost import Rates, TierSpace

MIN_STEPS = 8
"""Fewer steps than this say too little about four rates."""

_WORK_COLUMNS = ("num_prefill_rows", "num_decode_rows", "num_kv_tokens_read", "num_kv_tokens_spared")

_NO_COST = 1e-15
"""Seconds a unit where the fit finds none: so small that it adds nothing, and its inverse is still a number."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What rows are expected to do: the share of the tokens they may generate that they generate, and of these the share that is sampled, one in
    a step; a grammar forces the others.
    """

    generated_share: float = 1.0
    sampled_share: float = 1.0


EXPECT_ALL = Expected()
"""Of a row of which nothing is known."""


@dataclass(frozen=True, slots=True)
class ObservedRates:
    """What a run or a measurement showed: rates as in `Rates`, and what the finished rows did, None where no row has been run.

    `stages`: the same for each stage by its name, in a job that has stages.
    """

    prefill_tokens_per_s: float
    prefill_pairs_per_s: float
    decode_step_s: tuple[tuple[int, float], ...]
    kv_found_bytes_per_s: float
    kv_read_bytes_per_s: float
    kv_spared_bytes_per_s: float
    kv_first_write_bytes_per_s: float
    expected: Expected | None
    stages: tuple[tuple[str, Expected], ...] = ()

    def expected_of(self, stage: str | None) -> Expected | None:
        """`expected` of one stage; None: of the job."""
        return dict(self.stages).get(stage or "", self.expected)

    def with_tiers(self, tiers: tuple[TierSpace, ...]) -> Rates:
        """As the cost model takes them."""
        rates = {field.name: getattr(self, field.name) for field in fields(Rates) if field.name != "tiers"}
        return Rates(**rates, tiers=tiers)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ObservedRates:
        """What `to_json` wrote. Raises KeyError, TypeError or ValueError for anything else."""
        return cls(
            **{field.name: float(values[field.name]) for field in fields(Rates) if field.name.endswith("_per_s")},
            decode_step_s=tuple((int(sequences), float(seconds)) for sequences, seconds in values["decode_step_s"]),
            expected=Expected(**values["expected"]),
            stages=tuple((str(name), Expected(**expected)) for name, expected in values["stages"]),
        )


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step: `fixed` where it decodes, for each prompt row, each decoding row, each token whose keys and values are read
    while decoding, and each such read that is spared.
    """

    fixed: float
    prefill_row: float
    decode_row: float
    read_token: float
    spared_token: float


def fit_steps(steps: Mapping[str, Any]) -> StepCosts | None:
    """The costs that explain the seconds of a step log best, none below zero; None for too few steps.

    `steps`: columns `seconds`, `num_prefill_rows`, `num_decode_rows`, `num_kv_tokens_read`, `num_kv_tokens_spared`.
    """
    seconds = np.asarray(steps["seconds"], dtype=np.float64)
    if len(seconds) < MIN_STEPS:
        return None
    prefill, decode, read, spared = (np.asarray(steps[name], dtype=np.float64) for name in _WORK_COLUMNS)
    features = np.stack([decode > 0, prefill, decode, read, spared], axis=1)
    return StepCosts(*_least_squares(features.astype(np.float64), seconds))


def observed_rates(
    costs: StepCosts, *, kv_bytes_per_token: int, most_sequences: int, expected: Expected
) -> ObservedRates:
    """The rates that fitted costs stand for. `expected`: what the finished rows did.

    What attention, reads and first writes cost is in the cost of the prompt rows: the next run of a job has prompts of the same kind.
    """
    points = [(1, costs.fixed + costs.decode_row)]
    if most_sequences > 1:
        points.append((most_sequences, costs.fixed + most_sequences * costs.decode_row))
    return ObservedRates(
        prefill_tokens_per_s=1 / max(costs.prefill_row, _NO_COST),
        prefill_pairs_per_s=1 / _NO_COST,
        decode_step_s=tuple(points),
        kv_found_bytes_per_s=1 / _NO_COST,
        kv_read_bytes_per_s=kv_bytes_per_token / max(costs.read_token, _NO_COST),
        kv_spared_bytes_per_s=kv_bytes_per_token / max(costs.spared_token, _NO_COST),
        kv_first_write_bytes_per_s=1 / _NO_COST,
        expected=expected,
    )


def _least_squares(features: np.ndarray, seconds: np.ndarray) -> tuple[float, ...]:
    """Least squares with no negative coefficient, by trying every subset of the few features."""
    scale = np.maximum(np.abs(features).max(axis=0), 1e-30)
    scaled = features / scale
    width = features.shape[1]
    best, best_error = np.zeros(width), float(seconds @ seconds)
    for size in range(1, width + 1):
        for chosen in itertools.combinations(range(width), size):
            part = scaled[:, chosen]
            solution = np.linalg.lstsq(part, seconds, rcond=None)[0]
            if (solution < 0).any():
                continue
            error = float(((seconds - part @ solution) ** 2).sum())
            if error < best_error * (1 - 1e-9):
                best, best_error = np.zeros(width), error
                best[list(chosen)] = solution
    return tuple((best / scale).tolist())
