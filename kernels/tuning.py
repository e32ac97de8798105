"""The tuning table: tile sizes, warps and pipeline stages per device class, read by the launchers and never measured at
job time.

`tuning.json` maps device class -> operation -> shape class -> configuration. `benchmarks/tune_triton.py` remeasures
it on a GPU. A shape class is exact (`half/128`: element kind and head dimension) or a bound (`int8/16`: up to 16
rows; the last one of a kind also serves everything above it). No configuration depends on what else is in a batch
where that would change a row's bits.

Device classes: `sm_80` also serves every other device below 9.0 and the consumer devices from 12.0, so its
configurations stay under their 99 KiB of shared memory; `sm_90` and `sm_100` are the data-centre devices of that
name; `interpreter` keeps tiles small.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from batchllm.kernels.launch import is_interpreted

TABLE_PATH = Path(__file__).with_name("tuning.json")

_LAUNCH_OPTIONS = ("num_warps", "num_stages")

Config = Mapping[str, int]
Table = dict[str, dict[str, dict[str, Config]]]


@functools.cache
def load_table() -> Table:
    """The table as it lies in the repository; one object for the process, which only the script that tunes it changes."""
    table: Table = json.loads(TABLE_PATH.read_text(encoding="utf-8"))
    return table


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What launchers ask about a device: its row of the table, its streaming multiprocessors, whether it converts e4m3
    itself."""

    device_class: str
    num_processors: int
    has_e4m3: bool


@functools.cache
def describe_device(device: torch.device) -> DeviceFacts:
    """The facts of a CUDA device; in the interpreter, those of a small one, so that persistent grids stay grids."""
    if is_interpreted():
        return DeviceFacts(device_class="interpreter", num_processors=2, has_e4m3=True)
    capability = torch.cuda.get_device_capability(device)
    return DeviceFacts(
        device_class={9: "sm_90", 10: "sm_100"}.get(capability[0], "sm_80"),
        num_processors=torch.cuda.get_device_properties(device).multi_processor_count,
        has_e4m3=capability >= (8, 9),
    )


def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of `device`: persistent grids are sized by it."""
    return describe_device(device).num_processors


def shape_classes(operation: str, device: torch.device) -> list[str]:
    """The shape classes that the table has of an operation."""
    return list(load_table()[describe_device(device).device_class][operation])


def exact_config(operation: str, shape_class: str, device: torch.device) -> Config:
    """The configuration of exactly this shape class; ValueError names what the table has."""
    configs = load_table()[describe_device(device).device_class][operation]
    if shape_class not in configs:
        raise ValueError(f"no {operation} configuration for {shape_class}; the tuning table has {', '.join(configs)}")
    return configs[shape_class]


def bounded_config(operation: str, kind: str, size: int, device: torch.device) -> Config:
    """The configuration of `kind` with the smallest bound that is at least `size`, else the one with the largest
    bound."""
    configs = load_table()[describe_device(device).device_class][operation]
    bounds = sorted(int(name.partition("/")[2]) for name in configs if name.partition("/")[0] == kind)
    if not bounds:
        raise ValueError(f"no {operation} configuration for {kind}; the tuning table has {', '.join(configs)}")
    bound = next((bound for bound in bounds if bound >= size), bounds[-1])
    return configs[f"{kind}/{bound}"]


def launch_options(config: Config) -> dict[str, int]:
    """The part of a configuration that goes to the compiler rather than into the kernel."""
    return {name: config[name] for name in _LAUNCH_OPTIONS if name in config}
