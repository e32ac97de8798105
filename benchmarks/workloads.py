"""Seeded workloads of natural text from what ships with Python, written to Parquet with exact token counts.

    python benchmarks/workloads.py [--folder FOLDER] [--only W1,W3]

The text is pydoc's topics, the licence and the docstrings of the standard library, so it depends on the Python version, which the files
carry. Every prompt is pieces of that text cut at words, so that the whole prompt's text is tokenised to the concatenation of the
pieces' tokens: engines that take token ids and engines that take text see the same prompts. Columns: `row` int32, `text`, `token_ids`
list<int32>, `max_tokens` int32. All workloads are meant greedy and with EOS ignored, so that every output has exactly `max_tokens`.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import math
import os
import pydoc_data.topics
import random
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchllm.data.replaced_file import replace_file
from batchllm.errors import BatchLLMError
from batchllm.models.registry import resolve_model
from batchllm.models.tokenizer import Tokenizer, load_tokenizer

MODEL = "smollm2-135m"
DEFAULT_FOLDER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "batchllm-peers" / "workloads"
_SEED = 20261129
_SMALLEST_DOCUMENT = 1_500
"""Characters; shorter texts have too few places where a piece can be cut."""


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt: its text, the ids of that text, and how many tokens are wanted."""

    text: str
    token_ids: tuple[int, ...]
    max_tokens: int


class Corpus:
    """The texts that ship with Python as token ids, and which tokens begin a word."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.documents = tokenizer.encode_batch(standard_library_texts(), allow_special=False)
        self.starts_word = np.array([_starts_word(piece) for piece in tokenizer.token_bytes])


class PieceSource:
    """Natural text in pieces of exact token counts; a piece is given once, so that two pieces share no text.

    A piece begins with a space and a letter and the next token after it does so too: between two such pieces the tokenizer's
    rule for words always cuts, so the ids of a concatenation are the concatenation of the ids.
    """

    def __init__(self, corpus: Corpus, *, seed: int) -> None:
        self._tokenizer = corpus.tokenizer
        documents = list(corpus.documents)
        random.Random(seed).shuffle(documents)
        self._ids = np.concatenate(documents)
        self._starts = np.flatnonzero(corpus.starts_word[self._ids])
        self._is_start = np.zeros(len(self._ids) + 1, dtype=bool)
        self._is_start[self._starts] = True
        self._position = 0

    def take(self, num_tokens: int, *, avoid_first: frozenset[int] | set[int] = frozenset()) -> str:
        """The next piece of exactly `num_tokens` tokens, not beginning with a token of `avoid_first`.

        Raises ValueError when the text is used up.
        """
        for start in self._starts[np.searchsorted(self._starts, self._position) :]:
            end = start + num_tokens
            if end >= len(self._ids):
                break
            if not self._is_start[end] or int(self._ids[start]) in avoid_first:
                continue
            text = self._tokenizer.decode(self._ids[start:end])
            # Joins of documents and bytes of half a character do not survive the way back.
            if np.array_equal(self._tokenizer.encode_batch([text], allow_special=False)[0], self._ids[start:end]):
                self._position = int(end)
                return text
        raise ValueError(f"no piece of {num_tokens} tokens is left in the text that ships with Python")

    def first_token(self, text: str) -> int:
        return int(self._tokenizer.encode_batch([text], allow_special=False)[0][0])


def _starts_word(piece: bytes) -> bool:
    return len(piece) > 1 and piece[:1] == b" " and chr(piece[1]).isascii() and chr(piece[1]).isalpha()


@functools.cache
def standard_library_texts() -> tuple[str, ...]:
    """pydoc's topics, the licence and long docstrings of the standard library, sorted; nothing is imported for it."""
    texts = list(pydoc_data.topics.topics.values())
    root = Path(sysconfig.get_paths()["stdlib"])
    licence = root / "LICENSE.txt"
    if licence.exists():
        texts.append(licence.read_text(encoding="utf-8"))
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue  # A sample of bad source is not text that anybody wrote to be read.
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
        texts += [text for node in nodes if (text := ast.get_docstring(node)) is not None]
    return tuple(sorted({text for text in texts if len(text) >= _SMALLEST_DOCUMENT}))


def shared_prefix(source: PieceSource, random_: random.Random) -> list[tuple[str, int]]:
    """W1: one prefix of 512 tokens before 256 passages of 192; 64 tokens each."""
    prefix = source.take(512)
    return [(prefix + source.take(192), 64) for _ in range(256)]


def documents_and_questions(source: PieceSource, random_: random.Random) -> list[tuple[str, int]]:
    """W2: 16 documents of 768 tokens, 16 questions of 24 about each, shuffled; 32 tokens each."""
    documents = [source.take(768) for _ in range(16)]
    rows = [(document + source.take(24), 32) for document in documents for _ in range(16)]
    random_.shuffle(rows)
    return rows


def nothing_shared(source: PieceSource, random_: random.Random) -> list[tuple[str, int]]:
    """W3: 128 prompts of 128 tokens of which no two begin with the same token; 128 tokens each."""
    return [(text, 128) for text in _distinct_starts(source, num_texts=128, num_tokens=128)]


def heavy_tailed(source: PieceSource, random_: random.Random) -> list[tuple[str, int]]:
    """W4: 192 prompts of 64 tokens; outputs log-normal around 48, cut at 8 and 512."""
    texts = _distinct_starts(source, num_texts=192, num_tokens=64)
    return [(text, min(max(round(random_.lognormvariate(math.log(48), 1.2)), 8), 512)) for text in texts]


def tree(source: PieceSource, random_: random.Random) -> list[tuple[str, int]]:
    """W5: a system prompt of 256 tokens, 8 documents of 512, 4 groups of examples of 192, 8 questions of 32; 32 tokens each, shuffled."""
    system = source.take(256)
    rows = []
    for _ in range(8):
        document = source.take(512)
        for _ in range(4):
            examples = source.take(192)
            rows += [(system + document + examples + source.take(32), 32) for _ in range(8)]
    random_.shuffle(rows)
    return rows


def long_prompts(source: PieceSource, random_: random.Random) -> list[tuple[str, int]]:
    """W6: 24 prompts of 6,000 tokens that share 4,000; 128 tokens each."""
    prefix = "".join(source.take(500) for _ in range(8))
    return [(prefix + "".join(source.take(500) for _ in range(4)), 128) for _ in range(24)]


def short_rows(source: PieceSource, random_: random.Random) -> list[tuple[str, int]]:
    """W7: 5,000 rows of 20 tokens behind one prompt of 300; 4 tokens each."""
    prefix = source.take(300)
    return [(prefix + source.take(20), 4) for _ in range(5000)]


def _distinct_starts(source: PieceSource, *, num_texts: int, num_tokens: int) -> list[str]:
    texts: list[str] = []
    used: set[int] = set()
    for _ in range(num_texts):
        texts.append(source.take(num_tokens, avoid_first=used))
        used.add(source.first_token(texts[-1]))
    return texts


WORKLOADS: dict[str, Callable[[PieceSource, random.Random], list[tuple[str, int]]]] = {
    "W1": shared_prefix,
    "W2": documents_and_questions,
    "W3": nothing_shared,
    "W4": heavy_tailed,
    "W5": tree,
    "W6": long_prompts,
    "W7": short_rows,
}


def make_workload(name: str, corpus: Corpus, *, seed: int = _SEED) -> list[Row]:
    """The rows of workload `name`, the same for the same seed and Python version."""
    source = PieceSource(corpus, seed=seed + int(name[1:]))
    pairs = WORKLOADS[name](source, random.Random(f"{seed} {name}"))
    encoded = corpus.tokenizer.encode_batch([text for text, _ in pairs])
    return [Row(text, tuple(ids.tolist()), max_tokens) for (text, max_tokens), ids in zip(pairs, encoded, strict=True)]


def write_workload(rows: Sequence[Row], path: Path, *, name: str) -> None:
    """Writes the rows, and what they depend on as the file's metadata, as a whole. Raises FolderError or OutputError."""
    table = pa.table(
        {
            "row": pa.array(range(len(rows)), pa.int32()),
            "text": pa.array([row.text for row in rows], pa.string()),
            "token_ids": pa.array([row.token_ids for row in rows], pa.list_(pa.int32())),
            "max_tokens": pa.array([row.max_tokens for row in rows], pa.int32()),
        }
    )
    about = {"workload": name, "seed": str(_SEED), "python": sys.version.split()[0], "model": MODEL}
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata(about), sink)
    replace_file(path, [sink.getvalue().to_pybytes()])


def describe(rows: Sequence[Row]) -> dict[str, int]:
    """Counts of one workload: rows, prompt tokens, tokens that are distinct as prefixes, output tokens."""
    seen: set[int] = set()
    for row in rows:
        state = 0
        for token in row.token_ids:
            state = hash((state, token))
            seen.add(state)
    return {
        "rows": len(rows),
        "prompt_tokens": sum(len(row.token_ids) for row in rows),
        "distinct_prompt_tokens": len(seen),
        "output_tokens": sum(row.max_tokens for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--only", default=",".join(WORKLOADS), help="names, with commas between")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        parser.error(f"--only: no {unknown[0]!r} among {', '.join(WORKLOADS)}")
    corpus = Corpus(load_tokenizer(resolve_model(MODEL, base_folder=Path.cwd())))
    counts = {}
    for name in names:
        rows = make_workload(name, corpus)
        try:
            write_workload(rows, options.folder / f"{name}.parquet", name=name)
        except BatchLLMError as error:
            sys.exit(f"workloads: {error}")
        counts[name] = describe(rows)
        print(f"{name}: {options.folder / name}.parquet, {counts[name]}", file=sys.stderr)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
