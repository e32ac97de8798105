"""What pairs of measured runs say: refusals, medians, ratios, a table. Pure; `compare.py` measures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_OTHER_CORES = 0.3
"""Above this another process counts as one that keeps a core busy."""
MOST_DRIFT = 0.20
FEWEST_PAIRS = 3


@dataclass(frozen=True, slots=True)
class Calibration:
    """The machine's speed at one moment."""

    matmul_gflops: float
    stream_gb_per_s: float

    def drift(self, other: Calibration) -> float:
        """The larger relative change of the two rates, as a share of the lower one: 0.2 is a fifth."""
        pairs = ((self.matmul_gflops, other.matmul_gflops), (self.stream_gb_per_s, other.stream_gb_per_s))
        return max(max(pair) / min(pair) - 1 for pair in pairs)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One engine's run of one workload. Counts per row; `other_cores`: kept busy by other processes meanwhile."""

    seconds: float
    output_tokens: tuple[int, ...]
    first_tokens: tuple[int, ...]
    peak_rss_bytes: int
    first_token_s: float | None
    load_s: float
    other_cores: float
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pair:
    """Both engines on one workload, one right after the other, and the machine before and after."""

    workload: str
    peer: str
    round: int
    wanted_tokens: tuple[int, ...]
    ours: Measurement
    theirs: Measurement
    before: Calibration
    after: Calibration

    @property
    def ratio(self) -> float:
        """How many times as long the peer took."""
        return self.theirs.seconds / self.ours.seconds

    @property
    def agreement(self) -> float:
        """Share of rows whose first token is the same: near 1 if both compute with the same weights."""
        pairs = zip(self.ours.first_tokens, self.theirs.first_tokens, strict=False)
        return sum(a == b for a, b in pairs) / len(self.wanted_tokens)

    def refusals(self) -> list[str]:
        """Why this pair gives no ratio; empty if it does."""
        reasons = []
        for who, run in (("batchllm", self.ours), (self.peer, self.theirs)):
            if run.output_tokens != self.wanted_tokens:
                wrong = sum(a != b for a, b in zip(run.output_tokens, self.wanted_tokens, strict=False))
                reasons.append(f"{who}: {wrong or 'some'} rows have another number of tokens than was asked for")
            if run.other_cores > MOST_OTHER_CORES:
                reasons.append(f"{who}: other processes kept {run.other_cores:.2f} cores busy")
        if (drift := self.before.drift(self.after)) > MOST_DRIFT:
            reasons.append(f"the machine's speed moved by {drift:.0%}")
        return reasons


def summarise(pairs: Sequence[Pair], *, rounds: int) -> dict[str, dict[str, Any]]:
    """By workload: `ours_s`, `best_peer`, `peer_s`, `ratio` (medians; None where too few pairs count), and all peers under `peers`."""
    result: dict[str, dict[str, Any]] = {}
    for workload in dict.fromkeys(pair.workload for pair in pairs):
        of_workload = [pair for pair in pairs if pair.workload == workload]
        peers = {
            peer: _of_peer([pair for pair in of_workload if pair.peer == peer], rounds=rounds)
            for peer in dict.fromkeys(pair.peer for pair in of_workload)
        }
        best = min(peers, key=lambda peer: peers[peer]["peer_s"])
        chosen = peers[best]
        result[workload] = {
            "ours_s": chosen["ours_s"],
            "best_peer": best,
            "peer_s": chosen["peer_s"],
            "ratio": chosen["ratio"],
            "peers": peers,
        }
    return result


def _of_peer(pairs: Sequence[Pair], *, rounds: int) -> dict[str, Any]:
    counted = [pair for pair in pairs if not pair.refusals()]
    # Seconds are shown even where no ratio is: they say how far off the machine was.
    shown = counted or list(pairs)
    ours, theirs = [pair.ours.seconds for pair in shown], [pair.theirs.seconds for pair in shown]
    is_enough = len(counted) >= min(FEWEST_PAIRS, rounds)
    return {
        "ours_s": round(statistics.median(ours), 3),
        "ours_spread_s": [round(min(ours), 3), round(max(ours), 3)],
        "peer_s": round(statistics.median(theirs), 3),
        "peer_spread_s": [round(min(theirs), 3), round(max(theirs), 3)],
        "ratio": round(statistics.median(pair.ratio for pair in counted), 3) if is_enough else None,
        "ratios": [round(pair.ratio, 3) if not pair.refusals() else None for pair in pairs],
        "refused": {str(pair.round): pair.refusals() for pair in pairs if pair.refusals()},
        "ours_peak_rss_gb": round(max(pair.ours.peak_rss_bytes for pair in shown) / 1e9, 2),
        "peer_peak_rss_gb": round(max(pair.theirs.peak_rss_bytes for pair in shown) / 1e9, 2),
        "ours_load_s": round(statistics.median(pair.ours.load_s for pair in shown), 2),
        "peer_load_s": round(statistics.median(pair.theirs.load_s for pair in shown), 2),
        "first_token_agreement": round(min(pair.agreement for pair in shown), 3),
    }


def markdown(summary: dict[str, dict[str, Any]]) -> str:
    """A row a workload and peer; the workload's best peer in bold."""
    lines = [
        "| workload | batchllm s (spread) | peer | peer s (spread) | ratio | by round | RSS GB, ours / peer |",
        "|---|---|---|---|---|---|---|",
    ]
    for workload, entry in summary.items():
        for peer, values in sorted(entry["peers"].items(), key=lambda item: item[1]["peer_s"]):
            ratio = "refused" if values["ratio"] is None else f"{values['ratio']:.2f}"
            rounds = ", ".join("–" if ratio_ is None else f"{ratio_:.2f}" for ratio_ in values["ratios"])
            lines.append(
                f"| {workload} | {_with_spread(values, 'ours')} | {f'**{peer}**' if peer == entry['best_peer'] else peer} "
                f"| {_with_spread(values, 'peer')} | {ratio} | {rounds} "
                f"| {values['ours_peak_rss_gb']:.1f} / {values['peer_peak_rss_gb']:.1f} |"
            )
    return "\n".join(lines)


def _with_spread(values: dict[str, Any], who: str) -> str:
    low, high = values[f"{who}_spread_s"]
    return f"{values[f'{who}_s']:.1f} ({low:.1f} to {high:.1f})"
