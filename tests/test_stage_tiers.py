"""Stages that continue a conversation over tiers: what was computed of it comes back, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchllm import Job, run

pytestmark = pytest.mark.usefixtures("tiers_always_pay")

BLOCK = 8
TEXTS = [f"the engine reads row {number} and the document below answers it" for number in range(6)]
ANSWER = {"regex": "[a-z ]{30,50}"}  # text that has one reading in tokens, so that the next prompt has the very tokens
TURNS = [
    {"name": "first", "prompt": {"system": "Be brief.", "template": "Tell of {{ text }}"}, "output": ANSWER},
    {"name": "second", "prompt": {"continue": True, "template": "Why, after all?"}, "output": ANSWER},
    {"name": "third", "prompt": {"continue": True, "template": "And then, in the end, what?"}},
]
MakeJob = Callable[..., Job]


@pytest.fixture
def make_job(chat_model: Path, tmp_path: Path) -> MakeJob:
    """A function (number of turns, `engine.kv`, other engine settings) -> a job; "spill" in `kv` becomes a disk tier."""

    def make(num_turns: int, kv: dict[str, Any], **engine: Any) -> Job:
        if kv.pop("spill", False):
            kv["disk"] = {"path": str(tmp_path / "spill"), "size": "64MiB"}
        return Job(
            model=str(chat_model),
            stages=TURNS[:num_turns],  # type: ignore[arg-type]
            sampling={"max_tokens": 60, "temperature": 0.7},  # type: ignore[arg-type]
            output={"token_ids": True},  # type: ignore[arg-type]
            engine={"dtype": "fp32", "device": "cpu", "block_size": BLOCK, "kv": kv, **engine},  # type: ignore[arg-type]
        )

    return make


def rows_of(job: Job) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run(job, pa.table({"text": TEXTS})).to_table().to_pylist()
    return found


def said(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (row["completion"], row["token_ids"], row["prompt_tokens"], row["finish_reason"], row["error"]) for row in rows
    ]


def tokens_so_far(row: dict[str, Any]) -> int:
    """Tokens of a row's conversation whose keys and values its stage computed: all but the last one generated."""
    return int(row["prompt_tokens"] + row["completion_tokens"] - 1)


KINDS = {
    "host": {"host": "64MiB"},
    "lru": {"host": "64MiB", "policy": "lru"},
    "persistent": {"host": "64MiB", "spill": True, "persist": True},
}


@pytest.mark.parametrize("kv", KINDS.values(), ids=KINDS.keys())
def test_the_second_turn_computes_only_what_follows_the_conversation_so_far(
    make_job: MakeJob, kv: dict[str, Any]
) -> None:
    first = rows_of(make_job(1, {}))
    plain = rows_of(make_job(2, {}))
    rows = rows_of(make_job(2, dict(kv)))
    assert said(rows) == said(plain)
    covered = [tokens_so_far(row) // BLOCK * BLOCK for row in first]
    assert [row["cached_tokens"] for row in rows] == covered
    # What rows share comes back once and is in the pool for the others.
    assert sum(row["restored_tokens"] for row in rows) > sum(covered) / 2
    assert all(row["restored_tokens"] == 0 for row in plain)
    assert sum(row["cached_tokens"] for row in plain) < sum(covered) / 2


def test_the_third_turn_finds_what_the_second_found_and_what_it_added(make_job: MakeJob) -> None:
    second = rows_of(make_job(2, {}))
    rows = rows_of(make_job(3, {"host": "64MiB"}))
    assert said(rows) == said(rows_of(make_job(3, {})))
    assert [row["cached_tokens"] for row in rows] == [tokens_so_far(row) // BLOCK * BLOCK for row in second]


SMALL = {
    "host": {"host": "24KiB"},
    "host over disk": {"host": "8KiB", "spill": True},
    "none": {"policy": "recompute", "host": "64MiB"},
}


@pytest.mark.parametrize("kv", SMALL.values(), ids=SMALL.keys())
def test_a_pool_and_tiers_too_small_for_the_batch_change_no_row(make_job: MakeJob, kv: dict[str, Any]) -> None:
    plain = rows_of(make_job(3, {}))
    kv = {"device": "160KiB", **kv}
    assert said(rows_of(make_job(3, kv, max_sequences=3, max_step_tokens=40))) == said(plain)


def test_a_run_over_tiers_reports_all_its_stages_at_once(make_job: MakeJob) -> None:
    result = run(make_job(3, {"host": "64MiB"}), pa.table({"text": TEXTS}))
    tiers = result.summary.tiers
    assert tiers is not None and tiers.num_load_misses == 0
    last = sum(row["restored_tokens"] for row in result.to_table().to_pylist())
    assert tiers.restored_tokens > last > 0
    assert tiers.num_loads * BLOCK >= tiers.restored_tokens
