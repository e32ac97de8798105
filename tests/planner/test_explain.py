"""What `explain` works out, and how it reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from batchllm.planner.cost import Rates, TierSpace
from batchllm.planner.explain import EngineLimits, ModelFacts, biggest_nodes, explain, token_histogram
from batchllm.planner.explanation import Explanation, HistogramBar
from batchllm.planner.plan import make_plan
from batchllm.planner.rates import Expected

SMOLLM2 = ModelFacts(num_layers=30, num_kv_heads=3, head_dim=64, kv_dtype_bytes=2, context_tokens=8192)
LIMITS = EngineLimits(max_sequences=64, step_tokens=1024, read_chunk=256)
RATES = Rates(
    prefill_tokens_per_s=1000.0,
    prefill_pairs_per_s=1e30,
    decode_step_s=((1, 0.02), (64, 0.2)),
    kv_read_bytes_per_s=20e9,
    kv_spared_bytes_per_s=1e30,
    kv_found_bytes_per_s=1e30,
    kv_first_write_bytes_per_s=1e30,
    tiers=(TierSpace(name="device", capacity_bytes=1 << 30, bytes_per_s=20e9),),
)


def spell(tokens: Sequence[int]) -> str:
    return "".join(chr(token) for token in tokens)


@pytest.fixture
def explained(stage_prompts: Callable[..., Any]) -> Explanation:
    question = [ord(c) for c in "Which city\nis it? "] * 2
    document = [ord(c) for c in "The document. "] * 20
    store = stage_prompts([document + question + [200 + i] for i in range(10)] + [[7] * 5000], [32] * 11)
    plan = make_plan(store, prefix_sharing=True, max_model_tokens=SMOLLM2.context_tokens)
    return explain(plan, store, model=SMOLLM2, limits=LIMITS, rates=RATES, decode_text=spell)


def test_kv_bytes_per_token_of_smollm2_are_23040() -> None:
    assert SMOLLM2.kv_bytes_per_token == 23_040


def test_totals_are_exact(explained: Explanation) -> None:
    assert explained.prompt_tokens == 10 * 317 + 5000
    assert explained.unique_prompt_tokens == 316 + 10 + 5000
    assert explained.reuse_ceiling == pytest.approx(1 - 5326 / 8170)
    assert explained.computed_prompt_tokens == 316 + 10 + 5000
    assert explained.decode_tokens == 11 * 32
    assert explained.kv_bytes_per_row_most == 5032 * 23_040
    assert explained.peak_kv_bytes == explained.peak_live_tokens * 23_040


def test_the_biggest_node_shows_the_text_it_starts_with_and_what_it_saves(explained: Explanation) -> None:
    biggest = explained.biggest_nodes[0]
    assert (biggest.start, biggest.end, biggest.num_prompts) == (0, 316, 10)
    assert biggest.tokens_saved == 9 * 316
    assert biggest.text.startswith("The document. The document.")


def test_a_node_inside_a_prompt_shows_its_own_text_not_its_parents(stage_prompts: Callable[..., Any]) -> None:
    prompts = [[ord(c) for c in text] for text in ("head left 1", "head left 2", "head right 1", "head right 2")]
    store = stage_prompts(prompts)
    nodes = biggest_nodes(make_plan(store, prefix_sharing=True), store, decode_text=spell)
    assert [(n.text, n.num_prompts, n.tokens_saved) for n in nodes] == [
        ("head ", 4, 15),
        ("right ", 2, 6),
        ("left ", 2, 5),
    ]


def test_the_histogram_covers_every_prompt_with_bars_that_double() -> None:
    bars = token_histogram(np.array([5, 7, 8, 40], dtype=np.int32))
    assert bars == (
        HistogramBar(4, 7, 2),
        HistogramBar(8, 15, 1),
        HistogramBar(16, 31, 0),
        HistogramBar(32, 63, 1),
    )


def test_the_json_form_survives_a_round_trip_and_carries_the_total(explained: Explanation) -> None:
    read = json.loads(json.dumps(explained.to_json()))
    assert read["unique_prompt_tokens"] == 5326
    assert read["predicted_total_s"] == pytest.approx(explained.prediction.total_s)
    assert read["prediction"]["tiers"][0]["name"] == "device"


def test_the_text_names_rows_ceiling_peak_and_bottleneck(explained: Explanation) -> None:
    text = explained.to_text()
    assert "rows             11\n" in text
    assert "reuse ceiling    34.81%" in text
    assert f"({explained.peak_live_tokens:,} tokens)" in text
    assert "bottleneck       prefill: arithmetic on prompt tokens" in text
    assert "'The document. The document." in text


def test_text_from_data_stays_on_one_line_without_control_characters(explained: Explanation) -> None:
    run = replace(explained.biggest_nodes[0], text="a\x1b[2J\nb\u2028" + "c" * 100)
    text = replace(explained, biggest_nodes=(run,)).to_text()
    assert "\x1b" not in text and "'a [2J b ccc" in text
    assert max(len(line) for line in text.splitlines()) < 160


def test_an_empty_plan_is_explained(stage_prompts: Callable[..., Any]) -> None:
    store = stage_prompts([])
    plan = make_plan(store, prefix_sharing=True)
    explanation = explain(plan, store, model=SMOLLM2, limits=LIMITS, rates=RATES, decode_text=spell)
    assert explanation.prompt_tokens == 0 and explanation.advice == ()
    assert "bottleneck       none: nothing to run" in explanation.to_text()


def test_an_explanation_read_back_predicts_the_same_times_from_the_same_rates(explained: Explanation) -> None:
    again = Explanation.from_json(json.loads(json.dumps(explained.to_json()))).with_rates(RATES)
    assert again.prediction is not None and explained.prediction is not None
    assert again.prediction.total_s == pytest.approx(explained.prediction.total_s)
    assert replace(again, prediction=None) == replace(explained, prediction=None, advice=())


def test_without_rates_the_text_leaves_times_out(explained: Explanation) -> None:
    text = replace(explained, prediction=None).to_text()
    assert "predicted time" not in text and "peak demand" in text


def test_the_expected_share_shortens_what_is_predicted_not_what_is_allowed(stage_prompts: Callable[..., Any]) -> None:
    store = stage_prompts([[1, 2, 3]] * 4, [40] * 4)
    plan = make_plan(store, prefix_sharing=True)
    half = explain(
        plan, store, model=SMOLLM2, limits=LIMITS, rates=RATES, decode_text=lambda tokens: "", expected=Expected(0.5)
    )
    assert (half.decode_tokens, half.expected_decode_tokens) == (160, 80)
    assert half.num_steps == pytest.approx(20, abs=1)
    assert "expected         80 tokens" in half.to_text()


def test_tokens_that_a_grammar_forces_take_no_steps(stage_prompts: Callable[..., Any]) -> None:
    store = stage_prompts([[1, 2, 3]] * 4, [40] * 4)
    plan = make_plan(store, prefix_sharing=True)
    expected = Expected(generated_share=0.5, sampled_share=0.25)
    forced = explain(
        plan, store, model=SMOLLM2, limits=LIMITS, rates=RATES, decode_text=lambda tokens: "", expected=expected
    )
    assert forced.expected_decode_tokens == 80
    assert forced.num_steps == pytest.approx(5, abs=1)


def test_the_biggest_nodes_show_their_own_text_whatever_the_order_of_the_plan(
    stage_prompts: Callable[..., Any],
) -> None:
    documents = [[ord(letter)] * (30 + 10 * number) for number, letter in enumerate("cab")]
    store = stage_prompts([documents[row % 3] + [200 + row] for row in range(9)], [4] * 9)
    plan = make_plan(store, prefix_sharing=True, keep_order=True)
    nodes = biggest_nodes(plan, store, decode_text=spell)
    assert [(node.text, node.num_prompts) for node in nodes] == [("b" * 48, 3), ("a" * 40, 3), ("c" * 30, 3)]
