"""The decoder against `transformers`: the embedded model and a tiny model of every architecture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import LlamaForCausalLM

from batchllm.errors import ModelError
from batchllm.models.decoder import Decoder, auto_dtype, dtype_for
from batchllm.models.loading import load_decoder
from batchllm.models.source import ModelSource
from batchllm.models.tokenizer import load_tokenizer
from batchllm.ops import REFERENCE, Kernels, select_kernels

CPU = torch.device("cpu")
# The reference takes longer to say its tokens than all that is compared with them: one process asks it.
one_reference = pytest.mark.xdist_group("reference tokens")
ARCHITECTURES = ("llama2", "llama3", "llama-linear", "llama-tied", "mistral", "qwen2", "qwen2-tied")
NUM_NEW = 48


def loaded(source: ModelSource, dtype: torch.dtype = torch.float32, kernels: Kernels = REFERENCE) -> Decoder:
    return load_decoder(source, dtype=dtype, device=CPU, kernels=kernels)


def reference_greedy(model: Any, prompts: list[list[int]], num_new: int, *, with_logits: bool = True) -> Any:
    """Greedy tokens, and where asked the logits [prompts, num_new, vocabulary] behind them. Short prompts get pads."""
    longest = max(len(prompt) for prompt in prompts)
    out = model.generate(
        torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts]),
        attention_mask=torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
        max_new_tokens=num_new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=with_logits,
    )
    tokens = out.sequences[:, longest:].tolist()
    return (tokens, torch.stack(out.logits, 1)) if with_logits else tokens


@pytest.fixture(scope="module")
def prompts(embedded_model: ModelSource) -> list[list[int]]:
    """64 prompts of 4 lengths, 16 each, from the documentation inside Python."""
    from pydoc_data.topics import topics

    tokenizer = load_tokenizer(embedded_model)
    encoded = [ids for ids in tokenizer.encode_batch([topics[key] for key in sorted(topics)]) if len(ids) > 40][:64]
    assert len(encoded) == 64
    return [ids[3 : 3 + (5, 12, 17, 32)[number // 16]].tolist() for number, ids in enumerate(encoded)]


@pytest.fixture(scope="module")
def reference_tokens(reference_model: LlamaForCausalLM, prompts: list[list[int]]) -> list[list[int]]:
    return reference_greedy(reference_model, prompts, NUM_NEW, with_logits=False)


@pytest.fixture(scope="module")
def embedded_decoder(embedded_model: ModelSource) -> Decoder:
    return loaded(embedded_model)


@one_reference
def test_64_prompts_times_48_greedy_tokens_equal_the_reference_in_fp32(
    embedded_decoder: Decoder,
    prompts: list[list[int]],
    reference_tokens: list[list[int]],
    make_driver: Callable[..., Any],
) -> None:
    # One pass over prompt and reference tokens: the argmax at each place is what greedy decoding would choose there, as
    # long as it chose the reference's tokens before; so all equal here is all equal step by step.
    for start in range(0, 64, 16):
        group = range(start, start + 16)
        driver = make_driver(embedded_decoder, num_sequences=16, max_tokens=96)
        hidden = driver.step([prompts[i] + reference_tokens[i][:-1] for i in group], num_sampled=NUM_NEW)
        assert embedded_decoder.argmax(hidden).view(16, NUM_NEW).tolist() == [reference_tokens[i] for i in group]


@one_reference
def test_decoding_one_token_at_a_time_gives_the_same_greedy_tokens(
    embedded_decoder: Decoder,
    prompts: list[list[int]],
    reference_tokens: list[list[int]],
    make_driver: Callable[..., Any],
) -> None:
    chosen = [0, 20, 40, 63]
    driver = make_driver(embedded_decoder, num_sequences=len(chosen), max_tokens=96)
    new = [prompts[i] for i in chosen]
    tokens: list[list[int]] = [[] for _ in chosen]
    for _ in range(NUM_NEW):
        picked = embedded_decoder.argmax(driver.step(new)).tolist()
        for row, token in zip(tokens, picked, strict=True):
            row.append(token)
        new = [[token] for token in picked]
    assert tokens == [reference_tokens[i] for i in chosen]


def test_the_embedded_model_knows_the_capital_of_france(
    embedded_model: ModelSource, embedded_decoder: Decoder, make_driver: Callable[..., Any]
) -> None:
    tokenizer = load_tokenizer(embedded_model)
    driver = make_driver(embedded_decoder, num_sequences=1, max_tokens=32)
    hidden = driver.step([tokenizer.encode_batch(["The capital of France is"])[0].tolist()])
    assert tokenizer.decode(embedded_decoder.argmax(hidden).tolist()) == " Paris"


@one_reference
def test_bf16_leaves_the_reference_only_where_its_top_two_logits_are_within_bf16_rounding(
    embedded_model: ModelSource,
    reference_model: LlamaForCausalLM,
    prompts: list[list[int]],
    reference_tokens: list[list[int]],
    make_driver: Callable[..., Any],
) -> None:
    # As a run has it: torch multiplies bfloat16 slowly where the processor has no instruction for it.
    decoder = loaded(embedded_model, torch.bfloat16, kernels=select_kernels(CPU))
    group = range(0, 64, 4)
    driver = make_driver(decoder, num_sequences=len(group), max_tokens=96)
    rows = [prompts[i] + reference_tokens[i][:-1] for i in group]
    ours = decoder.argmax(driver.step(rows, num_sampled=NUM_NEW)).view(len(group), NUM_NEW)
    num_equal = 0
    for number, index in enumerate(group):
        differs = (ours[number] != torch.tensor(reference_tokens[index])).nonzero().flatten()
        num_equal += NUM_NEW if not len(differs) else int(differs[0])
        if not len(differs):
            continue
        at = int(differs[0])
        with torch.inference_mode():
            logits = reference_model(torch.tensor([rows[number][: len(prompts[index]) + at]])).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        # 30 layers, each rounding the residual stream to 8 bits a few times: the logits move by about 2^-8 of their
        # size times the root of the roundings.
        assert best - second < abs(best) * 2**-8 * (4 * decoder.config.num_layers) ** 0.5, (index, at)
        assert int(ours[number, at]) in logits.topk(8).indices.tolist()
    assert num_equal > len(group) * NUM_NEW // 2


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_tiny_model_of_each_architecture_gives_the_reference_logits_and_greedy_tokens(
    name: str, save_tiny: Callable[..., Any], make_driver: Callable[..., Any]
) -> None:
    model, source = save_tiny(name)
    decoder = loaded(source)
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(0, 260, (3, 150), generator=generator).tolist()
    tokens, logits = reference_greedy(model, prompts, 12)
    driver = make_driver(decoder, num_sequences=3, max_tokens=170)
    # The prompt in two chunks, then token by token.
    driver.step([prompt[:70] for prompt in prompts])
    new = [prompt[70:] for prompt in prompts]
    for step in range(12):
        hidden = driver.step(new)
        ours = decoder.logits(hidden)
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, logits[:, step], atol=1e-4, rtol=0)
        assert decoder.argmax(hidden).tolist() == [row[step] for row in tokens]
        new = [[row[step]] for row in tokens]


@pytest.mark.parametrize("name", ["llama2", "llama-tied", "mistral", "qwen2"])
def test_a_tiny_model_out_of_gguf_gives_the_reference_logits(
    name: str,
    tmp_path: Path,
    tiny_model: Callable[..., Any],
    write_gguf: Callable[..., None],
    make_driver: Callable[..., Any],
) -> None:
    model = tiny_model(name)
    write_gguf(tmp_path / "tiny.gguf", model)
    decoder = loaded(ModelSource(kind="gguf", path=tmp_path / "tiny.gguf", name="tiny"))
    prompt = torch.randint(0, 260, (1, 90), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = model(prompt).logits[0]
    driver = make_driver(decoder, num_sequences=1, max_tokens=90)
    torch.testing.assert_close(
        decoder.logits(driver.step(prompt.tolist(), num_sampled=90)), expected, atol=1e-4, rtol=0
    )


def test_llama3_scaling_that_a_gguf_carries_as_divisors_gives_the_reference_logits(
    tmp_path: Path, tiny_model: Callable[..., Any], write_gguf: Callable[..., None], make_driver: Callable[..., Any]
) -> None:
    model = tiny_model("llama3")
    plain = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    divisors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert divisors.max() == pytest.approx(8.0) and divisors.min() == pytest.approx(1.0)
    write_gguf(tmp_path / "tiny.gguf", model, tensors={"rope_freqs.weight": divisors})
    decoder = loaded(ModelSource(kind="gguf", path=tmp_path / "tiny.gguf", name="tiny"))
    prompt = torch.randint(0, 260, (1, 200), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = model(prompt).logits[0, -1:]
    driver = make_driver(decoder, num_sequences=1, max_tokens=200)
    torch.testing.assert_close(decoder.logits(driver.step(prompt.tolist())), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_a_quantised_gguf_gives_the_logits_of_its_dequantised_weights(
    kind: str,
    tmp_path: Path,
    tiny_model: Callable[..., Any],
    write_gguf: Callable[..., None],
    make_driver: Callable[..., Any],
) -> None:
    quantisation = gguf.GGMLQuantizationType[kind]
    model = tiny_model("llama-tied")
    model.config.intermediate_size = 112
    # Q8_0 works on 32 columns, which the 112 of `down` are not: the tiny model is widened to 128.
    if kind == "Q8_0":
        for layer in model.model.layers:
            for part in (layer.mlp.gate_proj, layer.mlp.up_proj):
                part.weight.data = torch.cat([part.weight.data, part.weight.data[:16]])
            layer.mlp.down_proj.weight.data = torch.cat(
                [layer.mlp.down_proj.weight.data, layer.mlp.down_proj.weight.data[:, :16]], dim=1
            )
        model.config.intermediate_size = 128
    write_gguf(tmp_path / "tiny.gguf", model, kind=quantisation)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                stored = gguf.quants.quantize(parameter.numpy(), quantisation)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(stored, quantisation)))
    decoder = loaded(ModelSource(kind="gguf", path=tmp_path / "tiny.gguf", name="tiny"))
    prompt = torch.randint(0, 260, (1, 40), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = model(prompt).logits[0, -1:]
    driver = make_driver(decoder, num_sequences=1, max_tokens=40)
    torch.testing.assert_close(decoder.logits(driver.step(prompt.tolist())), expected, atol=1e-4, rtol=0)


def test_hidden_rows_come_back_in_the_order_asked_for_and_none_is_allowed(
    save_tiny: Callable[..., Any], make_driver: Callable[..., Any]
) -> None:
    _, source = save_tiny("llama2")
    decoder = loaded(source)
    prompt = list(range(1, 40))
    whole = make_driver(decoder, num_sequences=1, max_tokens=64).step([prompt], num_sampled=39)
    driver = make_driver(decoder, num_sequences=1, max_tokens=64)
    assert driver.step([prompt[:20]], num_sampled=0).shape == (0, 64)
    # The step without a sampled row still wrote the last layer's keys and values.
    torch.testing.assert_close(driver.step([prompt[20:]], num_sampled=19), whole[20:], atol=1e-5, rtol=0)


def test_the_first_layers_of_a_decoder_write_what_they_write_in_the_whole(
    save_tiny: Callable[..., Any], make_driver: Callable[..., Any]
) -> None:
    _, source = save_tiny("qwen2")
    decoder = loaded(source)
    whole, first = (make_driver(decoder, num_sequences=1, max_tokens=64) for _ in range(2))
    first.decoder = decoder.cut(2)
    hidden = [driver.step([list(range(1, 40))]) for driver in (whole, first)]
    assert torch.equal(whole.kv[:, :2].nan_to_num(), first.kv[:, :2].nan_to_num())
    assert whole.kv[:, 2].isfinite().any() and first.kv[:, 2].isnan().all()
    assert not torch.equal(*hidden)


def test_logits_of_a_long_prompt_are_made_for_the_sampled_row_only(
    tmp_path: Path, tiny_model: Callable[..., Any], make_driver: Callable[..., Any]
) -> None:
    model = tiny_model("llama-tied")
    model.resize_token_embeddings(200_000)
    model.save_pretrained(tmp_path)
    decoder = loaded(ModelSource(kind="huggingface", path=tmp_path, name="wide"))
    driver = make_driver(decoder, num_sequences=1, max_tokens=512)
    driver.step([[5] * 40])
    before = peak_bytes(reset=True)
    hidden = driver.step([[7] * 460])
    assert decoder.logits(hidden).shape == (1, 200_000)
    # All rows' float32 logits would take 368 MB.
    assert peak_bytes(reset=False) - before < 100_000_000


def peak_bytes(*, reset: bool) -> int:
    """This process's largest resident size since the last reset."""
    if reset:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            pytest.skip("needs a kernel that resets the peak of the resident size")
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def test_kv_bytes_per_token_are_those_of_the_design(embedded_model: ModelSource, embedded_decoder: Decoder) -> None:
    assert embedded_decoder.kv_bytes_per_token == 46080
    assert loaded(embedded_model, torch.bfloat16).kv_bytes_per_token == 23040


def test_dtype_names_are_read_and_others_refused() -> None:
    assert dtype_for("bf16", CPU) == torch.bfloat16
    assert dtype_for("fp32", CPU) == torch.float32
    assert dtype_for("auto", CPU) == auto_dtype(CPU)
    with pytest.raises(ModelError, match="dtype 'fp8' is not known; auto, bf16 and fp32 are"):
        dtype_for("fp8", CPU)


def test_a_config_that_claims_more_layers_than_the_file_has_is_refused_before_weights_are_read(
    save_tiny: Callable[..., Any], edit_json: Callable[..., None]
) -> None:
    _, source = save_tiny("llama2")
    edit_json(source.path / "config.json", num_hidden_layers=4)
    assert json.loads((source.path / "config.json").read_text())["num_hidden_layers"] == 4
    with pytest.raises(ModelError, match=r"missing tensors model\.layers\.3\.input_layernorm\.weight.* and 5 more"):
        loaded(source)


def test_logits_may_be_changed_in_place_by_whoever_samples(
    save_tiny: Callable[..., Any], make_driver: Callable[..., Any]
) -> None:
    decoder = loaded(save_tiny("llama2")[1])
    logits = decoder.logits(make_driver(decoder, num_sequences=1, max_tokens=16).step([[1, 2, 3]]))
    logits[0, 7] = float("inf")
    assert not logits.requires_grad
    assert int(logits.argmax()) == 7
