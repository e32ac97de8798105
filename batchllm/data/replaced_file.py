"""Files beside the parts that are replaced as a whole: a reader sees the old one or the new one, never a piece."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path

from batchllm.errors import FolderError, write_error


def check_place(path: Path) -> None:
    """Raises FolderError where `replace_file` could not write there, found by trying; a disk that is full now may have room later."""
    temporary = _temporary(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        failure = write_error(f"{path}: cannot be written", error)
        if isinstance(failure, FolderError):
            raise failure from None


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def replace_file(path: Path, pieces: Iterable[bytes]) -> None:
    """Writes the pieces one after the other, durably, in the place of `path`; its folder is made where it is missing.

    Raises FolderError or OutputError, and then what was there before stays.
    """
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise write_error(f"{path}: cannot be written", error) from None
