"""Build hook of the native kernels: one shared object with a plain C interface, compiled file by file for its
instruction set.

Everything else about the package is in pyproject.toml. Where no compiler works, the install goes on without it and the
torch reference runs; `batchllm.kernels.native.library.load()` then says so.
"""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
SOURCE_DIR = Path("kernels") / "native"
LIBRARY_NAME = "libbatchllm_native.so"

# No contraction: the sources say where a product and a sum are rounded once. No OpenMP runtime is linked: torch's is
# the only one.
COMPILE_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wall",
    "-Wno-psabi",
]
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c"]
AVX512_FLAGS = [*AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
ANY_PROCESSOR = [
    "interface.cpp",
    "layers.cpp",
    "rows.cpp",
    "attention_units.cpp",
    "threads.cpp",
    "checksum.cpp",
    "dequantise.cpp",
    "path_portable.cpp",
]
X86_PATHS = {
    "path_avx2.cpp": AVX2_FLAGS,
    "path_avx2_vnni.cpp": [*AVX2_FLAGS, "-mavxvnni"],
    "path_avx512.cpp": AVX512_FLAGS,
    "path_avx512_vnni.cpp": [*AVX512_FLAGS, "-mavx512vnni"],
    "path_amx.cpp": [*AVX512_FLAGS, "-mavx512bf16", "-mavx512vbmi", "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
}


def source_flags() -> dict[str, list[str]]:
    """Each source that this machine's kind of processor can use, with the flags beyond the common ones."""
    flags: dict[str, list[str]] = {name: [] for name in ANY_PROCESSOR}
    if platform.machine() in ("x86_64", "AMD64"):
        flags.update(X86_PATHS)
    return flags


def find_compiler() -> str | None:
    """Path of the C++ compiler: CXX, or the first of the usual names."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    return next((path for name in names if (path := shutil.which(name))), None)


def build_library(target: Path) -> str | None:
    """Writes the library to `target`, whole or not at all. Returns why there is none, or None."""
    compiler = find_compiler()
    if compiler is None:
        return "no C++ compiler (looked for CXX, g++, c++, clang++)"
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = runpy.run_path(str(ROOT / SOURCE_DIR / "source_digest.py"))["source_digest"](ROOT / SOURCE_DIR)
    with tempfile.TemporaryDirectory() as folder:

        def run(arguments: list[str]) -> str | None:
            done = subprocess.run([compiler, *arguments], capture_output=True, text=True, check=False)
            return None if done.returncode == 0 else f"{Path(compiler).name} failed: {done.stderr.strip()[-2000:]}"

        def compile_source(name: str) -> str | None:
            source = ROOT / SOURCE_DIR / name
            flags = [*COMPILE_FLAGS, *source_flags()[name], f"-DBATCHLLM_SOURCE_DIGEST={digest}"]
            return run([*flags, "-c", str(source), "-o", str(Path(folder) / f"{name}.o")])

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for reason in pool.map(compile_source, source_flags()):
                if reason is not None:
                    return reason
        objects = [str(Path(folder) / f"{name}.o") for name in source_flags()]
        partial = target.with_name(f"{target.name}.{os.getpid()}")
        reason = run(["-shared", "-o", str(partial), *objects])
        if reason is None:
            os.replace(partial, target)
        return reason


class BuildNative(build_ext):
    """Builds the library where an extension module would go: into the wheel, or beside the sources for an editable
    install.
    """

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1]) / LIBRARY_NAME)

    def build_extension(self, ext: Extension) -> None:
        reason = build_library(Path(self.get_ext_fullpath(ext.name)))
        if reason is not None:
            self.warn(f"native kernels not built, the torch reference will run: {reason}")

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if Path(path).exists()]


setup(
    ext_modules=[
        Extension(
            "batchllm.kernels.native.library_file",
            sources=[str(SOURCE_DIR / name) for name in source_flags()],
            depends=[str(path.relative_to(ROOT)) for path in (ROOT / SOURCE_DIR).glob("*.h")],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNative},
)
