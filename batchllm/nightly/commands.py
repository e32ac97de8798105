"""`on_success` and `on_failure`: a command of the job file that is told how a run ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from batchllm.nightly.outcome import Outcome


def run_command(outcome: Outcome, *, summary_path: Path | None, say: Callable[[str], None]) -> None:
    """Runs the job's command for this outcome, if it names one, and waits for it; what goes wrong is said, no more.

    `summary_path` None is where no summary could be written: the command then reads an empty one.

    No shell; in the job file's folder; standard output goes to standard error, which is for logs. After
    `command_timeout_s` the command and what it started are killed.
    """
    job = outcome.job
    key, command = ("on_success", job.on_success) if outcome.exit_code == 0 else ("on_failure", job.on_failure)
    if not command:
        return
    environment = {
        **os.environ,
        "BATCHLLM_JOB": str(outcome.job_file),
        "BATCHLLM_EXIT_CODE": str(outcome.exit_code),
        "BATCHLLM_OUTPUT": job.output.path,
        # Not left out: an alarm that mails its summary should still go out.
        "BATCHLLM_SUMMARY": os.devnull if summary_path is None else str(summary_path.absolute()),
    }
    try:
        process = subprocess.Popen(
            command, cwd=job.folder, env=environment, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        say(f"{key}: {command[0]} cannot be started: {reason}")
        return
    try:
        code = process.wait(timeout=job.command_timeout_s)
    except subprocess.TimeoutExpired:
        say(f"{key}: {command[0]} was killed after {job.command_timeout_s:g} s")
    else:
        if code:
            how = f"ended with exit code {code}" if code > 0 else f"was ended by {_signal_name(-code)}"
            say(f"{key}: {command[0]} {how}")
    finally:
        if process.returncode is None:
            # The command leads its own process group, so what it started goes with it.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _signal_name(number: int) -> str:
    # Most of the real-time ones have no name.
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
