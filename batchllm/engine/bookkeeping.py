"""What a block's way to the tiers and back costs beside its bytes: names, books and handles, rehearsed on this machine."""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

from batchllm.engine.blocks import BlockPool
from batchllm.engine.metrics import TransferCounters
from batchllm.engine.offload import Offload
from batchllm.engine.transfer import HostMover
from batchllm.planner.tree import PrefixTree
from batchllm.storage.cost import CostTable, Rate
from batchllm.storage.host import HostTier
from batchllm.storage.keys import KEY_BYTES
from batchllm.storage.store import TieredStore

_NUM_BLOCKS = 12
_NUM_ROUNDS = 9
_BLOCK_SIZE = 16
_BLOCK_BYTES = 64  # copied in next to no time
_SWEEP_BYTES = 64 << 20
"""Read before each round: between two steps of a model, its weights have pushed everything else out of the caches. With warm ones a block
costs half."""


def measure_block_s() -> float:
    """Seconds for a block that leaves the pool with a shared prefix and comes back: the middle one of some rounds. Takes about 0.1 s."""
    num_tokens = _NUM_BLOCKS * _BLOCK_SIZE
    tree = PrefixTree(
        parent=np.array([-1], dtype=np.int32),
        start=np.array([0], dtype=np.int32),
        end=np.array([num_tokens], dtype=np.int32),
        first=np.array([0]),
        last=np.array([2]),
        leaf_node=np.zeros(2, dtype=np.int32),
    )
    pool = BlockPool(_NUM_BLOCKS)
    blocks = pool.allocate(_NUM_BLOCKS)
    mover = HostMover(
        pool=torch.zeros((_NUM_BLOCKS, _BLOCK_BYTES), dtype=torch.uint8),
        store=TieredStore(host=HostTier(num_slots=_NUM_BLOCKS, block_bytes=_BLOCK_BYTES), disk=None),
        costs=CostTable({Rate.COPY_OUT: 1.0, Rate.COPY_IN: 1.0}),  # without a rate of prefill a tier always pays
        counters=TransferCounters(),
    )
    sweep = np.ones(_SWEEP_BYTES // 8)
    times = []
    for start in range(_NUM_ROUNDS):
        sweep.sum()
        times.append(_round_s(tree, pool, blocks, mover, np.arange(num_tokens) + start))
    mover.close()
    return statistics.median(times) / _NUM_BLOCKS


def _round_s(tree: PrefixTree, pool: BlockPool, blocks: np.ndarray, mover: HostMover, tokens: np.ndarray) -> float:
    """Seconds of one round for all blocks; the store is empty before and after."""
    offload = Offload(mover=mover, root=bytes(KEY_BYTES), tree=tree, pool=pool, block_size=_BLOCK_SIZE, persist=False)
    held = blocks.tolist()
    began_s = time.perf_counter()
    offload.note_release(0, num_blocks=len(held), last_use=False)
    offload.save_node([0], blocks=held, tail=-1, tokens=tokens, next_use=1, last_use=False)
    offload.prefetch(lambda node: 1, position=0)
    restorable = offload.find([0], tokens=tokens, saved_tokens=0, num_blocks=0)
    offload.begin_restore(0, restorable, blocks=blocks, blocks_before=0)
    ((_slot, restored_tokens),) = offload.poll(0.0)
    offload.note_release(0, num_blocks=len(held), last_use=True)
    elapsed_s = time.perf_counter() - began_s
    assert restored_tokens == tokens.size, "a block that was saved is there"
    return elapsed_s
