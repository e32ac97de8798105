"""fp32 on a CPU: a row says the same whatever runs beside it, in whatever steps, blocks and order, and however often it is preempted."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchllm.engine.engine import Engine, EngineConfig
from batchllm.models.decoder import Decoder
from batchllm.models.loading import load_decoder
from batchllm.models.source import ModelSource
from batchllm.models.tokenizer import Tokenizer, load_tokenizer
from batchllm.ops import REFERENCE, Kernels, native_kernels
from batchllm.planner.plan import make_plan
from batchllm.prompt import Completion, SamplingParams

BLOCK_SIZES = (1, 5, 16, 17)


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to run the batch. `preempt_every`: after each so many steps a running sequence is preempted."""

    sequences: int = 32
    step_tokens: int = 256
    block_size: int = 16
    num_blocks: int = 400
    sharing: bool = True
    shuffled: bool = False
    preempt_every: int = 0
    ahead: bool = False


ALONE = Way(sequences=1, step_tokens=1024, sharing=False)
WAYS = [
    ALONE,
    Way(sequences=8, sharing=False),
    Way(),
    Way(step_tokens=7),
    Way(step_tokens=64, sequences=8),
    Way(step_tokens=1024, shuffled=True),
    Way(block_size=1, num_blocks=6000),
    Way(block_size=5, num_blocks=1200, shuffled=True),
    Way(block_size=17, step_tokens=100),
    Way(num_blocks=45, step_tokens=128),
    Way(preempt_every=1, step_tokens=200),
    Way(preempt_every=3, block_size=5, num_blocks=140, shuffled=True),
]
"""The pool of 45 blocks holds one long row and little beside it."""

ALONE_AHEAD = dataclasses.replace(ALONE, ahead=True)
AHEAD_WAYS = [
    Way(ahead=True),
    Way(ahead=True, step_tokens=64, sequences=8),
    Way(ahead=True, step_tokens=1024, shuffled=True, block_size=5, num_blocks=1200),
    Way(ahead=True, num_blocks=45, step_tokens=128),
    Way(ahead=True, preempt_every=3, block_size=17),
]


def make_prompts() -> list[list[int]]:
    """Lengths from 2 to 600: random ones, exact multiples of every block size, prefixes of each other, and duplicates."""
    random = np.random.default_rng(3)
    document = random.integers(5, 300, size=600).tolist()
    other = random.integers(5, 300, size=200).tolist()
    # 85 and 170 are multiples of 5 and 17, 80 and 160 of 5 and 16, 272 of 16 and 17.
    prompts = [document[:length] for length in (2, 16, 17, 80, 85, 160, 170, 256, 257, 272, 600)]
    prompts += [document[:256] + other[:length] for length in (1, 15, 40)]
    prompts += [other[:3], other[:160], other[:161], other[:160], document[:80], document[:600]]
    return prompts


SETTINGS = [
    SamplingParams(max_tokens=9, logprobs=2),
    SamplingParams(max_tokens=9, temperature=1.0, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0.9, top_k=20, top_p=0.9, seed=5),
    SamplingParams(max_tokens=9, temperature=1.3, min_p=0.05, repetition_penalty=1.3, n=3),
    SamplingParams(max_tokens=14, frequency_penalty=2.0, presence_penalty=0.5, min_tokens=3, logprobs=0),
    SamplingParams(max_tokens=9, temperature=1.0, stop=("a", "e"), logit_bias=((101, 6.0),)),
]


class Case:
    """The batch and its model, and the function that runs it one way."""

    def __init__(self, model: Path, stage: Callable[..., Any]) -> None:
        self.source = ModelSource(kind="huggingface", path=model, name="tiny")
        self.tokenizer: Tokenizer = load_tokenizer(self.source)
        self.decoders: dict[str, Decoder] = {}
        self._stage = stage
        self.samples: list[tuple[list[int], SamplingParams, int, int]] = []
        for row, prompt in enumerate(make_prompts()):
            params = SETTINGS[row % len(SETTINGS)]
            self.samples += [(prompt, params, row, sample) for sample in range(params.n)]

    def decoder(self, kernels: Kernels) -> Decoder:
        if kernels.name not in self.decoders:
            device = torch.device("cpu")
            self.decoders[kernels.name] = load_decoder(self.source, dtype=torch.float32, device=device, kernels=kernels)
        return self.decoders[kernels.name]

    def run(self, kernels: Kernels, way: Way) -> tuple[dict[tuple[int, int], Completion], Engine]:
        samples = list(self.samples)
        if way.shuffled:
            order = np.random.default_rng(1).permutation(len(samples))
            samples = [samples[place] for place in order]
        store = dataclasses.replace(
            self._stage([prompt for prompt, *_ in samples], [params for _, params, *_ in samples]),
            row_index=np.array([row for *_, row, _ in samples], dtype=np.int64),
            sample_index=np.array([sample for *_, sample in samples], dtype=np.int32),
        )
        engine = Engine(
            decoder=self.decoder(kernels),
            vocabulary=self.tokenizer,
            store=store,
            plan=make_plan(store, prefix_sharing=way.sharing),
            config=EngineConfig(way.block_size, way.num_blocks, way.step_tokens, way.sequences, runs_ahead=way.ahead),
            seed=11,
            started_at=time.monotonic(),
        )
        answers: dict[tuple[int, int], Completion] = {}
        num_steps = 0
        while not engine.scheduler.done:
            for answer in engine.step():
                assert (answer.row_index, answer.sample_index) not in answers
                answers[answer.row_index, answer.sample_index] = answer
            num_steps += 1
            table = engine.scheduler.table
            running = table.running[~table.is_restoring[table.running]]
            # Ends by itself: preemption gets rarer while a long prompt would otherwise start again for ever.
            if way.preempt_every and num_steps % (way.preempt_every + num_steps // 40) == 0 and running.size:
                engine.scheduler.preempt(int(running[num_steps % running.size]))
        engine.scheduler.check_integrity()
        return answers, engine


def what_it_says(answer: Completion) -> tuple[Any, ...]:
    """All of a completion that must not depend on the way."""
    return answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason, answer.prompt_tokens, answer.error


@pytest.fixture(scope="module")
def case(chat_model: Path, list_prompts: Callable[..., Any]) -> Case:
    return Case(chat_model, list_prompts)


@pytest.fixture(scope="module", params=["reference", "native"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "reference":
        return REFERENCE
    found = native_kernels()
    if isinstance(found, str):
        pytest.skip(f"needs the native kernels: {found}")
    return found


@pytest.fixture(scope="module")
def alone(case: Case, kernels: Kernels) -> dict[tuple[int, int], Completion]:
    """Every sample on its own, nothing shared, each prompt in one step."""
    answers, engine = case.run(kernels, ALONE)
    assert engine.metrics.preemptions == 0 and engine.metrics.cached_prompt_tokens == 0
    return answers


def test_the_batch_has_what_could_differ(alone: dict[tuple[int, int], Completion]) -> None:
    assert len(alone) == 26 and not any(answer.error for answer in alone.values())
    assert {answer.finish_reason for answer in alone.values()} >= {"length", "stop"}
    assert len({tuple(answer.token_ids) for answer in alone.values()}) > 15
    # Samples of one row are streams of their own.
    assert len({tuple(alone[3, sample].token_ids) for sample in range(3)}) == 3


@pytest.mark.parametrize("way", WAYS[1:], ids=str)
def test_rows_are_identical_whatever_the_way(
    case: Case, kernels: Kernels, alone: dict[tuple[int, int], Completion], way: Way
) -> None:
    answers, engine = case.run(kernels, way)
    assert answers.keys() == alone.keys()
    for key, answer in answers.items():
        assert what_it_says(answer) == what_it_says(alone[key]), f"row {key}"
        ours, theirs = answer.logprobs, alone[key].logprobs
        assert (ours is None) == (theirs is None)
        for one, other in zip(ours or [], theirs or [], strict=True):
            assert one[0] == other[0] and one[1] == pytest.approx(other[1], abs=1e-4)
    assert (engine.metrics.cached_prompt_tokens > 0) == way.sharing
    if way.preempt_every:
        assert engine.metrics.preemptions > 0
        assert sum(answer.preemptions for answer in answers.values()) == engine.metrics.preemptions


def check_same(answers: dict[tuple[int, int], Completion], expected: dict[tuple[int, int], Completion]) -> None:
    assert answers.keys() == expected.keys()
    for key, answer in answers.items():
        assert what_it_says(answer) == what_it_says(expected[key]), f"row {key}"


def test_rows_are_identical_whatever_the_way_when_the_engine_runs_ahead(case: Case) -> None:
    alone, _ = case.run(REFERENCE, ALONE_AHEAD)
    for way in AHEAD_WAYS:
        answers, engine = case.run(REFERENCE, way)
        check_same(answers, alone)
        assert (engine.metrics.preemptions > 0) == (way.preempt_every > 0)


def test_rows_that_are_not_drawn_on_the_device_say_the_same_ahead_and_waiting(case: Case) -> None:
    # Without penalties, biases and log-probabilities, a drawn row takes the device's random numbers.
    drawn = [number for number, params in enumerate(SETTINGS) if params.temperature and params.repetition_penalty == 1]
    drawn = [number for number in drawn if not SETTINGS[number].logit_bias]
    assert drawn == [1, 2]
    ahead, _ = case.run(REFERENCE, Way(ahead=True))
    waiting, _ = case.run(REFERENCE, Way())
    kept = [key for key in ahead if key[0] % len(SETTINGS) not in drawn]
    check_same({key: ahead[key] for key in kept}, {key: waiting[key] for key in kept})


def test_the_backends_agree_on_greedy_rows(case: Case, alone: dict[tuple[int, int], Completion]) -> None:
    reference, _ = case.run(REFERENCE, Way())
    for row, sample in alone:
        if SETTINGS[row % len(SETTINGS)].temperature == 0:
            assert reference[row, sample].token_ids == alone[row, sample].token_ids
