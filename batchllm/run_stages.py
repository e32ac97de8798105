"""The stages of a run: each is a batch of its own over the rows that the one before has answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from batchllm.data.earlier import CarriedCells, StageCompletions, completion_column
from batchllm.data.inputs import Input
from batchllm.data.prompts import Staging
from batchllm.data.rendering import History
from batchllm.job import Job
from batchllm.models.tokenizer import Tokenizer
from batchllm.planner.store import PromptStore
from batchllm.prompt import Completion


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage, open, by its `number` from 0: its job, its rows, where its prompts go. `name` and `completions` are None in a job without stages.

    `completions` takes what a stage before the last answers. `is_continued`: the next stage goes on with the conversation.
    """

    number: int
    name: str | None
    job: Job
    input: Input
    staging: Staging
    history: History | None
    completions: StageCompletions | None
    is_continued: bool

    @property
    def is_last(self) -> bool:
        return self.completions is None

    def named(self, message: str) -> str:
        """An error's text with the stage that it comes from."""
        return message if self.name is None else f"stage {self.name}: {message}"

    def keep(self, completion: Completion, tokenizer: Tokenizer) -> None:
        """Takes a completion for the stages that follow."""
        assert self.completions is not None and completion.text is not None
        ids = completion.token_ids
        # What ended the row is no part of its text, and the chat template writes it again.
        spoken = ids[:-1] if completion.finish_reason == "eos" or not tokenizer.token_bytes[ids[-1]] else ids
        is_exact = b"".join([tokenizer.token_bytes[token_id] for token_id in spoken]) == completion.text.encode()
        self.completions.add(completion.row_index, text=completion.text, token_ids=spoken if is_exact else [])


class RunStages:
    """The stages of `job` in their order. Owns what they stage in `folder`, `staging` among it, until `close`."""

    def __init__(self, job: Job, *, input: Input, staging: Staging, folder: Path) -> None:
        self.jobs = job.stage_jobs()
        self._names = [stage.name for stage in job.stages]
        self._input = input
        self._staging = staging
        self._folder = folder
        self._stores: list[PromptStore] = [staging.store]
        self._earlier = [StageCompletions(folder, stage=name, num_rows=len(staging.done)) for name in self._names[:-1]]
        self.cells = CarriedCells(staging.kept, self._earlier)

    @property
    def completion_fields(self) -> list[pa.Field]:
        """The output columns of the stages before the last."""
        return [pa.field(completion_column(name), pa.string()) for name in self._names[:-1]]

    def open(self, number: int, tokenizer: Tokenizer) -> Stage:
        """Stage `number`, once all before it have run."""
        earlier = self._earlier[:number]
        staging, rows, history = self._staging, self._input, None
        if number:
            staging = staging.next_stage(self._folder / f"prompts-{number}", done=~earlier[-1].is_done)
            rows = rows.after(earlier)
            history = History(
                self.jobs[:number],
                tuple(self._names[:number]),
                _spoken(self._stores[-1], earlier[-1], tokenizer),
            )
            self._stores.append(staging.store)
        return Stage(
            number=number,
            name=self._names[number] if self._names else None,
            job=self.jobs[number],
            input=rows,
            staging=staging,
            history=history,
            completions=self._earlier[number] if number < len(self._earlier) else None,
            is_continued=number + 1 < len(self.jobs) and self.jobs[number + 1].prompt.continues,
        )

    def close(self) -> None:
        """Closes the files."""
        for store in self._stores[1:]:
            store.close()
        for completions in self._earlier:
            completions.close()
        self._staging.close()


def _spoken(
    store: PromptStore, completions: StageCompletions, tokenizer: Tokenizer
) -> Callable[[int], np.ndarray | None]:
    """The tokens of a row's prompt and completion in a stage that has run, as `History` wants them."""

    def find(row_index: int) -> np.ndarray | None:
        # A tokenizer that puts a space before a text would put one into the middle of the conversation.
        if tokenizer.strips_leading_space:
            return None
        token_ids = completions.token_ids(row_index)
        return np.concatenate([store.tokens(store.first_of_row(row_index)), token_ids]) if token_ids.size else None

    return find
