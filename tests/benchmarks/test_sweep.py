"""The sweep's variants and the kept best settings are settings that the runners have; the table puts the fastest first."""

from __future__ import annotations

import importlib
import json

import numpy as np
import pytest
from compare import PEERS
from protocol import parse_settings
from run_llamacpp import common_length
from sweep import VARIANTS, Trial, table


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_every_variant_and_every_kept_setting_is_one_that_the_runner_knows(name: str) -> None:
    settings_type = importlib.import_module(f"run_{name}").Settings
    best = json.loads((PEERS / "best.json").read_text())
    kept = [entry["settings"] for kind in ("bf16", "int8") for entry in best[kind].values() if entry["peer"] == name]
    kept += [best["defaults"][kind].get(name, []) for kind in ("bf16", "int8")]
    for changes in [*VARIANTS[name], *kept]:
        settings = parse_settings(settings_type, changes)
        assert (settings == settings_type()) == (not changes), f"{changes} are defaults already"


def test_the_table_puts_the_fastest_of_a_workload_first_and_failures_last() -> None:
    trials = [
        Trial("vllm", (), "W2", 8, seconds=5.0, cpu_s=9.0),
        Trial("vllm", ("x=1",), "W2", 8, seconds=None, cpu_s=None, failed="ended"),
        Trial("openvino", (), "W2", 8, seconds=7.0, cpu_s=8.0),
    ]
    by_seconds, by_cpu = table(trials, by_cpu=False).splitlines(), table(trials, by_cpu=True).splitlines()
    assert by_seconds[2] == "| W2 | vllm | default | 5.0 | 9.0 |"
    assert by_cpu[2] == "| W2 | openvino | default | 7.0 | 8.0 |"
    assert by_cpu[4] == "| W2 | vllm | x=1 | failed | ended |"


def test_a_common_beginning_is_counted_to_the_first_difference_or_the_shorter_end() -> None:
    one = np.array([1, 2, 3, 4], dtype=np.int32)
    assert common_length(one, np.array([1, 2, 9, 4], dtype=np.int32)) == 2
    assert common_length(one, one[:3]) == 3
    assert common_length(one, one[:0]) == 0
