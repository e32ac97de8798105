"""The command line in this process: torch is imported once, and exit codes and both streams are seen."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchllm.cli.main import main


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    exit_code: int
    out: str
    err: str


@pytest.fixture
def batchllm(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ended]]:
    """Runs `batchllm ARGUMENTS`."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*arguments: str | Path) -> Ended:
        monkeypatch.setattr(sys, "argv", ["batchllm", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, out, err)

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def write_job(tmp_path: Path, tiny_model: Path) -> Callable[..., Path]:
    """A job of raw prompts over rows; a None is a row that cannot be run. `more` is added to the job file."""

    def write(texts: list[str | None], *, more: str = "", output: str = "out/{{ date }}") -> Path:
        pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), tmp_path / "rows.parquet")
        job = tmp_path / "job.yaml"
        job.write_text(
            f"name: t\nmodel: {tiny_model}\ninput: {{path: rows.parquet}}\n"
            'prompt: {raw: true, template: "{{ text }}"}\n'
            "sampling: {max_tokens: 4, ignore_eos: true}\n"
            f"output: {{path: '{output}'}}\nengine: {{device: cpu, dtype: fp32}}\n{more}"
        )
        return job

    return write
