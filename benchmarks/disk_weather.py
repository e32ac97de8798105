"""A disk in bad weather: a real queue of reads and writes in front of which things go wrong by chance. For tests and the soak of the tiers."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from batchllm.storage.ring import open_queue
from batchllm.storage.submission import Completion, Operation, SubmissionQueue

_PAGE_BYTES = 4096


@dataclass(slots=True)
class Weather:
    """Shares of reads and of writes that fail, of operations that fall short or are refused when they are submitted.

    `delay_s`: completions are held up to so long, and returned in random order. While `is_frozen` nothing completes. May change under a queue.
    """

    read_errors: float = 0.0
    write_errors: float = 0.0
    shorten: float = 0.0
    refuse: float = 0.0
    delay_s: float = 0.0
    is_frozen: bool = False


class WeatherQueue:
    """A `SubmissionQueue`. What goes wrong follows from `seed` and the order of operations."""

    name = "weather"

    def __init__(self, inner: SubmissionQueue, weather: Weather, *, seed: int) -> None:
        self._inner = inner
        self._weather = weather
        self._random = random.Random(seed)
        self._made_up: list[Completion] = []

    def submit(self, operation: Operation) -> None:
        weather, draw = self._weather, self._random.random
        if draw() < weather.refuse:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if draw() < (weather.write_errors if operation.is_write else weather.read_errors):
            code = errno.ENOSPC if operation.is_write and draw() < 0.5 else errno.EIO
            self._made_up.append(Completion(operation.tag, -code))
            self._inner.wake()
        elif draw() < weather.shorten and operation.view.nbytes > _PAGE_BYTES:
            self._inner.submit(operation._replace(view=operation.view[:_PAGE_BYTES]))
        else:
            self._inner.submit(operation)

    def begin(self) -> None:
        self._inner.begin()

    def wait(self) -> list[Completion]:
        completions = self._inner.wait() + self._made_up
        self._made_up = []
        while self._weather.is_frozen:
            time.sleep(0.002)
        if self._weather.delay_s:
            time.sleep(self._random.uniform(0, self._weather.delay_s))
            self._random.shuffle(completions)
        return completions

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._inner.close()


def open_in(weather: Weather, *, seed: int = 0) -> Callable[[int, int], tuple[SubmissionQueue, str]]:
    """Opens queues in this weather: `open_submissions` for a `DiskTier`."""

    def open_submissions(file_descriptor: int, depth: int) -> tuple[SubmissionQueue, str]:
        inner, note = open_queue(file_descriptor, depth)
        return WeatherQueue(inner, weather, seed=seed), note

    return open_submissions
