"""Imports point down: walked in the source, so that nothing has to be importable."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

LAYERS = [
    ["bounded_files", "errors", "prompt"],
    ["kernels", "storage"],
    ["ops"],
    ["models", "planner"],
    ["engine"],
    ["job", "job_file", "job_schema", "data"],
    [
        "run_load",
        "run_progress",
        "run_record",
        "run_stages",
        "run_summary",
        "run_tiers",
        "run_versions",
        "planning_stages",
    ],
    ["run_engine"],
    ["run_job", "planning", "planning_analysis", "doctor", "simulation"],
    ["nightly", "api"],
    ["cli", "__init__"],
    ["__main__"],
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def sources() -> list[Path]:
    found = [path for path in (REPOSITORY / "batchllm").rglob("*.py") if not path.is_symlink()]
    for folder in ("kernels", "storage"):
        found += [path for path in (REPOSITORY / folder).rglob("*.py")]
    return [path for path in found if not any(part.is_symlink() for part in path.parents)]


def layer_of(path: Path) -> str:
    relative = path.relative_to(REPOSITORY)
    return relative.parts[0] if relative.parts[0] != "batchllm" else relative.with_suffix("").parts[1]


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names |= {f"{module}.{alias.name}" for alias in node.names} if module == "batchllm" else {module}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def test_no_module_imports_a_layer_above_its_own() -> None:
    wrong = []
    for path in sources():
        own = RANK[layer_of(path)]
        for module in imported(path):
            parts = module.split(".")
            if parts[0] == "batchllm" and len(parts) > 1 and RANK.get(parts[1], 0) > own:
                wrong.append(f"{path.relative_to(REPOSITORY)} imports {module}")
    assert wrong == []


def test_kernels_and_storage_import_nothing_else_of_the_project() -> None:
    for path in sources():
        layer = layer_of(path)
        if layer in ("kernels", "storage"):
            for module in imported(path):
                assert not module.startswith("batchllm") or module.startswith(f"batchllm.{layer}"), f"{path}: {module}"


def test_storage_and_plan_do_not_import_torch() -> None:
    for path in sources():
        if layer_of(path) in ("storage", "planner"):
            assert not any(module.split(".")[0] == "torch" for module in imported(path)), path


def test_the_folders_at_the_root_are_no_packages_and_the_links_resolve() -> None:
    for name in ("kernels", "storage"):
        assert not list((REPOSITORY / name).rglob("__init__.py"))
        link = REPOSITORY / "batchllm" / name
        assert link.is_symlink() and link.resolve() == REPOSITORY / name


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys\nfrom batchllm.cli.main import cli\n"
        "try:\n    cli.main(['--help'], standalone_mode=False)\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'pyarrow' not in sys.modules, 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_package_is_imported_without_torch_and_its_names_keep_their_meaning() -> None:
    code = (
        "import sys, batchllm\n"
        "assert not {'torch', 'pyarrow', 'pydantic', 'llguidance'} & set(sys.modules), 'imported'\n"
        "import batchllm.run_job, batchllm.planner.plan\n"
        "from batchllm import Job, load_job, plan, run\n"
        "assert callable(plan) and callable(run) and run.__module__ == 'batchllm.api'\n"
        "assert batchllm.run is run and batchllm.run_job.run_job is not run\n"
        "try:\n    batchllm.nothing\nexcept AttributeError as error: assert 'nothing' in str(error)\n"
        "else: raise AssertionError('an unknown name was found')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
