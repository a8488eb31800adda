"""`splice diagnose`: what recorded runs say about missing edges, without asking a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splice.errors import StoreError

if TYPE_CHECKING:
    from splice.records import Trace
    from splice.workflow import Workflow


def diagnose(
    workflow: Annotated[Path, typer.Argument(metavar="WORKFLOW", help="A workflow as TOML.")],
    store: Annotated[Path, typer.Argument(metavar="STORE", help="A file written by --store.")],
    query: Annotated[str | None, typer.Option(help="Only the query with this id.")] = None,
    code: Annotated[
        Path | None, typer.Option(help="A Python file with the workflow's functions and tools.")
    ] = None,
    parts: Annotated[
        Path | None,
        typer.Option(
            help="Folder of learned parts, or `shipped` for those that come with the package; "
            "default: hand-set scores and the documented rules."
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Edges to show of each query.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Explain recorded runs: room for improvement, and which missing edges may close a gap.

    Asks no model: everything is read from the base runs in STORE.
    """
    from splice.code import load_code
    from splice.learned import explain
    from splice.report.diagnosis import explanation_text
    from splice.selectors import open_parts
    from splice.workflow import load_workflow

    functions, tools = load_code(code) if code is not None else ({}, ())
    loaded = load_workflow(workflow, functions=functions, tools=tools)
    learned = open_parts(parts)
    for trace in _base_runs(store, loaded, query):
        explained = explain(loaded, trace, learned)
        if as_json:
            typer.echo(explained.model_dump_json())
        else:
            typer.echo(f"{explanation_text(trace, explained, n_edges=top)}\n")


def _base_runs(path: Path, workflow: Workflow, query: str | None) -> list[Trace]:
    """The runs of a store that are no trials, all of this workflow.

    Raises:
        StoreError: there is none, or none of that query.
        TraceMismatch: another workflow recorded one.
    """
    from splice.store import read_store

    contents = read_store(path)
    trials = {
        result.trial.trace.content()
        for result in contents.results.values()
        if result.trial is not None
    }
    bases = [
        trace
        for trace in contents.traces.values()
        if trace.content() not in trials and all(call.stage != "trial" for call in trace.calls)
    ]
    found = [trace for trace in bases if query in (None, trace.query.id)]
    if not found:
        known = ", ".join(dict.fromkeys(trace.query.id for trace in bases)) or "none at all"
        raise StoreError(f"{path} holds no base run of query {query!r}; there are: {known}")
    for trace in found:
        workflow.check_trace(trace)
    return found
