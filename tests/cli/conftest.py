"""A tiny random model with a byte-level tokenizer, a job over it, and the command line as a user calls it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import torch
from safetensors.torch import save_file

from batchllm.cli.main import main

REPOSITORY = Path(__file__).resolve().parents[2]
HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, VOCABULARY = 32, 2, 4, 2, 64, 258
Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: one token a byte, random weights, no chat template."""
    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)} | {"<bos>": 256, "<eos>": 257}
    pipeline = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    pipeline.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = tokenizers.decoders.ByteLevel()
    pipeline.add_special_tokens(["<bos>", "<eos>"])
    pipeline.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": INNER,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(3)
    kv_size = HIDDEN // HEADS * KV_HEADS
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {at + "input_layernorm.weight": (HIDDEN,), at + "post_attention_layernorm.weight": (HIDDEN,)}
        shapes |= {at + "self_attn.q_proj.weight": (HIDDEN, HIDDEN), at + "self_attn.o_proj.weight": (HIDDEN, HIDDEN)}
        shapes |= {at + f"self_attn.{name}_proj.weight": (kv_size, HIDDEN) for name in "kv"}
        shapes |= {at + f"mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes |= {at + "mlp.down_proj.weight": (HIDDEN, INNER)}
    weights = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def run_cli(command_server: Any) -> Cli:
    """`batchllm` with the given arguments in a process of its own; one thread, since tests share the machine."""

    def run(*arguments: str | Path, input: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        ended = command_server.run(*arguments, folder=Path.cwd(), stdin=input, environment=environment, timeout_s=240)
        return subprocess.CompletedProcess(arguments, ended.code, ended.stdout, ended.stderr)

    return run


@pytest.fixture(scope="session")
def write_job(tiny_folder: Path) -> Callable[..., Path]:
    """A function (folder, rows, keys of the job) -> a job file over these rows, raw prompts, greedy."""

    def write(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> Path:
        pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
        job: dict[str, Any] = {
            "name": "tiny",
            "model": str(tiny_folder),
            "input": {"path": "rows.parquet"},
            "prompt": {"raw": True, "template": "{{ text }}"},
            "sampling": {"max_tokens": 8},
            "output": {"path": "out/{{ date }}"},
            "engine": {"device": "cpu", "dtype": "fp32"},
        }
        job |= changes
        path = folder / "job.yaml"
        path.write_text(json.dumps(job))
        return path

    return write


@pytest.fixture(scope="session")
def finished_job(tmp_path_factory: pytest.TempPathFactory, write_job: Callable[..., Path], run_cli: Cli) -> Path:
    """A job of 40 rows that share a head, two of them hostile and one null, run twice on successive dates; read only."""
    folder = tmp_path_factory.mktemp("finished")
    texts: list[str | None] = [f"The head that all rows share, and then row {number}" for number in range(37)]
    texts += ['<script>alert(1)</script> & "quoted"', "\x1b[31mred\x00", None]
    rows = [{"text": text, "title": f"row <b>{number}</b>"} for number, text in enumerate(texts)]
    job = write_job(
        folder,
        rows,
        input={"path": "rows.parquet", "id": "title"},
        engine={"device": "cpu", "dtype": "fp32", "max_sequences": 8},
    )
    for date in ("2026-11-28", "2026-11-29"):
        done = run_cli("run", job, "--date", date, "--json")
        assert done.returncode == 3, done.stderr
    return job


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    exit_code: int
    out: str
    err: str


@pytest.fixture
def batchllm(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ended]]:
    """Runs `batchllm ARGUMENTS` in this process, which imports torch only once."""
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
def write_texts_job(tmp_path: Path, tiny_model: Path) -> Callable[..., Path]:
    """A job of raw prompts over texts; a None is a row that cannot be run. `more` is added to the job file."""

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
