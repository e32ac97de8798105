"""The engine one step ahead of its tokens says what the engine that waits for them says."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm.engine.device_steps import padded_count
from batchllm.engine.engine import Engine, EngineConfig
from batchllm.planner.plan import make_plan
from batchllm.prompt import Completion, SamplingParams

Build = Callable[..., Engine]

SETTINGS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, ignore_eos=True),
    SamplingParams(temperature=0, min_tokens=3),
    SamplingParams(temperature=0, stop=("a", "ef")),
    SamplingParams(temperature=0, repetition_penalty=1.4, presence_penalty=0.5),
    SamplingParams(temperature=0, logprobs=2, logit_bias=((9, 3.0),)),
    SamplingParams(temperature=1.0, repetition_penalty=1.4, ignore_eos=True),
    SamplingParams(temperature=1.0, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, seed=4),
]
DRAWN_ON_DEVICE = SETTINGS[-2:]


@pytest.fixture(scope="module")
def build(list_prompts: Any, make_stub_decoder: Any, make_stub_vocabulary: Any) -> Build:
    def make(prompts: list[list[int]], params: list[SamplingParams], *, poisoned: int = -1, **sizes: Any) -> Engine:
        store = list_prompts(prompts, params)
        usual = EngineConfig(block_size=4, num_blocks=400, max_step_tokens=64, max_sequences=8, runs_ahead=True)
        return Engine(
            decoder=make_stub_decoder(poisoned_token=poisoned),
            vocabulary=make_stub_vocabulary(),
            store=store,
            plan=make_plan(store, prefix_sharing=True),
            config=dataclasses.replace(usual, **sizes),
            seed=3,
            started_at=time.monotonic(),
        )

    return make


def run(engine: Engine, *, preempt_every: int = 0) -> dict[int, Completion]:
    answers: dict[int, Completion] = {}
    num_steps = 0
    while not engine.scheduler.done:
        for answer in engine.step():
            assert answer.row_index not in answers
            answers[answer.row_index] = answer
        num_steps += 1
        assert num_steps < 3000, "the engine makes no progress"
        table = engine.scheduler.table
        running = table.running[~table.is_restoring[table.running]]
        if preempt_every and num_steps < 60 and num_steps % preempt_every == 0 and running.size:
            engine.scheduler.preempt(int(running[num_steps % running.size]))
    engine.scheduler.check_integrity()
    return answers


def what_it_says(answer: Completion) -> tuple[Any, ...]:
    logprobs = answer.logprobs and [(entry[0], round(entry[1], 4)) for entry in answer.logprobs]
    return answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason, answer.error, logprobs


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[SamplingParams]]:
    documents = draw(st.lists(st.lists(st.integers(0, 62), min_size=8, max_size=30), min_size=1, max_size=2))
    prompts, params = [], []
    for _ in range(draw(st.integers(1, 12))):
        document = draw(st.sampled_from(documents))
        prompts.append(document[: draw(st.integers(1, len(document)))] + draw(st.lists(st.integers(0, 62), max_size=3)))
        params.append(dataclasses.replace(draw(st.sampled_from(SETTINGS)), max_tokens=draw(st.integers(1, 14))))
    return prompts, params


@settings(max_examples=25, deadline=None)
@given(
    batch=batches(),
    num_blocks=st.sampled_from([14, 25, 400]),
    max_sequences=st.sampled_from([1, 3, 8]),
    max_step_tokens=st.sampled_from([3, 9, 64]),
    poisoned=st.sampled_from([-1, 11]),
    preempt_every=st.sampled_from([0, 0, 1, 4]),
)
def test_rows_say_the_same_whether_tokens_are_waited_for_or_not(
    build: Build,
    batch: tuple[list[list[int]], list[SamplingParams]],
    num_blocks: int,
    max_sequences: int,
    max_step_tokens: int,
    poisoned: int,
    preempt_every: int,
) -> None:
    prompts, params = batch
    sizes = {"num_blocks": num_blocks, "max_sequences": max_sequences, "max_step_tokens": max_step_tokens}
    ahead = run(build(prompts, params, poisoned=poisoned, **sizes), preempt_every=preempt_every)
    waiting = run(build(prompts, params, poisoned=poisoned, **sizes, runs_ahead=False))
    # Rows that are drawn on the device use its random numbers: they are compared with themselves alone.
    alone = run(build(prompts, params, poisoned=poisoned, max_sequences=1))
    assert sorted(ahead) == list(range(len(prompts)))
    for row, answer in ahead.items():
        kind = dataclasses.replace(params[row], max_tokens=SamplingParams().max_tokens)
        expected = alone if kind in DRAWN_ON_DEVICE else waiting
        assert what_it_says(answer) == what_it_says(expected[row]), f"row {row}: {params[row]}"


def num_decode_rows(engine: Engine) -> int:
    return int(sum(np.asarray(engine.metrics.step_log.columns["num_decode_rows"])))


def test_a_sequence_that_ends_by_its_length_has_no_row_too_many(build: Build) -> None:
    engine = build([[1, 2, 3]], [SamplingParams(max_tokens=6, ignore_eos=True)])
    assert len(run(engine)[0].token_ids) == 6
    assert num_decode_rows(engine) == 5


def test_a_sequence_that_a_token_ends_has_one_row_too_many_and_does_not_say_it(build: Build) -> None:
    # 63 ends a row; the stub's next token after t at position p is (31 t + 7 p) % 64, and 31 * 33 + 7 * 0 is 63.
    engine = build([[33]], [SamplingParams(max_tokens=6)])
    answer = run(engine)[0]
    assert answer.token_ids == [63] and answer.finish_reason == "eos"
    assert num_decode_rows(engine) == 1
    assert engine.metrics.generated_tokens == 1


def test_the_next_step_is_launched_before_the_tokens_of_this_one_are_answered(build: Build) -> None:
    engine = build([[1, 2, 3], [4, 5]], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=9, ignore_eos=True)])
    assert engine.step() == []
    assert [answer.row_index for answer in engine.step()] == [0]
    assert engine.metrics.num_steps == 2


def test_a_row_that_needs_the_host_between_tokens_is_answered_in_its_own_step(build: Build) -> None:
    engine = build([[1, 2, 3]], [SamplingParams(max_tokens=1, logprobs=1)])
    assert [answer.row_index for answer in engine.step()] == [0]


@pytest.mark.parametrize(
    ("count", "padded"), [(1, 1), (3, 4), (8, 8), (9, 16), (64, 64), (65, 72), (129, 144), (256, 256), (257, 288)]
)
def test_rows_are_padded_to_few_sizes(count: int, padded: int) -> None:
    assert padded_count(count) == padded


def test_padded_sizes_hold_their_rows_and_little_more() -> None:
    counts = np.arange(1, 513)
    padded = np.array([padded_count(int(count)) for count in counts])
    assert (padded >= counts).all() and ((padded - counts < 8) | (padded <= counts * 1.125)).all()
    assert np.unique(padded).size == 35


def test_tokens_of_a_forgotten_sequence_are_no_longer_wanted(build: Build) -> None:
    engine = build([[1, 2, 3], [7, 8]], [SamplingParams(max_tokens=5, ignore_eos=True)] * 2)
    engine.step()
    table = engine.scheduler.table
    slot = int(table.running[0])
    before = int(table.num_tokens[slot])
    sequence = engine.scheduler.preempt(slot)
    assert sequence.tokens.size == before - 1
