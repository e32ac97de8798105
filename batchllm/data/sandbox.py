"""The sandbox that every template runs in: no way out of it, and a finite answer to a template that grows without end.

Jinja2's own sandbox keeps templates from Python's internals, but `'x' * 10**10` is harmless to it, and so is a text that doubles in a loop.
Here whatever makes text or items pays for them from the rendering's budget (`template_budget`), as does every turn of a loop; operations
that can multiply a size are checked before they are done. Nothing is computed when a template is compiled.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import generate_lorem_ipsum

from batchllm.data.template_budget import (
    ITEM,
    begin_budget,
    check,
    checked,
    end_budget,
    paid,
    spend,
    turns,
)
from batchllm.data.template_formats import check_date_form, check_percent
from batchllm.data.template_operations import bounded_filters, check_method, split

_LOOP_FILTER, _CHECKED_FILTER = " turns", " checked"
"""Filters that no template can name: they are put into its tree."""

_NODE = 4
"""Characters that a node in a loop's body stands for: what it makes in each turn without an operation, such as a list of names."""

_MOST_BITS = 50_000
_LOREM = 1600
"""Characters of a paragraph of `lipsum`, where no length is given."""


class _BoundedTemplate(Template):
    def render(self, *arguments: Any, **named: Any) -> str:
        token = begin_budget()
        try:
            return super().render(*arguments, **named)
        finally:
            end_budget(token)


class _BoundedCode(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """`a ~ b`, through the environment."""
        self.write("environment.concat_values((")
        for value in node.nodes:
            self.visit(value, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        """A slice copies, and Jinja2 takes it without asking the environment."""
        is_slice = isinstance(node.arg, nodes.Slice)
        self.write("environment.paid(" if is_slice else "")
        super().visit_Getitem(node, frame)
        self.write(")" if is_slice else "")


_COMPARING = frozenset(
    {"in", "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge", ">="}
)
"""Tests that compare what may hold itself many times over."""


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """`ImmutableSandboxedEnvironment` in which a rendering that makes too much, or takes too long, is refused as SecurityError."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _BoundedCode
    template_class = _BoundedTemplate
    paid = staticmethod(paid)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, finalize=_finalized, optimized=False, **options)
        self.filters |= bounded_filters(self.filters)
        self.filters |= {_LOOP_FILTER: _loop_turns, _CHECKED_FILTER: checked}

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """The pieces of an output, a macro or a block as one text. Turns of loops are paid for, so there are not too many."""
        texts = list(pieces)
        spend(sum(map(len, texts)))
        return "".join(texts)

    @staticmethod
    def concat_values(values: tuple[Any, ...]) -> str:
        """`a ~ b`."""
        for value in values:
            checked(value)
        return str(paid("".join(map(str, values))))

    def _generate(self, source: nodes.Template, *arguments: Any, **named: Any) -> str:
        _bound_tree(source)
        return super()._generate(source, *arguments, **named)

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, checked(argument))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, (str, bytes, list, tuple)):
            spend(_size(left) + (_size(right) if isinstance(right, type(left)) else 0))
        elif operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(value, (str, bytes, list, tuple)) and isinstance(count, int):
                    spend(_size(value) * max(count, 0))
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * right)
        elif operator == "%" and isinstance(left, (str, bytes)):
            values = right if isinstance(right, tuple) else (right,)
            check_percent(left, [*values, *(right.values() if isinstance(right, dict) else ())])
            return paid(super().call_binop(context, operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, callee: Any, *arguments: Any, **named: Any) -> Any:
        # Jinja2 hands `str.format` out in a wrapper of its own.
        owner = getattr(getattr(callee, "__wrapped__", callee), "__self__", None)
        for value in (owner, *arguments, *named.values()):
            checked(value)
        if isinstance(owner, (str, bytes)):
            if callee.__name__ in ("split", "rsplit"):
                check_method(owner, callee.__name__, (*arguments, *named.values()))
                return paid(split(owner, callee.__name__, *arguments, **named))
            if callee.__name__ == "join" and arguments:
                # Its items may be made while it runs.
                arguments = (list(turns(arguments[0])), *arguments[1:])
            check_method(owner, callee.__name__, (*arguments, *named.values()))
        elif isinstance(owner, int) and callee.__name__ == "to_bytes":
            check(max((value for value in (*arguments, *named.values()) if isinstance(value, int)), default=0))
        elif isinstance(owner, datetime.date) and callee.__name__ == "strftime":
            for form in (*arguments, *named.values()):
                check_date_form(form)
        elif callee is generate_lorem_ipsum:
            numbers = [max(value, 1) for value in (*arguments, *named.values()) if isinstance(value, int)]
            check(_LOREM * math.prod(numbers))
        elif isinstance(callee, LoopContext):
            # A recursive loop over the items below this one.
            arguments = (turns(arguments[0]), *arguments[1:]) if arguments else arguments
        return paid(super().call(context, callee, *arguments, **named))


def _bound_tree(tree: nodes.Template) -> None:
    """Lets every turn of a loop be paid for, and containers be looked at before they are compared or hashed."""
    for loop in list(tree.find_all(nodes.For)):
        size = sum(1 for part in (*loop.body, *loop.else_) for _ in part.find_all(nodes.Node))
        cost = nodes.Const(ITEM + _NODE * size, lineno=loop.lineno)
        loop.iter = nodes.Filter(loop.iter, _LOOP_FILTER, [cost], [], None, None, lineno=loop.lineno)
    for compared in list(tree.find_all(nodes.Compare)):
        compared.expr = _with_check(compared.expr)
        for operand in compared.ops:
            operand.expr = _with_check(operand.expr)
    # `is eq` and `is in` compare too.
    for test in list(tree.find_all(nodes.Test)):
        if test.name not in _COMPARING:
            continue
        test.node = _with_check(test.node)
        test.args = [_with_check(argument) for argument in test.args]
    for pair in list(tree.find_all(nodes.Pair)):
        pair.key = _with_check(pair.key)
    assert tree.environment is not None
    tree.set_environment(tree.environment)


def _with_check(node: nodes.Expr) -> nodes.Expr:
    if isinstance(node, nodes.Const):
        return node
    return nodes.Filter(node, _CHECKED_FILTER, [], [], None, None, lineno=node.lineno)


# With the context, which a template being compiled does not have: a value that stands in it is then not written out before it is rendered.
@pass_context
def _finalized(context: Context, value: Any) -> Any:
    return checked(value)


@pass_context
def _loop_turns(context: Context, values: Any, cost: int) -> Any:
    return turns(values, cost=cost)


def _size(value: Any) -> int:
    return len(value) * (1 if isinstance(value, (str, bytes)) else ITEM)


def _check_bits(num_bits: int) -> None:
    if num_bits > _MOST_BITS:
        raise SecurityError(f"a number of about {num_bits} bits is too large")
