"""Tests marked `triton` need Triton kernels to run: on a GPU they do; elsewhere in Triton's interpreter, in one child
process.

The interpreter is chosen when Triton is imported, so this process could not have both it and the compiler. Each
marked test runs in the child and is reported here under its own name with its own outcome.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
CHILD_TIMEOUT_S = 280

# The inputs and float64 answers that the GPU benchmark checks with as well.
sys.path.insert(0, str(REPOSITORY / "benchmarks"))

Outcomes = dict[tuple[str, str], ElementTree.Element]
OUTCOMES = pytest.StashKey[Outcomes]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "triton: needs Triton kernels to run; without a GPU it runs in their interpreter"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if pyfuncitem.get_closest_marker("triton") is None:
        return None
    pytest.importorskip("triton", reason="needs triton")
    if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available():
        return None
    session = pyfuncitem.session
    if OUTCOMES not in session.stash:
        session.stash[OUTCOMES] = run_in_interpreter(session)
    case = session.stash[OUTCOMES].get(key_of(pyfuncitem))
    if case is None:
        pytest.fail("the interpreter's process ended before this test did")
    for kind, report in (("failure", pytest.fail), ("error", pytest.fail), ("skipped", pytest.skip)):
        found = case.find(kind)
        if found is not None:
            report(found.text or found.get("message") or kind)
    return True


def key_of(item: pytest.Item) -> tuple[str, str]:
    """How junit names a test: the file as a dotted path, and the test's name with its parameters."""
    path = item.path.relative_to(REPOSITORY).with_suffix("")
    return ".".join(path.parts), item.name


def run_in_interpreter(session: pytest.Session) -> Outcomes:
    """Runs the session's marked tests in a child process under TRITON_INTERPRET=1."""
    marked = [item.nodeid for item in session.items if item.get_closest_marker("triton") is not None]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *marked]
        environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S
        )
        if not report.exists():
            pytest.fail(
                f"the interpreter's process ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        cases = ElementTree.parse(report).iter("testcase")
        return {(case.get("classname", ""), case.get("name", "")): case for case in cases}
