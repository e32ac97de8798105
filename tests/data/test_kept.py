"""Kept rows come back as they were, in any order, while more are being appended."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from batchllm.data.kept import KeptRows
from batchllm.data.schema import carried_fields, carried_type
from batchllm.data.sections import InputSection
from batchllm.errors import JobError


def test_rows_come_back_by_index_with_repeats_while_more_are_appended(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("n", pa.int64()), pa.field("s", pa.string())])
    kept = KeptRows(tmp_path, schema=schema)
    for start in range(0, 1000, 250):
        numbers = list(range(start, start + 250))
        texts = [None if n % 7 == 0 else "x" * (n % 5000) for n in numbers]
        kept.append(pa.RecordBatch.from_arrays([pa.array(numbers), pa.array(texts)], schema=schema))
        wanted = np.array([0, 1, 1, start, start + 249], dtype=np.int64)
        wanted.sort()
        table = kept.take(wanted)
        assert table.column("n").to_pylist() == wanted.tolist()
        assert table.column("s").to_pylist() == [None if n % 7 == 0 else "x" * (n % 5000) for n in wanted.tolist()]
    assert kept.take(np.zeros(0, dtype=np.int64)).num_rows == 0
    kept.close()


def test_views_and_dictionaries_become_plain_types_deep_down() -> None:
    words = pa.dictionary(pa.int8(), pa.string_view())
    assert carried_type(pa.struct([("a", pa.list_(words))])) == pa.struct([("a", pa.list_(pa.string()))])
    assert carried_type(pa.large_list(pa.binary_view())) == pa.large_list(pa.binary())
    assert carried_type(pa.map_(pa.string_view(), pa.int8())) == pa.map_(pa.string(), pa.int8())
    assert carried_type(pa.uuid()) == pa.binary(16)


def test_a_kept_column_named_like_an_output_column_in_any_case_is_refused() -> None:
    schema = pa.schema([("Error", pa.string()), ("x", pa.string())])
    assert [field.name for field in carried_fields(InputSection(path="p", keep=("x",)), schema)] == ["id", "x"]
    with pytest.raises(JobError, match="'Error' is a column of the output"):
        carried_fields(InputSection(path="p", keep=("Error",)), schema)
