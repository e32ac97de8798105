"""Forms of output that no engine could keep to are refused when the job is loaded."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from batchllm.data.constraint_section import ConstraintSection, row_choice
from batchllm.data.constraints import check_grammar, regex_grammar

NO_TEXT = r"[^\x00-\x{10FFFF}]"


@pytest.mark.parametrize(
    "values",
    [
        {"regex": NO_TEXT},
        {"schema": {"type": "string", "pattern": NO_TEXT}},
        {"schema": {"type": "object", "properties": {"a": {"type": "string", "pattern": NO_TEXT}}, "required": ["a"]}},
        {"regex": r"\bword\b"},
        {"schema": {"not": {}}},
        {"schema": {"const": "\ud800"}},
    ],
)
def test_a_form_that_no_text_or_no_matcher_takes_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as refused:
        ConstraintSection.model_validate(values)
    assert "\n" not in str(refused.value.errors()[0]["msg"])


def test_a_regex_that_only_the_matcher_refuses_passes_the_librarys_check_and_not_ours() -> None:
    grammar = regex_grammar(NO_TEXT)
    with pytest.raises(ValueError, match="cannot be kept to: "):
        check_grammar(grammar)


MANY = {"type": "array", "items": {"const": "yes"}, "minItems": 100_000}


@pytest.mark.parametrize(
    "values",
    [
        {"regex": "(a{1000}){1000}"},
        {"regex": "[ab]{100}x{60000}"},
        {"regex": "(yes|no)*, because x{600000}"},
        {"schema": {"type": "string", "pattern": "^(a{1000}){1000}$"}},
        {"schema": MANY},
        {
            "schema": {
                "type": "object",
                "properties": {"why": {"type": "string", "minLength": 300}, "all": MANY},
                "required": ["why", "all"],
            }
        },
    ],
)
def test_a_form_that_grows_too_large_after_its_first_tokens_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as refused:
        ConstraintSection.model_validate(values)
    (error,) = refused.value.errors()
    assert error["loc"] == tuple(values)
    assert error["msg"].startswith("Value error, cannot be kept to: ")
    assert error["msg"].count("(") == error["msg"].count(")")
    assert error["msg"].endswith("; repeat less in it (as with {n}, minItems and minLength)")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000},
        {"type": "array", "items": {"type": "array", "minItems": 1000}, "minItems": 1000},
        {"type": "string", "minLength": 1_000_000},
        {"type": "object", "minProperties": 1_000_000},
        {
            "type": "object",
            "properties": {"a": {"type": "string", "minLength": 2_000_000}},
            "required": ["a"],
        },
    ],
)
def test_a_schema_whose_shortest_text_is_longer_than_any_completion_is_refused(schema: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="its shortest text has more than 1000000 characters; make minItems"):
        ConstraintSection.model_validate({"schema": schema})


def test_honest_forms_are_taken() -> None:
    for values in (
        {"regex": "(yes|no)"},
        {"regex": "a{0,3}"},
        {"choice": ["yes", "no", "perhaps (later)"]},
        {"schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
        {"schema": {"enum": ["a", 1, None]}},
        {"regex": "a{5000}"},
        {"regex": "x?"},
        {"schema": {"const": {"minItems": 1_000_000}}},
        {"schema": {"type": "array", "maxItems": 1_000_000}},
        {"schema": {"type": "object", "properties": {"a": {"type": "string", "minLength": 2_000_000}}}},
    ):
        assert ConstraintSection.model_validate(values).grammar() is not None


def test_a_rows_labels_make_a_grammar_and_wrong_ones_name_their_column() -> None:
    assert (
        row_choice(["yes", "no"], column="labels")
        == ConstraintSection.model_validate({"choice": ["yes", "no"]}).grammar()
    )
    for cell, says in (
        (None, "must be a list of at least one label"),
        ([], "must be a list of at least one label"),
        ("yes", "must be a list of at least one label"),
        (["a", "a"], "names a label twice"),
        (["a", None], "must be text"),
        ([""], "must not be empty"),
        ({"column": "x"}, "must be a list of at least one label"),
    ):
        with pytest.raises(ValueError, match="column 'labels' as output.choice: ") as refused:
            row_choice(cell, column="labels")
        assert says in str(refused.value)
