"""The job file: one YAML mapping that says what to run. Loading resolves paths and dates and names every mistake."""

from __future__ import annotations

import datetime
import difflib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, Field, PrivateAttr, ValidationError, WithJsonSchema, model_validator

from batchllm.data.phrases import describe
from batchllm.data.places import checked_place
from batchllm.data.section import Argument, Name, Place, Section
from batchllm.data.sections import (
    InputSection,
    OutputSection,
    PromptSection,
    SamplingSection,
    StageSection,
)
from batchllm.data.stage_rules import check_prompt, check_requests, check_stages
from batchllm.errors import JobError
from batchllm.job_file import JobSource, Location, fill_dates, read_job_file

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {"ki": 1024, "mi": 1024**2, "gi": 1024**3, "ti": 1024**4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?", re.IGNORECASE)


def parse_size(value: object) -> object:
    """`auto`, a number of bytes, or a text such as `2GiB`, `500 MB`, `1.5g`: `auto` or bytes. Raises ValueError."""
    if value == "auto":
        return value
    if type(value) is int and value > 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    size = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
    size_bytes = int(size) if size < 2**63 else 0
    if size_bytes <= 0:
        raise ValueError("must be auto or a size such as 2GiB")
    return size_bytes


def _auto_or_count(value: object) -> object:
    if value == "auto" or (type(value) is int and value >= 1):
        return value
    raise ValueError("must be auto or a whole number of at least 1")


_SIZE_SCHEMA = {
    "anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1}, {"type": "string", "pattern": "^ *[0-9]"}]
}

AutoCount = Annotated[
    Literal["auto"] | int,
    BeforeValidator(_auto_or_count),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1}]}),
]
AutoSize = Annotated[Literal["auto"] | int, BeforeValidator(parse_size), WithJsonSchema(_SIZE_SCHEMA)]


Command = Annotated[tuple[Argument, ...], Field(strict=False)]
"""A program and its arguments, run without a shell; empty for none."""


def _size_or_none(value: object) -> object:
    return value if value == 0 and type(value) is int else parse_size(value)


class KvDiskSection(Section):
    """A tier in a file of folder `path` (absolute once the job is loaded), of at most `size` bytes.

    Blocks kept by `persist` that are older than `max_age_days` are free for others.
    """

    path: Place
    size: AutoSize = "auto"
    max_age_days: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 14.0


class KvSection(Section):
    """Memory for keys and values, in bytes. `device: auto` takes what the model and the step leave free.

    `host` (0: none) and `disk` are tiers for blocks that leave the device before their last use. `policy` chooses what leaves:
    `next-use` by the plan; `lru` and `recompute` (no tier at all) are there to compare with. `persist` keeps shared blocks on disk
    for later runs. `dtype: fp8` keeps keys and values in 8 bits (e4m3), with fixed scales read off the model's weights; `auto` keeps
    them as they are computed.
    """

    device: AutoSize = "auto"
    dtype: Literal["auto", "fp8"] = "auto"
    host: Annotated[
        Literal["auto"] | int,
        BeforeValidator(_size_or_none),
        WithJsonSchema({"anyOf": [{"const": 0}, *_SIZE_SCHEMA["anyOf"]]}),
    ] = 0
    disk: KvDiskSection | None = None
    policy: Literal["next-use", "lru", "recompute"] = "next-use"
    persist: bool = False

    @model_validator(mode="after")
    def _persist_needs_disk(self) -> KvSection:
        if self.persist and self.disk is None:
            raise ValueError("persist needs a place to keep blocks: give engine.kv.disk.path")
        return self


class EngineSection(Section):
    """Where and how fast. None of it but `device`, `dtype`, `weights` and `kv.dtype` changes what a row says.

    `speculation`: tokens that a row repeats from its own text are drafted and checked in one step; `auto` does so where it pays, a number
    is how many are drafted for each row in every step.
    `weights: int8` rounds the weights of large products to eight bits; `auto` leaves them in `dtype`.
    `order: input` runs rows as they stand in the input, so that a run that is stopped has done the first ones.
    """

    device: Literal["auto", "cuda", "cpu"] = "auto"
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    weights: Literal["auto", "int8"] = "auto"
    max_step_tokens: AutoCount = "auto"
    max_sequences: AutoCount = "auto"
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    prefix_sharing: bool = True
    speculation: Annotated[int, Field(ge=1, le=64)] | Literal["auto", "off"] = "auto"
    order: Literal["plan", "input"] = "plan"
    kv: KvSection = KvSection()


class Job(Section):
    """A validated job: what a job file says, under the same keys. `date` is the one date that every part of the run sees.

    `load_job` makes it from a file; its paths are then absolute. In Python it is made by keyword arguments, a section as
    a mapping or as its class: `Job(model="smollm2-135m", prompt={"template": "Summarise: {{ text }}"})`. Relative paths
    are then taken from the working folder, `{{ date }}` is not filled in paths, and `name`, `input` and `output` may
    be left out. Raises pydantic.ValidationError, a ValueError, which names the keys that are wrong.
    """

    model: Place
    prompt: PromptSection = PromptSection()
    name: Name = "job"
    input: InputSection = InputSection()
    sampling: SamplingSection = SamplingSection()
    output: OutputSection = OutputSection()
    stages: Annotated[tuple[StageSection, ...], Field(strict=False)] = ()
    engine: EngineSection = EngineSection()
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    on_success: Command = ()
    on_failure: Command = ()
    command_timeout_s: Annotated[float, Field(gt=0, le=86400)] = 60.0

    _date: datetime.date = PrivateAttr(default_factory=datetime.date.today)
    _folder: Path = PrivateAttr(default_factory=Path.cwd)
    _has_given_rows: bool = PrivateAttr(default=False)

    @property
    def date(self) -> datetime.date:
        """The run's date: of `--date`, or the day on which the job was loaded."""
        return self._date

    @property
    def folder(self) -> Path:
        """The job file's folder, from which relative paths and the files in `input.sql` are taken."""
        return self._folder

    # A message begins with the place that it is about; `load_job` finds the line by it.
    @model_validator(mode="after")
    def _sections_fit(self) -> Job:
        if self.input.openai_batch is not None:
            check_requests(prompt=self.prompt, sampling=self.sampling, output=self.output, stages=self.stages)
            return self
        if not self.stages:
            check_prompt(self.prompt, at="prompt")
            return self
        if self.prompt.model_fields_set:
            raise ValueError("prompt: has no place beside stages; each stage has its own")
        check_stages(self.stages, sampling=self.sampling, output=self.output, keep=self.input.keep)
        return self

    def stage_jobs(self) -> tuple[Job, ...]:
        """The job of each stage, without stages; a job without stages is its only one."""
        if not self.stages:
            return (self,)
        return tuple(
            self.model_copy(
                update={
                    "stages": (),
                    "prompt": stage.prompt,
                    "sampling": stage.sampling or self.sampling,
                    "output": self.output.model_copy(update=dict(stage.output)),
                }
            )
            for stage in self.stages
        )

    def with_rows(self, path: Path) -> Job:
        """The same job over rows that were written to `path`, a temporary place that a resume does not ask for."""
        section = self.input.model_copy(update={"path": str(path)})
        job = self.model_copy(update={"input": section})
        job._has_given_rows = True
        return job

    def fingerprint_parts(self) -> dict[str, object]:
        """What must be the same when an output folder is resumed, by key; plain JSON values.

        Throughput settings are not in it: they may change between a kill and the resume.
        """
        input_part: dict[str, object] = {"input.id": self.input.id, "input.keep": list(self.input.keep)}
        if self._has_given_rows:
            input_part["input.path"] = "rows that the caller gave"
        elif self.input.path is not None:
            input_part["input.path"] = os.path.relpath(self.input.path, self.folder)
        elif self.input.openai_batch is not None:
            input_part["input.openai_batch"] = os.path.relpath(self.input.openai_batch, self.folder)
        else:
            input_part["input.sql"] = self.input.sql
        model = os.path.relpath(self.model, self.folder) if os.path.isabs(self.model) else self.model
        parts: dict[str, object] = {"name": self.name, "model": model, **input_part}
        parts |= {f"prompt.{key}": value for key, value in self.prompt.model_dump(mode="json", by_alias=True).items()}
        parts |= {f"sampling.{key}": value for key, value in self.sampling.model_dump(mode="json").items()}
        parts |= {f"output.{key}": value for key, value in self.output.constraint_values().items()}
        parts["stages"] = [stage.model_dump(mode="json", by_alias=True) for stage in self.stages]
        parts |= {"engine.dtype": self.engine.dtype, "engine.weights": self.engine.weights}
        parts |= {"output.token_ids": self.output.token_ids, "seed": self.seed, "engine.kv.dtype": self.engine.kv.dtype}
        parts["date"] = self.date.isoformat()
        return parts


def load_job(path: Path | str, *, overrides: Sequence[str] = (), date: datetime.date | None = None) -> Job:
    """Read, complete and check a job file. `overrides` are `key.key=value` texts; `date` None is today.

    Raises JobError, one line, naming file (or override), line and key.
    """
    path = Path(path)
    run_date = date if date is not None else datetime.date.today()
    source = read_job_file(path, overrides=overrides)
    _check_keys(source)
    _check_complete(source)
    folder = Path(os.path.abspath(path)).parent

    def dated(text: str) -> str:
        return fill_dates(text, date=run_date)

    def absolute(text: str) -> str:
        return _absolute(text, folder=folder)

    _replace(source, ("input", "sql"), dated)
    for at in (("input", "path"), ("input", "openai_batch"), ("output", "path")):
        _replace(source, at, lambda text: absolute(dated(text)))
    _replace(source, ("engine", "kv", "disk", "path"), absolute)
    stages = source.value.get("stages")
    for outer in [(), *(("stages", number) for number in range(len(stages) if isinstance(stages, list) else 0))]:
        _replace(source, (*outer, "output", "schema"), absolute)
    _replace(source, ("model",), lambda text: absolute(text) if _is_path(text, folder=folder) else text)
    try:
        job = Job.model_validate(source.value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        location, text = tuple(first["loc"]), describe(first)
        if not location:
            place, _, text = text.partition(": ")
            location = tuple(int(part) if part.isdecimal() else part for part in place.split("."))
        raise _error(source, location, text) from None
    job._date, job._folder = run_date, folder
    return job


def _replace(source: JobSource, at: Location, change: Callable[[str], str]) -> None:
    """Changes the text at a location, if there is one. Raises JobError where `change` raises ValueError."""
    holder: Any = source.value
    for part in at[:-1]:
        holder = holder[part] if isinstance(part, int) else holder.get(part) if isinstance(holder, dict) else None
    value = holder.get(at[-1]) if isinstance(holder, dict) else None
    if isinstance(value, str) and value:
        try:
            holder[at[-1]] = change(value)
        except ValueError as error:
            raise _error(source, at, str(error)) from None


def _absolute(text: str, *, folder: Path) -> str:
    """Raises ValueError for what is no path."""
    try:
        path = Path(checked_place(text)).expanduser()
    except RuntimeError:
        raise ValueError(f"{text} begins with a user who is not known here") from None
    return os.path.normpath(folder / path)


def _is_path(model: str, *, folder: Path) -> bool:
    """A model is a path when it is written as one or lies there; else it is a known name or a hub id."""
    return model.startswith((".", "/", "~")) or model.endswith(".gguf") or (folder / checked_place(model)).exists()


def _check_keys(source: JobSource) -> None:
    """Unknown keys first: a misspelt key is the cause of the missing one that the models would report."""

    def visit(model: type[BaseModel], value: dict[str, Any], at: Location) -> None:
        known = {field.alias or name: field for name, field in model.model_fields.items()}
        for key, below in value.items():
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
                if ":" in str(key):
                    raise _error(source, (*at, str(key)), "unknown key; YAML wants a space after a colon")
                if not isinstance(key, str):
                    # A number, a date or nothing: its place is known by its text.
                    here = (*at, str(key))
                    raise JobError(f"{source.origin(here)}: {'.'.join(map(str, here))}: unknown key; it is no text")
                raise _error(source, (*at, str(key)), f"unknown key; the nearest known key is {near[0]}")
            section = _section_of(known[key].annotation)
            for place, part in enumerate(below) if isinstance(below, list) else [(None, below)]:
                if section is not None and isinstance(part, dict):
                    visit(section, part, (*at, key) if place is None else (*at, key, place))

    visit(Job, source.value, ())


SOURCES = ("path", "sql", "openai_batch")
"""The keys of `input` that say where rows come from."""


def _check_complete(source: JobSource) -> None:
    """A file says all that a job made in Python may leave for later."""
    for section, key in (("name", None), ("input", None), ("output", "path")):
        values = source.value.get(section)
        if section not in source.value:
            raise _error(source, (section,), "is missing")
        if key is not None and isinstance(values, dict) and key not in values:
            raise _error(source, (section, key), "is missing")
    rows = source.value["input"]
    if isinstance(rows, dict) and all(rows.get(key) is None for key in SOURCES):
        raise _error(source, ("input",), f"needs exactly one of {', '.join(SOURCES[:-1])} and {SOURCES[-1]}")


def _section_of(annotation: object) -> type[BaseModel] | None:
    """The section that a field holds; a field that may be a section or a plain value is checked by the models."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    parts = get_args(annotation)
    sections = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
    return sections[0] if len(sections) == 1 and (type(None) in parts or Ellipsis in parts) else None


def _error(source: JobSource, location: Location, text: str) -> JobError:
    """`location` may hold names that pydantic added (tags of unions); those are no keys of the file."""
    keys: list[str | int] = []
    value: Any = source.value
    for depth, part in enumerate(location):
        present = part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)
        if present:
            keys.append(part)
            value = value[part]
        elif depth == len(location) - 1 and text == "is missing" and isinstance(value, dict):
            keys.append(part)
    name = ".".join(str(key) for key in keys)
    return JobError(f"{source.origin(tuple(keys))}: {name + ': ' if name else ''}{text}")
