"""What is installed: the wheel holds the tree, whole and under one name."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PLACES = {"batchllm": "batchllm", "kernels": "batchllm/kernels", "storage": "batchllm/storage"}
"""Folders at the root, and where their files are installed."""


def tracked(suffix: str) -> list[Path]:
    """The source files of the package, from the root; nothing that a build or a run has left."""
    found: list[Path] = []
    for folder in PLACES:
        for path in (REPOSITORY / folder).rglob(f"*{suffix}"):
            relative = path.relative_to(REPOSITORY)
            linked = any((REPOSITORY / part).is_symlink() for part in relative.parents)
            if not linked and "__pycache__" not in relative.parts:
                found.append(relative)
    return sorted(found)


def installed_name(path: Path) -> str:
    first, *rest = path.parts
    return "/".join([PLACES[first], *rest])


@pytest.fixture(scope="module")
def source_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree as a checkout has it, links as links, so that a build leaves nothing in ours."""
    folder = tmp_path_factory.mktemp("source") / "project"
    names = shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.so", "build", "*.egg-info", ".*_cache", "out")

    def ignored(place: str, entries: list[str]) -> set[str]:
        return set(names(place, entries)) | ({"data"} if Path(place).name == "jobs" else set())

    shutil.copytree(REPOSITORY, folder, symlinks=True, ignore=ignored)
    return folder


def run_backend(code: str, *, folder: Path) -> None:
    """A hook of the build backend, as pip would call it, without the network."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("needs setuptools to build")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def wheel_names(source_copy: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The wheel's files. No compiler is used: the native library is optional, and an install without one must work."""
    folder = tmp_path_factory.mktemp("wheel")
    code = (
        "import os; os.environ['CXX'] = '/nowhere/c++'\n"
        f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    )
    run_backend(code, folder=source_copy)
    (wheel,) = folder.glob("*.whl")
    assert wheel.name.startswith("batchllm_offline-")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_every_module_of_the_tree_and_no_other(wheel_names: set[str]) -> None:
    assert {name for name in wheel_names if name.endswith(".py")} == {installed_name(path) for path in tracked(".py")}


def test_the_wheel_has_one_top_level_package_and_its_type_marker(wheel_names: set[str]) -> None:
    top = {name.split("/")[0] for name in wheel_names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"batchllm"}
    assert "batchllm/py.typed" in wheel_names
    data = {installed_name(path) for path in tracked(".json")}
    assert data <= wheel_names, f"the wheel lacks {data - wheel_names}"


def test_the_source_archive_holds_what_a_build_needs(source_copy: Path, tmp_path: Path) -> None:
    run_backend(f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})", folder=source_copy)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.split("/", 1)[-1] for name in file.getnames()}
    needed = [path for suffix in (".py", ".cpp", ".h", ".json") for path in tracked(suffix)]
    assert {path.as_posix() for path in needed} <= names
    assert {"setup.py", "pyproject.toml", "README.md"} <= names


def test_every_folder_with_modules_is_a_listed_package() -> None:
    folders = {installed_name(path.parent / "x").removesuffix("/x").replace("/", ".") for path in tracked(".py")}
    assert folders == set(PROJECT["tool"]["setuptools"]["packages"])


def test_nothing_imports_kernels_or_storage_by_a_top_level_name() -> None:
    paths = [REPOSITORY / path for path in tracked(".py")]
    paths += [path for folder in ("tests", "benchmarks", "jobs") for path in (REPOSITORY / folder).rglob("*.py")]
    wrong: list[str] = []
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            wrong += [f"{path}: {name}" for name in names if name.split(".")[0] in ("kernels", "storage")]
    assert wrong == []


def test_every_import_of_another_distribution_is_a_declared_dependency() -> None:
    declared = {
        re.split(r"[<>=!; \[]", line)[0].lower().replace("-", "_") for line in PROJECT["project"]["dependencies"]
    }
    declared |= {re.split(r"[<>=!; ]", line)[0] for line in PROJECT["project"]["optional-dependencies"]["gpu"]}
    names = {"yaml": "pyyaml", "vl_convert": "vl_convert_python"}
    imported: set[str] = set()
    for path in tracked(".py"):
        for node in ast.walk(ast.parse((REPOSITORY / path).read_text())):
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            imported |= {name.split(".")[0] for name in found}
    others = imported - set(sys.stdlib_module_names) - {"batchllm"}
    assert {names.get(name, name) for name in others} <= declared
