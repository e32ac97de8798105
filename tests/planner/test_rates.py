"""Rates fitted to a step log."""

from __future__ import annotations

import json

import numpy as np
import pytest

from batchllm.planner.rates import MIN_STEPS, ObservedRates, fit_steps, observed_rates


def made_steps(num_steps: int, noise: float = 0.0) -> dict[str, np.ndarray]:
    """Steps that cost 5 ms, 1 ms a prompt row, 2 ms a decoding row and 1 ns a byte held."""
    random = np.random.default_rng(0)
    prefill, decode, used = (random.integers(0, most, num_steps) for most in (512, 64, 1000))
    decode[: num_steps // 2] = 0
    seconds = 0.001 * prefill + np.where(decode > 0, 0.005 + 0.002 * decode + 1e-9 * used * 4096, 0)
    seconds = seconds * (1 + noise * random.standard_normal(num_steps))
    return {"seconds": seconds, "num_prefill_rows": prefill, "num_decode_rows": decode, "num_used_blocks": used}


def test_costs_that_made_a_step_log_are_found_again() -> None:
    costs = fit_steps(made_steps(200), block_bytes=4096)
    assert costs is not None
    assert (costs.fixed, costs.prefill_row, costs.decode_row) == pytest.approx((0.005, 0.001, 0.002))
    assert costs.kv_byte == pytest.approx(1e-9)


def test_noise_leaves_no_cost_below_zero_and_the_large_one_close() -> None:
    costs = fit_steps(made_steps(400, noise=0.1), block_bytes=4096)
    assert costs is not None and min(costs.fixed, costs.decode_row, costs.kv_byte) >= 0
    assert costs.prefill_row == pytest.approx(0.001, rel=0.05)


def test_too_few_steps_say_nothing() -> None:
    assert fit_steps(made_steps(MIN_STEPS - 1), block_bytes=1) is None


def test_a_run_that_never_decoded_has_rates_that_are_numbers() -> None:
    steps = made_steps(20)
    steps["num_decode_rows"] = np.zeros(20, dtype=np.int64)
    steps["seconds"] = steps["num_prefill_rows"] * 0.001
    costs = fit_steps(steps, block_bytes=4096)
    assert costs is not None
    rates = observed_rates(costs, most_sequences=1, generated_tokens=0, allowed_tokens=0)
    assert rates.prefill_tokens_per_s == pytest.approx(1000)
    assert rates.decode_step_s == ((1, 0.0),) and rates.generated_share == 1.0
    assert ObservedRates.from_json(json.loads(json.dumps(rates.to_json()))) == rates
