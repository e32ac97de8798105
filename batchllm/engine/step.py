"""From a scheduled step to arrays: rows, slots, and the attention plan of work items. Array work only; no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchllm.engine.scheduled import ScheduledStep
from batchllm.engine.scheduler import Scheduler
from batchllm.planner.demand import FRONT_STEPS


@dataclass(frozen=True, slots=True)
class KvReads:
    """Tokens whose keys and values are read, what several rows read together once, and the reads that this spares."""

    num_read: int
    num_spared: int


@dataclass(frozen=True, slots=True)
class PlanArrays:
    """The arrays of `batchllm.kernels.attention.AttentionPlan`, which see; all int32."""

    positions: np.ndarray
    tables: np.ndarray
    block_table: np.ndarray
    items: np.ndarray
    merge_rows: np.ndarray
    merge_start: np.ndarray
    merge_partials: np.ndarray
    num_partials: int
    last_items: np.ndarray | None = None

    def reads_of(self, num_rows: int) -> KvReads:
        """What the first `num_rows` rows read, whole items."""
        items = self.items[self.items[:, 0] < num_rows].astype(np.int64)
        shared = items[:, 4] - items[:, 2]
        num_read = int(shared.sum())
        forks = items[items[:, 4] < items[:, 3]]
        if len(forks):
            # Behind the front of an item that forks each row reads alone.
            rows, fork = _rows_of(forks)
            num_read += int((np.minimum(forks[fork, 3], self.positions[rows] + 1) - forks[fork, 4]).sum())
        return KvReads(num_read=num_read, num_spared=int((shared * (items[:, 1] - 1)).sum()))


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass. Rows: decoding sequences first, each with its drafted tokens, then prefill chunks, each part in plan order.

    `token_ids` int64 [num_rows]; `kv_slots` int64 [num_rows]: where a row's KV goes, -1 where it is already; `sample_rows` int64: rows
    whose next token is wanted, and `sample_slots`: the sequences they belong to. A sequence with drafts has a row for each token that
    they may give, one after the other.
    """

    token_ids: np.ndarray
    kv_slots: np.ndarray
    sample_rows: np.ndarray
    sample_slots: np.ndarray
    plan: PlanArrays


def build_step(step: ScheduledStep, scheduler: Scheduler, *, chunk: int) -> StepBatch:
    """The batch of a step that `scheduler.schedule()` returned. `chunk`: where attention spans are cut, in tokens."""
    table, block_size = scheduler.table, scheduler.config.block_size
    slots, counts = step.slots, step.num_rows
    starts = table.num_computed[slots].astype(np.int64) - counts
    first_rows = np.concatenate([[0], np.cumsum(counts)])
    # Most steps only decode: a row for each sequence.
    row_slots, positions = slots, starts
    if first_rows[-1] > slots.size:
        row_slots = np.repeat(slots, counts)
        positions = np.arange(first_rows[-1]) - np.repeat(first_rows[:-1] - starts, counts)
    block, offset = np.divmod(positions, block_size)
    kv_slots = table.block_table[row_slots, block].astype(np.int64) * block_size + offset
    kv_slots[positions < scheduler.holdings.shared_rows_end[row_slots]] = -1
    sample_rows = np.flatnonzero(positions >= table.num_tokens[row_slots] - 1)
    return StepBatch(
        token_ids=table.tokens[row_slots, positions].astype(np.int64),
        kv_slots=kv_slots,
        sample_rows=sample_rows,
        sample_slots=row_slots[sample_rows],
        plan=_plan_attention(
            scheduler,
            slots=slots,
            counts=counts,
            starts=starts,
            first_rows=first_rows,
            positions=positions,
            sample_rows=sample_rows,
            num_decode=step.num_decode,
            chunk=chunk,
        ),
    )


def _plan_attention(
    scheduler: Scheduler,
    *,
    slots: np.ndarray,
    counts: np.ndarray,
    starts: np.ndarray,
    first_rows: np.ndarray,
    positions: np.ndarray,
    sample_rows: np.ndarray,
    num_decode: int,
    chunk: int,
) -> PlanArrays:
    """The arrays of a step's rows: its items, and what is merged."""
    table = scheduler.table
    stops = starts + counts
    width = int(table.num_blocks[slots].max()) if slots.size else 1
    block_table = np.ascontiguousarray(table.block_table[slots, :width])
    common = _common_tokens(scheduler, block_table[:num_decode], slots[:num_decode], starts[:num_decode])
    if common.any():
        items, partial_counts = _shared_and_own_items(
            common, counts=counts, starts=starts, first_rows=first_rows, num_decode=num_decode, chunk=chunk
        )
    else:
        items, partial_counts = _own_items(first_rows[:-1], counts, np.zeros_like(stops), stops), np.zeros_like(stops)
    merge_rows, merge_start, merge_partials = _merge_lists(items, partial_counts, positions, chunk)
    return PlanArrays(
        positions=positions.astype(np.int32),
        tables=np.repeat(np.arange(slots.size, dtype=np.int32), counts),
        block_table=block_table,
        items=items.astype(np.int32),
        merge_rows=merge_rows,
        merge_start=merge_start,
        merge_partials=merge_partials,
        num_partials=int(partial_counts.sum()),
        last_items=_sampled_items(items, sample_rows, num_rows=positions.size),
    )


def _sampled_items(items: np.ndarray, sample_rows: np.ndarray, *, num_rows: int) -> np.ndarray | None:
    """Items int32 [n, 6] of the last layer, without prompt rows whose next token nobody wants; None where each row's is wanted."""
    if sample_rows.size == num_rows:
        return None
    if sample_rows.size == 0:
        return np.zeros((0, 6), dtype=np.int32)
    is_sampled = np.zeros(num_rows + 1, dtype=np.int64)
    is_sampled[sample_rows + 1] = 1
    before = np.cumsum(is_sampled)
    stops = items[:, 0] + items[:, 1]
    counts = before[stops] - before[items[:, 0]]
    # A sequence's sampled rows are its last ones. Items that are shared or leave partials stay whole: only decoding sequences have such, and each of
    # these has a sampled row.
    alone = (items[:, 5] < 0) & (items[:, 4] == items[:, 3])
    sampled = items.astype(np.int32)
    sampled[alone, 0], sampled[alone, 1] = (stops - counts)[alone], counts[alone]
    return sampled[sampled[:, 1] > 0]


def _own_items(first_rows: np.ndarray, counts: np.ndarray, own_start: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Items [n, 6], one for what each sequence reads alone, without partials."""
    items = np.empty((counts.size, 6), dtype=np.int64)
    for column, values in enumerate((first_rows, counts, own_start, stops, stops)):
        items[:, column] = values
    items[:, 5] = -1
    return items


def _shared_and_own_items(
    common: np.ndarray,
    *,
    counts: np.ndarray,
    starts: np.ndarray,
    first_rows: np.ndarray,
    num_decode: int,
    chunk: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Items [n, 6]: shared spans of neighbouring decoding sequences as one each, and one for what each sequence reads alone; and how many
    partials each leaves.

    Neighbours that share the front of a chunk have one item for the chunk, which forks. `common`: see `_common_tokens`.
    """
    stops = starts + counts
    shared = common // chunk
    # What a sequence shares with a neighbour on either side it does not read alone.
    own_start = np.zeros(counts.size, dtype=np.int64)
    if num_decode > 1:
        own_start[: num_decode - 1] = shared
        own_start[1:num_decode] = np.maximum(own_start[1:num_decode], shared)
    own_start *= chunk
    groups = _shared_items(shared, chunk)
    forks = _forking_items(
        common, starts=starts[:num_decode], stops=stops[:num_decode], own_start=own_start, chunk=chunk
    )
    own_start[_rows_of(forks)[0]] += chunk
    for items in (groups, forks):
        # From sequences to their rows.
        items[:, 1] = first_rows[items[:, 0] + items[:, 1]] - first_rows[items[:, 0]]
        items[:, 0] = first_rows[items[:, 0]]
    own = np.flatnonzero(stops > own_start)
    alone = _own_items(first_rows[own], counts[own], own_start[own], stops[own])
    items = np.concatenate([groups, forks, alone])
    folded = items[:, 2] == 0
    pieces = np.where(folded, 1, -(-(items[:, 3] - items[:, 2]) // chunk))
    # What its rows read from position 0 on is their whole output if nothing comes behind it; anything else leaves partials.
    whole = folded.copy()
    whole[: len(groups)] = False
    whole[len(groups) : len(groups) + len(forks)] &= forks[:, 3] < chunk
    partial_counts = np.where(whole, 0, pieces * items[:, 1])
    partial_starts = np.concatenate([[0], np.cumsum(partial_counts)])
    items[:, 5] = np.where(partial_counts > 0, partial_starts[:-1], -1)
    return items, partial_counts


def _common_tokens(scheduler: Scheduler, block_table: np.ndarray, slots: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """For each decoding sequence but the last: the leading tokens that it shares with the next, by equal block ids."""
    if slots.size < 2:
        return np.zeros(0, dtype=np.int64)
    if not (block_table[1:, 0] == block_table[:-1, 0]).any():
        return np.zeros(slots.size - 1, dtype=np.int64)
    same = block_table[1:] == block_table[:-1]
    common = np.where(same.all(axis=1), same.shape[1], same.argmin(axis=1))
    num_blocks = scheduler.table.num_blocks[slots]
    common = np.minimum(common, np.minimum(num_blocks[1:], num_blocks[:-1]))
    # A row's own position stays its own, so that every row reads something alone.
    return np.minimum(common * scheduler.config.block_size, np.minimum(starts[1:], starts[:-1]))


def _shared_items(shared: np.ndarray, chunk: int) -> np.ndarray:
    """Items [n, 6] for the spans that runs of neighbours share, over sequences in place of rows.

    Level by level (chunk 0, 1, ...), a run of neighbours that share the chunk is one item. A run that stays the same from chunk 0 on is
    one item over these chunks, folded; behind that each chunk is an item, which costs nothing, since each has its own partial anyway.
    """
    items: list[np.ndarray] = []
    folded: np.ndarray | None = None
    for level in range(int(shared.max(initial=0))):
        edges = np.diff(np.concatenate([[0], (shared > level).astype(np.int8), [0]]))
        first = np.nonzero(edges == 1)[0]
        last = np.nonzero(edges == -1)[0]
        level_items = np.stack(
            [
                first,
                last - first + 1,
                np.full(first.size, level * chunk),
                np.full(first.size, (level + 1) * chunk),
                np.full(first.size, (level + 1) * chunk),
                np.full(first.size, -1),
            ],
            axis=1,
        )
        if folded is None:
            folded = level_items
            continue
        # Extend what is still the same run from chunk 0.
        where = np.searchsorted(folded[:, 0], first)
        where = np.minimum(where, len(folded) - 1)
        extends = (folded[where, 0] == first) & (folded[where, 1] == last - first + 1)
        extends &= folded[where, 3] == level * chunk
        folded[where[extends], 3:5] += chunk
        items.append(level_items[~extends])
    if folded is None:
        return np.zeros((0, 6), dtype=np.int64)
    return np.concatenate([folded, *items])


def _forking_items(
    common: np.ndarray, *, starts: np.ndarray, stops: np.ndarray, own_start: np.ndarray, chunk: int
) -> np.ndarray:
    """Items [n, 6], over sequences in place of rows, for the chunk that neighbours first read alone, where they share its front.

    `common` int64: tokens that each sequence but the last shares with the next; `own_start`: where each begins to read alone.
    """
    if starts.size < 2:
        return np.zeros((0, 6), dtype=np.int64)
    own_start = own_start[: starts.size]
    step = max(1, chunk // FRONT_STEPS)
    fronts = np.where(own_start[1:] == own_start[:-1], np.maximum(common - own_start[1:], 0) // step * step, 0)
    # A sequence of several rows reads its rest again for each of them, which must not be more than it is spared, and its rows must be all
    # in this chunk or all behind it. What is read alone from position 0 on folds its chunks; a partial for each of them, which it leaves
    # if its first chunk is another item's, costs about as much as a step is worth that is read together.
    ends = np.minimum(stops - own_start, chunk)
    again = stops - starts - 1
    straddles = (starts < own_start + chunk) & (own_start + chunk < stops)
    least = np.where((own_start == 0) & (stops > chunk), -(-stops // chunk) * step, 0)
    for side in (slice(None, -1), slice(1, None)):
        fronts[straddles[side] | (again[side] * (ends[side] - fronts) > fronts) | (fronts <= least[side])] = 0
    # Those that share far more with each other than with the next are a group of their own.
    edge = np.zeros(1, dtype=np.int64)
    nearby = np.maximum(np.concatenate([edge, fronts[:-1]]), np.concatenate([fronts[1:], edge]))
    edges = np.diff(np.concatenate([edge, ((fronts > 0) & (2 * fronts > nearby)).astype(np.int64), edge]))
    first, last = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    if first.size == 0:
        return np.zeros((0, 6), dtype=np.int64)
    # [first, last] are the sequences of a group, [first, last) its pairs.
    pairs, sequences = (np.stack([first, last + extra], axis=1).ravel() for extra in (0, 1))
    front = np.minimum.reduceat(np.append(fronts, 0), pairs)[::2]
    stop = np.minimum(np.maximum.reduceat(np.append(stops, 0), sequences)[::2], own_start[first] + chunk)
    start = own_start[first]
    return np.stack([first, last - first + 1, start, stop, start + front, np.full(first.size, -1)], axis=1)


def _rows_of(items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows of all `items`, and for each the place of its item."""
    place = np.repeat(np.arange(len(items)), items[:, 1])
    return items[place, 0] + np.arange(place.size) - np.repeat(np.cumsum(items[:, 1]) - items[:, 1], items[:, 1]), place


def _merge_lists(
    items: np.ndarray, partial_counts: np.ndarray, positions: np.ndarray, chunk: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows that have partials, and for each its partial numbers in ascending position, but for those that lie behind the row."""
    total = int(partial_counts.sum())
    if total == 0:
        return np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int32), np.zeros(0, dtype=np.int32)
    item = np.repeat(np.arange(len(items)), partial_counts)
    within = np.arange(total) - np.repeat(np.concatenate([[0], np.cumsum(partial_counts)])[:-1], partial_counts)
    rows = items[item, 0] + within % items[item, 1]
    position = items[item, 2] + within // items[item, 1] * chunk
    numbers = np.flatnonzero(position <= positions[rows])
    order = np.lexsort((position[numbers], rows[numbers]))
    merged, row_counts = np.unique(rows[numbers], return_counts=True)
    starts = np.concatenate([[0], np.cumsum(row_counts)])
    return merged.astype(np.int32), starts.astype(np.int32), numbers[order].astype(np.int32)
