"""The command line: data on stdout, progress and notes on stderr.

Exit codes: 0 done (an answer that was retained is no failure), 1 failed, 2 wrong usage. Other
packages add commands of their own as typer apps under the entry-point group `splice.commands`.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from splice import diagnose_cli, ears_cli, evaluate_cli, models_cli, selfcheck_cli
from splice._version import __version__
from splice.errors import SettingsError, SpliceError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from importlib.metadata import EntryPoint

    from splice.models.protocol import ChatModel
    from splice.queries import Case
    from splice.records import RepairBatch, RepairResult, Trace
    from splice.store import TraceStore
    from splice.workflow import Workflow

app = typer.Typer(
    help="Repair fixed workflows of LLM agents, query by query.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Without rich help takes half the time, and errors are plain lines.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
trace_app = typer.Typer(help="Read recorded runs.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(trace_app, name="trace")
app.add_typer(models_cli.app, name="models")
app.add_typer(ears_cli.app, name="ears")
app.command()(diagnose_cli.diagnose)
app.command()(evaluate_cli.evaluate)
app.command()(selfcheck_cli.selfcheck)


def add_commands(found: Iterable[EntryPoint]) -> None:
    """Add the commands of other packages; one that can't be imported takes no other with it."""
    for command in found:
        try:
            app.add_typer(command.load(), name=command.name)
        except ImportError as error:
            typer.echo(f"note: there is no command {command.name!r}: {error}", err=True)


add_commands(entry_points(group="splice.commands"))

WorkflowPath = Annotated[
    Path, typer.Argument(metavar="WORKFLOW", help="A workflow as a TOML file.")
]
Text = Annotated[str | None, typer.Option("--query", "-q", help="The question.")]
QueriesPath = Annotated[
    Path | None, typer.Option("--queries", help="Questions as JSONL: text, id, context, answers.")
]
Code = Annotated[
    Path | None,
    typer.Option(help="A Python file with the functions and tools that the workflow names."),
]
ModelName = Annotated[
    str | None, typer.Option("--model", help="Model at the endpoint, or embedded model by name.")
]
Threads = Annotated[int, typer.Option(min=1, help="Threads of the embedded model.")]
StorePath = Annotated[
    Path | None, typer.Option("--store", help="Record into this file, and go on from it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Run the command line."""
    run_app(app, "splice")


def run_app(commands: typer.Typer, name: str) -> None:
    """Run commands; errors of ours become one line on stderr and exit code 1."""
    try:
        commands(prog_name=name)
    except SpliceError as error:
        _note(f"error: {error}")
        sys.exit(1)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"splice {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Repair fixed workflows of LLM agents, query by query."""


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
) -> None:
    """Write a working sample: a workflow, its papers, questions.

    A trip desk of five agents, and twenty questions with their answers.
    """
    from splice.sample import write_sample

    write_sample(folder)
    typer.echo(f"wrote {folder / 'workflow.toml'}, its documents and {folder / 'queries.jsonl'}")
    typer.echo(
        f"next: splice validate {folder / 'workflow.toml'}\n"
        f"      splice repair {folder / 'workflow.toml'} --queries {folder / 'queries.jsonl'}",
        err=True,
    )


@app.command()
def validate(workflow: WorkflowPath, code: Code = None, as_json: AsJson = False) -> None:
    """Check a workflow and show its graph."""
    from splice.report.display import visible
    from splice.report.text import workflow_text

    loaded = _load(workflow, code)
    if as_json:
        found = {
            "name": loaded.name,
            "nodes": list(loaded.plan.order),
            "edges": [list(edge) for edge in loaded.edges],
            "output": loaded.output,
            "candidate_edges": [
                [edge.source, edge.receiver, edge.kind] for edge in loaded.candidate_edges
            ],
            "fingerprint": loaded.fingerprint,
        }
        typer.echo(json.dumps(found, indent=2))
        return
    typer.echo(workflow_text(loaded.plan.order, loaded.edges, loaded.output))
    n = len(loaded.candidate_edges)
    edges = "1 missing edge" if n == 1 else f"{n} missing edges"
    typer.echo(f"\n{visible(loaded.name)}: valid; {edges} could be tried")


@app.command()
def schema() -> None:
    """Print the JSON Schema of workflow files, for editors."""
    from splice.workflow import workflow_schema

    typer.echo(json.dumps(workflow_schema(), indent=2))


@app.command()
def run(
    workflow: WorkflowPath,
    query: Text = None,
    queries: QueriesPath = None,
    code: Code = None,
    model: ModelName = None,
    threads: Threads = 1,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """Run a workflow as it is and show what each node said.

    Exits with 1 if the node that gives the answer failed for a question.
    """
    from splice import api
    from splice.report.text import trace_text

    loaded = _load(workflow, code)
    cases = _cases(loaded, query, queries)
    answering = _model(loaded, model, threads)
    traces = []
    with _store(store) as opened:
        for place, case in enumerate(cases, 1):
            if len(cases) > 1:
                _note(f"{place}/{len(cases)} {case.query.id}")
            trace = api.run(loaded, case.query, model=answering, store=opened)
            typer.echo(trace.model_dump_json() if as_json else trace_text(trace))
            traces.append(trace)
    _exit_if_failed(loaded, traces)


@app.command()
def repair(
    workflow: WorkflowPath,
    query: Text = None,
    queries: QueriesPath = None,
    code: Code = None,
    model: ModelName = None,
    threads: Threads = 1,
    store: StorePath = None,
    budget: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Share of the questions that may get a trial."),
    ] = 0.5,
    writer: Annotated[
        Literal["extractive", "model"],
        typer.Option(help="Who writes messages: nobody (quotations only), or a model."),
    ] = "extractive",
    weighting: Annotated[
        Literal["headroom", "none"], typer.Option(help="Weights of the decision rule.")
    ] = "headroom",
    selector: Annotated[
        str | None,
        typer.Option(help="Folder of a trained selector; default: the documented rules."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write the result of one question as an HTML page.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a workflow, try a missing edge, keep the better answer.

    Exits with 1 if the node that gives the answer failed for a question.
    """
    from splice import api
    from splice.line import RepairSettings
    from splice.message import MessageSettings
    from splice.report.html import result_page
    from splice.report.progress import bars

    if report is not None and queries is not None:
        raise typer.BadParameter("--report shows one question; give it with --query")
    if report is not None and (report.is_dir() or not report.parent.is_dir()):
        raise typer.BadParameter(f"--report names no file in a folder that exists: {report}")
    loaded = _load(workflow, code)
    cases = _cases(loaded, query, queries)
    settings = RepairSettings(message=MessageSettings(writer=writer), weighting=weighting)
    answering = _model(loaded, model, threads)
    if queries is None:
        with _store(store) as opened:
            result = api.repair(
                loaded,
                cases[0].query,
                model=answering,
                settings=settings,
                selector=selector,
                store=opened,
            )
        typer.echo(result.to_json() if as_json else str(result))
        if report is not None:
            _write(report, result_page(result))
        _exit_if_failed(loaded, _retained([result]))
        return
    with _store(store) as opened, bars(("run", "repair")) as progress:
        batch = api.repair_many(
            loaded,
            [case.query for case in cases],
            model=answering,
            budget_fraction=budget,
            settings=settings,
            selector=selector,
            store=opened,
            progress=progress,
        )
    _show_batch(batch, cases, as_json)
    _exit_if_failed(loaded, _retained(batch.results))


@trace_app.command("show")
def trace_show(
    path: Annotated[Path, typer.Argument(metavar="STORE", help="A file written by --store.")],
    query: Annotated[str | None, typer.Option(help="Only runs of the query with this id.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Texts in full.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print recorded runs and repairs, readable or as JSON lines."""
    from splice.report.text import trace_text
    from splice.store import read_store

    contents = read_store(path)
    for damage in contents.damage:
        _note(f"{path}:{damage.line}: {damage.reason}; left out")
    results = [r for r in contents.results.values() if query in (None, r.query.id)]
    # A trial's run stands in its result; alone it would look like a run of the bare workflow.
    shown = {result.base.content() for result in results}
    shown |= {result.trial.trace.content() for result in results if result.trial is not None}
    traces = [
        trace
        for trace in contents.traces.values()
        if query in (None, trace.query.id) and trace.content() not in shown
    ]
    if not contents.traces:
        raise StoreError(f"{path} holds no finished run")
    if not results and not traces:
        known = ", ".join(sorted({trace.query.id for trace in contents.traces.values()}))
        raise typer.BadParameter(f"no run of query {query!r} in {path}; there are: {known}")
    for result in results:
        typer.echo(result.to_json() if as_json else f"{result}\n")
        if full and not as_json:
            typer.echo(trace_text(result.base, full=True))
            if result.trial is not None:
                typer.echo(trace_text(result.trial.trace, full=True))
    for trace in traces:
        typer.echo(trace.model_dump_json() if as_json else trace_text(trace, full=full))


# --- what the commands share -----------------------------------------------------------------


def _note(text: str) -> None:
    """Say something on stderr; names in it may come from a file of anybody's."""
    from splice.report.display import visible

    typer.echo(visible(text), err=True)


def _load(path: Path, code: Path | None) -> Workflow:
    from splice.code import load_code
    from splice.workflow import load_workflow

    functions, tools = load_code(code) if code is not None else ({}, ())
    return load_workflow(path, functions=functions, tools=tools)


def _cases(workflow: Workflow, query: str | None, queries: Path | None) -> tuple[Case, ...]:
    """The questions, each checked against the workflow before anything is asked."""
    from splice.queries import Case, load_cases
    from splice.records import Query

    if (query is None) == (queries is None):
        raise typer.BadParameter("give either --query or --queries")
    asked = (Case(query=Query(text=query or "")),) if queries is None else load_cases(queries)
    for case in asked:
        workflow.check_query(case.query)
    return asked


def _model(workflow: Workflow, name: str | None, threads: int) -> ChatModel | None:
    """The model of the environment; None for a workflow without agents."""
    if not workflow.agents:
        return None
    from splice.models.default import default_model
    from splice.models.local import LocalModel

    model = default_model(workflow, name, threads=threads)
    if isinstance(model, LocalModel):
        identity = model.identity(None)
        _note(f"no endpoint is configured: asking the embedded model {identity.name}")
    return model


def _retained(results: Iterable[RepairResult]) -> list[Trace]:
    """Base runs whose answer, or lack of one, is the result."""
    return [result.base for result in results if result.decision.action == "retain"]


def _exit_if_failed(workflow: Workflow, bases: Iterable[Trace]) -> None:
    """End with exit code 1 if a base run has no output, for whatever reason."""
    failed = [base for base in bases if base.by_node[workflow.output].output is None]
    for base in failed:
        run = base.by_node[workflow.output]
        problem = run.failure.message if run.failure else run.status
        _note(f"error: query {base.query.id!r}: node {run.node!r} {run.status}: {problem}")
    if failed:
        raise typer.Exit(1)


@contextmanager
def _store(path: Path | None) -> Iterator[TraceStore | None]:
    if path is None:
        yield None
        return
    import os

    from splice.redact import Redactor
    from splice.store import TraceStore

    with TraceStore(path, redactor=Redactor(os.environ)) as store:
        if store.recovered is not None:
            _note(f"{path}: {store.recovered.reason}; everything before it is there")
        yield store


def _show_batch(batch: RepairBatch, cases: tuple[Case, ...], as_json: bool) -> None:
    from splice.report.batch import batch_table, batch_totals, result_rows

    if as_json:
        typer.echo(batch.model_dump_json())
        return
    from rich.console import Console

    by_id = {case.query.id: case for case in cases}

    def is_correct(answer: str | None, query_id: str) -> bool:
        return bool(by_id[query_id].is_correct(answer))

    is_scored = all(case.answers for case in cases)
    rows = result_rows(batch, is_correct if is_scored else None)
    # A file or a pipe has no width of its own; the customary 80 columns cut the questions to bits.
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(batch_table(rows))
    parts: dict[str, list[str]] = {}
    for case in cases:
        if case.split is not None:
            parts.setdefault(case.split, []).append(case.query.id)
    typer.echo(batch_totals(rows, batch, parts))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    _note(f"wrote {path}")
