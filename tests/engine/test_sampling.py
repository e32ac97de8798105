"""The sampler: each row as if alone, the filters of transformers, and one random stream per sample."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from batchllm.engine.sampling import AllowedTokens, Sampled, Sampler
from batchllm.prompt import SamplingParams

CPU = torch.device("cpu")
GREEDY = SamplingParams()


def sample(
    logits: torch.Tensor,
    settings_of_rows: list[SamplingParams],
    *,
    positions: np.ndarray | None = None,
    job_seed: int = 0,
    row_indexes: list[int] | None = None,
    prompt_ids: np.ndarray | None = None,
    output_ids: np.ndarray | None = None,
    ending_ids: tuple[int, ...] = (),
    allowed: AllowedTokens | None = None,
) -> Sampled:
    """One step of fresh rows."""
    sampler = Sampler(vocab_size=logits.shape[1], device=CPU, job_seed=job_seed)
    num_rows = len(settings_of_rows)
    for slot, params in enumerate(settings_of_rows):
        sampler.add(
            slot,
            params,
            row_index=slot if row_indexes is None else row_indexes[slot],
            sample_index=0,
            prompt_ids=np.array([0]) if prompt_ids is None else prompt_ids,
            output_ids=np.zeros(0, dtype=np.int64) if output_ids is None else output_ids,
            ending_ids=ending_ids,
        )
    where = np.zeros(num_rows, dtype=np.int64) if positions is None else positions
    return sampler.sample(logits.clone(), np.arange(num_rows), where, allowed)


def draws(logits: torch.Tensor, params: SamplingParams, *, num_draws: int) -> np.ndarray:
    """Tokens of `num_draws` rows with the same logits `[vocabulary]`, each from its own stream."""
    return sample(logits.expand(num_draws, -1), [params] * num_draws).token_ids


def expect_frequencies(token_ids: np.ndarray, probabilities: torch.Tensor) -> None:
    """Chi-square of the drawn tokens against the probabilities `[vocabulary]`, and nothing drawn that cannot be."""
    possible = probabilities > 0
    counts = np.bincount(token_ids, minlength=len(probabilities))
    assert counts[~possible.numpy()].sum() == 0
    expected = probabilities[possible].double().numpy() * len(token_ids)
    seen = counts[possible.numpy()]
    rare = expected < 10
    if rare.any():  # the test wants 5 or more in each cell: pool the rare ones
        seen = np.append(seen[~rare], seen[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom) + 8  # about 1 in 10,000


MIXED = [
    SamplingParams(),
    SamplingParams(temperature=1.0, top_k=64, top_p=0.95),
    SamplingParams(temperature=1.0, top_k=0),
    SamplingParams(temperature=1.0, top_k=9_999_999),
    SamplingParams(temperature=1.0, top_p=1.0),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=0.7, top_k=-1, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=1.3, top_k=400, logprobs=3),
    SamplingParams(temperature=1.0, top_p=0.999, repetition_penalty=1.3),
    SamplingParams(temperature=1e-5, frequency_penalty=2.0, logit_bias=((3, 4.0),)),
    SamplingParams(temperature=2.0, presence_penalty=0.5, min_tokens=4, logprobs=0),
    SamplingParams(temperature=1.0, seed=7),
]


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.sampled_from(range(len(MIXED))), min_size=2, max_size=14),
    vocab_size=st.sampled_from([33, 128, 1000, 5000]),
    seed=st.integers(0, 2**31),
)
def test_a_batch_of_mixed_settings_equals_solo_runs_bit_for_bit(rows: list[int], vocab_size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(len(rows), 1, generator=generator) * 6
    logits = torch.randn(len(rows), vocab_size, generator=generator) * spread
    together = Sampler(vocab_size=vocab_size, device=CPU, job_seed=seed)
    order = np.random.default_rng(seed).permutation(len(rows))
    positions = np.arange(len(rows)) * 3
    tokens = [np.random.default_rng([seed, row]).integers(0, vocab_size, 6) for row in range(len(rows))]
    for row, setting in enumerate(rows):
        together.add(
            int(order[row]),
            MIXED[setting],
            row_index=row,
            sample_index=0,
            prompt_ids=tokens[row][:3],
            output_ids=tokens[row][3:],
            ending_ids=(1, 2),
        )
    mixed = together.sample(logits.clone(), order, positions)
    for row, setting in enumerate(rows):
        alone = Sampler(vocab_size=vocab_size, device=CPU, job_seed=seed)
        alone.add(
            0,
            MIXED[setting],
            row_index=row,
            sample_index=0,
            prompt_ids=tokens[row][:3],
            output_ids=tokens[row][3:],
            ending_ids=(1, 2),
        )
        solo = alone.sample(logits[row : row + 1].clone(), np.array([0]), positions[row : row + 1])
        assert solo.token_ids[0] == mixed.token_ids[row]
        assert solo.logprobs.get(0) == mixed.logprobs.get(row)


def test_mixed_rows_over_a_real_vocabulary_equal_solo_runs() -> None:
    logits = torch.randn(len(MIXED), 49_152, generator=torch.Generator().manual_seed(1)) * 3
    together = sample(logits, MIXED)
    for row, params in enumerate(MIXED):
        assert sample(logits[row : row + 1], [params], row_indexes=[row]).token_ids[0] == together.token_ids[row]


def test_a_row_needs_as_much_ranking_as_its_cut_and_no_neighbour_changes_it() -> None:
    """Flat and peaked rows with the same top-p end in different widths of the ranking, in one batch and alone."""
    generator = torch.Generator().manual_seed(2)
    spread = torch.tensor([[0.01], [1.0], [4.0], [30.0]])
    logits = torch.randn(4, 20_000, generator=generator) * spread
    for top_k in (0, 300, 15_000):
        rows = [SamplingParams(temperature=1.0, top_p=0.97, top_k=top_k)] * 4
        together = sample(logits, rows).token_ids
        alone = [int(sample(logits[row : row + 1], rows[:1], row_indexes=[row]).token_ids[0]) for row in range(4)]
        assert together.tolist() == alone


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(3, 500)
    logits[0, [400, 77, 300]] = 5.0
    logits[1, 499] = 1.0
    assert sample(logits, [GREEDY] * 3).token_ids.tolist() == [77, 499, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-5, 1e-4, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float, dtype: torch.dtype) -> None:
    logits = (torch.randn(64, 3000, generator=torch.Generator().manual_seed(3)) * 4).to(dtype).float()
    logits[:, 40] = logits[:, 20] = logits.amax(dim=1)  # rounded logits tie at the top more often than not
    rows = [SamplingParams(temperature=temperature)] * 64
    assert sample(logits, rows).token_ids.tolist() == sample(logits, [GREEDY] * 64).token_ids.tolist()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_p=1e-4),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=0.002, top_p=1e-9),
    ],
)
def test_filters_that_keep_one_token_are_greedy_ties_or_not(params: SamplingParams) -> None:
    logits = torch.randn(32, 2000, generator=torch.Generator().manual_seed(4))
    logits[:, [7, 1999]] = logits.amax(dim=1, keepdim=True)
    logits[0] = 0.0
    assert sample(logits, [params] * 32).token_ids.tolist() == logits.argmax(dim=1).tolist()


def test_huge_logits_and_a_low_temperature_stay_finite() -> None:
    logits = torch.full((1, 50), -3e38)
    logits[0, 31] = 3e38
    assert sample(logits, [SamplingParams(temperature=0.0011)]).token_ids.tolist() == [31]


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        (dict(temperature=1.0), []),
        (dict(temperature=0.6), [TemperatureLogitsWarper(0.6)]),
        (dict(temperature=1.0, top_k=5), [TopKLogitsWarper(5)]),
        (dict(temperature=1.0, top_p=0.8), [TopPLogitsWarper(0.8)]),
        (dict(temperature=1.0, min_p=0.1), [MinPLogitsWarper(0.1)]),
        (
            dict(temperature=1.7, top_k=12, top_p=0.7, min_p=0.15),
            [TemperatureLogitsWarper(1.7), TopKLogitsWarper(12), TopPLogitsWarper(0.7), MinPLogitsWarper(0.15)],
        ),
    ],
)
def test_draws_follow_the_distribution_that_transformers_filters_to(params: dict[str, float], warpers: list) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(5)) * 1.5
    kept = LogitsProcessorList(warpers)(torch.zeros((1, 1), dtype=torch.long), logits[None].clone())[0]
    expect_frequencies(draws(logits, SamplingParams(**params), num_draws=20_000), kept.softmax(dim=0))


def test_draws_follow_the_distribution_where_a_ranking_is_cut() -> None:
    """300 kept of 3,000 tokens, behind the first width; ids and probabilities are unrelated."""
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(3000, generator=generator)
    kept = TopKLogitsWarper(300)(torch.zeros((1, 1), dtype=torch.long), logits[None].clone())[0]
    drawn = draws(logits, SamplingParams(temperature=1.0, top_k=300), num_draws=5_000)
    expect_frequencies(drawn, kept.softmax(dim=0))


def test_repetition_penalty_equals_transformers_over_twenty_tokens_and_after_a_preemption() -> None:
    vocab_size, prompt = 60, np.array([5, 5, 5, 9, 30])
    steps = torch.randn(20, vocab_size, generator=torch.Generator().manual_seed(7))
    steps[:, [5, 9]] += 2.0
    reference: list[int] = []
    processor = RepetitionPenaltyLogitsProcessor(1.3)
    for logits in steps:
        so_far = torch.tensor([*prompt.tolist(), *reference])[None]
        reference.append(int(processor(so_far, logits[None].clone())[0].argmax()))
    params = SamplingParams(repetition_penalty=1.3)
    assert generate(steps, params, prompt=prompt, preempt_at=None) == reference
    assert generate(steps, params, prompt=prompt, preempt_at=7) == reference
    assert reference != steps.argmax(dim=1).tolist()


def generate(steps: torch.Tensor, params: SamplingParams, *, prompt: np.ndarray, preempt_at: int | None) -> list[int]:
    """Tokens of one row over the logits of each step; a preempted row leaves its slot and starts again in another."""
    sampler = Sampler(vocab_size=steps.shape[1], device=CPU, job_seed=3)
    sampler.add(0, params, row_index=0, sample_index=0, prompt_ids=prompt)
    slot, output = np.array([0]), []
    for position, logits in enumerate(steps):
        if position == preempt_at:
            sampler.remove(0)
            sampler.add(0, params, row_index=99, sample_index=0, prompt_ids=np.array([1, 2]), output_ids=[3, 3])
            slot = np.array([2])
            sampler.add(2, params, row_index=0, sample_index=0, prompt_ids=prompt, output_ids=output)
        token_ids = sampler.sample(logits[None].clone(), slot, np.array([position])).token_ids
        sampler.append(slot, token_ids)
        output.append(int(token_ids[0]))
    return output


@settings(max_examples=20, deadline=None)
@given(
    presence=st.sampled_from([0.0, 0.7, -0.4]),
    frequency=st.sampled_from([0.0, 0.9]),
    repetition=st.sampled_from([1.0, 1.4, 0.8]),
    preempt_at=st.sampled_from([None, 1, 7]),
    seed=st.integers(0, 2**31),
)
def test_penalties_count_output_for_presence_and_frequency_and_both_for_repetition(
    presence: float, frequency: float, repetition: float, preempt_at: int | None, seed: int
) -> None:
    steps = torch.randn(24, 12, generator=torch.Generator().manual_seed(seed))
    prompt = np.array([0, 1, 1, 1])
    expected: list[int] = []
    for logits in steps.double():
        scores = logits.clone()
        for token_id in {*prompt.tolist(), *expected}:
            value = scores[token_id]
            scores[token_id] = value * repetition if value < 0 else value / repetition
        for token_id in set(expected):
            scores[token_id] -= frequency * expected.count(token_id) + presence
        expected.append(int(scores.argmax()))
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition)
    assert generate(steps, params, prompt=prompt, preempt_at=preempt_at) == expected


def test_a_preempted_row_draws_the_same_tokens() -> None:
    steps = torch.randn(30, 200, generator=torch.Generator().manual_seed(8))
    params = SamplingParams(temperature=1.0, top_p=0.9, frequency_penalty=0.5)
    whole = generate(steps, params, prompt=np.array([4]), preempt_at=None)
    assert generate(steps, params, prompt=np.array([4]), preempt_at=7) == whole


def test_one_job_seed_gives_each_row_and_sample_its_own_stream() -> None:
    logits = torch.zeros(200, 1000)
    params = SamplingParams(temperature=1.0)
    first = sample(logits, [params] * 200, job_seed=42).token_ids
    assert len(set(first.tolist())) > 150
    assert first.tolist() == sample(logits, [params] * 200, job_seed=42).token_ids.tolist()
    assert first.tolist() != sample(logits, [params] * 200, job_seed=43).token_ids.tolist()
    sampler = Sampler(vocab_size=1000, device=CPU, job_seed=42)
    for sample_index in range(50):
        sampler.add(sample_index, params, row_index=0, sample_index=sample_index, prompt_ids=np.array([0]))
    of_one_row = sampler.sample(logits[:50].clone(), np.arange(50), np.zeros(50, dtype=np.int64)).token_ids
    assert len(set(of_one_row.tolist())) > 40


def test_positions_of_one_stream_are_independent() -> None:
    params = SamplingParams(temperature=1.0)
    positions = np.arange(4000)
    logits = torch.zeros(4000, 16)
    same_stream = sample(logits, [params] * 4000, positions=positions, row_indexes=[5] * 4000).token_ids
    pairs = same_stream[:-1] * 16 + same_stream[1:]
    expect_frequencies(pairs[::2], torch.full((256,), 1 / 256))


def test_rows_with_the_same_own_seed_draw_the_same_whatever_the_job_seed_and_row() -> None:
    logits = torch.zeros(2, 1000)
    params = SamplingParams(temperature=1.0, seed=11)
    token_ids = [sample(logits, [params] * 2, job_seed=job_seed).token_ids.tolist() for job_seed in (0, 1)]
    assert token_ids[0][0] == token_ids[0][1] == token_ids[1][0]
    assert sample(logits, [replace(params, seed=12)] * 2).token_ids[0] != token_ids[0][0]


def test_logit_bias_is_added_and_ids_outside_the_vocabulary_are_left_alone() -> None:
    logits = torch.zeros(2, 10)
    bias = ((4, 2.0), (6, 1.5), (10, 100.0), (-1, 100.0))
    rows = [SamplingParams(logit_bias=bias), SamplingParams(logit_bias=((4, -5.0), (0, -1.0)))]
    assert sample(logits, rows).token_ids.tolist() == [4, 1]


def test_min_tokens_forbids_every_ending_id_until_it_is_reached() -> None:
    logits = torch.zeros(4, 10)
    logits[:, 2], logits[:, 5], logits[:, 7] = 9.0, 8.0, 1.0
    positions = np.array([0, 2, 3, 4])
    token_ids = sample(logits, [SamplingParams(min_tokens=3)] * 4, positions=positions, ending_ids=(2, 5)).token_ids
    assert token_ids.tolist() == [7, 7, 2, 2]


def test_a_forbidden_ending_id_with_a_bias_stays_forbidden() -> None:
    params = SamplingParams(min_tokens=1, logit_bias=((2, 50.0),))
    logits = torch.zeros(2, 10)
    assert sample(logits, [params] * 2, positions=np.array([0, 1]), ending_ids=(2,)).token_ids.tolist() == [0, 2]


def test_allowed_tokens_bind_their_rows_only_whether_they_are_named_or_all_others_are() -> None:
    logits = torch.arange(70.0).expand(4, 70)
    closed, others = np.array([31, 40]), np.setdiff1d(np.arange(70), [3, 68])
    allowed = AllowedTokens(rows=np.array([1, 3]), ids=[closed, others], is_open=np.array([False, True]))
    assert sample(logits, [GREEDY] * 4, allowed=allowed).token_ids.tolist() == [69, 40, 69, 68]
    allowed = AllowedTokens(rows=np.array([1]), ids=[closed], is_open=np.array([False]))
    drawn = {
        int(sample(logits[:3] * 0, [SamplingParams(temperature=1.0)] * 3, job_seed=seed, allowed=allowed).token_ids[1])
        for seed in range(30)
    }
    assert drawn == {31, 40}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite_are_an_error_of_their_row_only(value: float) -> None:
    rows = [SamplingParams(), SamplingParams(temperature=1.0, logprobs=2), SamplingParams(top_k=3, temperature=1.0)]
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(9))
    good = sample(logits, rows)
    logits[1, 50] = value
    sampled = sample(logits, rows)
    assert sampled.bad_rows == {1: "the model gave logits that are not finite"}
    assert sampled.token_ids.tolist() == [good.token_ids[0], -1, good.token_ids[2]]
    assert sampled.logprobs == {}


def test_a_row_whose_settings_leave_no_token_is_an_error_of_its_own() -> None:
    logits = torch.zeros(2, 40)
    allowed = AllowedTokens(rows=np.array([0]), ids=[np.array([2])], is_open=np.array([False]))
    sampled = sample(logits, [SamplingParams(min_tokens=2)] * 2, ending_ids=(2,), allowed=allowed)
    assert sampled.bad_rows == {0: "the row's settings leave no token to sample"}
    assert sampled.token_ids.tolist() == [-1, 0]


def test_logprobs_are_those_of_the_raw_distribution_with_the_best_alternatives() -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(10)) * 2
    params = SamplingParams(temperature=1.5, top_k=1, logprobs=5, repetition_penalty=2.0, logit_bias=((8, 100.0),))
    token_id, logprob, alternatives = sample(logits, [params]).logprobs[0]
    raw = logits.log_softmax(dim=1)[0]
    assert token_id == 8
    assert logprob == pytest.approx(float(raw[8]))
    assert [token for token, _ in alternatives] == raw.topk(5).indices.tolist()
    assert [value for _, value in alternatives] == pytest.approx(raw.topk(5).values.tolist())


def test_alternatives_that_tie_are_the_lowest_ids_whatever_a_neighbour_asks_for() -> None:
    logits = torch.zeros(2, 5000)
    logits[:, 4000:] = 1.0
    few, many = SamplingParams(logprobs=2), SamplingParams(logprobs=40)
    assert [token for token, _ in sample(logits, [few, many]).logprobs[0][2]] == [4000, 4001]
    assert [token for token, _ in sample(logits, [few, many]).logprobs[1][2]] == list(range(4000, 4040))
    assert [token for token, _ in sample(logits[:1], [few]).logprobs[0][2]] == [4000, 4001]


def test_logprobs_are_finite_and_fit_json_even_for_a_token_of_no_probability() -> None:
    logits = torch.zeros(1, 20)
    logits[0, 3] = 3e38
    params = SamplingParams(logprobs=4, logit_bias=((3, -3.4e38), (9, 5.0)), temperature=1.0, top_k=1)
    token_id, logprob, alternatives = sample(logits, [params]).logprobs[0]
    assert token_id == 9
    assert logprob == -1e4
    assert alternatives == ((3, 0.0), (0, -1e4), (1, -1e4), (2, -1e4))
    json.dumps(alternatives, allow_nan=False)


def test_logprobs_zero_gives_the_sampled_token_only() -> None:
    sampled = sample(torch.zeros(2, 4), [SamplingParams(logprobs=0), GREEDY])
    assert sampled.logprobs == {0: (0, pytest.approx(np.log(0.25)), ())}


def test_a_slot_used_again_carries_nothing_over() -> None:
    sampler = Sampler(vocab_size=8, device=CPU, job_seed=0)
    heavy = SamplingParams(
        repetition_penalty=1.9, frequency_penalty=1.0, logit_bias=((6, 9.0),), min_tokens=5, logprobs=2, temperature=1.0
    )
    sampler.add(0, heavy, row_index=0, sample_index=0, prompt_ids=np.arange(8), output_ids=[7, 7], ending_ids=(7,))
    sampler.remove(0)
    sampler.add(0, GREEDY, row_index=1, sample_index=0, prompt_ids=np.array([7]))
    slot, position = np.array([0]), np.array([0])
    assert sampler.all_greedy(slot, position)
    sampled = sampler.sample(torch.arange(8.0)[None], slot, position)
    assert (sampled.token_ids.tolist(), sampled.logprobs) == ([7], {})
    sampler.remove(0)
    counting = SamplingParams(frequency_penalty=0.6)
    sampler.add(0, counting, row_index=2, sample_index=0, prompt_ids=np.array([7]))
    assert sampler.sample(torch.arange(8.0)[None], slot, position).token_ids.tolist() == [7]
    sampler.append(slot, np.array([7]))
    sampler.append(slot, np.array([7]))
    assert sampler.sample(torch.arange(8.0)[None], slot, position + 2).token_ids.tolist() == [6]


def test_all_greedy_is_true_only_where_the_argmax_of_raw_logits_is_the_answer() -> None:
    def is_greedy(params: SamplingParams, position: int = 0) -> bool:
        sampler = Sampler(vocab_size=8, device=CPU, job_seed=0)
        sampler.add(3, GREEDY, row_index=0, sample_index=0, prompt_ids=np.array([0]))
        sampler.add(5, params, row_index=1, sample_index=0, prompt_ids=np.array([0]), ending_ids=(2,))
        return sampler.all_greedy(np.array([5, 3]), np.array([position, 0]))

    assert is_greedy(GREEDY)
    assert is_greedy(SamplingParams(temperature=1e-5, top_k=4, top_p=0.5, min_p=0.1))
    assert is_greedy(SamplingParams(min_tokens=3), position=3)
    assert not is_greedy(SamplingParams(min_tokens=3), position=2)
    assert not is_greedy(SamplingParams(temperature=0.5))
    assert not is_greedy(SamplingParams(logprobs=0))
    assert not is_greedy(SamplingParams(logit_bias=((1, 1.0),)))
    for penalty in ({"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": 0.1}):
        assert not is_greedy(SamplingParams(**penalty))
