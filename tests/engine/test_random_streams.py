"""The counter-based generator against its published answers, and what its streams depend on."""

from __future__ import annotations

import numpy as np

from batchllm.engine.random_streams import philox, stream_key, uniforms


def test_philox_gives_the_published_answer_for_zero() -> None:
    zero = np.zeros(1, dtype=np.uint64)
    assert [int(word[0]) for word in philox(zero, zero)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_uniforms_are_spread_over_the_unit_interval() -> None:
    values = uniforms(np.full(50_000, 17, dtype=np.uint64), np.arange(50_000))
    assert values.min() >= 0.0
    assert values.max() < 1.0
    counts = np.histogram(values, bins=100, range=(0.0, 1.0))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 99 + 4 * np.sqrt(2 * 99)


def test_a_draw_depends_on_its_own_key_and_position_only() -> None:
    keys = np.array([3, 2**64 - 1, 3], dtype=np.uint64)
    positions = np.array([0, 5, 2**40])
    together = uniforms(keys, positions)
    alone = [uniforms(keys[row : row + 1], positions[row : row + 1])[0] for row in range(3)]
    assert together.tolist() == alone
    assert len(set(alone)) == 3


def test_stream_keys_do_not_mix_up_their_parts() -> None:
    keys = {
        stream_key(job_seed=job_seed, row_seed=row_seed, row_index=row_index, sample_index=sample_index)
        for job_seed in (1, 11, -1)
        for row_seed in (None,)
        for row_index in (1, 11)
        for sample_index in (1, 11)
    }
    assert len(keys) == 12
    own = stream_key(job_seed=1, row_seed=1, row_index=1, sample_index=1)
    assert own not in keys
    assert own == stream_key(job_seed=2, row_seed=1, row_index=2, sample_index=1)
