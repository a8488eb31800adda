"""A workload: a workflow, questions with references, and how an answer is scored.

Workloads come from packages that register a loader under the entry-point group `splice.workloads`,
or from a function named as `module:function`. A loader reads data and returns a `Workload`; what
follows (runs, policies, statistics) does not know which one it has.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from pydantic import ConfigDict, model_validator

from splice.code import load_code
from splice.errors import SettingsError
from splice.queries import Case, Split, load_cases
from splice.records import Edge, Query, Record
from splice.workflow import Workflow, load_workflow

GROUP = "splice.workloads"
"""Entry-point group under which packages register loaders."""

Scores: TypeAlias = Mapping[str, float]
"""Score by metric, each in [0, 1]; the same metrics for each answer of a workload."""

Options: TypeAlias = Mapping[str, str]
"""Settings of a workload as the command line gives them."""


class Example(Record):
    """One question of a workload, with what only a scorer may see."""

    query: Query
    reference: Mapping[str, Any] = {}
    """What a right answer is, in the workload's own form."""
    kind: str | None = None
    """Type of the question as its data set names it; kinds are counted apart."""
    gap_edges: tuple[Edge, ...] | None = None
    """Missing edges whose source holds what the receiver needs, cannot read and cannot recover
    (method 2.2); empty: there is none; None: not known."""
    workflow: Workflow | None = None
    """The question's own workflow, where tools differ by question; None: the workload's."""


Scorer: TypeAlias = Callable[[Example, str | None], Scores | Awaitable[Scores]]
"""Scores an answer (None: there was none); a judge that asks a model is a coroutine function."""


class Workload(Record):
    """Questions for one workflow, and how their answers are scored."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    name: str
    about: str
    """What is asked, who sees what, and where subtasks come from: printed above every table."""
    workflow: Workflow
    examples: tuple[Example, ...]
    metrics: tuple[str, ...]
    """Names of the scores; the first is the one that policies are compared by."""
    score: Scorer
    sources: Mapping[str, str] = {}
    """SHA-256 by name of each data file that was read."""

    @model_validator(mode="after")
    def _check(self) -> Workload:
        if not self.metrics:
            raise SettingsError(f"workload {self.name!r} names no metric")
        seen: set[str] = set()
        for example in self.examples:
            if example.query.id in seen:
                raise SettingsError(
                    f"workload {self.name!r} has two questions with the id {example.query.id!r}"
                )
            seen.add(example.query.id)
        return self

    def workflow_of(self, example: Example) -> Workflow:
        """The workflow that `example` runs on."""
        return example.workflow or self.workflow


class Loader(Protocol):
    """Reads data and makes a workload of it."""

    def __call__(self, data: Path | None, *, split: Split, options: Options) -> Workload:
        """Load one split.

        Args:
            data: file or folder; None: what a package ships, where there is such a package.
            split: which part of the questions.
            options: the workload's own settings.

        Raises:
            DataError: a file is missing or malformed; it names file, line and field.
            SettingsError: an option that does not exist; it names the choices.
        """
        ...


def case_workload(workflow: Workflow, cases: Sequence[Case], *, split: Split) -> Workload:
    """A workload of a workflow and a file of queries with reference answers.

    Its one score, `correct`, is 1 if the answer contains a reference answer. A case that names no
    split belongs to the one that is asked for.

    Raises:
        SettingsError: no case belongs to the split, or one has no reference answer.
    """
    own = [case for case in cases if case.split in (None, split)]
    if not own:
        raise SettingsError(f"no query of {workflow.name!r} belongs to split {split!r}")
    for case in own:
        if not case.answers:
            raise SettingsError(
                f"query {case.query.id!r} has no reference answer: give it `answers`, or its "
                "answer can't be scored"
            )
    by_id = {case.query.id: case for case in own}
    return Workload(
        name=workflow.name,
        about=workflow.description or f"Queries of your own for the workflow {workflow.name!r}.",
        workflow=workflow,
        examples=tuple(
            Example(query=case.query, reference={"answers": case.answers}) for case in own
        ),
        metrics=("correct",),
        score=lambda example, answer: {
            "correct": float(bool(by_id[example.query.id].is_correct(answer)))
        },
    )


def workload_names() -> tuple[str, ...]:
    """Names of the registered workloads, sorted."""
    return tuple(sorted(entry_points(group=GROUP).names))


def find_loader(name: str) -> Loader:
    """The loader registered as `name`, or the one at `module:function`.

    Raises:
        SettingsError: there is none; the message names those that there are.
    """
    if ":" in name:
        module, _, function = name.partition(":")
        try:
            loader: Loader = getattr(import_module(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            raise SettingsError(f"no workload loader at {name!r}: {error}") from None
        return loader
    found = entry_points(group=GROUP, name=name)
    if not found:
        known = ", ".join(workload_names()) or "none is registered"
        raise SettingsError(f"no workload {name!r}; there are: {known}; or give module:function")
    registered: Loader = next(iter(found)).load()
    return registered


def open_workload(
    name: str,
    data: Path | None,
    *,
    split: Split,
    options: Options,
    code: Path | None = None,
) -> Workload:
    """The workload of that name, or a workflow file with a file of queries.

    Args:
        name: of a registered workload; `module:function` of a loader; or path of a `.toml` file
            with a workflow, for which `data` is a JSONL file of queries with answers.
        data: the workload's data.
        split: which part of the questions.
        options: the workload's own settings; a workflow file has none.
        code: a Python file with the functions and tools of the workflow file.

    Raises:
        SettingsError: there is no such workload, an option does not exist, or data is missing.
        DataError, WorkflowError, QueryError: a file is missing or malformed.
    """
    if not name.endswith(".toml"):
        if code is not None:
            raise SettingsError("code goes with a workflow file; a workload brings its own")
        return find_loader(name)(data, split=split, options=options)
    refuse_unknown(options, ())
    if data is None:
        raise SettingsError(f"{name} needs a JSONL file of queries with answers: give it as data")
    functions, tools = load_code(code) if code is not None else ({}, ())
    workflow = load_workflow(name, functions=functions, tools=tools)
    return case_workload(workflow, load_cases(data), split=split)


def refuse_unknown(options: Options, known: Collection[str]) -> None:
    """Accept options only by the names that a workload has.

    Raises:
        SettingsError: another option; the message names those that there are.
    """
    if unknown := sorted(options.keys() - set(known)):
        names = ", ".join(known) or "none"
        raise SettingsError(f"unknown option {unknown[0]!r}; there are: {names}")


def choose(options: Options, menu: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Each option of `menu`, as given or else its first choice.

    >>> choose({"host": "chain"}, {"host": ("parallel", "chain"), "subtasks": ("form", "planned")})
    {'host': 'chain', 'subtasks': 'form'}

    Raises:
        SettingsError: an option or a value that is not on the menu.
    """
    refuse_unknown(options, menu)
    chosen = {name: options.get(name, values[0]) for name, values in menu.items()}
    for name, value in chosen.items():
        if value not in menu[name]:
            raise SettingsError(f"option {name}={value!r}; it is one of {', '.join(menu[name])}")
    return chosen
