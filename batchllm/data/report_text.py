"""A report for a terminal."""

from __future__ import annotations

import json
from dataclasses import asdict, fields

from batchllm.data.report import Report
from batchllm.data.report_numbers import duration, moment, number, share
from batchllm.planner.roofline import roofline_text

_WIDTH = 100


def report_text(report: Report) -> str:
    """The same figures as the page, without its charts."""
    figures = report.figures
    lines = [
        f"{report.name}: run {report.run.run_id}, {figures['status']}",
        f"  started     {moment(figures['started'])}",
    ]
    if figures["error"]:
        lines.append(f"  error       {_one_line(figures['error'])}")
    lines += [
        f"  rows        {number(figures['rows_answered'])} answered, {number(figures['rows_with_error'])} with errors",
        f"  prompt      {number(figures['prompt_tokens'])} tokens, {number(figures['computed_prompt_tokens'])} computed, "
        f"{share(figures['reuse_share'])} were there already (prompts of the whole batch share {share(figures['reuse_ceiling'])})",
        f"  output      {number(figures['completion_tokens'])} tokens, {number(figures['output_tokens_per_s'])} tok/s",
        f"  time        {duration(figures['wall_s'])}, {duration(figures['steps_s'])} in {number(figures['num_steps'])} steps",
        f"  KV memory   peak {share(figures['kv_peak_share'])}, {number(figures['preemptions'])} preemptions",
    ]
    if figures["drafted_tokens"]:
        lines.append(
            f"  drafts      {number(figures['drafted_tokens'])} tokens, of which {number(figures['accepted_tokens'])} were right"
        )
    if figures["roofline"] is not None:
        lines.append(f"  reached     {roofline_text(json.loads(figures['roofline']))}")
    lines += [
        f"  {phase['phase']:<13} {duration(phase['seconds']):>10} {share(phase['share']):>7}" for phase in report.phases
    ]
    lines.append(f"\n  {'seconds':<10} {'p50':>10} {'p90':>10} {'p99':>10} {'most':>10}")
    for latency in report.latencies:
        cells = (latency.p50, latency.p90, latency.p99, latency.most)
        lines.append(f"  {latency.column:<10} " + " ".join(f"{duration(cell):>10}" for cell in cells))
    if report.slowest:
        lines.append("\n  slowest rows (seconds from first scheduled to done)")
        lines += [f"  {duration(row['service_s']):>10}  row {row['row_index']}" for row in report.slowest[:5]]
    if report.reasons:
        lines.append("\n  failed rows")
        lines += [
            f"  {reason['num_rows']:>10,}  {_one_line(reason['reason'])} (first: row {reason['first_row']})"
            for reason in report.reasons
        ]
    if len(report.runs) > 1:
        lines.append("\n  runs of this job")
        for run in report.runs:
            speed, failed = number(run.get("output_tokens_per_s")), number(run.get("rows_failed"))
            lines.append(
                f"  {run['run_id']}  {run['status']:<9} {duration(run.get('wall_s')):>10} {speed:>8} tok/s  {failed} failed"
            )
    return "\n".join(lines)


def report_json(report: Report) -> str:
    """The figures as a JSON object."""
    values = {field.name: getattr(report, field.name) for field in fields(report) if field.name != "run"}
    values |= {"run_id": report.run.run_id, "latencies": [asdict(latency) for latency in report.latencies]}
    return json.dumps(values, default=str, ensure_ascii=False)


def _one_line(text: str) -> str:
    """Text from data, without what a terminal would obey."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…"
