"""Sampling: the reference against definitions and distributions, the Triton kernel against the reference."""

from __future__ import annotations

import dataclasses

import kernel_cases as cases
import pytest
import torch

from batchllm.kernels import sampling
from batchllm.kernels.sampling import SamplingBatch

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def batch_of(num_rows: int, **columns: float) -> SamplingBatch:
    """`num_rows` equal rows, but for their streams; columns not named are at their neutral values."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7, "step": 0} | columns
    dtypes = {"top_k": torch.int32, "step": torch.int32, "seed": torch.int64}
    tensors = {
        name: torch.full((num_rows,), value, dtype=dtypes.get(name, torch.float32)) for name, value in values.items()
    }
    return SamplingBatch(**tensors, stream=torch.arange(num_rows))


def words(batch: SamplingBatch) -> torch.Tensor:
    return sampling.gumbel_noise(batch, 64)


def test_philox_gives_its_published_words() -> None:
    zeros = [torch.zeros(1, dtype=torch.int64)] * 4
    assert [int(word) for word in sampling.philox(zeros, (zeros[0], zeros[0]))] == [
        0x6627E8D5,
        0xE169C58D,
        0xBC57AC4C,
        0x9B00DBD8,
    ]
    ones = [torch.full((1,), 0xFFFFFFFF, dtype=torch.int64)] * 4
    assert [int(word) for word in sampling.philox(ones, (ones[0], ones[0]))] == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]


def test_sampled_tokens_follow_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf])
    num_rows = 20_000
    tokens = sampling.sample(logits.expand(num_rows, 5), batch_of(num_rows, temperature=1.5))
    share = torch.bincount(tokens, minlength=5) / num_rows
    # Four standard deviations of a share.
    assert torch.allclose(share, (logits / 1.5).softmax(0), atol=4 * (0.25 / num_rows) ** 0.5)
    assert share[4] == 0


def test_temperature_zero_takes_the_lowest_of_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    assert sampling.sample(logits, batch_of(1, temperature=0.0)).tolist() == [1]


@pytest.mark.parametrize(
    "columns, kept",
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [0, 1, 2]),
        ({"top_k": 1}, [0]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_k": -1}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.49}, [0]),
        ({"top_p": 0.51}, [0, 1, 2]),
        ({"top_p": 0.0}, [0]),
        ({"top_p": 0.91}, [0, 1, 2, 3]),
        ({"min_p": 0.4}, [0, 1, 2]),
        ({"min_p": 0.1}, [0, 1, 2, 3]),
        ({"top_k": 3, "top_p": 0.55}, [0]),
        ({"top_k": 3, "top_p": 0.56}, [0, 1, 2]),
    ],
)
def test_filters_keep_what_they_are_defined_to_keep(columns: dict[str, float], kept: list[int]) -> None:
    # Probabilities with equals at a threshold: both stay. 0.5 / 0.9 = 0.5556 is the first token's share under top_k =
    # 3.
    logits = torch.tensor([[0.5, 0.2, 0.2, 0.07, 0.03]]).double().log()
    assert sampling.kept_tokens(logits, batch_of(1, **columns))[0].nonzero().squeeze(1).tolist() == kept


@pytest.mark.parametrize("change", ["seed", "stream", "step"])
def test_noise_changes_with_each_of_its_names(change: str) -> None:
    batch = batch_of(1)
    moved = dataclasses.replace(batch, **{change: getattr(batch, change) + 1})
    assert not torch.equal(words(batch), words(moved))


def test_noise_of_a_token_does_not_depend_on_the_vocabulary_or_the_batch() -> None:
    batch = batch_of(3)
    last = SamplingBatch(**{field.name: getattr(batch, field.name)[2:] for field in dataclasses.fields(batch)})
    assert torch.equal(sampling.gumbel_noise(batch, 101)[2:, :50], sampling.gumbel_noise(last, 50))


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows, vocabulary", [(6, 1000), (13, 257), (1, 1), (6, 3)])
def test_the_kernel_draws_the_tokens_of_the_reference(num_rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    assert cases.sample_share(num_rows, vocabulary, dtype=dtype, device=DEVICE) == 0


@pytest.mark.triton
def test_the_kernel_never_draws_a_filtered_token() -> None:
    num_rows = 4
    logits = (2 * torch.randn(num_rows, 150, generator=torch.Generator().manual_seed(5))).round()
    for columns in ({"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.5}, {"top_k": 10, "top_p": 0.5}, {"top_p": 0.0}):
        batch = batch_of(num_rows, temperature=2.0, **columns)
        kept = sampling.kept_tokens(logits, batch)
        on_device = SamplingBatch(
            **{field.name: getattr(batch, field.name).to(DEVICE) for field in dataclasses.fields(batch)}
        )
        tokens = sampling.sample_triton(logits.to(DEVICE), on_device).cpu()
        assert bool(kept.gather(1, tokens[:, None]).all())


@pytest.mark.triton
def test_the_kernel_takes_masked_logits() -> None:
    logits = torch.full((4, 100), -torch.inf)
    logits[:, 7] = -3.0
    logits[1:3, 50] = -2.0
    batch = SamplingBatch(
        **{
            field.name: getattr(batch_of(4, temperature=0.5, top_k=5, top_p=0.9), field.name).to(DEVICE)
            for field in dataclasses.fields(SamplingBatch)
        }
    )
    tokens = sampling.sample_triton(logits.to(DEVICE), batch).cpu()
    assert set(tokens.tolist()) <= {7, 50}
    assert tokens[0] == tokens[3] == 7
