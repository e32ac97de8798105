"""The engine's loop over a model that costs nothing: rows, reasons, times, refusals, preemption."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from batchllm.engine.engine import Engine, EngineConfig
from batchllm.engine.metrics import RunMetrics
from batchllm.engine.scheduler import Speculation
from batchllm.planner.plan import make_plan
from batchllm.prompt import Completion, SamplingParams

Build = Callable[..., Engine]


def next_token(token: int, position: int) -> int:
    return (token * 31 + position * 7) % 64


def expected_tokens(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens[-1], len(tokens) - 1))
        if tokens[-1] == 63:
            break
    return tokens[len(prompt) :]


@pytest.fixture
def build(list_prompts: Any, stub_decoder: Any, stub_vocabulary: Any) -> Build:
    def make(
        prompts: list[list[int]],
        params: list[SamplingParams],
        *,
        blocks: int = 200,
        sequences: int = 8,
        decoder: Any = None,
        speculation: Speculation = "off",
    ) -> Engine:
        store = list_prompts(prompts, params)
        return Engine(
            decoder=decoder or stub_decoder(),
            vocabulary=stub_vocabulary,
            store=store,
            plan=make_plan(store, prefix_sharing=True),
            config=EngineConfig(4, blocks, max_step_tokens=32, max_sequences=sequences, speculation=speculation),
            seed=0,
            started_at=time.monotonic(),
        )

    return make


def run(engine: Engine) -> dict[int, Completion]:
    answers: dict[int, Completion] = {}

    def deliver(completions: list[Completion]) -> None:
        for completion in completions:
            assert completion.row_index not in answers
            answers[completion.row_index] = completion

    assert engine.run(deliver=deliver)
    return answers


def prompts_of(count: int) -> list[list[int]]:
    return [[5, 6, 7, 8, 9, 1 + row % 7, row % 60] for row in range(count)]


def test_every_row_is_answered_once_with_its_own_tokens(build: Build) -> None:
    prompts = prompts_of(50)
    answers = run(build(prompts, [SamplingParams(max_tokens=1 + row % 20) for row in range(50)]))
    assert sorted(answers) == list(range(50))
    for row, answer in answers.items():
        assert answer.token_ids == expected_tokens(prompts[row], 1 + row % 20)
        assert answer.finish_reason == ("eos" if answer.token_ids[-1] == 63 else "length")
        assert answer.prompt_tokens == 7


def test_a_small_pool_preempts_and_no_answer_shows_it(build: Build) -> None:
    prompts = prompts_of(12)
    params = [SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, repetition_penalty=1.2)] * 12
    roomy = run(build(prompts, params))
    engine = build(prompts, params, blocks=24)
    answers: dict[int, Completion] = {}
    forced = 0
    while not engine.scheduler.done:
        answers |= {completion.row_index: completion for completion in engine.step()}
        running = engine.scheduler.table.running
        if running.size and forced < 30:
            engine.scheduler.preempt(int(running[0]))
            forced += 1
    assert engine.metrics.preemptions >= 30
    assert sum(answer.preemptions for answer in answers.values()) == engine.metrics.preemptions
    for row in range(12):
        assert answers[row].token_ids == roomy[row].token_ids
        assert answers[row].text == roomy[row].text
        assert answers[row].prompt_tokens == 7
    engine.scheduler.check_integrity()


def test_a_row_larger_than_the_pool_is_an_error_with_the_numbers_and_the_rest_runs(build: Build) -> None:
    params = [SamplingParams(max_tokens=4), SamplingParams(max_tokens=400), SamplingParams(max_tokens=4)]
    answers = run(build([[1, 2], [3, 4], [5, 6]], params, blocks=10))
    assert answers[1].error is not None
    assert "102 pages" not in answers[1].error
    assert "101 KV blocks" in answers[1].error and "the pool has 10 (40 tokens)" in answers[1].error
    assert answers[0].error is None and answers[2].error is None


def test_a_prompt_that_fills_the_context_is_an_error_and_one_below_is_cut_at_the_context(build: Build) -> None:
    answers = run(build([[1] * 512, [1] * 510], [SamplingParams(max_tokens=9, ignore_eos=True)] * 2))
    assert answers[0].error is not None and "512" in answers[0].error
    assert len(answers[1].token_ids) == 2
    assert answers[1].finish_reason == "length"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("poison", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_a_row_whose_logits_are_no_numbers_is_an_error_and_its_neighbours_are_not(
    build: Build, stub_decoder: Any, dtype: torch.dtype, poison: float
) -> None:
    prompts = [[1, 2, 3], [1, 2, 50], [1, 2, 4]]
    decoder = stub_decoder(poisoned_token=50, poison=poison, dtype=dtype)
    answers = run(build(prompts, [SamplingParams(max_tokens=1)] * 3, decoder=decoder))
    assert answers[1].error is not None and "not finite" in answers[1].error
    assert answers[0].error is None and answers[2].error is None


def test_times_are_ordered_and_tpot_needs_two_tokens(build: Build) -> None:
    answers = run(
        build([[1, 2], [3, 4]], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=5, ignore_eos=True)])
    )
    assert answers[0].tpot_s is None
    assert answers[1].tpot_s is not None and answers[1].tpot_s > 0
    for answer in answers.values():
        assert answer.queue_s is not None and answer.ttft_s is not None and answer.e2e_s is not None
        assert 0 <= answer.queue_s <= answer.queue_s + answer.ttft_s <= answer.e2e_s


def test_shared_prompt_tokens_are_reported_as_cached(build: Build) -> None:
    prompts = [[7] * 16 + [row] for row in range(6)]
    engine = build(prompts, [SamplingParams(max_tokens=2, ignore_eos=True)] * 6)
    answers = run(engine)
    assert sorted(answer.cached_tokens for answer in answers.values()) == [0, 16, 16, 16, 16, 16]
    assert engine.metrics.cached_prompt_tokens == 80
    assert engine.metrics.computed_prompt_tokens == 16 + 6


def test_logprobs_come_one_a_token_and_the_sampled_one_is_finite(build: Build) -> None:
    answers = run(build([[1, 2, 3]], [SamplingParams(max_tokens=4, logprobs=2, ignore_eos=True, top_k=1)]))
    logprobs = answers[0].logprobs
    assert logprobs is not None
    assert [entry[0] for entry in logprobs] == answers[0].token_ids
    assert all(entry[1] <= 0 and len(entry[2]) == 2 for entry in logprobs)


def test_stopping_early_leaves_the_rest_unanswered(build: Build) -> None:
    engine = build(prompts_of(40), [SamplingParams(max_tokens=20, ignore_eos=True)] * 40)
    answers: list[Completion] = []
    assert not engine.run(deliver=answers.extend, should_stop=lambda: len(answers) > 5)
    assert 5 < len(answers) < 40


def test_a_wrong_guess_that_the_model_cannot_take_is_no_error_of_the_row(build: Build, stub_decoder: Any) -> None:
    first = next_token(20, 6)
    prompt = [10, 20, first, 50, 12, 10, 20]
    expected = expected_tokens(prompt, 8)
    assert 50 not in expected and 63 not in expected
    engine = build([prompt], [SamplingParams(max_tokens=8)], decoder=stub_decoder(poisoned_token=50), speculation=3)
    (answer,) = run(engine).values()
    assert answer.error is None and answer.token_ids == expected
    assert engine.metrics.drafted_tokens > 0, "the token behind the first one was guessed to be 50"


def test_a_row_that_ends_inside_its_guesses_takes_nothing_of_what_follows(build: Build) -> None:
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, stop=("zzzz",), logit_bias=((25, 1e6),))
    engine = build([[1, 2, 25, 25, 25, 25, 25]], [params], speculation=8)
    (answer,) = run(engine).values()
    assert (answer.text, answer.finish_reason, len(answer.token_ids)) == ("", "stop", 4)
    assert engine.metrics.accepted_tokens == 2, "one came from the prompt, one is always the model's own"
    assert engine.metrics.completion_tokens == engine.metrics.generated_tokens == 4


def test_the_peak_of_stages_is_that_of_the_pool_that_was_fullest() -> None:
    full, wide = RunMetrics(peak_used_blocks=40, num_blocks=40), RunMetrics(peak_used_blocks=100, num_blocks=400)
    for total in (full.plus(wide), wide.plus(full)):
        assert (total.peak_used_blocks, total.num_blocks) == (40, 40)
