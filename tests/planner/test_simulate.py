"""Replays: what the policies hit and move, on random requests, recorded traces and the sample jobs' plans."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchllm.planner.plan import make_plan
from batchllm.planner.requests import Request, Requests, read_trace, requests_of_plan
from batchllm.planner.simulate import Replay, Sizes, best_hits, simulate
from batchllm.planner.store import PromptStore
from batchllm.storage.cost import CostTable, Rate

JOBS = Path(__file__).resolve().parents[2] / "jobs"

SHARES = [0.10, 0.25, 0.50, 0.90]

SPLITS = {"pool and host": (0.5, 0.5, 0.0), "pool and disk": (0.25, 0.0, 0.75), "all three": (0.2, 0.3, 0.5)}
"""Of the capacity: pool, host, disk."""


def requests_of(*blocks: list[int], num_private: int = 0) -> Requests:
    requests = [Request(np.array(each), num_private, 512 * len(each), 1) for each in blocks]
    return Requests(requests, 512, 1 + max(block for each in blocks for block in each))


def split(requests: Requests, *, share: float, parts: tuple[float, float, float]) -> Sizes:
    """Sizes of `share` of the working set together; the pool holds the largest request in any case."""
    capacity = int(requests.working_set * share)
    largest = max(len(request.blocks) + request.num_private for request in requests.requests)
    return Sizes(max(largest, int(capacity * parts[0])), int(capacity * parts[1]), int(capacity * parts[2]))


def check_policies(requests: Requests, sizes: Sizes) -> tuple[Replay, Replay]:
    """Next use hits no less and moves no more than LRU, and no policy beats the optimum."""
    best, recent, alone = (
        simulate(requests, sizes=sizes, policy=name, block_bytes=1) for name in ("next-use", "lru", "none")
    )
    assert best.num_hits >= recent.num_hits
    assert best.moved_bytes <= recent.moved_bytes
    assert best.num_hits >= alone.num_hits
    assert alone.moved_bytes == 0
    assert best.num_hits <= best.optimum_hits
    for replay in (best, recent, alone):
        assert replay.num_hits + replay.computed_blocks == replay.num_accesses
    return best, recent


def test_what_the_pool_gave_up_comes_back_from_the_host() -> None:
    requests = requests_of([0, 1], [2, 3], [0, 1])
    replay = simulate(requests, sizes=Sizes(2, 2, 0), policy="next-use", block_bytes=100)
    assert (replay.pool_hits, replay.host_hits, replay.computed_blocks) == (0, 2, 4)
    assert (replay.host_bytes_in, replay.host_bytes_out) == (200, 200)
    assert simulate(requests, sizes=Sizes(2, 0, 2), policy="lru", block_bytes=100).disk_hits == 2
    assert simulate(requests, sizes=Sizes(2, 2, 0), policy="none", block_bytes=100).computed_blocks == 6


def test_a_block_behind_a_gap_is_computed_again() -> None:
    # The pool keeps two of three blocks at the front, the host none: the last one is lost.
    requests = requests_of([0, 1, 2], [3], [0, 1, 2])
    replay = simulate(requests, sizes=Sizes(3, 0, 0), policy="next-use", block_bytes=1)
    assert (replay.pool_hits, replay.computed_blocks) == (2, 5)


def test_sequences_at_once_hold_their_blocks_and_a_request_above_the_pool_is_refused() -> None:
    requests = requests_of([0, 1], [0, 2], [0, 3], list(range(4, 13)), num_private=1)
    replay = simulate(requests, sizes=Sizes(6, 0, 0, max_sequences=3), policy="next-use", block_bytes=1)
    assert (replay.num_refused, replay.num_requests, replay.num_accesses, replay.pool_hits) == (1, 4, 6, 2)


def test_the_optimum_counts_no_request_that_is_larger_than_the_pool() -> None:
    requests = requests_of([0, 1], [2, 3, 4, 5], [0, 1], [2, 3, 4, 5], [2, 3, 4, 5])
    replay = simulate(requests, sizes=Sizes(3, 9, 0), policy="next-use", block_bytes=1)
    assert (replay.num_refused, replay.num_hits, replay.optimum_hits) == (3, 2, 2)


def test_a_tier_that_does_not_pay_is_not_used_and_times_follow_the_rates() -> None:
    requests = requests_of([0, 1], [2, 3], [0, 1])
    rates = {Rate.PREFILL: 512.0, Rate.COPY_IN: 100.0, Rate.COPY_OUT: 50.0}
    dear = simulate(requests, sizes=Sizes(2, 2, 0), policy="next-use", block_bytes=1000, costs=CostTable(rates))
    assert (dear.moved_bytes, dear.compute_s, dear.transfer_s, dear.predicted_s) == (0, 6.0, 0.0, 6.0)
    cheap = simulate(requests, sizes=Sizes(2, 2, 0), policy="next-use", block_bytes=10, costs=CostTable(rates))
    assert cheap.compute_s == 4.0
    assert cheap.transfer_s == pytest.approx(20 / 100 + 20 / 50)
    no_rates = simulate(requests, sizes=Sizes(2, 2, 0), policy="next-use", block_bytes=10)
    assert no_rates.predicted_s is None and no_rates.num_hits == 2


def test_the_optimum_knows_the_future() -> None:
    requests = requests_of(*[[0], [1], [2]] * 4)
    # With two places, two of the three stay and the third is read anew each round.
    assert best_hits(requests, capacity=2) == 6
    assert best_hits(requests, capacity=3) == 9
    assert simulate(requests, sizes=Sizes(2, 0, 0), policy="lru", block_bytes=1).num_hits <= 1


PREFIXES = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 5)), min_size=2, max_size=25)


@settings(max_examples=60, deadline=None)
@given(
    prefixes=PREFIXES,
    pool=st.integers(9, 14),
    host=st.integers(0, 6),
    disk=st.integers(0, 6),
    sequences=st.integers(1, 3),
)
def test_any_requests_are_replayed_to_their_end_and_no_policy_beats_the_optimum(
    prefixes: list[tuple[int, int, int]], pool: int, host: int, disk: int, sequences: int
) -> None:
    # Four documents of four blocks; each request reads the beginning of one and a few blocks that only it and its like read.
    blocks = [[4 * document + i for i in range(length)] + [16 + own] for document, length, own in prefixes]
    requests = requests_of(*blocks)
    sizes = Sizes(pool, host, disk, max_sequences=sequences)
    for policy in ("next-use", "lru", "none"):
        replay = simulate(requests, sizes=sizes, policy=policy, block_bytes=1)
        assert replay.num_accesses == sum(map(len, blocks)) and replay.num_refused == 0
        assert replay.num_hits <= replay.optimum_hits


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_next_use_never_hits_less_nor_moves_more_than_lru_on_a_trace(
    shared_data: Callable[[str], Path], name: str, share: float
) -> None:
    requests = read_trace(shared_data(f"mooncake_traces/{name}_trace.jsonl"), limit=500)
    for where, parts in SPLITS.items():
        best, recent = check_policies(requests, split(requests, share=share, parts=parts))
        gap = best.optimum_rate - best.hit_rate
        print(
            f"{name} {share:.0%} {where}: {best.hit_rate:.2%}, LRU {recent.hit_rate:.2%}, {gap:.2%} below the optimum"
        )
        assert gap < 0.01


@pytest.fixture(scope="module")
def make_data() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_data", JOBS / "make_data.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["summarise", "docqa", "classify"])
def test_next_use_never_hits_less_nor_moves_more_than_lru_on_a_sample_jobs_plan(
    stage_prompts: Callable[..., PromptStore], make_data: ModuleType, name: str
) -> None:
    texts = make_data.documents()
    system = " ".join(["system"] * 30)
    if name == "docqa":
        prompts = [f"{row['document']} Question: {row['question']}" for row in make_data.docqa(texts).to_pylist()]
    elif name == "summarise":
        prompts = [row["text"] for row in make_data.python_docs(texts).to_pylist()]
    else:
        prompts = [f"{row['title']} {row['text']}" for row in make_data.classify(texts).to_pylist()]
    numbers: dict[str, int] = {}
    # One token a word: the sharing is that of the job.
    tokens = [[numbers.setdefault(word, len(numbers)) for word in f"{system} {prompt}".split()] for prompt in prompts]
    store = stage_prompts(tokens, [48] * len(tokens))
    for keep_order in (False, True):
        plan = make_plan(store, prefix_sharing=True, keep_order=keep_order)
        requests = requests_of_plan(plan, block_size=16)
        for share in SHARES:
            for parts in SPLITS.values():
                check_policies(requests, split(requests, share=share, parts=parts))
