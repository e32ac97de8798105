"""The least time of a job, from round numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import pytest

from batchllm.planner.roofline import MachineLimits, RunFacts, roofline, roofline_text
from batchllm.planner.work import PlanWork


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer of 100 x (2 x 100 + 2 x 50 + 3 x 200) = 90,000 weights, of which 10,000 make keys and values; a head of 100,000."""

    hidden_size: int = 100
    num_layers: int = 2
    num_heads: int = 10
    num_kv_heads: int = 5
    head_dim: int = 10
    intermediate_size: int = 200
    vocab_size: int = 1000


WORK = PlanWork(
    prompt_tokens=1000,
    prompt_pairs=50_000,
    num_samples=10,
    decode_tokens=90,
    decode_pairs=9_000,
    decode_steps=9.0,
    kv_tokens_read=1_000.0,
)
FACTS = RunFacts(max_step_tokens=500, prefill_rows=1000, decode_steps=9, decode_turns=90, steps_s=2.0, forced_tokens=0)
LIMITS = MachineLimits(flops_per_s=1e9, bytes_per_s=1e7)


def test_phases_take_the_longer_of_arithmetic_and_memory_and_add_up() -> None:
    found = roofline(WORK, model=Shape(), weight_bytes=2, kv_bytes=200, facts=FACTS, limits=LIMITS)

    prefill_flops = 2 * (180_000 * 1000 - 990 * 80_000 + 100_000 * 10) + 400 * 50_000
    decode_flops = 2 * 280_000 * 90 + 800 * 9_000
    prefill_bytes = 180_000 * 2 * 2 + 400 * 1000
    decode_bytes = 280_000 * 2 * 9 + 400 * (1_000 + 90)
    assert (found.prefill.flops, found.prefill.num_bytes) == (prefill_flops, prefill_bytes)
    assert (found.decode.flops, found.decode.num_bytes) == (decode_flops, decode_bytes)
    assert (found.prefill.limited_by, found.decode.limited_by) == ("arithmetic", "memory bandwidth")
    assert found.least_s == pytest.approx(prefill_flops / 1e9 + decode_bytes / 1e7)
    assert found.share == pytest.approx(found.least_s / 2.0)


def test_prompts_of_an_earlier_run_and_accepted_drafts_ask_less_of_the_machine() -> None:
    facts = replace(FACTS, prefill_rows=500, decode_steps=3, decode_turns=30)
    found = roofline(WORK, model=Shape(), weight_bytes=2, kv_bytes=200, facts=facts, limits=LIMITS)

    assert found.prefill.tokens == 500
    assert found.decode.num_bytes == pytest.approx(280_000 * 2 * 3 + 400 * (1_000 / 3 + 90))
    assert found.decode.flops == 2 * 280_000 * 90 + 800 * 9_000, "every token is computed, drafted or not"


def test_a_row_before_a_forced_token_asks_for_no_vocabulary_and_for_keys_and_values_alone_in_the_last_layer() -> None:
    facts = replace(FACTS, forced_tokens=60)
    found = roofline(WORK, model=Shape(), weight_bytes=2, kv_bytes=200, facts=facts, limits=LIMITS)
    # Two thirds of the pairs are of such rows, half of them in the last layer.
    assert found.decode.flops == pytest.approx(2 * (280_000 * 90 - 180_000 * 60) + 800 * 9_000 * (1 - 2 / 3 / 2))


def test_more_than_the_machine_can_do_is_said_to_be_the_measurements() -> None:
    found = asdict(roofline(WORK, model=Shape(), weight_bytes=2, kv_bytes=200, facts=FACTS, limits=LIMITS))
    assert roofline_text(found | {"share": 1.03}).startswith("103% of what this machine did when it was measured")


def test_text_names_what_limits_each_phase_that_there_was() -> None:
    found = asdict(roofline(WORK, model=Shape(), weight_bytes=2, kv_bytes=200, facts=FACTS, limits=LIMITS))
    assert roofline_text(found | {"share": 0.714}) == (
        "71% of what this machine can do; prefill is limited by arithmetic, decode by memory bandwidth"
    )
    nothing = found["decode"] | {"tokens": 0}
    assert roofline_text(found | {"share": 0.5, "decode": nothing}).endswith("do; prefill is limited by arithmetic")
    same = found["decode"] | {"limited_by": "arithmetic"}
    assert roofline_text(found | {"decode": same}).endswith("do; prefill and decode are limited by arithmetic")
