"""What would make a job cheaper, each line computed from its plan and left out where it does not matter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchllm.planner.cost import Prediction
from batchllm.planner.demand import Demand
from batchllm.planner.plan import Plan
from batchllm.planner.tree import NO_NODE, own_tokens

# Below this share of the batch's tokens, rows or seconds a remark is not worth a line.
WORTH_SAYING = 0.05


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """What advice is computed from; `prediction` None where no rates are known."""

    plan: Plan
    demand: Demand
    prediction: Prediction | None
    context_tokens: int
    max_sequences: int


@dataclass(frozen=True, slots=True)
class PlanTotals:
    """The prompt tokens of one rendering of a job: asked for, and to be computed once sharing is exact."""

    prompt_tokens: int
    unique_prompt_tokens: int


def totals(plan: Plan) -> PlanTotals:
    """The totals of a plan, for comparing renderings."""
    return PlanTotals(prompt_tokens=plan.total_prompt_tokens, unique_prompt_tokens=plan.unique_prompt_tokens)


def reordered_saving(original: PlanTotals, alternative: PlanTotals, *, change: str) -> str | None:
    """What rendering the job otherwise would save; None unless it saves at least a twentieth.

    `change` names it as the start of a sentence: "moving {{ date }} behind the document".
    """
    if original.unique_prompt_tokens == 0:
        return None
    saving = 1 - alternative.unique_prompt_tokens / original.unique_prompt_tokens
    if saving < WORTH_SAYING:
        return None
    return (
        f"{change} would cut computed prompt tokens by {saving:.0%} "
        f"({original.unique_prompt_tokens:,} to {alternative.unique_prompt_tokens:,})"
    )


def advise(facts: PlanFacts) -> tuple[str, ...]:
    """Remarks on a plan, those about wrong results first."""
    if facts.plan.num_prompts == 0:
        return ()
    remarks = (
        _too_long(facts),
        _duplicates(facts),
        _long_pole(facts),
        _more_than_fits(facts),
    )
    return tuple(remark for remark in remarks if remark is not None)


def _too_long(facts: PlanFacts) -> str | None:
    num_too_long = int((facts.plan.prompt_tokens >= facts.context_tokens).sum())
    if not num_too_long:
        return None
    return (
        f"{num_too_long:,} prompts leave no room to generate in the context of {facts.context_tokens:,} tokens and "
        f"become error rows; the longest has {int(facts.plan.prompt_tokens.max()):,} tokens"
    )


def _duplicates(facts: PlanFacts) -> str | None:
    plan = facts.plan
    ends_with_node = (own_tokens(plan.tree, plan.prompt_tokens) == 0) & (plan.tree.leaf_node != NO_NODE)
    equal_prompts = np.bincount(plan.tree.leaf_node[ends_with_node])
    num_repeated = int(np.maximum(equal_prompts - 1, 0).sum())
    if num_repeated < WORTH_SAYING * plan.num_prompts:
        return None
    return f"{num_repeated:,} prompts ({num_repeated / plan.num_prompts:.0%}) equal an earlier one, of another row or sample"


def _long_pole(facts: PlanFacts) -> str | None:
    if facts.demand.tail_share < 2 * WORTH_SAYING:
        return None
    return (
        f"during the last {facts.demand.tail_share:.0%} of the steps fewer than a quarter of the sequences run; "
        f"the longest row may generate {int(facts.plan.decode_tokens.max()):,} tokens: a lower max_tokens ends sooner"
    )


def _more_than_fits(facts: PlanFacts) -> str | None:
    tiers = facts.prediction.tiers if facts.prediction is not None else ()
    if not tiers or not tiers[0].missing_bytes:
        return None
    device = tiers[0]
    demand = device.demand_bytes + device.missing_bytes
    fitting = max(1, facts.max_sequences * device.demand_bytes // demand)
    return (
        f"the device holds {device.demand_bytes / demand:.0%} of the peak demand for keys and values; "
        f"about {fitting:,} sequences at a time would fit"
    )
