"""What a batch, or a recorded trace, asks of KV memory: for each request in turn, which blocks it reads and how much it adds.

A block is a number here. Two requests that name the same block share it; a block's place in `blocks` is its place in the prompt, so a
block is of use only where all blocks before it are there or computed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from batchllm.bounded_files import read_lines
from batchllm.errors import InputError
from batchllm.planner.plan import Plan

TRACE_BLOCK_TOKENS = 512
"""Tokens of one `hash_ids` block of a Mooncake trace."""


@dataclass(frozen=True, slots=True)
class Request:
    """`blocks`: whole blocks of the prompt, int64, that others may share. `num_private`: further blocks it fills by its end.

    `prompt_tokens` and `output_tokens` are what it reads and writes at most.
    """

    blocks: np.ndarray
    num_private: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests in the order in which they run, over blocks of `block_tokens` tokens numbered below `num_blocks`."""

    requests: list[Request]
    block_tokens: int
    num_blocks: int

    @property
    def working_set(self) -> int:
        """Distinct blocks of all prompts, those that nothing shares among them: what a cache that never gave up one would hold."""
        return self.num_blocks


def requests_of_plan(plan: Plan, *, block_size: int) -> Requests:
    """The plan's prompts in plan order. Shared blocks are those of the prefix tree; a prompt's own whole blocks are named too."""
    tree = plan.tree
    node_first = tree.start.astype(np.int64) // block_size
    owned = tree.end.astype(np.int64) // block_size - node_first
    offset = np.cumsum(owned) - owned
    num_blocks = int(owned.sum())
    requests = []
    for position in range(plan.num_prompts):
        path = tree.path(position)
        parts = [np.arange(offset[node], offset[node] + owned[node]) for node in path]
        prompt_tokens, output_tokens = int(plan.prompt_tokens[position]), int(plan.decode_tokens[position])
        num_own = prompt_tokens // block_size - (int(tree.end[path[-1]]) // block_size if path else 0)
        parts.append(np.arange(num_blocks, num_blocks + num_own))
        num_blocks += num_own
        # The last token generated is never read, so its KV needs no slot.
        num_filled = -(-(prompt_tokens + output_tokens - 1) // block_size)
        blocks = np.concatenate(parts)
        requests.append(Request(blocks, num_filled - len(blocks), prompt_tokens, output_tokens))
    return Requests(requests, block_size, num_blocks)


def read_trace(path: Path, *, limit: int | None = None) -> Requests:
    """A trace of JSON lines with `input_length`, `output_length` and `hash_ids`, in the file's order; the first `limit` of them.

    Raises InputError that names the line.
    """
    requests: list[Request] = []
    numbers: dict[int, int] = {}
    for line_number, line in enumerate(_lines(path), start=1):
        if limit is not None and len(requests) == limit:
            break
        try:
            prompt_tokens, output_tokens, ids = _trace_entry(line)
        except ValueError as error:
            raise InputError(f"{path}, line {line_number}: not a request of a trace: {error}") from None
        blocks = np.array([numbers.setdefault(identity, len(numbers)) for identity in ids], dtype=np.int64)
        requests.append(Request(blocks, -(-output_tokens // TRACE_BLOCK_TOKENS), prompt_tokens, output_tokens))
    if not requests:
        raise InputError(f"{path}: a trace without requests")
    return Requests(requests, TRACE_BLOCK_TOKENS, len(numbers))


_MOST_TOKENS = 1_000_000_000
"""Of a request: beyond any context."""


def _trace_entry(line: bytes) -> tuple[int, int, list[int]]:
    """`input_length`, `output_length` and `hash_ids` of a line. Raises ValueError that says what is wrong."""
    try:
        entry = json.loads(line)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(entry, dict):
        raise ValueError("must be a JSON object")
    lengths = []
    for key in ("input_length", "output_length"):
        value = entry.get(key)
        if type(value) is not int or not 0 <= value <= _MOST_TOKENS:
            raise ValueError(f"{key} must be a whole number from 0 to {_MOST_TOKENS:,}")
        lengths.append(value)
    ids = entry.get("hash_ids")
    if not isinstance(ids, list) or not all(type(identity) is int for identity in ids):
        raise ValueError("hash_ids must be a list of whole numbers")
    if len(set(ids)) != len(ids):
        raise ValueError("hash_ids names a block twice")
    return lengths[0], lengths[1], ids


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from read_lines(file)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def following_uses(requests: list[Request], num_blocks: int) -> list[np.ndarray]:
    """For each request, float64 as long as its `blocks`: the request that reads each next, or infinity.

    Of blocks that one request reads next, the deeper counts as needed later, by less than a whole request: without what comes before
    it in the prompt a block is of no use.
    """
    longest = max((len(request.blocks) for request in requests), default=0)
    depth = np.arange(longest) / (longest + 1)
    coming = np.full(num_blocks, np.inf)
    following: list[np.ndarray] = []
    for number in range(len(requests) - 1, -1, -1):
        blocks = requests[number].blocks
        following.append(coming[blocks])
        coming[blocks] = number + depth[: len(blocks)]
    following.reverse()
    return following
