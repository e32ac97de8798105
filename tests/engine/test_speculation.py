"""Drafts change the time, never the tokens: every kind of row says the same with them as without."""

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
from batchllm.engine.scheduler import Speculation
from batchllm.models.decoder import Decoder
from batchllm.models.loading import load_decoder
from batchllm.models.source import ModelSource
from batchllm.models.tokenizer import Tokenizer, load_tokenizer
from batchllm.ops import REFERENCE, Kernels, native_kernels
from batchllm.planner.plan import make_plan
from batchllm.prompt import Completion, Grammar, SamplingParams

BACKENDS = [("reference", torch.float32), ("native", torch.float32), ("native", torch.bfloat16)]
REPEATED = 101
SETTINGS = [
    SamplingParams(max_tokens=40, ignore_eos=True),
    SamplingParams(max_tokens=30, ignore_eos=True, logprobs=2, logit_bias=((REPEATED, 50.0),)),
    SamplingParams(max_tokens=40, temperature=0.05, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=1.0, ignore_eos=True, logit_bias=((REPEATED, 12.0), (102, 12.0))),
    SamplingParams(max_tokens=30, ignore_eos=True, repetition_penalty=1.2, frequency_penalty=0.3),
    SamplingParams(max_tokens=30, min_tokens=20, stop_token_ids=(REPEATED,), logit_bias=((REPEATED, 50.0),)),
    SamplingParams(max_tokens=60, ignore_eos=True, stop=("aaaaaaaaaa",), logit_bias=((102, 3.0),)),
    SamplingParams(max_tokens=30, grammar=Grammar(kind="regex", text="start: /(ab){2,9}/")),
]


@dataclasses.dataclass(frozen=True)
class Way:
    speculation: Speculation
    sequences: int = 32
    step_tokens: int = 256
    block_size: int = 16
    num_blocks: int = 400
    preempt_every: int = 0


WAYS = [
    Way("auto"),
    Way(1),
    Way(4),
    Way(15, step_tokens=1024, block_size=5, num_blocks=1500),
    Way(5, step_tokens=20, sequences=8),
    Way(7, block_size=1, num_blocks=6000),
    Way(4, num_blocks=30, step_tokens=128),
    Way(6, preempt_every=2, step_tokens=200),
]
"""The pool of 30 blocks holds one long row and little beside it."""


class Case:
    """The batch and its models, and the function that runs it one way."""

    def __init__(self, model: Path, stage: Callable[..., Any]) -> None:
        self.source = ModelSource(kind="huggingface", path=model, name="tiny")
        self.tokenizer: Tokenizer = load_tokenizer(self.source)
        self.decoders: dict[tuple[str, torch.dtype], Decoder] = {}
        random = np.random.default_rng(3)
        quoted = random.integers(5, 300, size=120).tolist()
        prompts = [
            (quoted + random.integers(5, 300, size=length).tolist() + quoted[:length])
            for length in (3, 10, 40, 118)
            for _ in SETTINGS[:4]
        ]
        self.store = stage(prompts * 2, [SETTINGS[row % len(SETTINGS)] for row in range(2 * len(prompts))])

    def run(self, kernels: Kernels, dtype: torch.dtype, way: Way) -> tuple[dict[int, Completion], Engine]:
        key = kernels.name, dtype
        if key not in self.decoders:
            self.decoders[key] = load_decoder(self.source, dtype=dtype, device=torch.device("cpu"), kernels=kernels)
        engine = Engine(
            decoder=self.decoders[key],
            vocabulary=self.tokenizer,
            store=self.store,
            plan=make_plan(self.store, prefix_sharing=True),
            config=EngineConfig(
                way.block_size, way.num_blocks, way.step_tokens, way.sequences, speculation=way.speculation
            ),
            seed=11,
            started_at=time.monotonic(),
        )
        answers: dict[int, Completion] = {}
        num_steps = 0
        while not engine.scheduler.done:
            answers |= {answer.row_index: answer for answer in engine.step()}
            num_steps += 1
            running = engine.scheduler.table.running
            if way.preempt_every and num_steps % (way.preempt_every + num_steps // 40) == 0 and running.size:
                engine.scheduler.preempt(int(running[num_steps % running.size]))
        engine.scheduler.check_integrity()
        engine.close()
        return answers, engine


@pytest.fixture(scope="module")
def case(chat_model: Path, list_prompts: Callable[..., Any]) -> Case:
    return Case(chat_model, list_prompts)


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda backend: f"{backend[0]}-{str(backend[1])[6:]}")
def backend(request: pytest.FixtureRequest) -> tuple[Kernels, torch.dtype]:
    name, dtype = request.param
    if name == "reference":
        return REFERENCE, dtype
    found = native_kernels()
    if isinstance(found, str):
        pytest.skip(f"needs the native kernels: {found}")
    return found, dtype


@pytest.fixture(scope="module")
def plain(case: Case, backend: tuple[Kernels, torch.dtype]) -> tuple[dict[int, Completion], Engine]:
    return case.run(*backend, Way("off"))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_rows_say_the_same_with_drafts(
    case: Case, backend: tuple[Kernels, torch.dtype], plain: tuple[dict[int, Completion], Engine], way: Way
) -> None:
    expected, _ = plain
    answers, engine = case.run(*backend, way)

    assert answers.keys() == expected.keys()
    for row, answer in answers.items():
        other = expected[row]
        assert answer.error is None and answer.token_ids == other.token_ids, f"row {row}: {SETTINGS[row % 8]}"
        assert (answer.text, answer.finish_reason, answer.stop_reason) == (
            other.text,
            other.finish_reason,
            other.stop_reason,
        )
        assert (answer.logprobs is None) == (other.logprobs is None)
        for one, another in zip(answer.logprobs or [], other.logprobs or [], strict=True):
            assert one[0] == another[0] and one[1] == pytest.approx(another[1], abs=1e-4)
    metrics = engine.metrics
    assert metrics.completion_tokens == sum(len(answer.token_ids) for answer in answers.values())
    assert metrics.generated_tokens == metrics.completion_tokens
    if way.speculation != "auto":
        assert 0 < metrics.accepted_tokens < metrics.drafted_tokens, "some drafts are right, and some are not"
        if not metrics.preemptions:
            # The first token of each comes out of its prompt.
            assert sum(metrics.step_log.columns["num_decode_rows"]) == metrics.completion_tokens - len(answers)


def test_drafts_take_fewer_steps(
    case: Case, backend: tuple[Kernels, torch.dtype], plain: tuple[dict[int, Completion], Engine]
) -> None:
    _, engine = case.run(*backend, Way(8))
    assert engine.metrics.num_steps < 0.8 * plain[1].metrics.num_steps
    assert plain[1].metrics.drafted_tokens == 0
