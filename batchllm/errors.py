"""The one exception family. Each error carries the exit code that the command line ends with.

What a command was given is wrong (`WrongInputError`, 2): the command line, an environment variable, the job file, or a table, model or folder
that they name. The same command would fail again. Everything else that ends a command early has the code of its class, 1 in general: a
full disk, a network that is down, memory that ran out.
"""

from __future__ import annotations

import errno


class BatchLLMError(Exception):
    """What a user can act on, in one line: names the file, key, row or size, and what to do."""

    exit_code = 1


class WrongInputError(BatchLLMError):
    """What the command was given is wrong, by itself or in what it names."""

    exit_code = 2


class JobError(WrongInputError):
    """The job file, an option or an argument is wrong."""


class InputError(WrongInputError):
    """The input table cannot be read, or lacks a column."""


class ModelError(WrongInputError):
    """The model, its tokenizer or its cache cannot be used."""


class FolderError(WrongInputError):
    """A file or folder that was named for output cannot be it: of the wrong kind, not to be written to, another job's, or damaged."""


class ModelFetchError(BatchLLMError):
    """A model that may well exist could not be fetched: the network, an index or the hub does not answer."""


class OutputError(BatchLLMError):
    """Completions, or what is written beside them, cannot be written: the disk is full or broken."""


class ScheduleError(BatchLLMError):
    """The user's crontab cannot be read or changed."""


class RunLockedError(BatchLLMError):
    """Another run holds the lock of this output folder."""

    exit_code = 4


class StoppedError(BatchLLMError):
    """The run was stopped by a signal or a deadline; running it again finishes the rest."""

    exit_code = 130


_WRONG_PLACE = frozenset(
    getattr(errno, name)
    for name in "ENOENT ENOTDIR EISDIR EACCES EPERM EROFS ENAMETOOLONG ELOOP EEXIST EINVAL ETXTBSY ENOTSUP".split()
)


def write_error(message: str, cause: OSError) -> FolderError | OutputError:
    """The error to raise where something cannot be written: the place is wrong, or the place is right and its disk full or broken.

    `message` names the path; the reason is added to it.
    """
    kind = FolderError if cause.errno in _WRONG_PLACE else OutputError
    return kind(f"{message}: {cause.strerror or cause}")
