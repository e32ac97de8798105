"""A model's fingerprint: names what a run was made with, and keys KV blocks that are kept between runs."""

from __future__ import annotations

import hashlib
from pathlib import Path

from batchllm.errors import ModelError
from batchllm.models.source import ModelSource
from batchllm.models.weight_files import weight_files

_WHOLE_BYTES = 1 << 30
"""Up to here a file is hashed whole, in a second or less."""

_NUM_SAMPLES = 4096
_SAMPLE_BYTES = 16384
_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


def model_fingerprint(source: ModelSource) -> str:
    """32 hex digits over config, tokenizer and weights; the same for a copy or under another name.

    A weight file above 1 GiB is hashed by its size, its first and last bytes and 4,096 samples of 16 KiB at even
    distances: another training step changes every sample, a single byte edited by hand may not.
    """
    digest = hashlib.blake2b(digest_size=16)
    if source.kind == "gguf":
        files = [source.path]
    else:
        files = [source.path / name for name in _TEXT_FILES if (source.path / name).exists()]
        files += weight_files(source.path)
    for path in files:
        try:
            content = file_digest(path)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
        # The name of a GGUF file is the user's; the names in a folder have a meaning.
        digest.update(b"" if source.kind == "gguf" else path.name.encode())
        digest.update(content)
    return digest.hexdigest()


def file_digest(path: Path) -> bytes:
    """Of a file's bytes; of one above 1 GiB, of its size, its first and last bytes and the samples between them. Raises OSError."""
    with path.open("rb") as file:
        size = path.stat().st_size
        if size <= _WHOLE_BYTES:
            return hashlib.file_digest(file, "blake2b").digest()
        digest = hashlib.blake2b(size.to_bytes(8, "little"))
        for number in range(_NUM_SAMPLES):
            file.seek((size - _SAMPLE_BYTES) * number // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
        return digest.digest()
