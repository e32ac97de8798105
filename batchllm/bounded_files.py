"""Files that a user names, read no further than such a file can be long: a device or a pipe may have no end.

What is longer is an OSError with a reason of its own, so that it is said as any other file that cannot be read.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 256 << 20
"""Of a file that is read whole, or of one line: beyond any prompt, job or schema, and well within memory."""


def read_whole(path: Path) -> bytes:
    """The file's bytes. Raises OSError."""
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES:,} bytes", str(path))
    return data


def read_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines, each with its end. Raises OSError that names the line that is too long."""
    number = 0
    while line := file.readline(MOST_BYTES + 1):
        number += 1
        if len(line) > MOST_BYTES:
            raise OSError(errno.EFBIG, f"its line {number} has more than {MOST_BYTES:,} bytes")
        yield line
