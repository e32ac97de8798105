"""Offline batch engine for language models: plans the whole batch, then runs it as fast as the machine allows.

In Python: `from batchllm import Job, load_job, plan, run`. What these need is imported when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["Job", "Result", "load_job", "plan", "run"]

if TYPE_CHECKING:  # the same names, for editors and type checkers
    from batchllm.api import Result, plan, run
    from batchllm.job import Job, load_job

_MODULES = {
    "Job": "batchllm.job",
    "load_job": "batchllm.job",
    "Result": "batchllm.api",
    "plan": "batchllm.api",
    "run": "batchllm.api",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
