"""A batch over tiers that a test, or a process that a test starts, can run: documents with a planted word, each asked several times.

python tier_job.py FOLDER [refuse ERRNO]     (keeps blocks in FOLDER; prints rows and tiers as JSON)
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batchllm.engine.decoder import kv_shape
from batchllm.engine.engine import Engine, EngineConfig
from batchllm.engine.transfer import TierSetup
from batchllm.kernels.checksum import copy_checksum
from batchllm.models.decoder import Decoder
from batchllm.models.random_model import SMALL, RandomWeights
from batchllm.ops import select_kernels
from batchllm.planner.plan import make_plan
from batchllm.planner.store import PromptStore
from batchllm.prompt import Completion, SamplingParams
from batchllm.storage.cost import CostTable, Rate
from batchllm.storage.disk import DiskOptions, DiskTier
from batchllm.storage.host import HostTier
from batchllm.storage.keys import KeyScope, root_key
from batchllm.storage.ring import open_queue
from batchllm.storage.store import TieredStore

ROOT = root_key(KeyScope(model=b"random", layout="test", dtype="test"))


@dataclass(frozen=True)
class Letters:
    """A vocabulary of 64 letters without an end."""

    eos_ids: frozenset[int] = frozenset()
    token_bytes: tuple[bytes, ...] = tuple(bytes([97 + number % 26]) for number in range(64))
    special_tokens: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Tiers:
    """Slots of each tier; `folder` None: no disk. `open_submissions` as for `DiskTier`."""

    host: int = 0
    disk: int = 0
    folder: Path | None = None
    persist: bool = False
    open_submissions: Callable[..., Any] = open_queue


@dataclass
class Ran:
    """Rows (tokens and log-probabilities) and what the tiers did."""

    rows: dict[int, Any]
    restored_tokens: int = 0
    backend: str = ""
    num_disk_hits: int = 0
    num_load_misses: int = 0
    num_disk_slots: int = 0


def make_decoder(dtype: torch.dtype = torch.float32) -> Decoder:
    device = torch.device("cpu")
    return Decoder(
        SMALL,
        RandomWeights(),
        dtype=dtype,
        device=device,
        kernels=select_kernels(device),
        fingerprint="random",
    )


def run(
    decoder: Decoder,
    tiers: Tiers | None,
    *,
    num_tokens: int = 120,
    block_size: int = 4,
    between: Callable[[], None] = lambda: None,
) -> Ran:
    """Four documents of 40 tokens with a planted word of four, each asked four times, in an order that scatters them.

    The pool holds `num_tokens` tokens. `between` is called between steps.
    """
    random = np.random.default_rng(5)
    documents = random.integers(0, 60, (4, 40))
    for number, document in enumerate(documents):
        document[12:16] = [60 + number, number, 63 - number, 60]
    prompts = [
        np.concatenate([documents[row % 4], random.integers(0, 60, 1 + row % 5)]).astype(np.int32) for row in range(16)
    ]
    scratch = tempfile.TemporaryDirectory()
    store = PromptStore(Path(scratch.name) / "prompts")
    params = SamplingParams(max_tokens=14, ignore_eos=True, logprobs=2)
    store.append_batch(
        row_index=np.arange(16),
        lengths=np.array([prompt.size for prompt in prompts], dtype=np.int32),
        tokens=np.concatenate(prompts),
        sampling_ids=np.full(16, store.intern_sampling(params), dtype=np.int32),
    )
    store.finish()
    setup = None if tiers is None else open_setup(tiers, block_bytes=kv_shape(decoder).block_bytes(block_size))
    engine = Engine(
        decoder=decoder,
        vocabulary=Letters(),
        store=store,
        plan=make_plan(store, prefix_sharing=True, keep_order=True),
        config=EngineConfig(
            block_size=block_size,
            num_blocks=-(-num_tokens // block_size),
            max_step_tokens=48,
            max_sequences=3,
        ),
        seed=3,
        started_at=time.monotonic(),
        tiers=setup,
    )
    answers: list[Completion] = []

    def deliver(completions: list[Completion]) -> None:
        answers.extend(completions)
        between()

    engine.run(deliver=deliver)
    if engine.mover is not None:
        engine.mover.store.check_integrity()
    engine.close()
    store.close()
    scratch.cleanup()
    ran = Ran({answer.row_index: [answer.error, answer.token_ids, answer.logprobs] for answer in answers})
    ran.restored_tokens = engine.metrics.restored_tokens
    if engine.mover is not None:
        ran.num_load_misses = engine.mover.counters.num_load_misses
        disk = engine.mover.store.disk
        if disk is not None:
            ran.backend, ran.num_disk_slots = disk.backend, disk.num_slots
            ran.num_disk_hits = disk.counters.num_hits
            assert disk.counters.num_in_flight == 0
    return ran


def open_setup(tiers: Tiers, *, block_bytes: int) -> TierSetup:
    """Tiers that always pay."""
    disk = None
    if tiers.folder is not None:
        disk = DiskTier(
            tiers.folder,
            fingerprint=ROOT,
            block_bytes=block_bytes,
            num_slots=tiers.disk,
            options=DiskOptions(persist=tiers.persist, depth=8, retry_after_s=0.001, max_retry_after_s=0.01),
            open_submissions=tiers.open_submissions,
            copy_checksum=copy_checksum,
        )
    host = HostTier(num_slots=tiers.host, block_bytes=block_bytes, num_spare=8 if disk is not None else 0)
    rates = dict.fromkeys((Rate.COPY_IN, Rate.COPY_OUT, Rate.DISK_READ, Rate.DISK_WRITE), 1e15)
    store = TieredStore(host=host, disk=disk, copy_checksum=copy_checksum)
    return TierSetup(store=store, costs=CostTable(rates), root=ROOT, persist=tiers.persist)


def refuse_io_uring(code: int) -> None:
    """A filter like a container's: io_uring_setup (425) fails with `code`, all else is allowed. Exits where there is no seccomp."""
    rules = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | code), (0x06, 0, 0, 0x7FFF0000)]
    program_text = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *rule) for rule in rules))
    program = struct.pack("<HxxxxxxQ", len(rules), ctypes.addressof(program_text))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) != 0 or libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0) != 0:
        print("no seccomp")
        sys.exit()


if __name__ == "__main__":
    torch.set_num_threads(1)
    is_slow = len(sys.argv) == 2
    if not is_slow:
        refuse_io_uring(int(sys.argv[3]))
    ran = run(
        make_decoder(),
        Tiers(host=2, disk=200, folder=Path(sys.argv[1]), persist=True),
        between=lambda: time.sleep(0.02 if is_slow else 0),
    )
    print(json.dumps({"rows": ran.rows, "backend": ran.backend, "restored_tokens": ran.restored_tokens}))
