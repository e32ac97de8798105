"""Which sources a library was built from: an old library beside new sources would compute wrong numbers in silence."""

from __future__ import annotations

import hashlib
from pathlib import Path


def source_digest(folder: Path) -> int | None:
    """63 bits over the names and contents of the C++ sources in `folder`; None where there are none, as in a wheel."""
    sources = sorted(path for path in folder.iterdir() if path.suffix in (".cpp", ".h"))
    if not sources:
        return None
    state = hashlib.blake2b(digest_size=8)
    for path in sources:
        content = path.read_bytes()
        state.update(f"{path.name} {len(content)}\n".encode() + content)
    return int.from_bytes(state.digest(), "little") >> 1
