"""Model names to files: local paths first, embedded names, the hub, and clear refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchllm.errors import ModelError, ModelFetchError
from batchllm.models.registry import cache_home, resolve_model
from batchllm.models.source import ModelSource


def test_a_gguf_file_and_a_folder_are_found_from_the_base_folder(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    assert resolve_model("m.gguf", base_folder=tmp_path) == ModelSource(
        kind="gguf", path=tmp_path / "m.gguf", name="m.gguf"
    )
    found = resolve_model("folder", base_folder=tmp_path)
    assert (found.kind, found.path) == ("huggingface", tmp_path / "folder")


def test_a_local_path_wins_over_the_embedded_name(tmp_path: Path) -> None:
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "smollm2-135m" / "config.json").write_text("{}")
    assert resolve_model("smollm2-135m", base_folder=tmp_path).kind == "huggingface"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.gguf", "no such file or folder"),
        ("owner/none.gguf", "no such file or folder"),
        ("../a/b/c", "no such file or folder"),
        ("", "a model is smollm2-135m, a .gguf file"),
        ("weights.bin", "pickled weights can run code and are never opened"),
        ("weights.pt", "pickled weights can run code and are never opened"),
        ("model.safetensors", "name the folder that holds it"),
        ("notes.txt", "not a .gguf file and not a folder"),
        ("empty", "no config.json in it"),
    ],
)
def test_what_is_no_model_is_refused_with_the_remedy(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for file in ("weights.bin", "weights.pt", "model.safetensors", "notes.txt"):
        (tmp_path / file).write_bytes(b"cos\nsystem\n")
    with pytest.raises(ModelError, match=message):
        resolve_model(name, base_folder=tmp_path)


def test_a_hub_id_that_cannot_be_reached_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ModelFetchError, match="model 'some-owner/some-model': .*not to be had from the hub: "
    ) as caught:
        resolve_model("some-owner/some-model", base_folder=tmp_path)
    assert "\n" not in str(caught.value)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("looking up some-owner/some-model")


def test_a_hub_id_is_fetched_as_data_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_tiny: Callable[..., Any]
) -> None:
    _, source = save_tiny("llama2")
    asked: dict[str, Any] = {}

    def snapshot(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(source.path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    said: list[str] = []
    found = resolve_model("owner/name", base_folder=tmp_path, say=said.append)
    assert (found.kind, found.path, found.name) == ("huggingface", source.path, "owner/name")
    # What a tokenizer's special tokens are may stand in there alone.
    assert "special_tokens_map.json" in asked["allow_patterns"]
    assert not any(pattern.endswith((".py", ".bin", ".pt", "*")) for pattern in asked["allow_patterns"])
    assert said == ["looking up owner/name on the Hugging Face hub"]


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATCHLLM_HOME", str(tmp_path / "here"))
    assert cache_home() == tmp_path / "here"
    monkeypatch.delenv("BATCHLLM_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_home() == tmp_path / "xdg" / "batchllm"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_home().is_relative_to(tmp_path)
    assert cache_home().name == "batchllm"
