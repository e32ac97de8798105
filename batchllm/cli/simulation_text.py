"""A simulation as a table for a terminal."""

from __future__ import annotations

from batchllm.planner.simulate import Replay
from batchllm.simulation import Simulation

_COLUMNS = (
    "policy",
    "hit rate",
    "optimum",
    "pool",
    "host",
    "disk",
    "computed",
    "moved",
    "compute",
    "transfer",
    "predicted",
)


def simulation_text(simulation: Simulation) -> str:
    """The sizes in one line, then a line for each policy."""
    sizes, size = simulation.sizes, simulation.block_bytes
    head = (
        f"{simulation.name}: {simulation.num_requests:,} requests, working set {simulation.working_set_blocks:,} blocks of "
        f"{size:,} bytes\npool {sizes.pool:,}, host {sizes.host:,}, disk {sizes.disk:,} blocks; "
        f"{sizes.max_sequences} sequences at once"
    )
    rows = [_COLUMNS, *map(_row, simulation.replays)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    num_refused = simulation.replays[0].num_refused
    notes = [f"{num_refused:,} requests are larger than the pool and were not run"] if num_refused else []
    return "\n".join([head, "", *lines, *notes])


def _row(replay: Replay) -> tuple[str, ...]:
    return (
        replay.policy,
        f"{replay.hit_rate:.2%}",
        f"{replay.optimum_rate:.2%}",
        f"{replay.pool_hits:,}",
        f"{replay.host_hits:,}",
        f"{replay.disk_hits:,}",
        f"{replay.computed_blocks:,}",
        f"{replay.moved_bytes / 1e9:,.2f} GB",
        *(
            ("-" if seconds is None else f"{seconds:,.1f} s")
            for seconds in (replay.compute_s, replay.transfer_s, replay.predicted_s)
        ),
    )
