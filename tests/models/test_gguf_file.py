"""The GGUF header reader: equal to the `gguf` package's, and one clear error for whatever is no whole file."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchllm.errors import ModelError
from batchllm.models.gguf_file import forget_gguf, read_gguf, read_gguf_once


@pytest.fixture
def tiny_file(tmp_path: Path, tiny_model: Callable[..., Any], write_gguf: Callable[..., None]) -> Path:
    metadata = {"tokenizer.ggml.tokens": ["a", "\u0120b", "ż"], "some.scores": [0.5, -1.0], "some.flags": [True, False]}
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama-tied"), metadata=metadata)
    return tmp_path / "tiny.gguf"


def test_metadata_and_places_equal_those_of_the_gguf_package(tiny_file: Path) -> None:
    ours, theirs = read_gguf(tiny_file), gguf.GGUFReader(str(tiny_file))
    expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == expected
    assert ours.metadata["tokenizer.ggml.tokens"] == ["a", "\u0120b", "ż"]
    assert [
        (tensor.name, tensor.shape, tensor.kind, tensor.offset, tensor.num_bytes) for tensor in ours.tensors.values()
    ] == [
        (tensor.name, tuple(map(int, reversed(tensor.shape))), tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        for tensor in theirs.tensors
    ]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_cut_anywhere_is_one_line_that_names_it(data: st.DataObject, tiny_file: Path) -> None:
    content = tiny_file.read_bytes()
    cut = tiny_file.with_name("cut.gguf")
    cut.write_bytes(content[: data.draw(st.integers(0, len(content) - 64) | st.integers(0, 4000))])
    with pytest.raises(ModelError) as caught:
        read_gguf(cut)
    assert "cut.gguf" in str(caught.value) and "\n" not in str(caught.value)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 3000), junk=st.binary(min_size=1, max_size=12))
def test_a_header_with_any_bytes_changed_is_read_or_refused_and_never_crashes(
    at: int, junk: bytes, tiny_file: Path
) -> None:
    content = bytearray(tiny_file.read_bytes())
    content[at : at + len(junk)] = junk
    changed = tiny_file.with_name("changed.gguf")
    changed.write_bytes(content)
    try:
        file = read_gguf(changed)
    except ModelError:
        return
    assert all(tensor.offset + tensor.num_bytes <= len(content) for tensor in file.tensors.values())


@pytest.mark.parametrize("count_at", [8, 16])
def test_a_count_of_a_billion_billion_is_refused_at_once(count_at: int, tiny_file: Path) -> None:
    content = bytearray(tiny_file.read_bytes())
    content[count_at : count_at + 8] = struct.pack("<Q", 1 << 60)
    tiny_file.write_bytes(content)
    with pytest.raises(ModelError, match="cut short"):
        read_gguf(tiny_file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a whole GGUF file"),
        (b"GGML" + bytes(60), "does not start with GGUF"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(60), "version 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 62) + bytes(20), "cut short"),
    ],
)
def test_what_is_no_gguf_is_refused_with_the_reason(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read_gguf(tmp_path / "x.gguf")


def test_a_part_of_a_split_file_is_refused(
    tmp_path: Path, tiny_model: Callable[..., Any], write_gguf: Callable[..., None]
) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama2"), metadata={"split.count": 2})
    with pytest.raises(ModelError, match="one part of a split GGUF"):
        read_gguf(tmp_path / "tiny.gguf")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.gguf: cannot be read: No such file"):
        read_gguf(tmp_path / "none.gguf")


def test_a_file_is_parsed_once_until_it_changes(tiny_file: Path) -> None:
    first = read_gguf_once(tiny_file)
    assert read_gguf_once(tiny_file) is first
    tiny_file.write_bytes(tiny_file.read_bytes() + bytes(32))
    again = read_gguf_once(tiny_file)
    assert again is not first and again.metadata == first.metadata
    forget_gguf()
    assert read_gguf_once(tiny_file) is not again
    tiny_file.unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        read_gguf_once(tiny_file)
