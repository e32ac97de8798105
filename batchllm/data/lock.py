"""One run at a time per output folder: a `flock` that dies with its process, so no stale lock can block a night."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import socket
from pathlib import Path

from batchllm.errors import RunLockedError, write_error

LOCK_NAME = ".lock"


class RunLock:
    """Owns the locked file descriptor; `release` (or the end of the process) gives the folder back."""

    def __init__(self, folder: Path) -> None:
        """Locks `folder`. Raises RunLockedError naming the holder, or FolderError where the folder takes no lock.

        The file itself stays: removing it would let two runs lock two files of one name.
        """
        path = folder / LOCK_NAME
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise write_error(f"{path}: cannot be opened", error) from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(self._fd)
            os.close(self._fd)
            raise RunLockedError(f"{folder}: another run is writing here: {holder}") from None
        except OSError as error:
            os.close(self._fd)
            raise write_error(f"{path}: cannot be locked", error) from None
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        holder_text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": started})
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, holder_text.encode(), 0)
        except OSError:
            # A full disk must not hide that the lock is held: the holder then stays unnamed.
            os.ftruncate(self._fd, 0)

    def release(self) -> None:
        """Gives the folder back; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _holder(fd: int) -> str:
    try:
        holder = json.loads(os.pread(fd, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}, since {holder['started']}"
    except (ValueError, KeyError, TypeError):
        return "a process that left no name"
