"""What the kernel tests share: every backend this machine has, the tolerances, and attention cases with their float64 answer.

Tests marked `triton` need Triton kernels to run: on a GPU they do; elsewhere in Triton's interpreter, in one child process.
The interpreter is chosen when Triton is imported, so this process could not have both it and the compiler. Each marked test runs in
the child and is reported here under its own name with its own outcome.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchllm import ops
from batchllm.kernels.attention import CHUNK, AttentionPlan
from batchllm.kernels.native import layers, operations, row_memory
from batchllm.kernels.native import library as native_library

REPOSITORY = Path(__file__).resolve().parents[2]
CHILD_TIMEOUT_S = 900
GROUP = "triton"

# The inputs and float64 answers that the GPU benchmark checks with as well.
sys.path.insert(0, str(REPOSITORY / "benchmarks"))

from kernel_cases import error_share  # noqa: E402

Outcomes = dict[tuple[str, str], ElementTree.Element]
OUTCOMES = pytest.StashKey[Outcomes]()
# cuBLAS is deterministic only with this; it is read when its first product runs.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _native_paths() -> list[str]:
    library = native_library.load()
    return [] if isinstance(library, str) else library.runnable_paths()


def _backends() -> list[Any]:
    # Paths that end in vnni differ in products over int8 weights only: what wants them takes `native`.
    native = [f"native-{path}" for path in _native_paths() if "vnni" not in path]
    return ["reference", *native, pytest.param("triton", marks=pytest.mark.triton)]


@pytest.fixture(params=_backends())
def kernels(request: pytest.FixtureRequest) -> Iterator[ops.Kernels]:
    """Each backend that runs here in turn, native once for each path of instructions, Triton on the GPU or in its interpreter."""
    backend, _, path = request.param.partition("-")
    if backend == "reference":
        yield ops.REFERENCE
        return
    if backend == "triton":
        # The interpreter computes with numpy, which warns of an infinite exponential; a GPU does not.
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"), np.errstate(over="ignore"):
            yield ops.TRITON
        return
    with _native_on(path) as native:
        yield native


@pytest.fixture(params=_native_paths())
def native(request: pytest.FixtureRequest) -> Iterator[ops.Kernels]:
    """The native kernels on each path of instructions, those with dot products of int8 among them."""
    with _native_on(request.param) as kernels:
        yield kernels


@pytest.fixture(params=["reference", *_native_paths()])
def reference_or_native(request: pytest.FixtureRequest) -> Iterator[ops.Kernels]:
    """The reference, and what `native` gives."""
    if request.param == "reference":
        yield ops.REFERENCE
        return
    with _native_on(request.param) as kernels:
        yield kernels


@contextlib.contextmanager
def _native_on(path: str) -> Iterator[ops.Kernels]:
    library, kernels = native_library.load(), ops.native_kernels()
    assert not isinstance(library, str) and not isinstance(kernels, str)
    before = library.path_name()
    library.use_path(path)
    yield kernels
    library.use_path(before)


@pytest.fixture(autouse=True)
def poison_new_tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fills what `torch.empty` and `empty_rows` return with NaN, so that a result which was never written is seen."""

    def poisoned_rows(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> torch.Tensor:
        rows = row_memory.empty_rows(shape, dtype)
        return rows.fill_(torch.nan) if dtype.is_floating_point else rows

    for module in (operations, layers):
        monkeypatch.setattr(module, "empty_rows", poisoned_rows)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def assert_near(kernels: ops.Kernels) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Compares a result with its float64 truth within the tolerance of the result's dtype; CPU kernels take half of it.

    The interpreter cuts numbers off at bfloat16's 8 bits where hardware rounds.
    """
    return functools.partial(_check_near, factor=1.0 if kernels.name == "triton" else 0.5)


@pytest.fixture
def assert_is_near() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """`assert_near` for tests of the native kernels alone."""
    return functools.partial(_check_near, factor=0.5)


def _check_near(result: torch.Tensor, truth: torch.Tensor, *, factor: float) -> None:
    assert error_share(result, truth.cpu().double(), dtype=result.dtype) <= factor


@dataclass(frozen=True, slots=True)
class Span:
    """The query rows of one sequence: positions [kv_length - num_rows, kv_length)."""

    kv_length: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Sequences in a poisoned pool: only written slots hold numbers, and blocks lie in random order.

    The first `shared` tokens of all sequences are the same blocks; a whole number of blocks, or 0.
    """

    query: torch.Tensor
    kv: torch.Tensor
    block_table: torch.Tensor
    spans: list[Span]
    shared: int
    layer: int
    scale: float

    def positions(self) -> torch.Tensor:
        parts = [torch.arange(span.kv_length - span.num_rows, span.kv_length) for span in self.spans]
        return torch.cat(parts).int()

    def tables(self) -> torch.Tensor:
        return torch.arange(len(self.spans)).repeat_interleave(torch.tensor([s.num_rows for s in self.spans])).int()

    def private_plan(self) -> AttentionPlan:
        """One item a sequence, from position 0 to its end."""
        items, row = [], 0
        for span in self.spans:
            items.append((row, span.num_rows, 0, span.kv_length, span.kv_length, -1))
            row += span.num_rows
        return self._plan(items, {})

    def shared_plan(self) -> AttentionPlan:
        """One item for the shared prefix, read by every row that sees more, and one for each sequence's tail."""
        assert self.shared % CHUNK == 0
        assert all(span.kv_length - span.num_rows >= self.shared for span in self.spans)
        num_rows = sum(span.num_rows for span in self.spans)
        items = [(0, num_rows, 0, self.shared, self.shared, 0)]
        merges: dict[int, list[int]] = {row: [row] for row in range(num_rows)}
        self._add_chunks(items, merges, start=self.shared, partial=num_rows, one_item=True)
        return self._plan(items, merges)

    def forked_plan(self) -> AttentionPlan:
        """One item for the whole chunks of the shared prefix, one that forks where it ends, and what each sequence has behind that chunk."""
        assert all(span.kv_length - span.num_rows >= self.shared for span in self.spans)
        positions, num_rows = self.positions().tolist(), sum(span.num_rows for span in self.spans)
        start = self.shared // CHUNK * CHUNK
        stop = min(start + CHUNK, max(span.kv_length for span in self.spans))
        is_whole = start == 0 and max(positions) < stop
        merges: dict[int, list[int]] = {row: [] for row in range(0 if is_whole else num_rows)}
        items = [(0, num_rows, start, stop, self.shared, -1 if is_whole else 0)]
        if start:
            items.append((0, num_rows, 0, start, start, num_rows))
        for row in merges:
            merges[row] += [num_rows + row, row] if start else [row]
        partial, first = 2 * num_rows, 0
        for span in self.spans:
            hidden = sum(position < stop for position in positions[first : first + span.num_rows])
            rows = span.num_rows - hidden
            if rows:
                items.append((first + hidden, rows, stop, span.kv_length, span.kv_length, partial))
            for chunk in range(stop, span.kv_length, CHUNK):
                for row in range(first + hidden, first + span.num_rows):
                    if positions[row] >= chunk:
                        merges[row].append(partial + row - first - hidden)
                partial += rows
            first += span.num_rows
        return self._plan(items, merges)

    def split_plan(self) -> AttentionPlan:
        """One item a chunk and sequence, all merged."""
        items: list[tuple[int, ...]] = []
        merges: dict[int, list[int]] = {}
        self._add_chunks(items, merges, start=0, partial=0, one_item=False)
        return self._plan(items, merges)

    def _add_chunks(
        self, items: list[tuple[int, ...]], merges: dict[int, list[int]], *, start: int, partial: int, one_item: bool
    ) -> None:
        first_row = 0
        for span in self.spans:
            first_position = span.kv_length - span.num_rows
            item_start = partial
            for chunk in range(start, span.kv_length, CHUNK):
                # An item holds rows that see at least its first position: in later chunks the first rows see nothing.
                hidden = 0 if one_item else max(0, chunk - first_position)
                rows = span.num_rows - hidden
                if not one_item:
                    stop = min(chunk + CHUNK, span.kv_length)
                    items.append((first_row + hidden, rows, chunk, stop, stop, partial))
                for row in range(rows):
                    if first_position + hidden + row >= chunk:
                        merges.setdefault(first_row + hidden + row, []).append(partial + row)
                partial += rows
            if one_item and start < span.kv_length:
                items.append((first_row, span.num_rows, start, span.kv_length, span.kv_length, item_start))
            first_row += span.num_rows

    def _plan(self, items: list[tuple[int, ...]], merges: dict[int, list[int]]) -> AttentionPlan:
        listed = [number for row in sorted(merges) for number in merges[row]]
        starts = [0]
        for row in sorted(merges):
            starts.append(starts[-1] + len(merges[row]))
        return AttentionPlan(
            positions=self.positions(),
            tables=self.tables(),
            block_table=self.block_table,
            items=torch.tensor(items, dtype=torch.int32).reshape(-1, 6),
            merge_rows=torch.tensor(sorted(merges), dtype=torch.int32),
            merge_start=torch.tensor(starts, dtype=torch.int32),
            merge_partials=torch.tensor(listed, dtype=torch.int32),
            num_partials=max(listed, default=-1) + 1,
        )

    def truth(self) -> torch.Tensor:
        """Softmax attention of each row over its own positions, float64."""
        num_kv_heads, block_size = self.kv.shape[3:5]
        group = self.query.shape[1] // num_kv_heads
        out, row = torch.zeros_like(self.query, dtype=torch.float64), 0
        for table, span in enumerate(self.spans):
            positions = torch.arange(span.kv_length)
            blocks = self.block_table[table][positions // block_size].long()
            keys, values = (
                self.kv[blocks, self.layer, side, :, positions % block_size].double().repeat_interleave(group, dim=1)
                for side in (0, 1)
            )
            for position in range(span.kv_length - span.num_rows, span.kv_length):
                scores = torch.einsum("hd,khd->hk", self.query[row].double(), keys[: position + 1]) * self.scale
                out[row] = torch.einsum("hk,khd->hd", scores.softmax(dim=-1), values[: position + 1])
                row += 1
        return out


MakeAttentionCase = Callable[..., AttentionCase]


@pytest.fixture
def make_attention_case() -> MakeAttentionCase:
    """Builds an AttentionCase from the (kv_length, num_rows) of its sequences."""

    def make(
        spans: list[tuple[int, int]],
        *,
        dtype: torch.dtype,
        num_heads: int = 6,
        num_kv_heads: int = 2,
        head_dim: int = 64,
        block_size: int = 16,
        shared: int = 0,
        padded_blocks: bool = True,
    ) -> AttentionCase:
        num_layers, layer = 3, 1
        blocks_of = [-(-kv_length // block_size) for kv_length, _ in spans]
        num_shared = shared // block_size
        assert shared % block_size == 0
        num_blocks = num_shared + sum(count - num_shared for count in blocks_of) + 3
        free = torch.randperm(num_blocks).tolist()
        prefix = [free.pop() for _ in range(num_shared)]
        block_table = torch.full((len(spans), max(blocks_of) + 1), -1, dtype=torch.int32)
        shape = (num_layers, 2, num_kv_heads, block_size, head_dim)
        # A stride beyond the block's size, as the pool has it for direct I/O.
        pool = torch.full(
            (num_blocks, torch.Size(shape).numel() + (32 if padded_blocks else 0)), torch.nan, dtype=dtype
        )
        kv = pool[:, : torch.Size(shape).numel()].view(num_blocks, *shape)
        for table, (kv_length, _) in enumerate(spans):
            blocks = prefix + [free.pop() for _ in range(blocks_of[table] - num_shared)]
            block_table[table, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            positions = torch.arange(shared if table else 0, kv_length)
            written = torch.randn(len(positions), 2, num_kv_heads, head_dim).to(dtype)
            for side in (0, 1):
                kv[torch.tensor(blocks)[positions // block_size], layer, side, :, positions % block_size] = written[
                    :, side
                ]
        query = torch.randn(sum(num_rows for _, num_rows in spans), num_heads, head_dim).to(dtype)
        return AttentionCase(
            query=query,
            kv=kv,
            block_table=block_table,
            spans=[Span(*span) for span in spans],
            shared=shared,
            layer=layer,
            scale=head_dim**-0.5,
        )

    return make


def pytest_configure() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        patch_the_language_once()


def patch_the_language_once() -> None:
    """Triton's interpreter replaces the functions of its language at each launch and at each call of a device function, and takes half of its
    time for that. A process that compiles nothing can leave them replaced.
    """
    with contextlib.suppress(ModuleNotFoundError):
        from triton.runtime import interpreter

        # Private names: a Triton that has others is as slow as it is.
        patch, scope = getattr(interpreter, "_patch_lang", None), getattr(interpreter, "_LangPatchScope", None)
        if patch is None or scope is None:
            return
        nothing_to_restore = scope()
        patched = set()

        def patch_once(function: Any) -> Any:
            if function not in patched:
                patch(function)
                patched.add(function)
            return nothing_to_restore

        interpreter._patch_lang = patch_once


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The first of them waits for the child, in which each has the usual time; one worker has them all, so that there is one child.
    if os.environ.get("TRITON_INTERPRET") != "1":
        for item in items:
            if item.get_closest_marker("triton") is not None:
                item.add_marker(pytest.mark.timeout(CHILD_TIMEOUT_S + 20))
                item.add_marker(pytest.mark.xdist_group(GROUP))


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
    marked = [
        item.nodeid.removesuffix(f"@{GROUP}") for item in session.items if item.get_closest_marker("triton") is not None
    ]
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
