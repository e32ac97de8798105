"""`batchllm doctor`: what this machine has for a run, what it lacks, and what to do about it. Changes nothing."""

from __future__ import annotations

import errno
import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

from batchllm import __version__
from batchllm.data.inputs import open_input
from batchllm.data.token_ids import check_token_ids
from batchllm.errors import BatchLLMError, FolderError, JobError
from batchllm.job import Job
from batchllm.kernels.native import library as native_library
from batchllm.models.embedded import EMBEDDED
from batchllm.models.registry import cache_home, list_embedded, resolve_model
from batchllm.models.source import read_config
from batchllm.ops import ENVIRONMENT_VARIABLE, select_kernels
from batchllm.run_record import device_for, existing_folder
from batchllm.storage.cost import measure_disk
from batchllm.storage.errors import StorageError
from batchllm.storage.ring import check_uring_setup
from batchllm.storage.store_file import open_store_file

Status = Literal["ok", "note", "problem"]

_LOW_SPACE_BYTES = 2 << 30
_LOW_MEMORY_BYTES = 2 << 30
_DISK_BLOCK_BYTES = 1 << 20
_LIBRARIES = ("torch", "pyarrow", "duckdb", "tokenizers", "safetensors", "numpy")
_URING_REMEDIES = {
    errno.EPERM: "allow io_uring_setup in the container's seccomp profile, or set sysctl kernel.io_uring_disabled=0",
    errno.ENOSYS: "needs Linux 5.6 or newer with CONFIG_IO_URING",
    errno.ENOMEM: "raise the memlock limit: ulimit -l, or --ulimit memlock=-1 for a container",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `note`: a run works, but slower or with less; `problem`: a run would fail. `remedy` empty where all is well."""

    name: str
    status: Status
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings, in the order in which they are read."""

    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0 where a run would work, 1 where it would not."""
        return int(any(finding.status == "problem" for finding in self.findings))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"findings": [asdict(finding) for finding in self.findings], "exit_code": self.exit_code}

    def to_text(self) -> str:
        """A line for each finding, its remedy under it."""
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.status:<8} {finding.name:<16} {finding.text}")
            if finding.remedy:
                lines.append(f"{'':<25} → {finding.remedy}")
        return "\n".join(lines)


def diagnose(job: Job | None, *, spill_folder: Path | None = None) -> Diagnosis:
    """Looks at everything; with a job also at its model, input and output. `spill_folder` default: the job's, else the cache folder.

    Reads and writes up to 256 MiB in the spill folder, in a file that has no name. Raises FolderError for a `spill_folder` that is a file.
    """
    disk = job.engine.kv.disk if job is not None else None
    if spill_folder is not None:
        spill = existing_folder(spill_folder)
    else:
        spill = Path(disk.path) if disk is not None else _cache_folder()
    findings = [*_software(), *_compute(job), *_memory(), *_disk(spill), *_models()]
    if job is not None:
        findings += _job(job)
    return Diagnosis(tuple(findings))


def _software() -> Iterator[Finding]:
    yield Finding("batchllm", "ok", f"{__version__}, Python {platform.python_version()}, {platform.platform()}")
    yield Finding("libraries", "ok", ", ".join(f"{name} {metadata.version(name)}" for name in _LIBRARIES))


def _compute(job: Job | None) -> Iterator[Finding]:
    try:
        device = device_for(job.engine.device if job is not None else "auto")
    except BatchLLMError as error:
        yield Finding("device", "problem", str(error), "set engine.device: auto, or install a CUDA build of torch")
        return
    yield _device(device)
    yield _triton(device)
    native, kernels = _native(device), _kernels(device)
    if native.status == "problem" and kernels.status == "ok":
        native = replace(native, status="note")
    yield native
    # A wrong path of the native kernels is one thing to mend, whatever it keeps from running.
    if native.status != "problem" or native.text not in kernels.text:
        yield kernels
    yield _threads()


def _device(device: torch.device) -> Finding:
    driver = Path("/proc/driver/nvidia/version")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        text = f"{properties.name}, {_size(properties.total_memory)}, CUDA {torch.version.cuda}"
        return Finding("device", "ok", f"{text}, driver: {_first_line(driver)}")
    if driver.exists():
        remedy = "install a torch that fits the driver: see the table of CUDA builds on pytorch.org"
        return Finding(
            "device", "note", f"an NVIDIA driver is there ({_first_line(driver)}), but torch finds no GPU", remedy
        )
    return Finding("device", "ok", f"cpu: {_cpu_name()}; no NVIDIA driver")


def _triton(device: torch.device) -> Finding:
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        if device.type == "cuda":
            return Finding("triton", "note", "not installed", "pip install triton")
        return Finding("triton", "ok", "not installed, and not needed without a GPU")
    return Finding("triton", "ok", version)


def _native(device: torch.device) -> Finding:
    try:
        library = native_library.load()
    except ValueError as error:
        return Finding("native kernels", "problem", str(error), f"unset {native_library.PATH_VARIABLE}")
    if isinstance(library, str):
        status: Status = "note" if device.type == "cpu" else "ok"
        return Finding("native kernels", status, library, "install a C++ compiler (g++) and install batchllm again")
    paths = ", ".join(library.runnable_paths())
    return Finding("native kernels", "ok", f"path {library.path_name()}; this processor can run {paths}")


def _kernels(device: torch.device) -> Finding:
    try:
        return Finding("kernels", "ok", f"{select_kernels(device).name} kernels run on {device}")
    except BatchLLMError as error:
        return Finding("kernels", "problem", str(error), f"unset {ENVIRONMENT_VARIABLE}")


def _threads() -> Finding:
    num_threads, num_cpus = torch.get_num_threads(), _usable_cpus()
    text = f"{num_threads} for {num_cpus:g} usable processors"
    if num_threads > num_cpus:
        return Finding(
            "threads", "note", text, f"set OMP_NUM_THREADS={max(1, int(num_cpus))}: more wait for each other"
        )
    return Finding("threads", "ok", text)


def _memory() -> Iterator[Finding]:
    info = {}
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        info[name] = int(value.split()[0]) * 1024
    total, available = info["MemTotal"], info["MemAvailable"]
    limit = _cgroup_number("memory.max")
    text = f"{_size(available)} available of {_size(total)}"
    if limit is not None and limit < total:
        text += f", limited to {_size(limit)} here"
        available = min(available, limit)
    if available < _LOW_MEMORY_BYTES:
        yield Finding(
            "memory", "note", text, "a small model needs about 2 GiB: end other programs or take a larger machine"
        )
    else:
        yield Finding("memory", "ok", text)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if soft == resource.RLIM_INFINITY else f"{_size(soft)} (hard limit {_limit(hard)})"
    is_tight = soft != resource.RLIM_INFINITY and soft < 8 << 20
    yield Finding("memlock", "note" if is_tight else "ok", text, "ulimit -l unlimited" if is_tight else "")


def _disk(spill: Path) -> Iterator[Finding]:
    yield _uring()
    try:
        folder = existing_folder(spill)
    except FolderError as error:
        yield Finding("spill folder", "problem", str(error), "correct engine.kv.disk.path, or BATCHLLM_HOME")
        return
    if not os.access(folder, os.W_OK):
        yield Finding(
            "spill folder", "problem", f"{folder}: cannot be written", "set BATCHLLM_HOME to a folder of yours"
        )
        return
    yield _space("spill folder", folder)
    try:
        with tempfile.TemporaryDirectory(prefix="batchllm-doctor-", dir=folder) as name:
            store = open_store_file(
                Path(name), fingerprint=bytes(32), block_bytes=_DISK_BLOCK_BYTES, num_slots=1, persist=False
            )
            os.close(store.file_descriptor)
            write_rate, read_rate = measure_disk(Path(name), block_bytes=_DISK_BLOCK_BYTES)
    except (OSError, StorageError) as error:
        yield Finding("spill disk", "note", str(error), "choose another folder with --spill-folder")
        return
    text = f"{write_rate / 1e9:.2f} GB/s written, {read_rate / 1e9:.2f} GB/s read"
    if store.is_direct:
        yield Finding("spill disk", "ok", f"{text}, O_DIRECT")
    else:
        remedy = "spill to ext4 or xfs on a local disk; tmpfs and some network file systems refuse O_DIRECT"
        yield Finding("spill disk", "note", f"{text}, through the file cache: O_DIRECT refused", remedy)


def _uring() -> Finding:
    try:
        check_uring_setup()
        version = metadata.version("pyuring")
    except OSError as error:
        reason = f"refused ({errno.errorcode.get(error.errno or 0, error.errno)}), threads are used instead"
        disabled = Path("/proc/sys/kernel/io_uring_disabled")
        if disabled.exists() and disabled.read_text().strip() != "0":
            reason += f"; kernel.io_uring_disabled is {disabled.read_text().strip()}"
        return Finding("io_uring", "note", reason, _URING_REMEDIES.get(error.errno or 0, "see dmesg"))
    except metadata.PackageNotFoundError:
        return Finding(
            "io_uring", "note", "pyuring is not installed, threads are used instead", "pip install pyuring==0.3.0"
        )
    return Finding("io_uring", "ok", f"the kernel grants it, pyuring {version}")


def _models() -> Iterator[Finding]:
    folder = _cache_folder()
    for model in list_embedded(folder):
        if model["present"]:
            yield Finding("model cache", "ok", f"{model['name']}: {model['path']}")
        else:
            text = f"{model['name']} is not in {folder}; the first run fetches {_size(int(model['num_bytes']))}"
            yield Finding("model cache", "note", text, f"batchllm models pull {model['name']}")


def _job(job: Job) -> Iterator[Finding]:
    yield _checked("model", lambda: _model(job), remedy="name a model that `batchllm models list` knows, or a path")
    if job.input.sql is not None:
        yield Finding("input", "ok", "SQL; it runs when the job does")
    else:
        yield _checked("input", lambda: _input(job), remedy="correct input.path and the columns that the job names")
    try:
        folder = existing_folder(Path(job.output.path))
    except FolderError as error:
        yield Finding("output", "problem", str(error), "choose another output.path")
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        yield Finding("output", "problem", f"{folder}: cannot be written", "choose another output.path")
    else:
        yield _space("output", folder)


def _checked(name: str, look: Callable[[], str], *, remedy: str) -> Finding:
    try:
        return Finding(name, "ok", look())
    except JobError as error:
        return Finding(name, "problem", str(error), "correct that key of the job")
    except BatchLLMError as error:
        return Finding(name, "problem", str(error), remedy)


def _model(job: Job) -> str:
    folder = _cache_folder()
    missing = {model["name"] for model in list_embedded(folder) if not model["present"]}
    # A job that is loaded has paths as absolute ones: what is neither a path nor a known name is a hub's id.
    if not os.path.isabs(job.model) and (job.model in missing or job.model not in EMBEDDED):
        # Looking a model up fetches it, which is for a run to do.
        return f"{job.model}: not on this machine yet, or in the hub's own cache; a run fetches it"
    source = resolve_model(job.model, base_folder=job.folder, say=lambda line: None)
    config = read_config(source)
    check_token_ids(job, vocab_size=config.vocab_size)
    weights = "" if job.engine.weights == "auto" else f", {job.engine.weights} weights"
    return f"{source.path}: {config.architecture}, {config.num_layers} layers, context {config.max_context:,}{weights}"


def _input(job: Job) -> str:
    with tempfile.TemporaryDirectory(prefix="batchllm-doctor-") as name:
        rows = open_input(job, spool_folder=Path(name))
    return f"{rows.num_rows:,} rows; the job reads {', '.join(rows.columns)}"


def _space(name: str, folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    text = f"{folder}: {_size(free)} free"
    if free < _LOW_SPACE_BYTES:
        return Finding(name, "note", text, "make room: completions, staged prompts and spilled blocks lie on disk")
    return Finding(name, "ok", text)


def _cache_folder() -> Path:
    try:
        return cache_home()
    except BatchLLMError:
        return Path(tempfile.gettempdir())


def _usable_cpus() -> float:
    """Processors that this process may use: its affinity, or less where a cgroup allows less."""
    num_cpus = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return num_cpus
    return num_cpus if quota == "max" else min(num_cpus, int(quota) / int(period))


def _cgroup_number(name: str) -> int | None:
    try:
        text = Path("/sys/fs/cgroup", name).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _first_line(path: Path) -> str:
    try:
        return path.read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return "unknown"


def _limit(value: int) -> str:
    return "none" if value == resource.RLIM_INFINITY else _size(value)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / 2**20:,.1f} MiB"
