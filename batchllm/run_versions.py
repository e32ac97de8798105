"""What a run writes into its run folder before it needs a device: the job as it is, and what runs it."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import version
from typing import Any

from batchllm import __version__
from batchllm.job import Job

_LIBRARIES = ("torch", "duckdb", "pyarrow", "numpy", "tokenizers")


def job_as_yaml_values(job: Job) -> dict[str, Any]:
    """The job with every default filled in, its date and its folder."""
    return {**job.model_dump(mode="json", by_alias=True), "date": job.date.isoformat(), "folder": str(job.folder)}


def versions() -> dict[str, Any]:
    """Programs, libraries, machine. The libraries are asked for their versions without being imported."""
    return {
        "batchllm": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in _LIBRARIES},
        "platform": platform.platform(),
        "host": platform.node(),
        "num_cpus": os.cpu_count(),
        "command": sys.argv,
    }
