"""Ratios and refusals of the comparison, from made-up measurements; no peer runs."""

from __future__ import annotations

import dataclasses

import pytest
from comparison import Calibration, Measurement, Pair, markdown, summarise

STEADY = Calibration(matmul_gflops=1700.0, stream_gb_per_s=25.0)


def run(seconds: float, **changes: object) -> Measurement:
    values = Measurement(
        seconds=seconds,
        output_tokens=(4, 8),
        first_tokens=(11, 12),
        peak_rss_bytes=1_500_000_000,
        first_token_s=None,
        load_s=2.0,
        other_cores=0.05,
    )
    return dataclasses.replace(values, **changes)  # type: ignore[arg-type]


def pair(ours: Measurement, theirs: Measurement, *, number: int = 1, peer: str = "vllm", **changes: object) -> Pair:
    values = Pair(
        workload="W1",
        peer=peer,
        round=number,
        wanted_tokens=(4, 8),
        ours=ours,
        theirs=theirs,
        before=STEADY,
        after=STEADY,
    )
    return dataclasses.replace(values, **changes)  # type: ignore[arg-type]


def test_the_ratio_is_the_median_of_the_rounds_ratios() -> None:
    pairs = [pair(run(10), run(theirs), number=number) for number, theirs in enumerate((20.0, 35.0, 25.0), 1)]
    entry = summarise(pairs, rounds=3)["W1"]
    assert (entry["ours_s"], entry["best_peer"], entry["peer_s"], entry["ratio"]) == (10, "vllm", 25.0, 2.5)
    assert entry["peers"]["vllm"]["ratios"] == [2.0, 3.5, 2.5]
    assert entry["peers"]["vllm"]["peer_spread_s"] == [20.0, 35.0]


def test_the_best_peer_is_the_fastest_and_not_the_one_with_the_best_ratio() -> None:
    pairs = [pair(run(10), run(30), peer="slow"), pair(run(14), run(28), peer="fast")]
    entry = summarise(pairs, rounds=1)["W1"]
    assert (entry["best_peer"], entry["peer_s"], entry["ratio"]) == ("fast", 28, 2.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"theirs": run(20, output_tokens=(4, 7))}, "vllm: 1 rows have another number of tokens"),
        ({"ours": run(10, output_tokens=(4,))}, "batchllm: some rows have another number of tokens"),
        ({"ours": run(10, other_cores=0.9)}, "batchllm: other processes kept 0.90 cores busy"),
        ({"after": Calibration(matmul_gflops=1300.0, stream_gb_per_s=25.0)}, "the machine's speed moved by 31%"),
        ({"after": Calibration(matmul_gflops=1700.0, stream_gb_per_s=31.0)}, "the machine's speed moved by 24%"),
    ],
)
def test_a_pair_is_refused_with_its_reason(changes: dict[str, object], reason: str) -> None:
    good = pair(run(10), run(20))
    assert good.refusals() == []
    (told,) = dataclasses.replace(good, **changes).refusals()  # type: ignore[arg-type]
    assert told.startswith(reason)


def test_no_ratio_is_given_where_fewer_than_three_rounds_count() -> None:
    pairs = [pair(run(10), run(20), number=number) for number in (1, 2)]
    pairs.append(pair(run(10, other_cores=1.0), run(50), number=3))
    entry = summarise(pairs, rounds=3)["W1"]
    assert entry["ratio"] is None
    # The seconds are those of the rounds that count.
    assert entry["peer_s"] == 20
    assert entry["peers"]["vllm"]["ratios"] == [2.0, 2.0, None]
    assert list(entry["peers"]["vllm"]["refused"]) == ["3"]
    assert "| refused | 2.00, 2.00, – |" in markdown({"W1": entry})


def test_a_fourth_round_makes_up_for_a_refused_one() -> None:
    pairs = [pair(run(10), run(20), number=number) for number in (1, 2, 3)]
    pairs.append(pair(run(10, other_cores=1.0), run(50), number=4))
    assert summarise(pairs, rounds=4)["W1"]["ratio"] == 2.0


def test_first_tokens_tell_whether_both_have_the_same_weights() -> None:
    assert pair(run(1), run(1, first_tokens=(11, 13))).agreement == 0.5
    assert pair(run(1), run(1, first_tokens=(11,))).agreement == 0.5
