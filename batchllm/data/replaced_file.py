"""Files beside the parts that are replaced as a whole: a reader sees the old one or the new one, never a piece."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from batchllm.errors import write_error


def replace_file(path: Path, pieces: Iterable[bytes]) -> None:
    """Writes the pieces one after the other, durably, in the place of `path`; its folder is made where it is missing.

    Raises FolderError or OutputError, and then what was there before stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
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
