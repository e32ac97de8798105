"""Benchmarks are scripts that import their neighbours; so do their tests."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
for folder in (BENCHMARKS, BENCHMARKS / "peers"):
    sys.path.insert(0, str(folder))
