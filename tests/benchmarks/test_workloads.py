"""The workloads: exact counts, seeds, and text that is tokenised to the ids beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import workloads
from workloads import Corpus, PieceSource, describe, make_workload, write_workload

from batchllm.models.source import ModelSource
from batchllm.models.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def corpus(embedded_model: ModelSource) -> Corpus:
    return Corpus(load_tokenizer(embedded_model))


def test_documents_and_questions_have_exact_counts_and_share_each_document_16_times(corpus: Corpus) -> None:
    rows = make_workload("W2", corpus)
    assert [len(row.token_ids) for row in rows] == [792] * 256
    assert {row.max_tokens for row in rows} == {32}
    documents = [row.token_ids[:768] for row in rows]
    assert sorted(documents.count(document) for document in set(documents)) == [16] * 16
    # Shuffled: documents do not lie beside each other.
    assert sum(a == b for a, b in zip(documents, documents[1:], strict=False)) < 40


def test_the_ids_of_a_row_are_those_of_its_text(corpus: Corpus) -> None:
    rows = make_workload("W5", corpus)[:32]
    for row, ids in zip(rows, corpus.tokenizer.encode_batch([row.text for row in rows]), strict=True):
        assert tuple(ids.tolist()) == row.token_ids
        assert len(row.token_ids) == 256 + 512 + 192 + 32
        assert corpus.tokenizer.decode(row.token_ids) == row.text


def test_w5_is_a_tree_of_three_levels_above_its_questions(corpus: Corpus) -> None:
    rows = make_workload("W5", corpus)
    assert len({row.token_ids[:256] for row in rows}) == 1
    assert len({row.token_ids[:768] for row in rows}) == 8
    assert len({row.token_ids[:960] for row in rows}) == 32
    assert len({row.token_ids for row in rows}) == 256


def test_rows_of_w3_and_w4_begin_with_different_tokens(corpus: Corpus) -> None:
    for name, num_rows, num_tokens in (("W3", 128, 128), ("W4", 192, 64)):
        rows = make_workload(name, corpus)
        assert {len(row.token_ids) for row in rows} == {num_tokens}
        assert len({row.token_ids[0] for row in rows}) == num_rows
        assert describe(rows)["distinct_prompt_tokens"] == num_rows * num_tokens


def test_outputs_of_w4_are_heavy_tailed_between_8_and_512(corpus: Corpus) -> None:
    lengths = np.array([row.max_tokens for row in make_workload("W4", corpus)])
    assert lengths.min() == 8 and lengths.max() == 512
    assert lengths.mean() > 1.4 * np.median(lengths)


def test_the_same_seed_gives_the_same_rows_and_another_seed_others(corpus: Corpus) -> None:
    assert make_workload("W3", corpus) == make_workload("W3", corpus)
    assert make_workload("W3", corpus, seed=1) != make_workload("W3", corpus)


def test_pieces_share_no_text_and_an_exhausted_source_says_so(corpus: Corpus) -> None:
    source = PieceSource(corpus, seed=7)
    pieces = [source.take(200) for _ in range(20)]
    assert len(set(pieces)) == 20
    assert all(len(ids) == 200 for ids in corpus.tokenizer.encode_batch(pieces))
    with pytest.raises(ValueError, match="no piece of 100000000 tokens"):
        source.take(100_000_000)


def test_a_written_workload_reads_back_with_what_it_depends_on(corpus: Corpus, tmp_path: Path) -> None:
    rows = make_workload("W3", corpus)[:5]
    write_workload(rows, tmp_path / "W3.parquet", name="W3")
    table = pq.read_table(tmp_path / "W3.parquet")
    assert table.column_names == ["row", "text", "token_ids", "max_tokens"]
    assert [tuple(ids) for ids in table.column("token_ids").to_pylist()] == [row.token_ids for row in rows]
    assert table.schema.metadata[b"workload"] == b"W3" and table.schema.metadata[b"model"] == workloads.MODEL.encode()
