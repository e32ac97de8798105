"""How long a plan should take on this machine, phase by phase, from measured rates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchllm.planner.demand import Demand


@dataclass(frozen=True, slots=True)
class TierSpace:
    """A place for keys and values, the fastest first: its capacity, and bytes a second to it and back to the device."""

    name: str
    capacity_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates of one machine with one model.

    `prefill_tokens_per_s`: prompt rows, all but what attention takes for each (row, token it attends to), which is
    `prefill_pairs_per_s`. `decode_step_s`: (sequences, seconds) of a step that decodes that many over empty contexts, at least one
    pair, by rising number of sequences. Of keys and values, in bytes a second: `kv_found_bytes_per_s`, of tokens that a prompt finds computed, and
    reads once for those that it computes; `kv_read_bytes_per_s`, read by decoding sequences;
    `kv_spared_bytes_per_s`, not read again, because several sequences read them together, and multiplied all the same;
    `kv_first_write_bytes_per_s`, written where nothing was before, so that the system has to find the memory. `tiers`: device first.
    """

    prefill_tokens_per_s: float
    prefill_pairs_per_s: float
    decode_step_s: tuple[tuple[int, float], ...]
    kv_found_bytes_per_s: float
    kv_read_bytes_per_s: float
    kv_spared_bytes_per_s: float
    kv_first_write_bytes_per_s: float
    tiers: tuple[TierSpace, ...]


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """Prompt tokens that are computed, pairs of one of them and a token that it attends to, and tokens that prompts find computed."""

    tokens: int
    pairs: int
    found: int


@dataclass(frozen=True, slots=True)
class TierDemand:
    """How much of the peak demand a tier would hold; `missing_bytes` of the last is what fits nowhere."""

    name: str
    capacity_bytes: int
    demand_bytes: int
    missing_bytes: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted seconds by phase. `decode_s` is the steps without attention over the cache, which is `attention_s`; `first_write_s` is what
    finding memory for generated keys and values adds to the steps that first write there.
    """

    prefill_s: float
    decode_s: float
    attention_s: float
    first_write_s: float
    transfer_s: float
    tiers: tuple[TierDemand, ...]

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s + self.attention_s + self.first_write_s + self.transfer_s

    @property
    def bottleneck(self) -> str:
        """The resource that the largest phase waits for, and that phase's share."""
        phases = {
            "prefill: arithmetic on prompt tokens": self.prefill_s,
            "decode: reading the weights, once a step": self.decode_s,
            "decode: reading keys and values": self.attention_s,
            "finding memory for keys and values, once": self.first_write_s,
            "moving keys and values between tiers": self.transfer_s,
        }
        name = max(phases, key=lambda phase: phases[phase])
        return f"{name} ({phases[name] / self.total_s:.0%} of the time)" if self.total_s else "none: nothing to run"


def predict(demand: Demand, *, prefill: PrefillWork, rates: Rates, kv_bytes_per_token: int) -> Prediction:
    """Predicts a run under `demand`; phases are added up, as if none hid behind another."""
    decoding = demand.running > 0
    steps = demand.duration[decoding]
    read_bytes = float((demand.read_tokens[decoding] * steps).sum()) * kv_bytes_per_token
    spared_bytes = float((demand.spared_tokens[decoding] * steps).sum()) * kv_bytes_per_token
    peak_bytes = demand.peak_live_tokens * kv_bytes_per_token
    tiers = spread_over_tiers(peak_bytes, tiers=rates.tiers)
    return Prediction(
        prefill_s=prefill.tokens / rates.prefill_tokens_per_s
        + prefill.pairs / rates.prefill_pairs_per_s
        + prefill.found * kv_bytes_per_token / rates.kv_found_bytes_per_s,
        decode_s=float((decode_step_s(demand.running[decoding], rates=rates) * steps).sum()),
        attention_s=read_bytes / rates.kv_read_bytes_per_s + spared_bytes / rates.kv_spared_bytes_per_s,
        # A block that is given back is handed out again before one that was never used. For prompts the memory is found beforehand.
        first_write_s=max((tiers[0].demand_bytes if tiers else peak_bytes) - prefill.tokens * kv_bytes_per_token, 0)
        / rates.kv_first_write_bytes_per_s,
        # What the device cannot hold at the peak leaves it once and comes back once.
        transfer_s=sum(2 * t.demand_bytes / s.bytes_per_s for t, s in zip(tiers[1:], rates.tiers[1:], strict=True)),
        tiers=tiers,
    )


def decode_step_s(sequences: np.ndarray, *, rates: Rates) -> np.ndarray:
    """Seconds of a decode step at each number of sequences: linear between the measured ones and beyond the last."""
    batch, seconds = (np.array([point[side] for point in rates.decode_step_s], dtype=np.float64) for side in (0, 1))
    inside = np.interp(sequences, batch, seconds)
    if len(batch) == 1:
        return inside
    slope = max((seconds[-1] - seconds[-2]) / (batch[-1] - batch[-2]), 0.0)
    return inside + slope * np.maximum(sequences - batch[-1], 0)


def spread_over_tiers(demand_bytes: int, *, tiers: tuple[TierSpace, ...]) -> tuple[TierDemand, ...]:
    """Fills the tiers in order with the demand."""
    spread = []
    for tier in tiers:
        here = min(demand_bytes, tier.capacity_bytes)
        demand_bytes -= here
        spread.append(
            TierDemand(
                name=tier.name, capacity_bytes=tier.capacity_bytes, demand_bytes=here, missing_bytes=demand_bytes
            )
        )
    return tuple(spread)
