"""Model names to files: the embedded model, local files and folders, and the Hugging Face hub."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from batchllm.errors import ModelError, ModelFetchError
from batchllm.models.embedded import EMBEDDED, cached_file, pull
from batchllm.models.source import PICKLED_SUFFIXES, ModelSource

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "*.safetensors",
    "model.safetensors.index.json",
]


def say_on_stderr(line: str) -> None:
    """One line for the person who waits; standard output stays for data."""
    print(line, file=sys.stderr, flush=True)


def cache_home() -> Path:
    """The cache folder: `BATCHLLM_HOME`, else `batchllm` in the user's cache folder."""
    named = os.environ.get("BATCHLLM_HOME")
    if named:
        try:
            return Path(named).expanduser()
        except RuntimeError as error:
            raise ModelError(f"BATCHLLM_HOME={named}: begins with a user who is not known here") from error
    base = os.environ.get("XDG_CACHE_HOME")
    if base and Path(base).is_absolute():
        return Path(base) / "batchllm"
    try:
        user = Path.home()
    except RuntimeError as error:
        raise ModelError("no home folder to keep models in; set BATCHLLM_HOME") from error
    return user / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "batchllm"


def resolve_model(name: str, *, base_folder: Path, say: Callable[[str], None] = say_on_stderr) -> ModelSource:
    """Finds the model that a job names: a path (from `base_folder`) that exists, an embedded name, or a hub id.

    Fetches what is not on this machine yet, and says so in one line. Raises ModelError or ModelFetchError.
    """
    try:
        path = base_folder / Path(name).expanduser()
        is_there = bool(name) and path.exists()
    except (OSError, RuntimeError) as error:
        raise ModelError(f"model {name!r}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if is_there:
        return _local(path, name)
    if name in EMBEDDED:
        home = cache_home()
        file = cached_file(name, home)
        if file is None:
            say(f"fetching {name} into {home}")
            file = pull(name, home)
        return ModelSource(kind="gguf", path=file, name=name)
    if _HUB_ID.fullmatch(name) and path.suffix not in PICKLED_SUFFIXES | {".gguf", ".safetensors"}:
        return ModelSource(kind="huggingface", path=_hub_folder(name, say), name=name)
    raise ModelError(
        f"model {name!r}: no such file or folder ({path}); a model is {', '.join(EMBEDDED)}, a .gguf file, "
        "a Hugging Face folder, or a hub id like owner/name"
    )


def _local(path: Path, name: str) -> ModelSource:
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"model folder {path}: no config.json in it; for a GGUF model name the .gguf file")
        return ModelSource(kind="huggingface", path=path, name=name)
    if path.suffix in PICKLED_SUFFIXES:
        raise ModelError(
            f"model {path}: pickled weights can run code and are never opened; convert them to safetensors"
        )
    if path.suffix == ".safetensors":
        raise ModelError(f"model {path}: name the folder that holds it with its config.json and tokenizer.json")
    if path.suffix != ".gguf":
        raise ModelError(f"model {path}: not a .gguf file and not a folder")
    return ModelSource(kind="gguf", path=path, name=name)


def _hub_folder(name: str, say: Callable[[str], None]) -> Path:
    """The model's files in the hub's own cache, fetched where they are missing: only files that are data."""
    # Imported here: the hub's client is slow to import and most runs need no network.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    say(f"looking up {name} on the Hugging Face hub")
    try:
        folder = Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        # Without a network nobody can tell whether there is such a model.
        kind = ModelError if isinstance(error, (HFValidationError, RepositoryNotFoundError)) else ModelFetchError
        raise kind(f"model {name!r}: no such file or folder here, and not to be had from the hub: {reason}") from error
    return _local(folder, name).path


def list_embedded(home: Path) -> list[dict[str, str | int | bool]]:
    """One entry for each embedded model: `name`, `present` (whole in the cache), `num_bytes`, `path`."""
    return [
        {
            "name": name,
            "present": cached_file(name, home) is not None,
            "num_bytes": model.num_bytes,
            "path": str(home / "models" / model.file_name),
        }
        for name, model in EMBEDDED.items()
    ]
