"""The tuning table: complete for every device class, read by the right rule, written as it is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import tune_triton

from batchllm.kernels import tuning

REPOSITORY = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
DEVICE_CLASSES = ("sm_80", "sm_90", "sm_100")


@pytest.fixture
def sm_90(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = tuning.DeviceFacts(device_class="sm_90", num_processors=132, has_e4m3=True)
    monkeypatch.setattr(tuning, "describe_device", lambda device: facts)


def test_every_device_class_has_every_operation_and_element_kind() -> None:
    table = tuning.load_table()
    assert set(table) == {*DEVICE_CLASSES, "interpreter"}
    for operations in table.values():
        assert set(operations) == set(tune_triton.CANDIDATES)
        assert set(operations["attention"]) == set(table["sm_80"]["attention"])
        kinds = {name.partition("/")[0] for name in operations["linear"]}
        assert kinds == {"half", "int8", "fp8", "float"}


def test_key_tiles_divide_the_chunk() -> None:
    for operations in tuning.load_table().values():
        for config in operations["attention"].values():
            assert 256 % config["tile_keys"] == 0


def test_the_tuner_offers_every_value_it_would_write() -> None:
    for device_class in DEVICE_CLASSES:
        for operation, entries in tuning.load_table()[device_class].items():
            for config in entries.values():
                assert set(config) == set(tune_triton.CANDIDATES[operation])


def test_the_written_form_is_the_form_in_the_repository() -> None:
    assert tune_triton.format_table(tuning.load_table()) == tuning.TABLE_PATH.read_text(encoding="utf-8")


@pytest.mark.usefixtures("sm_90")
def test_a_bounded_entry_serves_up_to_its_bound_and_the_last_one_everything_above() -> None:
    linear = tuning.load_table()["sm_90"]["linear"]
    for size, bound in ((1, 16), (16, 16), (17, 64), (65, 256), (100_000, 256)):
        assert tuning.bounded_config("linear", "int8", size, CPU) is linear[f"int8/{bound}"]


@pytest.mark.usefixtures("sm_90")
def test_an_entry_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(
        ValueError, match="no attention configuration for half/72; the tuning table has half/64, half/80"
    ):
        tuning.exact_config("attention", "half/72", CPU)


@pytest.mark.usefixtures("sm_90")
def test_compiler_options_are_told_from_tile_sizes() -> None:
    config = tuning.exact_config("attention", "half/64", CPU)
    assert set(tuning.launch_options(config)) == {"num_warps", "num_stages"}


def test_the_tuner_takes_operations_and_single_entries() -> None:
    entries = tuning.load_table()["sm_90"]
    assert tune_triton.chosen(["attention:half/64", "silu_mul"], entries) == [
        ("attention", "half/64"),
        ("silu_mul", "any"),
    ]
    with pytest.raises(ValueError, match="no attention:half/63"):
        tune_triton.chosen(["attention:half/63"], entries)


@pytest.mark.parametrize("script", ["tune_triton.py", "gpu.py"])
def test_scripts_end_with_one_line_where_there_is_no_gpu(script: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = subprocess.run([sys.executable, f"benchmarks/{script}"], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "nothing was measured" in done.stderr


def test_gpu_checks_and_the_engine_pass_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="needs triton")
    command = [sys.executable, "benchmarks/gpu.py", "--interpret", "--engine"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) > 40
    assert "engine, tokens of a tiny float32 model" in lines[-1]
    assert all(line.startswith("ok ") for line in lines)
