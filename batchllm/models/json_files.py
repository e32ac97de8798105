"""Reading a model folder's JSON files: a missing or broken one is a ModelError that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from batchllm.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises ModelError where the file is absent, unreadable, not JSON or not an object."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a {type(value).__name__} where an object is needed")
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """As `read_json`, and empty where there is no such file."""
    return read_json(path) if path.exists() else {}
