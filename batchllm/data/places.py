"""Paths that a user names: what keeps a text from being one, found before anything is opened, and names that a run gives its files."""

from __future__ import annotations

BATCH_OUTPUT_NAME = "batch_output.jsonl"
BATCH_ERRORS_NAME = "batch_errors.jsonl"
"""In an output folder: the answers to an OpenAI batch file."""
BATCH_RECORD_NAME = ".batch_files.json"
"""Beside them: of which parts they were made."""
_LONGEST_NAME = 255
_LONGEST_PATH = 4095
"""Bytes, as Linux takes them."""


def place_mistake(text: str) -> str | None:
    """What is wrong with a text as a path, beginning with a verb; None where nothing is.

    Paths are written to JSON, YAML and SQL, so they have to be Unicode.
    """
    if not text:
        return "must not be empty"
    if "\0" in text:
        return "must not hold a NUL character"
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        return f"must be Unicode text, which its character {error.start + 1} is not"
    longest = max(map(len, data.split(b"/")))
    if longest > _LONGEST_NAME:
        return f"must be made of names of at most {_LONGEST_NAME} bytes, not {longest}"
    if len(data) > _LONGEST_PATH:
        return f"must have at most {_LONGEST_PATH} bytes, not {len(data)}"
    return None


def checked_place(text: str) -> str:
    """The text, where it can be a path. Raises ValueError."""
    mistake = place_mistake(text)
    if mistake is not None:
        raise ValueError(mistake)
    return text
