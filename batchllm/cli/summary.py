"""The closing summary of a run, as text."""

from __future__ import annotations

from dataclasses import asdict

from batchllm.engine.tier_report import TierReport
from batchllm.planner.roofline import roofline_text
from batchllm.run_summary import RunSummary


def summary_text(summary: RunSummary) -> str:
    """What a person reads in the morning: what came of the rows, what it cost, where it is."""
    state = "finished" if summary.finished else "stopped; run the same command again to finish the rest"
    if summary.too_many_errors is not None:
        state = "gave up: too many rows carry an error"
    answered = summary.rows_completed + summary.rows_failed
    lines = [
        f"{summary.name}: {state}",
        f"  rows        {answered} of {summary.num_rows} answered: {summary.rows_completed} completed, "
        f"{summary.rows_failed} with errors ({summary.rows_before} from earlier runs)",
    ]
    if summary.num_steps:
        shared = summary.cached_prompt_tokens / summary.prompt_tokens if summary.prompt_tokens else 0.0
        lines += [
            f"  prompt      {summary.prompt_tokens:,} tokens: {summary.computed_prompt_tokens:,} computed, "
            f"{summary.cached_prompt_tokens:,} were there already ({shared:.1%}); "
            f"the batch has {summary.unique_prompt_tokens:,} distinct ones",
            f"  output      {summary.completion_tokens:,} tokens, {summary.output_tokens_per_s:,.0f} tok/s",
            f"  KV memory   peak {summary.kv_peak_share:.0%}, {summary.kv_waste_share:.1%} never filled, "
            f"{summary.preemptions} preemptions ({summary.recomputed_tokens:,} tokens computed again)",
            f"  machine     {summary.model} in {summary.dtype} on {summary.device}, {summary.kernels} kernels, "
            f"{summary.num_steps} steps",
        ]
    if summary.drafted_tokens:
        lines.append(
            f"  drafts      {summary.drafted_tokens:,} tokens, of which {summary.accepted_tokens:,} were right"
        )
    if summary.roofline is not None:
        lines.append(f"  reached     {roofline_text(asdict(summary.roofline))}")
    if summary.tiers is not None:
        lines += _tier_lines(summary.tiers)
    lines += [
        f"  time        {summary.wall_s:.1f} s, of which {summary.load_s:.1f} s for the model and its memory",
        f"  output in   {summary.output}",
    ]
    if summary.rows_failed:
        lines.append('  failed rows: batchllm query "select row_index, error from errors" JOB_FILE')
    return "\n".join(lines)


def _tier_lines(report: TierReport) -> list[str]:
    saved = "" if report.saved_s is None else f", about {report.saved_s:.1f} s saved against computing again"
    lines = [
        f"  tiers       {report.restored_tokens:,} tokens restored, {report.recomputed_tokens:,} computed again, "
        f"{report.stall_s:.2f} s waited{saved}"
    ]
    for tier in report.tiers:
        rate = "" if tier.bytes_per_s is None else f" at {tier.bytes_per_s / 1e9:.2f} GB/s"
        misses = "".join(f", {count} {cause}" for cause, count in tier.misses.items())
        lines.append(
            f"    {tier.name:<10}{tier.capacity_blocks:,} blocks ({tier.detail}): {tier.bytes_in / 1e6:,.0f} MB in, "
            f"{tier.bytes_out / 1e6:,.0f} MB out{rate}, {tier.num_hits:,} hits{misses}"
        )
    return lines
