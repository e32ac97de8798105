"""When a command stops before its end: signals and a deadline."""

from __future__ import annotations

import datetime
import os
import signal
import time
from collections.abc import Callable
from types import FrameType

from batchllm.errors import StoppedError


class StopWish:
    """Turns the first SIGINT or SIGTERM, or the deadline, into a wish to stop after the step; said once.

    A second SIGINT ends the run where it is, a third the process: a part is whole or not there, so no moment is a wrong one.
    """

    def __init__(self, *, deadline: datetime.datetime | None, say: Callable[[str], None]) -> None:
        """`deadline` is aware. It is compared with the wall clock, so a machine that slept stops when it wakes. `say` gets the one line."""
        self._say = say
        self._deadline_s = None if deadline is None else deadline.timestamp()
        self._is_asked = False
        self._is_interrupted = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_asked:
            self._ask("stopping after this step; what is done is kept")
        elif number == signal.SIGINT:
            if self._is_interrupted:
                os._exit(StoppedError.exit_code)
            self._is_interrupted = True
            raise KeyboardInterrupt

    def _ask(self, text: str) -> None:
        self._is_asked = True
        self._say(text)

    def asked(self) -> bool:
        if not self._is_asked and self._deadline_s is not None and time.time() >= self._deadline_s:
            self._ask("the deadline has come; stopping, what is done is kept")
        return self._is_asked
