"""One run at a time per output folder: a `flock` that dies with its process, so no stale lock can block a night."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import socket
import stat
from pathlib import Path

from batchllm.errors import FolderError, RunLockedError, write_error

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
        self._folder_fd = -1
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise FolderError(f"{path}: cannot be locked: it is no file")
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._folder_fd = _locked_folder(folder)
        except BlockingIOError:
            holder = _holder(self._fd)
            self.release()
            raise RunLockedError(f"{folder}: another run is writing here: {holder}") from None
        except FolderError:
            self.release()
            raise
        except OSError as error:
            self.release()
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
        for fd in (self._folder_fd, self._fd):
            if fd >= 0:
                os.close(fd)
        self._folder_fd = self._fd = -1


def _locked_folder(folder: Path) -> int:
    """The folder itself, locked: it holds where someone removes the file. -1 where the file system locks no folders.

    Raises BlockingIOError where another run has it.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise
    except OSError:
        os.close(fd)
        return -1
    return fd


def _holder(fd: int) -> str:
    try:
        holder = json.loads(os.pread(fd, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}, since {holder['started']}"
    except (ValueError, KeyError, TypeError):
        return "a process that left no name"
