"""What one rendering of a template may make, and how long it may take: the bounds that the sandbox's operations keep."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextvars import ContextVar, Token
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MOST_CHARACTERS = 50_000_000
"""Characters that one rendering may make in all, far above any prompt and far below a machine's memory."""

ITEM = 16
"""Characters that an item of a list, or one turn of a loop, stands for."""

MOST_CPU_S = 10.0
"""Seconds of processor time: no row of an honest job comes near, and a machine that is busy or asleep does not count."""

_TURNS_PER_LOOK = 16
_CHARACTERS_PER_TURN = 10_000
"""What takes long is looked at sooner."""

_LONG_TEXT = 1000
_READ = 16
"""Characters of a long text that are read in the time in which one is made."""

_OTHER = 64
_SIZED = (list, tuple, dict, set, frozenset)
_CONTAINERS = (*_SIZED, Namespace)


class _Budget:
    def __init__(self) -> None:
        self._left = MOST_CHARACTERS
        self._until = time.thread_time() + MOST_CPU_S
        self._until_look = _TURNS_PER_LOOK

    def spend(self, characters: int, looked_at: int) -> None:
        self._left -= characters
        if self._left < 0:
            raise SecurityError(f"the template makes too many characters on its way, more than {MOST_CHARACTERS:,}")
        self._until_look -= 1 + max(characters, looked_at) // _CHARACTERS_PER_TURN
        if self._until_look > 0:
            return
        self._until_look = _TURNS_PER_LOOK
        if time.thread_time() > self._until:
            raise SecurityError(f"the template takes more than {MOST_CPU_S:.0f} s")


_current: ContextVar[_Budget | None] = ContextVar("budget", default=None)


def begin_budget() -> Token[_Budget | None]:
    """A new budget for what this thread renders, until `end_budget`. Without one each operation has its own."""
    return _current.set(_Budget())


def end_budget(token: Token[_Budget | None]) -> None:
    """What was before `begin_budget` holds again."""
    _current.reset(token)


def spend(characters: int, *, looked_at: int = 0) -> None:
    """Takes from the budget; raises SecurityError when nothing is left, or the time is over. Before a thing is made, where its size is known.

    `looked_at`: characters that cost time alone.
    """
    (_current.get() or _Budget()).spend(characters, looked_at)


def check(characters: int) -> None:
    """Raises SecurityError for what no rendering may make, before it is made."""
    if characters > MOST_CHARACTERS:
        raise SecurityError(f"{characters:,} characters at once are too many, more than {MOST_CHARACTERS:,}")


def paid(value: Any) -> Any:
    """The value, once it is paid for."""
    if isinstance(value, (str, bytes)):
        spend(len(value))
    else:
        spend(ITEM * (len(value) + 1) if isinstance(value, _SIZED) else ITEM)
    return value


def checked(value: Any) -> Any:
    """The value, unless it is a container that is too large to be written out or compared; a long text is paid for as read."""
    if isinstance(value, _CONTAINERS):
        size = text_size(value)
        check(size)
        spend(0, looked_at=size)
    elif isinstance(value, (str, bytes)) and len(value) > _LONG_TEXT:
        spend(len(value) // _READ)
    return value


def text_size(value: Any, seen: dict[int, int] | None = None) -> int:
    """About how many characters `str(value)` has. A list may hold another twice, and that a third one twice: each is looked at once."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3 + 2
    if not isinstance(value, _CONTAINERS):
        return _OTHER
    seen = {} if seen is None else seen
    if id(value) not in seen:
        # One that holds itself has no end to write: Python says so.
        seen[id(value)] = 0
        if isinstance(value, Namespace):
            value_items: Any = object.__getattribute__(value, "_Namespace__attrs").items()
        else:
            value_items = value.items() if isinstance(value, dict) else value
        seen[id(value)] = 2 + sum(2 + text_size(item, seen) for item in value_items)
    return seen[id(value)]


def turns(values: Any, *, cost: int = ITEM) -> Iterator[Any]:
    """The values, each paid for."""
    for value in values:
        spend(cost)
        yield value
