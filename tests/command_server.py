"""Starts `batchllm` commands as processes of their own, by forking one process that has imported everything already.

Importing torch takes seconds and most tests want many runs. Each request is a JSON line on stdin: the command's arguments, folder,
environment and a `run` folder. The command's output goes to `run/stdout` and `run/stderr`, its process id to `run/pid`; when it has ended,
`run/status` holds its exit code (negative: the signal), seconds and peak memory. `part_rows` and `part_s` say when rows become a part: a
job of a second must write as many parts as one of a night. No file may grow beyond `file_limit_bytes`, as on a full disk. `stdin` is the
text of standard input. Nothing here starts a thread or runs a tensor operation before the fork.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

# Between them they import everything that is slow to import.
import batchllm.nightly.unattended
import batchllm.run_engine  # noqa: F401
from batchllm.cli.main import main
from batchllm.data.outputs import PartLimits


def write_whole(path: Path, text: str) -> None:
    """The reader polls for the file, so it must never see half of it."""
    aside = path.with_suffix(".tmp")
    aside.write_text(text)
    aside.rename(path)


def become_command(request: dict[str, Any], run: Path) -> None:
    if request["stdin"] is not None:
        (run / "stdin").write_text(request["stdin"])
    sources = (
        "/dev/null" if request["stdin"] is None else run / "stdin",
        request["stdout"] or run / "stdout",
        run / "stderr",
    )
    for descriptor, source in enumerate(sources):
        opened = os.open(source, os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    # As a shell leaves them: block-buffered where they are files, so that a lost flush shows.
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    os.chdir(request["folder"])
    if request["remove_folder"]:
        os.rmdir(request["folder"])
    if request["file_limit_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit_bytes"], resource.RLIM_INFINITY))
    os.environ.update(request["environment"])
    if request["part_rows"] is not None:
        max_rows, max_bytes, _, _ = PartLimits.__init__.__defaults__  # type: ignore[misc]
        interval = request["part_s"]
        PartLimits.__init__.__defaults__ = (request["part_rows"], max_bytes, interval, interval)  # type: ignore[misc]
    sys.argv = ["batchllm", *request["arguments"]]


def reap_watchers() -> None:
    """Watchers that have ended leave the process table."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def serve() -> bool:
    """Returns twice over: True in each child, which is the command then; False in the server when stdin ends."""
    for line in sys.stdin:
        request = json.loads(line)
        run = Path(request["run"])
        if os.fork():
            reap_watchers()
            continue
        started_at = time.monotonic()
        command = os.fork()
        if command == 0:
            become_command(request, run)
            return True
        write_whole(run / "pid", str(command))
        _, status, usage = os.wait4(command, 0)
        result = {
            "code": os.waitstatus_to_exitcode(status),
            "seconds": time.monotonic() - started_at,
            "peak_kib": usage.ru_maxrss,
        }
        write_whole(run / "status", json.dumps(result))
        os._exit(0)
    return False


def run_and_leave() -> None:
    """Runs the command and ends the process without Python's teardown, which would take longer than most commands do."""
    code = 1
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    # What is there before a fork is never collected, so its pages stay shared.
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    if serve():
        run_and_leave()
    os._exit(0)
