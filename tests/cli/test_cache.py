"""`batchllm cache`: ls, verify, rm."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from batchllm.cli.cache import cache
from batchllm.errors import JobError, RunLockedError
from batchllm.storage.disk import DiskOptions, DiskTier
from batchllm.storage.frame import PAGE_BYTES


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cache, list(map(str, arguments)), catch_exceptions=False)


@pytest.fixture
def kept(tmp_path: Path) -> Callable[[], DiskTier]:
    """Opens the kept tier of folder `kv`, with three blocks in it."""

    def make() -> DiskTier:
        options = DiskOptions(persist=True)
        tier = DiskTier(tmp_path / "kv", fingerprint=bytes(32), block_bytes=5000, num_slots=8, options=options)
        for number in range(3):
            transfer = tier.store(bytes([number]) * 32, memoryview(np.full(5000, number, np.uint8)))
            while not transfer.done:
                tier.poll(timeout_s=1.0)
        return tier

    return make


def test_what_is_no_file_is_no_cache_file_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "folder.kvcache").mkdir()
    (tmp_path / "gone.kvcache").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe.kvcache")
    result = run("ls", "--folder", tmp_path)
    assert result.exit_code == 0 and "kvcache" not in result.output


def test_an_empty_folder_has_no_cache_files(tmp_path: Path) -> None:
    for command in ("ls", "verify", "rm"):
        result = run(command, "--folder", tmp_path)
        assert (result.exit_code, result.stdout) == (0, "no cache files\n")
        assert json.loads(run(command, "--folder", tmp_path, "--json").stdout) == []


def test_ls_names_each_file_and_what_is_in_it(tmp_path: Path, kept: Callable[[], DiskTier]) -> None:
    tier = kept()
    assert "in use" in run("ls", "--folder", tmp_path / "kv").stdout
    tier.close()
    (row,) = json.loads(run("ls", "--folder", tmp_path / "kv", "--json").stdout)
    assert (row["num_blocks"], row["num_slots"], row["block_bytes"], row["is_in_use"]) == (3, 8, 5000, False)
    assert row["fingerprint"] == bytes(32).hex()
    assert "3 of 8 blocks" in run("ls", "--folder", tmp_path / "kv").stdout


def test_a_job_file_says_where_its_cache_lies(tmp_path: Path, kept: Callable[[], DiskTier]) -> None:
    kept().close()
    job = {
        "name": "tiny",
        "model": "smollm2-135m",
        "input": {"path": "rows.parquet"},
        "prompt": {"template": "{{ text }}"},
        "output": {"path": "out"},
    }
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(job | {"engine": {"kv": {"disk": {"path": "kv"}, "persist": True}}}))
    assert len(json.loads(run("ls", path, "--json").stdout)) == 1
    path.write_text(json.dumps(job))
    with pytest.raises(JobError, match=r"no engine\.kv\.disk"):
        run("ls", path)


def test_a_job_and_a_folder_or_neither_is_wrong_usage(tmp_path: Path) -> None:
    assert run("ls").exit_code == run("rm").exit_code == 2
    assert run("verify", "job.yaml", "--folder", tmp_path).exit_code == 2


def test_verify_tells_damaged_blocks_from_good_ones_by_cause_and_exit_code(
    tmp_path: Path, kept: Callable[[], DiskTier]
) -> None:
    kept().close()
    assert "3 good, 5 free" in run("verify", "--folder", tmp_path / "kv").stdout
    (path,) = (tmp_path / "kv").iterdir()
    with path.open("r+b") as file:
        file.seek(2 * PAGE_BYTES + 100)  # inside the first slot's payload
        file.write(b"\xff")
    result = run("verify", "--folder", tmp_path / "kv", "--json")
    (row,) = json.loads(result.stdout)
    assert result.exit_code == 3
    assert (row["state"], row["num_good"], row["damaged"]) == ("damaged", 2, {"checksum": 1})
    path.write_bytes(b"rubbish")
    result = run("verify", "--folder", tmp_path / "kv")
    assert result.exit_code == 3 and "no cache file" in result.stdout


def test_rm_removes_what_no_run_has(tmp_path: Path, kept: Callable[[], DiskTier]) -> None:
    tier = kept()
    with pytest.raises(RunLockedError, match="in use") as caught:
        run("rm", "--folder", tmp_path / "kv")
    assert caught.value.exit_code == 4
    tier.close()
    (path,) = (tmp_path / "kv").iterdir()
    assert run("rm", "--folder", tmp_path / "kv").stdout == f"removed {path}\n"
    assert list((tmp_path / "kv").iterdir()) == []
