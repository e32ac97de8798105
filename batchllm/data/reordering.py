"""Other orders of a job's template that might share more: what varies from row to row moved behind what rows have in common.

Only the order of a template's own pieces changes; each alternative is rendered and counted before anybody hears of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import jinja2
from jinja2.meta import find_undeclared_variables

from batchllm.data.sections import PromptSection
from batchllm.data.templates import parse_template

MOST_ALTERNATIVES = 6
_EXPRESSION = re.compile(r"\{\{.*?\}\}", re.DOTALL)
_WITH_TEXT_BEFORE = re.compile(r".*?\{\{.*?\}\}|.+", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Reordering:
    """`change` says what moved, as the start of a sentence; `prompt` is the section with it."""

    change: str
    prompt: PromptSection


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A template cut into pieces that can stand in any order; `separator` lies between them."""

    pieces: tuple[str, ...]
    separator: str

    @property
    def varying(self) -> list[int]:
        return [number for number, piece in enumerate(self.pieces) if _EXPRESSION.search(piece)]

    def moved(self, number: int, *, behind: int) -> str:
        rest = [piece for place, piece in enumerate(self.pieces) if place != number]
        rest.insert(behind if number < behind else behind + 1, self.pieces[number])
        return self.separator.join(rest)


def reorderings(prompt: PromptSection) -> list[Reordering]:
    """Each piece with a variable moved behind the last one that has any, those of the system prompt behind the template."""
    if prompt.template is None:
        return []
    found: list[Reordering] = []
    template = _cut(prompt.template)
    if template is not None and len(template.varying) > 1:
        last = template.varying[-1]
        for number in template.varying[:-1]:
            change = f"moving {_names(template.pieces[number])} behind {_names(template.pieces[last])}"
            moved = template.moved(number, behind=last)
            found.append(Reordering(change, prompt.model_copy(update={"template": moved})))
    system = _cut(prompt.system) if prompt.system is not None else None
    if system is not None:
        for number in system.varying:
            rest = system.separator.join(piece for place, piece in enumerate(system.pieces) if place != number)
            moved = f"{prompt.template.rstrip()}\n\n{system.pieces[number].strip()}\n"
            change = f"moving {_names(system.pieces[number])} from the system prompt behind the template"
            found.append(Reordering(change, prompt.model_copy(update={"template": moved, "system": rest or None})))
    return found[:MOST_ALTERNATIVES]


def _cut(text: str) -> _Pieces | None:
    """Paragraphs, else lines, else single expressions: the coarsest cut with two pieces that vary. None where no cut is safe."""
    single = _Pieces(tuple(_WITH_TEXT_BEFORE.findall(text)), "")
    cuts = [_Pieces(tuple(text.split(separator)), separator) for separator in ("\n\n", "\n")] + [single]
    safe = [cut for cut in cuts if _is_safe(text, cut)]
    return next((cut for cut in safe if len(cut.varying) > 1), safe[0] if safe else None)


def _is_safe(text: str, cut: _Pieces) -> bool:
    """Every piece stands alone, and reads from the row what the whole reads: no block is cut, no variable set for another piece."""
    wanted: set[str] = set()
    for piece in cut.pieces:
        try:
            wanted |= find_undeclared_variables(parse_template(piece))
        except jinja2.TemplateSyntaxError:
            return False
    return wanted == find_undeclared_variables(parse_template(text))


def _names(piece: str) -> str:
    return ", ".join(" ".join(name.split()) for name in _EXPRESSION.findall(piece))
