"""Completions that must fit a grammar: whatever the model says, beside free rows, after preemptions, and when it cannot be."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from batchllm.data.constraints import choice_grammar, regex_grammar, schema_grammar
from batchllm.engine.engine import Engine, EngineConfig
from batchllm.engine.grammar import GrammarMasks
from batchllm.engine.grammar_tokens import grammar_tokens
from batchllm.errors import ModelError
from batchllm.planner.plan import make_plan
from batchllm.prompt import Completion, Grammar, SamplingParams

Build = Callable[..., Engine]

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["kind", "age", "tags"],
    "additionalProperties": False,
}
LABELS = ("cat", "category", "a b", "[x]\n", "日本")
PATTERN = r"[a-c]{2,6}-[0-9]+"


@dataclass(frozen=True)
class ByteVocabulary:
    """A token for each byte, some longer ones, and EOS 263. Ids above stand for nothing, as in a padded model."""

    eos_ids: frozenset[int] = frozenset({263})
    token_bytes: tuple[bytes, ...] = (
        *(bytes([i]) for i in range(256)),
        b"cat",
        b'{"',
        b'": ',
        b"-1",
        b"ab",
        b"dog",
        b", ",
        b"",
    )
    special_tokens: dict[str, int] = field(default_factory=lambda: {"<eos>": 263})

    def encode_batch(self, texts: Sequence[str], *, allow_special: bool = True) -> list[np.ndarray]:
        found = []
        for text in texts:
            data = text.encode()
            ids = []
            while data:
                piece = next((long for long in self.token_bytes[256:263] if long and data.startswith(long)), data[:1])
                ids.append(self.token_bytes.index(piece))
                data = data[len(piece) :]
            found.append(np.array(ids, dtype=np.int32))
        return found


@pytest.fixture
def build(list_prompts: Any, stub_decoder: Any) -> Build:
    def make(params: list[SamplingParams], *, rows: Sequence[int] | None = None, vocabulary: Any = None) -> Engine:
        chosen = range(len(params)) if rows is None else rows
        store = list_prompts([[5, 6, 7, 8, 9, 1 + row] for row in chosen], params)
        store.row_index[:] = list(chosen)
        decoder = stub_decoder()
        object.__setattr__(decoder.config, "vocab_size", 270)
        return Engine(
            decoder=decoder,
            vocabulary=vocabulary or ByteVocabulary(),
            store=store,
            plan=make_plan(store, prefix_sharing=True),
            config=EngineConfig(block_size=4, num_blocks=400, max_step_tokens=64, max_sequences=16),
            seed=3,
            started_at=time.monotonic(),
        )

    return make


def run(engine: Engine, *, preempt_every: int = 0) -> dict[int, Completion]:
    answers: dict[int, Completion] = {}
    num_steps = 0
    while not engine.scheduler.done:
        answers |= {completion.row_index: completion for completion in engine.step()}
        num_steps += 1
        running = engine.scheduler.table.running
        if preempt_every and running.size and num_steps % preempt_every == 0 and num_steps < 200:
            engine.scheduler.preempt(int(running[num_steps % running.size]))
    engine.scheduler.check_integrity()
    engine.close()
    return answers


def params_of(grammar: Grammar | None, *, max_tokens: int = 120, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=60.0, grammar=grammar, **changes)


def fits(value: Any) -> bool:
    return (
        list(value) == ["kind", "age", "tags"]
        and value["kind"] in ("cat", "dog")
        and type(value["age"]) is int
        and 0 <= value["age"] <= 30
        and len(value["tags"]) <= 2
        and all(isinstance(tag, str) and len(tag) <= 3 for tag in value["tags"])
    )


def test_every_completion_under_a_schema_is_json_that_it_takes(build: Build) -> None:
    answers = run(build([params_of(schema_grammar(SCHEMA))] * 20))
    texts = [answers[row].text for row in range(20)]
    assert all(text is not None and fits(json.loads(text)) for text in texts)
    assert len(set(texts)) > 10
    assert {(answer.finish_reason, answer.stop_reason) for answer in answers.values()} == {("stop", "schema")}


def test_every_completion_under_a_choice_is_one_of_the_labels(build: Build) -> None:
    answers = run(build([params_of(choice_grammar(LABELS))] * 40))
    texts = {answer.text for answer in answers.values()}
    assert texts <= set(LABELS) and len(texts) >= 4
    # `cat` may go on to `category`, so an EOS ends it; `category` takes nothing more and needs none.
    reasons = {answer.text: answer.finish_reason for answer in answers.values()}
    assert reasons["cat"] == "eos" and reasons["a b"] == "stop"


def test_an_eos_that_the_model_does_not_have_ends_nothing_and_one_that_it_has_is_needed(build: Build) -> None:
    def texts(*eos_ids: int) -> list[str | None]:
        vocabulary = ByteVocabulary(eos_ids=frozenset(eos_ids))
        answers = run(build([params_of(regex_grammar(PATTERN))] * 6, vocabulary=vocabulary))
        return [answers[row].text for row in range(6)]

    assert texts(263, 270) == texts(263)
    with pytest.raises(ModelError, match="declares no EOS token that is in its vocabulary"):
        grammar_tokens(ByteVocabulary(eos_ids=frozenset({270})), vocab_size=270)


def test_every_completion_under_a_regex_matches_it_whole(build: Build) -> None:
    answers = run(build([params_of(regex_grammar(PATTERN))] * 20))
    assert all(re.fullmatch(PATTERN, answer.text or "") for answer in answers.values())
    assert {answer.finish_reason for answer in answers.values()} == {"eos"}


def mixed_params() -> list[SamplingParams]:
    grammars = [None, schema_grammar(SCHEMA), choice_grammar(LABELS), regex_grammar(PATTERN)]
    greedy = SamplingParams(max_tokens=30, ignore_eos=True)
    return [params_of(grammars[row % 4], ignore_eos=row % 8 == 0) for row in range(14)] + [greedy, greedy]


def test_rows_with_and_without_a_grammar_in_one_batch_say_what_each_says_alone(build: Build) -> None:
    params = mixed_params()
    together = run(build(params))
    for row, settings in enumerate(params):
        alone = run(build([settings], rows=[row]))[row]
        assert (together[row].token_ids, together[row].text) == (alone.token_ids, alone.text)
        assert (together[row].finish_reason, together[row].stop_reason) == (alone.finish_reason, alone.stop_reason)


def test_preemption_does_not_show_in_rows_with_a_grammar(build: Build) -> None:
    params = mixed_params()
    calm, engine = run(build(params)), build(params)
    disturbed = run(engine, preempt_every=2)
    assert engine.metrics.preemptions >= 30
    assert {row: answer.token_ids for row, answer in disturbed.items()} == {
        row: answer.token_ids for row, answer in calm.items()
    }


def test_a_row_that_spends_its_tokens_inside_the_grammar_says_length(build: Build) -> None:
    answer = run(build([params_of(schema_grammar(SCHEMA), max_tokens=4)]))[0]
    assert answer.finish_reason == "length" and answer.error is None
    assert answer.text is not None and json.dumps({"kind": "cat"}).startswith(answer.text[:10])
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer.text)


def test_ignore_eos_and_min_tokens_do_not_run_past_the_end_of_a_grammar(build: Build) -> None:
    grammar = choice_grammar(["dog"])
    answers = run(build([params_of(grammar, ignore_eos=True), params_of(grammar, min_tokens=50)]))
    assert [answers[row].text for row in range(2)] == ["dog", "dog"]
    assert [answers[row].stop_reason for row in range(2)] == ["choice", "choice"]


def test_a_grammar_that_the_vocabulary_cannot_spell_is_an_error_row_and_its_neighbour_goes_on(build: Build) -> None:
    lacks_digits = tuple(b"" if data.isdigit() or data == b"-1" else data for data in ByteVocabulary().token_bytes)
    vocabulary = ByteVocabulary(token_bytes=lacks_digits)
    answers = run(
        build([params_of(regex_grammar("[0-9]+")), params_of(choice_grammar(["dog"]))], vocabulary=vocabulary)
    )
    assert answers[0].error is not None and answers[0].text is None
    assert answers[1].text == "dog"


def test_tokens_that_a_grammar_forces_are_those_that_would_be_sampled_and_take_no_steps(build: Build) -> None:
    """A row that asks for log-probabilities has each of its tokens sampled, under the same masks."""
    grammars = [schema_grammar(SCHEMA), choice_grammar(LABELS), regex_grammar("(begin|start)-of-[a-z]{2,9}-and-end")]
    answers: list[dict[int, Completion]] = []
    num_steps = []
    for logprobs in (0, None):
        params = [params_of(grammars[row % 3], logprobs=logprobs, ignore_eos=row % 2 == 0) for row in range(30)]
        engine = build(params)
        answers.append(run(engine))
        num_steps.append(engine.metrics.num_steps)
        assert engine.metrics.generated_tokens == sum(len(answer.token_ids) for answer in answers[-1].values())
    sampled, forced = answers
    for row in range(30):
        assert (forced[row].token_ids, forced[row].text) == (sampled[row].token_ids, sampled[row].text)
        assert (forced[row].finish_reason, forced[row].stop_reason) == (
            sampled[row].finish_reason,
            sampled[row].stop_reason,
        )
        assert len(sampled[row].logprobs or ()) == len(sampled[row].token_ids)
    assert num_steps[1] < 0.7 * num_steps[0]


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_forced_tokens_stop_where_sampled_ones_would(build: Build, max_tokens: int) -> None:
    """At `max_tokens`, at a stop string that lies within what is forced, and at the end of the grammar."""
    grammar = regex_grammar("ab-one-cat-two")
    cases: list[dict[str, Any]] = [{}, {"stop": ("one",)}, {"stop_token_ids": (256,)}]
    params = [params_of(grammar, max_tokens=max_tokens, **case) for case in cases]
    forced, sampled = run(build(params)), run(build([replace(settings, logprobs=0) for settings in params]))
    for row in range(len(cases)):
        assert (forced[row].token_ids, forced[row].text) == (sampled[row].token_ids, sampled[row].text)
        assert (forced[row].finish_reason, forced[row].stop_reason) == (
            sampled[row].finish_reason,
            sampled[row].stop_reason,
        )


def test_min_tokens_and_a_bias_still_rule_over_the_only_token_of_a_grammar(build: Build) -> None:
    """Where they leave no token, the row is an error as it was before anything was forced."""
    grammar = regex_grammar("ab")
    params = [params_of(grammar, min_tokens=20), params_of(grammar, logit_bias=((260, -float("inf")),))]
    answers = run(build(params))
    assert [answers[row].error for row in range(2)] == [None, "the row's settings leave no token to sample"]


def test_a_row_that_comes_where_another_was_knows_at_once_what_is_forced_there() -> None:
    masks = GrammarMasks(vocabulary=ByteVocabulary(), vocab_size=270, max_sequences=2)
    slots = np.arange(2)
    for slot in slots:
        masks.add(int(slot), choice_grammar(["x-dog", "y-cat"]), output_ids=[])
    assert masks.forced(slots, wait=True).tolist() == [-1, -1]
    masks.accept(slots[:1], np.array([ord("x")]))
    masks.prepare(slots[:1])
    assert masks.forced(slots, wait=True).tolist() == [ord("-"), -1]
    masks.accept(slots[1:], np.array([ord("x")]))
    assert masks.forced(slots, wait=False).tolist() == [ord("-"), ord("-")]
    masks.accept(slots, np.array([ord("-"), ord("-")]))
    assert masks.forced(slots, wait=False).tolist() == [261, 261]
    assert masks.accept(slots, np.array([261, 261])).all()
    masks.close()


def test_masks_of_a_slot_that_is_given_to_another_row_are_those_of_the_new_row() -> None:
    masks = GrammarMasks(vocabulary=ByteVocabulary(), vocab_size=270, max_sequences=2)
    slots = np.array([1])
    for letter in "xyzxyz":
        masks.add(1, choice_grammar([letter, "?"]), output_ids=[])
        allowed = masks.allowed(slots)
        assert allowed is not None
        assert not allowed.is_open[0] and allowed.ids[0].tolist() == sorted([ord("?"), ord(letter)])
        masks.prepare(slots)
        masks.remove(1)
    assert masks.allowed(slots) is None
    masks.close()
