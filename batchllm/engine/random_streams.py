"""One random number per (stream, position), from Philox4x32-10: a counter-based generator, without state to carry.

A stream's key is a hash of where the sample stands, and the counter is the number of tokens generated so far. So a
draw depends on nothing else: not on neighbours in the batch, not on the order of the job, not on preemption or a
resume.
"""

from __future__ import annotations

import hashlib

import numpy as np

_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_NUM_ROUNDS = 10


def stream_key(*, job_seed: int, row_seed: int | None, row_index: int, sample_index: int) -> int:
    """The 64-bit key of one sample's stream.

    Without a seed of its own a row draws from (job seed, row index, sample index), so equal prompts in two rows get
    different samples. With `row_seed` the stream is (row seed, sample index): two rows with the same prompt and seed
    get equal samples.
    """
    name = f"job:{job_seed}:{row_index}" if row_seed is None else f"row:{row_seed}"
    digest = hashlib.blake2b(f"{name}:{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def philox(counters: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Philox4x32-10 of counters below 2**64 under 64-bit keys: four words, each uint64 `[n]` below 2**32."""
    counters = counters.astype(np.uint64)
    keys = keys.astype(np.uint64)
    words = (counters & _MASK, counters >> _SHIFT, np.zeros_like(counters), np.zeros_like(counters))
    key_low, key_high = keys & _MASK, keys >> _SHIFT
    for _ in range(_NUM_ROUNDS):
        first, second = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = (
            (second >> _SHIFT) ^ words[1] ^ key_low,
            second & _MASK,
            (first >> _SHIFT) ^ words[3] ^ key_high,
            first & _MASK,
        )
        key_low, key_high = (key_low + _KEY_STEPS[0]) & _MASK, (key_high + _KEY_STEPS[1]) & _MASK
    return words


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One float64 in [0, 1) for each stream key (uint64 `[n]`) at its position (tokens generated so far, `[n]`)."""
    high, low, _, _ = philox(positions, keys)
    bits = (high << np.uint64(21)) | (low >> np.uint64(11))
    return bits.astype(np.float64) * 2.0**-53
