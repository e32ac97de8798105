"""Child processes that answer lines with JSON lines, stopped while they are not asked, and the CPU time of others."""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SET_PARENT_DEATH_SIGNAL = 1
_prctl = ctypes.CDLL(None).prctl


class ChildFailed(Exception):
    """A child process ended, took too long, or said what nobody understands; the message ends with its last lines."""


def _end_with_parent() -> None:
    """Called in a child before its program: a parent that is killed cannot end it, and one that is stopped would stay for ever."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


class Child:
    """A process of a session of its own. It sleeps (SIGSTOP) except while it is started or asked."""

    def __init__(
        self, command: Sequence[str | Path], *, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        self._log_file = log.open("wb")
        self._buffer = b""
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log_file,
            start_new_session=True,
            env=dict(environment) if environment is not None else None,
            preexec_fn=_end_with_parent,
        )
        self.session = self._process.pid

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def ready(self, *, timeout_s: float) -> dict[str, Any]:
        """Its first line; then it sleeps. Raises ChildFailed."""
        message = self._read(timeout_s)
        self._signal(signal.SIGSTOP)
        return message

    def ask(self, line: str, *, timeout_s: float) -> dict[str, Any]:
        """Wakes it, sends a line, returns its answer, lets it sleep. Raises ChildFailed."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ChildFailed(self._last_words("ended")) from None
        message = self._read(timeout_s)
        self._signal(signal.SIGSTOP)
        return message

    def close(self) -> None:
        """Ends the process and all that it started."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._log_file.close()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.session, number)
        except ProcessLookupError:
            pass  # Gone already; a question to it says so.

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        stream = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(deadline - time.monotonic(), 0)):
                    raise ChildFailed(self._last_words(f"gave no answer within {timeout_s:.0f} s"))
                data = os.read(stream, 1 << 16)
                if not data:
                    raise ChildFailed(self._last_words("ended"))
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise ChildFailed(self._last_words(f"answered {line[:80]!r}, which is no JSON object"))
        return message

    def _last_words(self, what: str) -> str:
        self._log_file.flush()
        lines = self.log.read_text(errors="replace").splitlines()[-3:]
        return f"{what}; {self.log} ends: {' | '.join(lines)}"


def busy_s(stat: str) -> float:
    """CPU seconds of all cores since boot, from the text of /proc/stat: all but idle and waiting for disks; stolen time counts."""
    user, nice, system, _, _, irq, soft_irq, steal = map(int, stat.splitlines()[0].split()[1:9])
    return (user + nice + system + irq + soft_irq + steal) / _TICKS_PER_S


def sessions_cpu_s(sessions: Iterable[int]) -> float:
    """CPU seconds of every process in these sessions, ended children of theirs included."""
    wanted = set(sessions)
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in parentheses may hold anything.
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) in wanted:
            ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS_PER_S


class OthersWatch:
    """How many cores processes outside of some sessions (and outside this process) keep busy, from `start` to `stop`."""

    def __init__(self, sessions: Iterable[int]) -> None:
        self._sessions = {*sessions}
        self._started_at = time.monotonic()
        self._others_s = self._now()

    def _now(self) -> float:
        own = sessions_cpu_s(self._sessions) + time.process_time()
        return busy_s(Path("/proc/stat").read_text()) - own

    def cores(self) -> float:
        """Cores that others kept busy since this was made; never below 0."""
        return max(self._now() - self._others_s, 0.0) / max(time.monotonic() - self._started_at, 1e-6)
