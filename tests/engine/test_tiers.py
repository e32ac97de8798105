"""The engine over real tiers: the same tokens whatever leaves the pool and wherever it comes back from."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchllm.engine.decoder import kv_shape
from batchllm.engine.engine import Engine, EngineConfig
from batchllm.engine.tier_report import report_tiers
from batchllm.engine.tier_setup import DiskRequest, TierRequest, open_tiers
from batchllm.errors import JobError
from batchllm.models.decoder import Decoder
from batchllm.models.random_model import SMALL, RandomWeights
from batchllm.ops import select_kernels
from batchllm.planner.plan import make_plan
from batchllm.prompt import Completion, SamplingParams
from batchllm.storage.keys import KeyScope

pytestmark = pytest.mark.usefixtures("tiers_always_pay")


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    device = torch.device("cpu")
    return Decoder(
        SMALL,
        RandomWeights(seed=1),
        dtype=torch.float32,
        device=device,
        kernels=select_kernels(device),
        fingerprint="random-1",
    )


@dataclass
class Job:
    """One batch: documents of three, each with questions, in an order that scatters the documents."""

    list_prompts: Callable[..., Any]
    vocabulary: Any
    decoder: Decoder

    def engine(
        self, request: TierRequest | None, *, blocks: int, fingerprint: str = "random-1", sequences: int = 4
    ) -> Engine:
        random = np.random.default_rng(5)
        documents = [random.integers(0, 60, 37).tolist() for _ in range(3)]
        prompts = [documents[row % 3] + random.integers(0, 60, 1 + row % 5).tolist() for row in range(12)]
        params = [
            SamplingParams(max_tokens=12 + row % 7, ignore_eos=True, temperature=float(row % 2), repetition_penalty=1.1)
            for row in range(12)
        ]
        store = self.list_prompts(prompts, params)
        plan = make_plan(store, prefix_sharing=True, keep_order=True)
        tiers = None
        if request is not None:
            tiers = open_tiers(
                request,
                scope=KeyScope(model=fingerprint.encode(), layout="test", dtype="float32"),
                block_bytes=kv_shape(self.decoder).block_bytes(4),
                block_size=4,
                most_blocks=1000,
            )
        return Engine(
            decoder=self.decoder,
            vocabulary=self.vocabulary,
            store=store,
            plan=plan,
            config=EngineConfig(
                block_size=4,
                num_blocks=blocks,
                max_step_tokens=48,
                max_sequences=sequences,
                evict_least_recent=request is not None and request.policy == "lru",
            ),
            seed=3,
            started_at=time.monotonic(),
            tiers=tiers,
        )


@pytest.fixture
def job(list_prompts: Any, stub_vocabulary: Any, decoder: Decoder) -> Job:
    return Job(list_prompts, stub_vocabulary, decoder)


def run(engine: Engine, *, evict_everything: bool = False) -> dict[int, Completion]:
    """All completions; between any two steps every sequence is preempted and every shared block evicted, if asked."""
    answers: dict[int, Completion] = {}
    scheduler = engine.scheduler
    steps_left = 3000
    while not scheduler.done:
        answers |= {completion.row_index: completion for completion in engine.step()}
        steps_left -= 1
        assert steps_left, "no progress"
        if evict_everything and steps_left > 2850:
            for slot in scheduler.table.running[~scheduler.table.is_restoring[scheduler.table.running]]:
                scheduler.preempt(int(slot))
            scheduler.residency.evict(scheduler.pool.num_blocks, keep=set(), position=0)
    scheduler.check_integrity()
    if engine.mover is not None:
        engine.mover.store.check_integrity()
    engine.close()
    return answers


def request(
    tmp_path: Path,
    *,
    host: int | str = 0,
    disk: int | str | None = None,
    policy: str = "next-use",
    persist: bool = False,
) -> TierRequest:
    size = None if disk is None else DiskRequest(tmp_path / "spill", disk, max_age_s=1e6)  # type: ignore[arg-type]
    return TierRequest(host_bytes=host, disk=size, policy=policy, persist=persist)  # type: ignore[arg-type]


def texts(answers: dict[int, Completion]) -> dict[int, tuple[list[int], str | None, str, int]]:
    return {row: (a.token_ids, a.text, a.finish_reason, a.prompt_tokens) for row, a in answers.items()}


BLOCK_BYTES = 4096

TIERS = {
    "host": {"host": 1000 * BLOCK_BYTES},
    "disk": {"disk": 1000 * BLOCK_BYTES},
    "host over disk": {"host": 8 * BLOCK_BYTES, "disk": 1000 * BLOCK_BYTES},
    "host of one block": {"host": BLOCK_BYTES},
    "host of none over a disk of one slot": {"disk": BLOCK_BYTES},
    "disk of none": {"disk": BLOCK_BYTES - 1},
    "auto": {"host": "auto", "disk": "auto"},
}


@pytest.mark.parametrize("evict_everything", [False, True], ids=["small pool", "everything evicted between steps"])
@pytest.mark.parametrize("policy", ["next-use", "lru", "recompute"])
@pytest.mark.parametrize("sizes", TIERS.values(), ids=TIERS.keys())
def test_tokens_are_the_same_with_any_tiers_and_policy(
    job: Job, tmp_path: Path, sizes: dict[str, Any], policy: str, evict_everything: bool
) -> None:
    expected = texts(run(job.engine(None, blocks=400)))
    engine = job.engine(request(tmp_path, **sizes, policy=policy), blocks=20)
    assert texts(run(engine, evict_everything=evict_everything)) == expected


def test_a_preempted_sequence_loses_no_work_to_a_host_tier(job: Job, tmp_path: Path) -> None:
    engine = job.engine(request(tmp_path, host=1000 * BLOCK_BYTES), blocks=20)
    answers = run(engine, evict_everything=True)
    assert engine.metrics.preemptions > 20
    assert sum(answer.restored_tokens for answer in answers.values()) == engine.metrics.restored_tokens > 200
    # Only the token whose logits are wanted is computed again.
    assert engine.metrics.recomputed_tokens <= engine.metrics.preemptions
    assert engine.mover is not None
    report = report_tiers(engine.mover, engine.metrics)
    assert report.num_load_misses == 0
    assert report.tiers[0].bytes_out == report.num_loads * kv_shape(job.decoder).block_bytes(4)


def test_the_second_night_starts_from_the_shared_prefixes_of_the_first(job: Job, tmp_path: Path) -> None:
    first = job.engine(request(tmp_path, disk=1000 * BLOCK_BYTES, persist=True), blocks=400)
    expected = texts(run(first))
    assert first.metrics.restored_tokens == 0
    second = job.engine(request(tmp_path, disk=1000 * BLOCK_BYTES, persist=True), blocks=400)
    answers = run(second)
    assert texts(answers) == expected
    tree = make_plan(second.records.store, prefix_sharing=True).tree
    shared = int(tree.end[tree.leaf_node].sum())
    assert sum(answer.cached_tokens for answer in answers.values()) == shared
    assert first.metrics.cached_prompt_tokens < shared


def test_another_models_cache_is_not_used(job: Job, tmp_path: Path) -> None:
    run(job.engine(request(tmp_path, disk=1000 * BLOCK_BYTES, persist=True), blocks=400))
    other = job.engine(request(tmp_path, disk=1000 * BLOCK_BYTES, persist=True), blocks=400, fingerprint="random-2")
    run(other)
    assert other.metrics.restored_tokens == 0


def test_a_spill_folder_that_cannot_be_made_is_one_line(job: Job, tmp_path: Path) -> None:
    (tmp_path / "spill").write_text("in the way")
    with pytest.raises(JobError, match=r"engine\.kv\.disk"):
        job.engine(request(tmp_path, disk=1000 * BLOCK_BYTES), blocks=20)


@pytest.mark.parametrize("host_blocks", [6, 10, 14])
def test_a_small_host_tier_by_next_use_restores_no_less_than_by_recency(
    job: Job, tmp_path: Path, host_blocks: int
) -> None:
    restored = {}
    for policy in ("next-use", "lru"):
        engine = job.engine(request(tmp_path, host=host_blocks * BLOCK_BYTES, policy=policy), blocks=24, sequences=2)
        run(engine)
        restored[policy] = engine.metrics.restored_tokens
        assert engine.mover is not None and engine.mover.store.host is not None
        assert engine.mover.counters.num_load_misses == 0
    assert restored["next-use"] >= restored["lru"]
    assert restored["next-use"] > 0


def test_a_host_tier_is_not_clogged_by_blocks_that_the_pool_has_again(job: Job, tmp_path: Path) -> None:
    engine = job.engine(request(tmp_path, host=40 * BLOCK_BYTES), blocks=40, sequences=3)
    run(engine, evict_everything=True)
    assert engine.metrics.preemptions > 100
    assert engine.metrics.computed_prompt_tokens < 1000 < 6 * engine.metrics.restored_tokens


def test_a_host_tier_has_no_more_slots_than_the_batch_has_blocks(job: Job, tmp_path: Path) -> None:
    engine = job.engine(request(tmp_path, host=10**6 * BLOCK_BYTES), blocks=20)
    assert engine.mover is not None and engine.mover.store.host is not None
    assert engine.mover.store.host.num_slots == 1000
    engine.close()


def test_a_disk_tier_takes_no_more_room_than_the_batch_has_blocks_unless_it_is_kept(job: Job, tmp_path: Path) -> None:
    for persist, num_slots in ((False, 1000), (True, 3000)):
        engine = job.engine(request(tmp_path / str(persist), disk=3000 * BLOCK_BYTES, persist=persist), blocks=20)
        assert engine.mover is not None and engine.mover.store.disk is not None
        assert engine.mover.store.disk.num_slots == num_slots
        engine.close()


def test_a_kept_disk_tier_of_automatic_size_does_not_shrink_for_a_small_batch(tmp_path: Path) -> None:
    disk = DiskRequest(folder=tmp_path, size_bytes="auto", max_age_s=1e9)
    kept = TierRequest(host_bytes=0, disk=disk, policy="next-use", persist=True)
    scope = KeyScope(model=b"model", layout="test", dtype="float32")

    def num_slots(most: int) -> int:
        tiers = open_tiers(kept, scope=scope, block_bytes=BLOCK_BYTES, block_size=4, most_blocks=most)
        assert tiers is not None and tiers.store.disk is not None
        slots = tiers.store.disk.num_slots
        tiers.store.close()
        return slots

    assert [num_slots(50), num_slots(3), num_slots(60)] == [50, 50, 60]


def test_more_host_memory_than_there_is_is_refused_by_key_and_leaves_no_file_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(JobError, match=r"engine\.kv\.host: the system does not give [0-9,]+ bytes of memory"):
        open_tiers(
            request(tmp_path, host=1 << 62, disk=8 * BLOCK_BYTES, persist=True),
            scope=KeyScope(model=b"model", layout="test", dtype="float32"),
            block_bytes=BLOCK_BYTES,
            block_size=4,
            most_blocks=1 << 50,
        )
    assert len(os.listdir("/proc/self/fd")) == before
