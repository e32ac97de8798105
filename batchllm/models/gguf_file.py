"""The header of a GGUF file: metadata and where each tensor lies. Reads no weights.

Own reader, because the header of a file from anywhere is hostile input: every count and offset is checked against the
file's size before anything is allocated, and the 98 MB file's 150,000 strings take a tenth of a second. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from batchllm.errors import ModelError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor's place: `shape` outermost dimension first, `offset` in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file's metadata (Python scalars, strings, lists) and its tensors by name, in file order."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Parses the header. Raises ModelError for a file that is no GGUF, is cut short, or lies about its sizes."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(path, data).read_file()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except (struct.error, ValueError) as error:
        raise ModelError(f"{path}: not a whole GGUF file: {error}") from error


def read_gguf_once(path: Path) -> GgufFile:
    """`read_gguf`, and what it gave the last time where the file is the same: settings, tokenizer and weights each need it."""
    try:
        state = path.stat()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    return _read_state(path, state.st_ino, state.st_size, state.st_mtime_ns)


def forget_gguf() -> None:
    """Gives back what `read_gguf_once` keeps: a vocabulary is some ten megabytes of strings."""
    _read_state.cache_clear()


@functools.lru_cache(maxsize=1)
def _read_state(path: Path, *_state: int) -> GgufFile:
    return read_gguf(path)


class _Cursor:
    """A position in the mapped header; each read moves it. Raises ValueError or struct.error behind the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def read_file(self) -> GgufFile:
        if self.data[:4] != b"GGUF":
            raise ValueError("it does not start with GGUF")
        self.at = 4
        version = self.scalar("<I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}; this program reads {_VERSIONS[0]} and {_VERSIONS[1]}, little-endian")
        num_tensors, num_keys = self.scalar("<Q"), self.scalar("<Q")
        # A key takes 13 bytes or more, a tensor 24 or more.
        self.need(num_keys * 13 + num_tensors * 24)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string()
            if key in metadata:
                raise ValueError(f"key {key!r} twice")
            metadata[key] = self.value(self.scalar("<I"))
        if metadata.get("split.count", 1) not in (0, 1):
            raise ModelError(f"{self.path}: one part of a split GGUF; merge the parts with gguf-split first")
        places = [self.tensor_place() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ValueError(f"general.alignment is {alignment}")
        base = -(-self.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in places:
            if name in tensors:
                raise ValueError(f"tensor {name!r} twice")
            tensors[name] = self.tensor(name, shape, kind, base + offset)
        return GgufFile(path=self.path, metadata=metadata, tensors=tensors)

    def need(self, num_bytes: int) -> None:
        if num_bytes > len(self.data) - self.at:
            raise ValueError(f"cut short: {num_bytes} bytes needed at byte {self.at}, the file has {len(self.data)}")

    def scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        self.need(length)
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8")

    def strings(self, count: int) -> list[str]:
        """`count` strings in a row: a vocabulary has 100,000 of them, so nothing is called for each."""
        data, at, length_at = self.data, self.at, struct.Struct("<Q").unpack_from
        found: list[str] = []
        for _ in range(count):
            (length,) = length_at(data, at)
            start = at + 8
            at = start + length
            if at > len(data):
                self.at = start
                self.need(length)
            found.append(str(data[start:at], "utf-8"))
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"unknown value type {kind} at byte {self.at}")
        item_kind, length = self.scalar("<I"), self.scalar("<Q")
        if item_kind == _STRING:
            self.need(length * 8)
            return self.strings(length)
        if item_kind not in _SCALARS:
            raise ValueError(f"array of type {item_kind} at byte {self.at}")
        dtype = np.dtype(_SCALARS[item_kind])
        self.need(length * dtype.itemsize)
        values = np.frombuffer(self.data, dtype, length, self.at).tolist()
        self.at += length * dtype.itemsize
        return values

    def tensor_place(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        num_dimensions = self.scalar("<I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions")
        dimensions = [self.scalar("<Q") for _ in range(num_dimensions)]
        return name, tuple(reversed(dimensions)), self.scalar("<I"), self.scalar("<Q")

    def tensor(self, name: str, shape: tuple[int, ...], kind_id: int, offset: int) -> GgufTensor:
        if kind_id not in GGMLQuantizationType._value2member_map_:
            raise ValueError(f"tensor {name!r} has the unknown type {kind_id}")
        kind = GGMLQuantizationType(kind_id)
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block_size:
            raise ValueError(f"tensor {name!r} of type {kind.name} has the shape {shape}")
        num_bytes = math.prod(shape) // block_size * block_bytes
        if offset + num_bytes > len(self.data):
            raise ValueError(
                f"cut short: tensor {name!r} ends at byte {offset + num_bytes}, the file at {len(self.data)}"
            )
        return GgufTensor(name=name, shape=shape, kind=kind, offset=offset, num_bytes=num_bytes)
