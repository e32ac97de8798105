"""What the sections of a job must be for each other; each message begins with the key that it is about."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import nodes

from batchllm.data.earlier import STAGES_COLUMN, completion_column
from batchllm.data.schema import COMPLETION_FIELDS
from batchllm.data.sections import OutputSection, PromptSection, SamplingSection, StageSection
from batchllm.data.templates import parse_template


def check_prompt(prompt: PromptSection, *, at: str, is_first: bool = True) -> None:
    """Raises ValueError for a prompt that nothing fills, or that continues what was never begun."""
    if prompt.template is None and prompt.messages is None:
        raise ValueError(f"{at}: needs exactly one of template and messages")
    if prompt.continues and is_first:
        raise ValueError(f"{at}: continue needs an earlier stage, whose conversation goes on")


def check_requests(
    *, prompt: PromptSection, sampling: SamplingSection, output: OutputSection, stages: Sequence[StageSection]
) -> None:
    """Raises ValueError for what a batch file of requests brings itself."""
    if stages:
        raise ValueError("stages: have no place with input.openai_batch; its requests bring their prompts")
    for key, name in (("template",) * 2, ("messages",) * 2, ("system",) * 2, ("raw",) * 2, ("continue", "continues")):
        if getattr(prompt, name):
            raise ValueError(f"prompt: {key} has no place with input.openai_batch; its requests bring their prompts")
    columns = sampling.columns()
    if columns:
        raise ValueError(f"sampling: {next(iter(columns))} cannot name a column: a batch file has none")
    if output.choice_column is not None:
        raise ValueError("output: choice cannot name a column: a batch file has none")


def check_stages(
    stages: Sequence[StageSection], *, sampling: SamplingSection, output: OutputSection, keep: Sequence[str]
) -> None:
    """Raises ValueError. `sampling` and `output` are the job's own."""
    for key, value in output.constraint_values().items():
        if value is not None:
            raise ValueError(f"output: {key} has no place beside stages; give it to the output of a stage")
    names: list[str] = []
    for number, stage in enumerate(stages):
        at = f"stages.{number}"
        if stage.name in names:
            raise ValueError(f"{at}.name: two stages are called {stage.name}")
        check_prompt(stage.prompt, at=f"{at}.prompt", is_first=number == 0)
        if stage.prompt.continues and stages[number - 1].prompt.raw:
            raise ValueError(f"{at}.prompt: continue needs a conversation, and stage {names[-1]} is raw")
        for key, text in (("template", stage.prompt.template), ("system", stage.prompt.system)):
            for wanted in _stage_names(text) if number else []:
                if wanted not in names:
                    raise ValueError(
                        f"{at}.prompt.{key}: {STAGES_COLUMN}.{wanted} is no earlier stage; those are {', '.join(names)}"
                    )
        is_last = number == len(stages) - 1
        if not is_last and (stage.sampling or sampling).n != 1:
            place = f"{at}.sampling" if stage.sampling is not None else "sampling"
            raise ValueError(f"{place}: n above 1 is for the last stage; an earlier one gives one completion")
        column = completion_column(stage.name)
        if not is_last and column.lower() in {field.name for field in COMPLETION_FIELDS}:
            raise ValueError(f"{at}.name: {stage.name} would make a second column {column}; call the stage otherwise")
        if not is_last and column.lower() in {name.lower() for name in keep}:
            raise ValueError(f"input: keep names {completion_column(stage.name)}, the column of stage {stage.name}")
        names.append(stage.name)


def _stage_names(text: str | None) -> list[str]:
    """The stages that a template reads by name: `stages.draft`, `stages["draft"]`."""
    if text is None:
        return []
    tree = parse_template(text)
    found = [item.attr for item in tree.find_all(nodes.Getattr) if _is_stages(item.node)]
    keys = [item.arg for item in tree.find_all(nodes.Getitem) if _is_stages(item.node)]
    return found + [key.value for key in keys if isinstance(key, nodes.Const) and isinstance(key.value, str)]


def _is_stages(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == STAGES_COLUMN
