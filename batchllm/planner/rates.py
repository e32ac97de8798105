"""Rates that a run showed by itself, fitted to its step log, and their form on disk."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from batchllm.planner.cost import Rates, TierSpace

MIN_STEPS = 8
"""Fewer steps than this say too little about four rates."""

_NO_COST = 1e-15
"""Seconds a unit where the fit finds none: so small that it adds nothing, and its inverse is still a number."""


@dataclass(frozen=True, slots=True)
class ObservedRates:
    """What a run measured: `decode_step_s` as in `Rates`; `generated_share` of the tokens that finished rows might have generated.

    `stage_shares`: the same for each stage by its name, in a job that has stages.
    """

    prefill_tokens_per_s: float
    decode_step_s: tuple[tuple[int, float], ...]
    kv_read_bytes_per_s: float
    generated_share: float
    stage_shares: tuple[tuple[str, float], ...] = ()

    def share_of(self, stage: str | None) -> float:
        """`generated_share` of one stage; None: of the job."""
        return dict(self.stage_shares).get(stage or "", self.generated_share)

    def with_tiers(self, tiers: tuple[TierSpace, ...]) -> Rates:
        """As the cost model takes them."""
        return Rates(
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            decode_step_s=self.decode_step_s,
            kv_read_bytes_per_s=self.kv_read_bytes_per_s,
            tiers=tiers,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ObservedRates:
        """What `to_json` wrote. Raises KeyError, TypeError or ValueError for anything else."""
        return cls(
            prefill_tokens_per_s=float(values["prefill_tokens_per_s"]),
            decode_step_s=tuple((int(sequences), float(seconds)) for sequences, seconds in values["decode_step_s"]),
            kv_read_bytes_per_s=float(values["kv_read_bytes_per_s"]),
            generated_share=float(values["generated_share"]),
            stage_shares=tuple((str(name), float(share)) for name, share in values.get("stage_shares", ())),
        )


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step: `fixed`, and for each prompt row, each decoding row, and each byte of keys and values held while decoding."""

    fixed: float
    prefill_row: float
    decode_row: float
    kv_byte: float


def fit_steps(steps: Mapping[str, Any], *, block_bytes: int) -> StepCosts | None:
    """The costs that explain the seconds of a step log best, none below zero; None for too few steps.

    `steps`: columns `seconds`, `num_prefill_rows`, `num_decode_rows`, `num_used_blocks`.
    """
    seconds = np.asarray(steps["seconds"], dtype=np.float64)
    if len(seconds) < MIN_STEPS:
        return None
    prefill, decode, used = (
        np.asarray(steps[name], dtype=np.float64) for name in ("num_prefill_rows", "num_decode_rows", "num_used_blocks")
    )
    features = np.stack([decode > 0, prefill, decode, np.where(decode > 0, used * block_bytes, 0.0)], axis=1)
    return StepCosts(*_least_squares(features.astype(np.float64), seconds))


def observed_rates(
    costs: StepCosts, *, most_sequences: int, generated_tokens: int, allowed_tokens: int
) -> ObservedRates:
    """The rates that fitted costs stand for. `allowed_tokens`: the most that the finished rows might have generated."""
    points = [(1, costs.fixed + costs.decode_row)]
    if most_sequences > 1:
        points.append((most_sequences, costs.fixed + most_sequences * costs.decode_row))
    return ObservedRates(
        prefill_tokens_per_s=1 / max(costs.prefill_row, _NO_COST),
        decode_step_s=tuple(points),
        kv_read_bytes_per_s=1 / max(costs.kv_byte, _NO_COST),
        generated_share=min(generated_tokens / allowed_tokens, 1.0) if allowed_tokens else 1.0,
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
