"""A model's fingerprint: the same for the same model, another for any change."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchllm.models import fingerprint
from batchllm.models.fingerprint import model_fingerprint
from batchllm.models.source import ModelSource


def test_a_renamed_copy_has_the_same_fingerprint_and_one_changed_weight_another(
    tmp_path: Path, tiny_model: Callable[..., Any], write_gguf: Callable[..., None]
) -> None:
    first = tmp_path / "a.gguf"
    write_gguf(first, tiny_model("llama-tied"))
    copy = tmp_path / "b.gguf"
    shutil.copy(first, copy)
    expected = model_fingerprint(ModelSource(kind="gguf", path=first, name="a"))
    assert len(expected) == 32
    assert model_fingerprint(ModelSource(kind="gguf", path=copy, name="b")) == expected
    content = bytearray(copy.read_bytes())
    content[-40] ^= 1
    copy.write_bytes(content)
    assert model_fingerprint(ModelSource(kind="gguf", path=copy, name="b")) != expected


def test_config_tokenizer_and_weights_of_a_folder_all_count(
    save_tiny: Callable[..., Any], edit_json: Callable[..., None]
) -> None:
    _, source = save_tiny("llama2")
    seen = {model_fingerprint(source)}
    edit_json(source.path / "config.json", rope_theta=20000.0)
    seen.add(model_fingerprint(source))
    (source.path / "tokenizer.json").write_text("{}")
    seen.add(model_fingerprint(source))
    content = bytearray((source.path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (source.path / "model.safetensors").write_bytes(content)
    seen.add(model_fingerprint(source))
    assert len(seen) == 4
    (source.path / "README.md").write_text("no part of the model")
    assert model_fingerprint(source) in seen


def test_every_text_file_that_a_model_is_read_from_counts_and_one_that_is_not_there_changes_nothing(
    tmp_path: Path,
) -> None:
    source = ModelSource(kind="huggingface", path=tmp_path, name="m")
    for name, content in (("config.json", "{}"), ("tokenizer.json", '{"a": 1}'), ("model.safetensors", "weights")):
        (tmp_path / name).write_text(content)
    # Another number for the same files would keep every run of before from being resumed.
    assert model_fingerprint(source) == "c7647465515bf0518153841c93efe8ef"
    seen = {model_fingerprint(source)}
    names = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
    for name in (*names, "chat_template.jinja", "chat_template.json"):
        (tmp_path / name).write_text("{}")
        seen.add(model_fingerprint(source))
        (tmp_path / name).unlink()
    assert len(seen) == 6


def test_a_large_file_is_sampled_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(fingerprint, "_NUM_SAMPLES", 10)
    monkeypatch.setattr(fingerprint, "_SAMPLE_BYTES", 16)
    path = tmp_path / "m.gguf"
    source = ModelSource(kind="gguf", path=path, name="m")
    plain = bytes(range(256)) * 20
    path.write_bytes(plain)
    expected = model_fingerprint(source)
    for changed in (b"X" + plain[1:], plain[:-1] + b"X", bytes(b ^ 1 for b in plain), plain + b"\0"):
        path.write_bytes(changed)
        assert model_fingerprint(source) != expected
