"""Fixtures that several folders use."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def shared_data() -> Callable[[str], Path]:
    """Path of a public data file that lies beside the project; skips by name where it is absent."""
    root = Path(os.environ.get("BATCHLLM_SHARED", REPOSITORY.parent / "shared")) / "data"

    def find(name: str) -> Path:
        path = root / name
        if not path.exists():
            pytest.skip(f"needs the public data file {name} beside the project")
        return path

    return find
