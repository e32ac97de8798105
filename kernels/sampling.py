"""Sampling one token a row by the Gumbel-max trick, with top-k, top-p and min-p.

Per row, with z = logits / temperature:  token = argmax over kept tokens of  z + g,   g = -log(-log(1 - v)),   v
uniform in (0, 1).

Noise is counter-based: v of token t is word t % 4 of Philox-4x32-10 (Salmon et al., SC 2011) with the row's seed as
key and (t // 4, step, stream low word, stream high word) as counter. So a row's tokens depend on its own seed, stream
and step alone, never on its batch. Temperature 0 takes the largest logit, the lowest index among equals, and no
noise.

Filters, each a threshold on z, and equals at a threshold all stay, so that no order among them matters:
    top_k: the k-th largest value
    top_p: the largest value such that the tokens at or above it hold `top_p` of the mass that top_k left
    min_p: log(min_p) below the largest

Bound: memory, the logits. On a GPU one program takes one row and never sorts, nor divides by the softmax's sum: a
threshold is found digit by digit in the ordered bit pattern of the logits, 4 bits a pass, each pass weighing 16
candidates at once. A greedy row reads its logits once, a row without filters twice, and top-k and top-p read them 8 and
9 times more, from the second-level cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from batchllm.kernels.launch import jit, launch, tl
from batchllm.kernels.tuning import exact_config, launch_options

_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How each row is sampled; all [num_rows], contiguous, on the logits' device.

    `temperature` float32, 0 for greedy. `top_k` int32, 0 or less for off. `top_p` float32, 1 for off. `min_p` float32,
    0 for off.
    `seed` int64, `stream` int64 (which row and which of its samples), `step` int32 (how many tokens it has).
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    stream: torch.Tensor
    step: torch.Tensor


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """`logits` [num_rows, vocabulary], any float dtype -> token ids int64 [num_rows]. Logits may be -inf, not NaN or
    +inf."""
    wide = logits.float()
    greedy = batch.temperature <= 0
    scaled = (wide - wide.amax(dim=-1, keepdim=True)) / torch.where(greedy, 1.0, batch.temperature)[:, None]
    noisy = (scaled + gumbel_noise(batch, logits.shape[1])).masked_fill(~kept_tokens(logits, batch), -torch.inf)
    scores = torch.where(greedy[:, None], scaled, noisy)
    return (scores == scores.amax(dim=-1, keepdim=True)).to(torch.uint8).argmax(dim=-1)


def kept_tokens(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """bool [num_rows, vocabulary]: what the filters leave. The largest logit always stays."""
    wide = logits.double()
    vocabulary = logits.shape[1]
    scaled = (wide - wide.amax(dim=-1, keepdim=True)) / torch.where(batch.temperature <= 0, 1.0, batch.temperature)[
        :, None
    ]
    descending = scaled.sort(dim=-1, descending=True).values
    num_kept = torch.where(batch.top_k > 0, batch.top_k, vocabulary).clamp(max=vocabulary).long()
    threshold = descending.gather(1, num_kept[:, None] - 1)
    mass = torch.where(descending >= threshold, descending.exp(), 0.0).cumsum(dim=-1)
    wanted = (batch.top_p.double()[:, None] * mass[:, -1:]).clamp(max=mass[:, -1:])
    nucleus = descending.gather(1, (mass >= wanted).to(torch.uint8).argmax(dim=-1, keepdim=True))
    threshold = torch.where(batch.top_p[:, None] < 1, torch.maximum(threshold, nucleus), threshold)
    # log(0) = -inf is the filter switched off.
    return scaled >= torch.maximum(threshold, batch.min_p.double().log()[:, None])


def gumbel_noise(batch: SamplingBatch, vocabulary: int) -> torch.Tensor:
    """float32 [num_rows, vocabulary]."""
    block = torch.arange(-(-vocabulary // 4), device=batch.seed.device)[None, :]
    shape = (batch.seed.shape[0], block.shape[1])
    counter = [
        block,
        batch.step.long()[:, None] & _WORD,
        batch.stream[:, None] & _WORD,
        (batch.stream[:, None] >> 32) & _WORD,
    ]
    key = (batch.seed[:, None] & _WORD, (batch.seed[:, None] >> 32) & _WORD)
    words = torch.stack(philox([word.expand(shape) for word in counter], key), dim=-1).flatten(1)[:, :vocabulary]
    uniform = ((words.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def philox(counter: list[torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """Philox-4x32-10: four words from a counter of four and a key of two, each an int64 tensor holding 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low_0, high_0 = _multiply_words(c0, 0xD2511F53)
        low_1, high_1 = _multiply_words(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return [c0, c1, c2, c3]


def _multiply_words(words: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Low and high word of a 32 x 32-bit product, by halves: the product itself does not fit a signed 64-bit
    integer."""
    low_part = (words & 0xFFFF) * factor
    high_part = (words >> 16) * factor + (low_part >> 16)
    return ((high_part << 16) | (low_part & 0xFFFF)) & _WORD, high_part >> 16


@jit()
def _ordered_key(logits: tl.tensor) -> tl.tensor:
    """float32 as uint32 that sorts the same way."""
    bits = logits.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@jit()
def _search_threshold(
    row: tl.tensor,
    vocabulary: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    floor: tl.tensor,
    target: tl.tensor,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The largest key such that the tokens at or above it, and above `floor`, weigh `target`: as counts, or as exp(z)
    by mass."""
    digit = tl.arange(0, 16)
    found = floor * 0
    for level in range(8):
        candidates = found | (digit << (28 - 4 * level)).to(tl.uint32)
        weights = tl.zeros([BLOCK, 16], tl.float32)
        for start in range(0, vocabulary, BLOCK):
            token = start + tl.arange(0, BLOCK)
            logits = tl.load(row + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
            key = _ordered_key(logits)
            weight = tl.full([BLOCK], 1.0, tl.float32)
            if BY_MASS:
                weight = tl.exp((logits - peak) / temperature)
            weight = tl.where((token < vocabulary) & (key >= floor), weight, 0.0)
            weights += tl.where(key[:, None] >= candidates[None, :], weight[:, None], 0.0)
        # Weights fall with the digit, so the last digit that still reaches the target is their number less one.
        reached = tl.sum((tl.sum(weights, 0) >= target).to(tl.int32), 0)
        found = found | (tl.maximum(reached - 1, 0) << (28 - 4 * level)).to(tl.uint32)
    return found


@jit()
def _sample_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    seed: tl.tensor,
    stream: tl.tensor,
    step: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    vocabulary: tl.tensor,
    BLOCK: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
) -> None:
    number = tl.program_id(0)
    row = logits + number.to(tl.int64) * row_stride
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = lane
    for start in range(0, vocabulary, BLOCK):
        token = start + lane
        value = tl.load(row + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
        index = tl.where(value > best, token, index)
        best = tl.maximum(best, value)
    peak = tl.max(best, 0)
    heat = tl.load(temperature + number)
    if heat > 0:
        floor = tl.full([], 0, tl.uint32)
        num_kept = tl.load(top_k + number)
        if (num_kept > 0) & (num_kept < vocabulary):
            floor = _search_threshold(row, vocabulary, peak, heat, floor, num_kept.to(tl.float32), False, SEARCH_BLOCK)
        nucleus = tl.load(top_p + number)
        if nucleus < 1:
            mass = tl.zeros([BLOCK], tl.float32)
            for start in range(0, vocabulary, BLOCK):
                token = start + lane
                value = tl.load(row + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
                mass += tl.where(_ordered_key(value) >= floor, tl.exp((value - peak) / heat), 0.0)
            # A share of 0 still takes the largest logit.
            wanted = tl.maximum(tl.sum(mass, 0) * nucleus, 1e-30)
            # Sums of other lanes may round to less than what is wanted of all; then top-k alone holds.
            nucleus_floor = _search_threshold(row, vocabulary, peak, heat, floor, wanted, True, SEARCH_BLOCK)
            floor = tl.maximum(floor, nucleus_floor)
        least = tl.load(min_p + number)
        lowest = tl.where(least > 0, tl.log(tl.maximum(least, 1e-30)), float("-inf"))
        key = tl.load(seed + number)
        source = tl.load(stream + number)
        count = tl.load(step + number)
        quarter = tl.arange(0, BLOCK // 4)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        index = lane
        for start in range(0, vocabulary, BLOCK):
            token = start + lane
            value = tl.load(row + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
            zeros = quarter * 0
            w0, w1, w2, w3 = tl.philox(
                key,
                start // 4 + quarter,
                zeros + count,
                zeros + (source & 0xFFFFFFFF).to(tl.int32),
                zeros + (source >> 32).to(tl.int32),
            )
            words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
            uniform = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
            # log(1 - v) by its series where 1 - v would round away what makes small v differ.
            series = uniform * (1.0 + uniform * (0.5 + uniform * 0.33333334))
            exponential = tl.where(uniform < 0.01, series, -tl.log(1.0 - uniform))
            scaled = (value - peak) / heat
            kept = (token < vocabulary) & (_ordered_key(value) >= floor) & (scaled >= lowest)
            score = tl.where(kept, scaled - tl.log(exponential), float("-inf"))
            index = tl.where(score > best, token, index)
            best = tl.maximum(best, score)
        peak = tl.max(best, 0)
    tl.store(out + number, tl.min(tl.where(best == peak, index, 2147483647), 0).to(tl.int64))


def sample_triton(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """`sample` on a GPU; rows of `logits` may have any stride. Nothing waits for the device."""
    num_rows, vocabulary = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    config = exact_config("sample", "any", logits.device)
    launch(
        _sample_kernel,
        (num_rows,),
        device=logits.device,
        arguments={
            "logits": logits,
            "temperature": batch.temperature,
            "top_k": batch.top_k,
            "top_p": batch.top_p,
            "min_p": batch.min_p,
            "seed": batch.seed,
            "stream": batch.stream,
            "step": batch.step,
            "out": out,
            "row_stride": logits.stride(0),
            "vocabulary": vocabulary,
            "BLOCK": config["block"],
            "SEARCH_BLOCK": config["search_block"],
        },
        options=launch_options(config),
    )
    return out
