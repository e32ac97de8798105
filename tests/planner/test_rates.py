"""Rates fitted to a step log."""

from __future__ import annotations

import json

import numpy as np
import pytest

from batchllm.planner.rates import MIN_STEPS, Expected, ObservedRates, fit_steps, observed_rates


def made_steps(num_steps: int, noise: float = 0.0) -> dict[str, np.ndarray]:
    """Steps that cost 5 ms, 1 ms a prompt row, 2 ms a decoding row, 4 µs a token read and 0.1 µs a read spared."""
    random = np.random.default_rng(0)
    prefill, decode, read, spared = (random.integers(0, most, num_steps) for most in (512, 64, 1000, 9000))
    for column in (decode, read, spared):
        column[: num_steps // 2] = 0
    seconds = 0.001 * prefill + np.where(decode > 0, 0.005, 0) + 0.002 * decode + 4e-6 * read + 1e-7 * spared
    seconds = seconds * (1 + noise * random.standard_normal(num_steps))
    return {
        "seconds": seconds,
        "num_prefill_rows": prefill,
        "num_decode_rows": decode,
        "num_kv_tokens_read": read,
        "num_kv_tokens_spared": spared,
    }


def test_costs_that_made_a_step_log_are_found_again() -> None:
    costs = fit_steps(made_steps(200))
    assert costs is not None
    assert (costs.fixed, costs.prefill_row, costs.decode_row) == pytest.approx((0.005, 0.001, 0.002))
    assert (costs.read_token, costs.spared_token) == pytest.approx((4e-6, 1e-7))


def test_noise_leaves_no_cost_below_zero_and_the_large_one_close() -> None:
    costs = fit_steps(made_steps(400, noise=0.1))
    assert costs is not None and min(costs.fixed, costs.decode_row, costs.read_token, costs.spared_token) >= 0
    assert costs.prefill_row == pytest.approx(0.001, rel=0.05)


def test_too_few_steps_say_nothing() -> None:
    assert fit_steps(made_steps(MIN_STEPS - 1)) is None


def test_a_run_that_never_decoded_has_rates_that_are_numbers() -> None:
    steps = made_steps(20)
    for name in ("num_decode_rows", "num_kv_tokens_read", "num_kv_tokens_spared"):
        steps[name] = np.zeros(20, dtype=np.int64)
    steps["seconds"] = steps["num_prefill_rows"] * 0.001
    costs = fit_steps(steps)
    assert costs is not None
    rates = observed_rates(costs, kv_bytes_per_token=64, most_sequences=1, expected=Expected())
    assert rates.prefill_tokens_per_s == pytest.approx(1000)
    assert rates.decode_step_s == ((1, 0.0),) and rates.expected == Expected()
    assert ObservedRates.from_json(json.loads(json.dumps(rates.to_json()))) == rates


def test_observed_rates_put_a_step_together_again() -> None:
    costs = fit_steps(made_steps(200))
    assert costs is not None
    rates = observed_rates(costs, kv_bytes_per_token=1024, most_sequences=64, expected=Expected(0.5, 0.8)).with_tiers(
        ()
    )
    assert [number for number, _ in rates.decode_step_s] == [1, 64]
    assert [seconds for _, seconds in rates.decode_step_s] == pytest.approx([0.007, 0.133])
    assert 1024 / rates.kv_read_bytes_per_s == pytest.approx(4e-6)
    assert 1024 / rates.kv_spared_bytes_per_s == pytest.approx(1e-7)
    # These are in the prompt rows' cost already.
    assert 1e12 / rates.kv_found_bytes_per_s < 1e-2
    assert 1e6 / rates.prefill_pairs_per_s < 1e-6 and 1e12 / rates.kv_first_write_bytes_per_s < 1e-2
