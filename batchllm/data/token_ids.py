"""Token ids that a job or a row names, against the model's vocabulary: one beyond it would bias nothing and stop nothing, and nobody would be told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from batchllm.data.section import ColumnName
from batchllm.data.sections import SamplingSection, StageSection
from batchllm.errors import JobError
from batchllm.prompt import SamplingParams

TOKEN_ID_FIELDS = ("logit_bias", "stop_token_ids")


class _Job(Protocol):
    @property
    def sampling(self) -> SamplingSection: ...
    @property
    def stages(self) -> Sequence[StageSection]: ...


def check_token_ids(job: _Job, *, vocab_size: int) -> None:
    """Raises JobError, by key, for an id that the job names for all rows, in any stage, and that the model does not have."""
    own = [(f"stages.{number}.sampling", stage.sampling) for number, stage in enumerate(job.stages)]
    for key, sampling in (("sampling", job.sampling), *own):
        for field in TOKEN_ID_FIELDS:
            value = () if sampling is None else getattr(sampling, field)
            mistake = None if isinstance(value, ColumnName) else _mistake(value, vocab_size=vocab_size)
            if mistake is not None:
                raise JobError(f"{key}.{field}: {mistake}")


def wrong_token_id(params: SamplingParams, *, vocab_size: int) -> tuple[str, str] | None:
    """The field that names an id beyond the vocabulary, and what is wrong; None where none does."""
    for field in TOKEN_ID_FIELDS:
        mistake = _mistake(getattr(params, field), vocab_size=vocab_size)
        if mistake is not None:
            return field, mistake
    return None


def _mistake(value: tuple[int, ...] | tuple[tuple[int, float], ...], *, vocab_size: int) -> str | None:
    ids = [item[0] if isinstance(item, tuple) else item for item in value]
    beyond = next((token_id for token_id in ids if token_id >= vocab_size), None)
    if beyond is None:
        return None
    return f"{beyond_vocabulary(beyond, vocab_size=vocab_size)}; name ids from 0 to {vocab_size - 1}"


def beyond_vocabulary(token_id: int, *, vocab_size: int) -> str:
    """What is wrong with a token that the model has no row for."""
    return f"token {token_id} is beyond the model's vocabulary of {vocab_size}"
