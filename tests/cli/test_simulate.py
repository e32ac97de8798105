"""`batchllm simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from click.testing import CliRunner

from batchllm.cli.main import cli
from batchllm.cli.simulate import simulate
from batchllm.errors import BatchLLMError, InputError, JobError


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl"
    lines = [{"input_length": 1024, "output_length": 9, "hash_ids": [2 * (n % 3), 2 * (n % 3) + 1]} for n in range(9)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job over three rows of a document each, asked twice; one token a byte."""
    model = tmp_path / "model"
    model.mkdir()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pipeline = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={character: number for number, character in enumerate(alphabet)}, merges=[])
    )
    pipeline.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = tokenizers.decoders.ByteLevel()
    pipeline.add_special_tokens(["<eos>"])
    pipeline.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 257,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": 256,
    }
    (model / "config.json").write_text(json.dumps(config))
    rows = [{"text": f"{letter * 64}question {turn}"} for turn in range(2) for letter in "abc"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "job.yaml"
    path.write_text(
        json.dumps(
            {
                "name": "tiny",
                "model": str(model),
                "input": {"path": "rows.jsonl"},
                "prompt": {"raw": True, "template": "{{ text }}"},
                "sampling": {"max_tokens": 6},
                "output": {"path": "out"},
                "engine": {"device": "cpu", "dtype": "fp32", "order": "input"},
            }
        )
    )
    return path


def run(*arguments: str | Path) -> dict[str, object]:
    result = CliRunner().invoke(simulate, [*map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return dict(json.loads(result.stdout))


def test_a_trace_is_replayed_under_every_policy(trace: Path) -> None:
    report = run("--trace", trace, "--pool", "3GiB", "--host", "50%", "--sequences", "1", "--kv-bytes-per-token", 2**21)
    assert (report["pool_blocks"], report["host_blocks"], report["disk_blocks"]) == (3, 3, 0)
    policies = {replay["policy"]: replay for replay in report["policies"]}  # type: ignore[attr-defined]
    assert policies["next-use"]["host_hits"] > 0
    assert policies["next-use"]["hit_rate"] > policies["lru"]["hit_rate"] >= policies["none"]["hit_rate"] == 0
    assert policies["next-use"]["predicted_s"] is None


def test_a_job_is_replayed_without_weights_and_writes_nothing(job: Path) -> None:
    before = sorted(job.parent.rglob("*"))
    report = run(job, "--pool", "60%", "--host", "50%", "--sequences", "1")
    assert (report["num_requests"], report["working_set_blocks"]) == (6, 12)
    policies = {replay["policy"]: replay for replay in report["policies"]}  # type: ignore[attr-defined]
    assert policies["next-use"]["optimum_hits"] == 12
    assert policies["next-use"]["num_hits"] > policies["none"]["num_hits"] > 0
    assert sorted(job.parent.rglob("*")) == before


def test_rates_give_times_and_the_text_shows_them(trace: Path, tmp_path: Path) -> None:
    rates = tmp_path / "rates.json"
    rates.write_text(
        json.dumps({"prefill_tokens_per_s": 1024, "copy_out_bytes_per_s": 1e9, "copy_in_bytes_per_s": 1e9})
    )
    arguments = ["--trace", str(trace), "--pool", "50%", "--host", "0", "--rates", str(rates)]
    result = CliRunner().invoke(simulate, arguments)
    assert result.exit_code == 0
    none = next(line for line in result.stdout.splitlines() if line.startswith("none"))
    # A pool of three holds one request and nothing beside it: 18 blocks of 512 tokens at 1024 tokens a second.
    assert none.split()[-2:] == ["9.0", "s"]


@pytest.mark.parametrize("size", ["lots", "-1", "auto", "5 %%"])
def test_what_is_no_size_is_refused_by_its_option(trace: Path, size: str) -> None:
    with pytest.raises(JobError, match="--host"):
        CliRunner().invoke(simulate, ["--trace", str(trace), f"--host={size}"], catch_exceptions=False)


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"speed": 1}', '{"prefill_tokens_per_s": 0}', '{"prefill_tokens_per_s": "x"}']
)
def test_rates_that_are_none_are_refused(trace: Path, tmp_path: Path, text: str) -> None:
    rates = tmp_path / "rates.json"
    rates.write_text(text)
    with pytest.raises(JobError, match="--rates"):
        CliRunner().invoke(simulate, ["--trace", str(trace), "--rates", str(rates)], catch_exceptions=False)


def test_a_job_and_a_trace_or_neither_is_wrong_usage(trace: Path) -> None:
    assert CliRunner().invoke(cli, ["simulate"]).exit_code == 2
    assert CliRunner().invoke(cli, ["simulate", "job.yaml", "--trace", str(trace)]).exit_code == 2


def test_a_trace_that_is_missing_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none.jsonl") as caught:
        CliRunner().invoke(simulate, ["--trace", str(tmp_path / "none.jsonl")], catch_exceptions=False)
    assert isinstance(caught.value, BatchLLMError) and caught.value.exit_code == 2
