"""The one exception family. Each error carries the exit code that the command line ends with."""


class BatchLLMError(Exception):
    """What a user can act on, in one line: names the file, key, row or size, and what to do."""

    exit_code = 1


class JobError(BatchLLMError):
    """The job file, an option or an argument is wrong."""

    exit_code = 2


class InputError(BatchLLMError):
    """The input table cannot be read, or lacks a column."""


class ModelError(BatchLLMError):
    """The model, its tokenizer or its cache cannot be used."""


class OutputError(BatchLLMError):
    """Completions cannot be written, or the output folder belongs to another job."""


class ScheduleError(BatchLLMError):
    """The user's crontab cannot be read or changed."""


class RunLockedError(BatchLLMError):
    """Another run holds the lock of this output folder."""

    exit_code = 4


class StoppedError(BatchLLMError):
    """The run was stopped by a signal or a deadline; running it again finishes the rest."""

    exit_code = 130
