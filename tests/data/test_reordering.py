"""Other orders of a template: which are tried, and which are left alone."""

from __future__ import annotations

import pytest

from batchllm.data.reordering import reorderings
from batchllm.data.sections import PromptSection


def changes(template: str, system: str | None = None) -> dict[str, tuple[str | None, str | None]]:
    prompt = PromptSection(template=template, system=system)
    return {found.change: (found.prompt.template, found.prompt.system) for found in reorderings(prompt)}


def test_a_paragraph_moves_behind_the_last_that_varies_and_before_what_is_constant() -> None:
    template = "Question: {{ question }}\n\nText: {{ document }}\n\nAnswer:"
    assert changes(template) == {
        "moving {{ question }} behind {{ document }}": (
            "Text: {{ document }}\n\nQuestion: {{ question }}\n\nAnswer:",
            None,
        )
    }


def test_lines_move_where_there_is_one_paragraph_and_single_expressions_where_there_is_one_line() -> None:
    assert changes("Date: {{ date }}\n{{ text }}") == {
        "moving {{ date }} behind {{ text }}": ("{{ text }}\nDate: {{ date }}", None)
    }
    assert changes("{{ a }} and {{ b }}") == {"moving {{ a }} behind {{ b }}": (" and {{ b }}{{ a }}", None)}


def test_a_variable_of_the_system_prompt_moves_behind_the_template() -> None:
    moved = changes("{{ text }}", system="You are helpful.\n\nToday is {{ date }}.")
    assert moved == {
        "moving {{ date }} from the system prompt behind the template": (
            "{{ text }}\n\nToday is {{ date }}.\n",
            "You are helpful.",
        )
    }


@pytest.mark.parametrize(
    "template",
    [
        "{{ text }}",
        "no variable at all",
        "{% for m in rows %}\n\n{{ m }}\n\n{% endfor %}{{ tail }}",
        "{% set x = text %}{{ x }}\n\n{{ x }} {{ other }}",
    ],
)
def test_a_template_with_one_variable_or_pieces_that_hang_together_has_no_other_order(template: str) -> None:
    assert changes(template) == {}
