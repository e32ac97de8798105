"""Makes the sample tables of `jobs/` from the documentation that ships inside Python: real prose, no download.

python jobs/make_data.py [FOLDER]      (default: data/ beside this file)

Writes python_docs.parquet (id, title, text), docqa.parquet (id, title, document, question; few long documents, many
questions, shuffled) and classify.parquet (id, title, text). The same Python gives the same bytes.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import sysconfig
from pathlib import Path
from pydoc_data import topics

import pyarrow as pa
import pyarrow.parquet as pq

NUM_DOCS = 48
DOC_WORDS = (100, 400)
NUM_LONG_DOCS = 4
LONG_DOC_WORDS = 900
NUM_SNIPPETS = 96
SNIPPET_WORDS = 60
QUESTIONS = (
    "What is this document about, in one sentence?",
    "Which error or exception does it mention, and when is it raised?",
    "Name one thing that a beginner is likely to get wrong here.",
    "Which keyword or function does it explain first?",
    "What is allowed only in some cases, and in which?",
    "Quote the shortest code example in it.",
    "What happens by default?",
    "Which other part of Python does it refer to?",
    "Is anything described as deprecated or changed? Say what.",
    "What should a reader remember most?",
    "Which term does it define? Give the definition.",
    "Write one exam question that this document answers.",
)


def documents() -> dict[str, str]:
    """Title → text: the help topics, and the documentation strings of the standard library's modules."""
    found = {f"topic: {name}": text for name, text in sorted(topics.topics.items())}
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.glob("*.py")):
        try:
            text = ast.get_docstring(ast.parse(path.read_bytes()))
        except (SyntaxError, ValueError):
            continue
        if text:
            found[f"module: {path.stem}"] = text
    return {title: inspect.cleandoc(text).strip() for title, text in found.items()}


def in_fixed_disorder(names: list[str]) -> list[str]:
    """An order without pattern that is the same each time."""
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())


def first_words(text: str, num_words: int) -> str:
    """The beginning of a text, cut between words; its lines stay as they are."""
    ends = word_ends(text)[:num_words]
    return text[: ends[-1]] if ends else ""


def word_ends(text: str) -> list[int]:
    """Where each word ends, as offsets into the text."""
    ends, place = [], 0
    for word in text.split():
        place = text.index(word, place) + len(word)
        ends.append(place)
    return ends


def python_docs(texts: dict[str, str]) -> pa.Table:
    """Documents of a few hundred words."""
    fitting = [title for title, text in texts.items() if DOC_WORDS[0] <= len(text.split()) <= DOC_WORDS[1]]
    titles = sorted(in_fixed_disorder(fitting)[:NUM_DOCS])
    return pa.table({"id": range(len(titles)), "title": titles, "text": [texts[title] for title in titles]})


def docqa(texts: dict[str, str]) -> pa.Table:
    """Every question about each of a few long documents, shuffled, so that sharing must be found."""
    long = [title for title, text in texts.items() if len(text.split()) >= LONG_DOC_WORDS]
    titles = in_fixed_disorder(long)[:NUM_LONG_DOCS]
    pairs = [f"{title}\n{question}" for title in titles for question in QUESTIONS]
    rows = [pair.split("\n") for pair in in_fixed_disorder(pairs)]
    return pa.table(
        {
            "id": range(len(rows)),
            "title": [title for title, _ in rows],
            "document": [first_words(texts[title], LONG_DOC_WORDS) for title, _ in rows],
            "question": [question for _, question in rows],
        }
    )


def classify(texts: dict[str, str]) -> pa.Table:
    """Short beginnings of documents."""
    fitting = [title for title, text in texts.items() if len(text.split()) >= SNIPPET_WORDS // 2]
    titles = sorted(in_fixed_disorder(fitting)[:NUM_SNIPPETS])
    snippets = [first_words(texts[title], SNIPPET_WORDS) for title in titles]
    return pa.table({"id": range(len(titles)), "title": titles, "text": snippets})


def main(folder: Path) -> None:
    """Writes the three tables."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = documents()
    for name, table in (("python_docs", python_docs), ("docqa", docqa), ("classify", classify)):
        rows = table(texts)
        pq.write_table(rows, folder / f"{name}.parquet")
        print(f"{folder / name}.parquet: {rows.num_rows} rows")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "data")
