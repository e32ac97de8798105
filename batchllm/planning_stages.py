"""What a plan must assume of a job with stages: completions that are not written yet; and the plan of all its stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from batchllm.models.tokenizer import Tokenizer
from batchllm.run_stages import Stage

_NUM_WORDS = 4096
_WORD_SEED = 0


class StagePlan(Protocol):
    """The plan of one stage; `batchllm.planning.JobPlan` is one."""

    @property
    def predicted_total_s(self) -> float: ...
    def to_json(self) -> dict[str, Any]: ...
    def to_text(self) -> str: ...


@dataclass(frozen=True, slots=True)
class StagedPlan:
    """A job of stages explained: each stage's name, what is assumed or known of it, and its plan. The first stage's plan is exact.

    A later one's is for prompts in which every earlier completion has as many tokens as it may have at most.
    """

    stages: tuple[tuple[str, tuple[str, ...], StagePlan], ...]

    @property
    def predicted_total_s(self) -> float:
        return sum(plan.predicted_total_s for _, _, plan in self.stages)

    def to_json(self) -> dict[str, Any]:
        """Plain values: `stages`, each with `name`, `remarks` and what the plan of a job without stages has; `predicted_total_s` of all."""
        stages = [{"name": name, "remarks": list(remarks), **plan.to_json()} for name, remarks, plan in self.stages]
        return {"stages": stages, "predicted_total_s": self.predicted_total_s}

    def to_text(self) -> str:
        """For a person at a terminal."""
        parts = ["\n".join([f"stage {name}", *remarks, "", plan.to_text()]) for name, remarks, plan in self.stages]
        return "\n\n\n".join([*parts, f"all stages: predicted {self.predicted_total_s:,.1f} s"])


class AssumedCompletions:
    """Completions for planning: as long as a row may have them, of words that hardly two rows share."""

    def __init__(self, tokenizer: Tokenizer, *, max_context: int) -> None:
        self._tokenizer = tokenizer
        self._max_context = max_context
        self._random = np.random.default_rng(_WORD_SEED)
        self._words = _words(tokenizer)

    def fill(self, stage: Stage) -> int:
        """Answers every prompt of `stage` for the stages that follow; returns the tokens of all answers."""
        assert stage.completions is not None
        store, label, total = stage.staging.store, self._longest_label(stage), 0
        for prompt in range(store.num_prompts):
            params = store.sampling[int(store.sampling_id[prompt])]
            ids = label
            if ids is None:
                room = max(1, self._max_context - store.tokens(prompt).size)
                ids = self._words[self._random.integers(len(self._words), size=min(params.max_tokens, room))]
            text = self._tokenizer.decode_bytes(ids.tolist()).decode()
            stage.completions.add(int(store.row_index[prompt]), text=text, token_ids=ids.tolist())
            total += ids.size
        return total

    def _longest_label(self, stage: Stage) -> np.ndarray | None:
        """The tokens of the longest completion where there are only a few; None for free text."""
        labels = stage.job.output.choice
        return max(self._tokenizer.encode_batch(list(labels)), key=len) if isinstance(labels, tuple) else None


def _words(tokenizer: Tokenizer) -> np.ndarray:
    """Tokens that stay what they are wherever they stand in a text: a space and letters; else any single letters."""
    words = [token for token, data in enumerate(tokenizer.token_bytes) if data[:1] == b" " and data[1:].isalpha()]
    if len(words) < 16:
        words = [token for token, data in enumerate(tokenizer.token_bytes) if len(data) == 1 and data.isalpha()]
    assert words, "a vocabulary without letters"
    return np.array(words[:_NUM_WORDS], dtype=np.int32)


def num_restorable(*, prompt_tokens: int, completion_tokens: int, num_rows: int, block_size: int) -> int:
    """About how many tokens a stage finds that continues another, whose distinct prompt tokens and completions these are.

    The last token generated was not computed, and of a row's last block a half is lost on average.
    """
    return max(0, prompt_tokens + completion_tokens - num_rows * (1 + block_size // 2))
