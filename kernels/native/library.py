"""Loads the native kernels on torch's OpenMP runtime and picks the path of instructions.

A second OpenMP runtime on the same cores spins against the first, so the library names none: its OpenMP symbols resolve
to the one that torch has loaded, which is made visible to it here.
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Imported for its effect: it loads the OpenMP runtime.
import torch  # noqa: F401

from batchllm.kernels.native.source_digest import source_digest

PATH_VARIABLE = "BATCHLLM_NATIVE_PATH"
PATHS = ("portable", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "amx")
"""Instruction sets, least first; the index is the number in the C interface."""

LIBRARY_FILE = Path(__file__).with_name("libbatchllm_native.so")

_ROPE = (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int32, c_int32, c_int32, c_int32)
_LINEAR = (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_int32, c_int32)
_PLAN = (c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_int64)
_FUNCTIONS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "can_run": ((c_int,), c_int),
    "path": ((), c_int),
    "set_path": ((c_int,), None),
    "num_threads": ((), c_int),
    "attention": (
        (c_void_p, c_void_p, c_void_p, c_int64, c_int64) + (c_int32,) * 5 + (*_PLAN, c_float),
        None,
    ),
    "rms_norm": ((c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_int32), None),
    "silu_mul": ((c_void_p, c_void_p, c_int64, c_int64, c_int32), None),
    "rope_write_kv": ((c_void_p, c_void_p, c_int64, c_int32, *_ROPE), None),
    "linear": ((*_LINEAR, c_int32), None),
    "linear_rope_write_kv": ((*_LINEAR, *_ROPE), None),
    "to_last_attention": (
        (c_void_p, c_int64, c_int64, c_float, c_int32)
        + (c_void_p, c_int64)
        + (c_void_p,) * 5
        + (c_int64, *_ROPE, *_PLAN, c_void_p, c_int64, c_float),
        None,
    ),
    "after_last_attention": (
        (c_void_p, c_void_p, c_int64, c_int64, c_float, c_int32) + (c_void_p, c_void_p, c_int64) + (c_void_p,) * 5,
        c_int,
    ),
    "packed_rows": ((c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64), c_int),
    "copy_blocks": ((c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64), None),
    "dequantise": ((c_void_p, c_void_p, c_int64, c_int32, c_int32), None),
    "copy_checksum": ((c_void_p, c_void_p, c_int64), c_uint64),
}


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded library: one bound C function an operation, pointers as integers."""

    can_run: Any
    path: Any
    set_path: Any
    num_threads: Any
    attention: Any
    rms_norm: Any
    silu_mul: Any
    rope_write_kv: Any
    linear: Any
    linear_rope_write_kv: Any
    to_last_attention: Any
    after_last_attention: Any
    packed_rows: Any
    copy_blocks: Any
    copy_checksum: Any
    dequantise: Any

    def path_name(self) -> str:
        """The path that runs now."""
        return PATHS[self.path()]

    def runnable_paths(self) -> list[str]:
        """The paths that this processor has, least first."""
        return [name for number, name in enumerate(PATHS) if self.can_run(number)]

    def use_path(self, name: str) -> None:
        """Runs `name` from now on, in every thread. Raises ValueError for one that this processor lacks."""
        if name not in PATHS:
            raise ValueError(f"{name}: no such native path; the paths are {', '.join(PATHS)}")
        if name not in self.runnable_paths():
            raise ValueError(f"{name}: this processor cannot run it; it can run {', '.join(self.runnable_paths())}")
        self.set_path(PATHS.index(name))


@functools.cache
def load() -> Library | str:
    """The library, or the reason why there is none. Raises ValueError where BATCHLLM_NATIVE_PATH asks for what cannot
    run.
    """
    if not LIBRARY_FILE.exists():
        return f"not built: {LIBRARY_FILE.name} is missing, the install found no working C++ compiler"
    runtime = find_openmp_runtime()
    if runtime is None:
        return "torch has loaded no OpenMP runtime"
    # Loaded already: this only makes its symbols visible to libraries loaded later.
    ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    try:
        loaded = ctypes.CDLL(str(LIBRARY_FILE))
    except OSError as error:
        return f"cannot be loaded: {error}"
    digest = source_digest(LIBRARY_FILE.parent)
    built_from = getattr(loaded, "batchllm_source_digest", None)
    if built_from is not None:
        built_from.restype = ctypes.c_int64
    if digest is not None and (built_from is None or built_from() != digest):
        return f"{LIBRARY_FILE.name} was built from other sources: install again"
    functions = {}
    for name, (argument_types, result_type) in _FUNCTIONS.items():
        function = getattr(loaded, f"batchllm_{name}", None)
        if function is None:
            return f"{LIBRARY_FILE.name} is older than the sources: install again"
        function.argtypes, function.restype = argument_types, result_type
        functions[name] = function
    library = Library(**functions)
    asked = os.environ.get(PATH_VARIABLE, "")
    if asked:
        library.use_path(asked)
    return library


def find_openmp_runtime() -> str | None:
    """Path of the OpenMP runtime that this process has loaded; torch's own where there are several."""
    runtimes = loaded_openmp_runtimes()
    return next((path for path in runtimes if "torch" in Path(path).parts), runtimes[0] if runtimes else None)


def loaded_openmp_runtimes() -> list[str]:
    """Paths of all OpenMP runtimes that this process has loaded."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    paths = {line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if line.count("/")}
    return sorted(path for path in paths if Path(path).name.startswith(("libgomp", "libiomp5", "libomp")))
