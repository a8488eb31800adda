"""`splice probes`: generate a probe pool, look at it, merge and export it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from splice.evaluate_cli import parsed_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from probes.estimate import Amount, Estimate
    from probes.generate import Engine, Generated, GenerateSettings, Progress
    from probes.plan import ProbeSettings
    from probes.pool import Counts, Manifest
    from splice.executor import Models
    from splice.queries import Split
    from splice.workflow import Workflow
    from splice.workload import Workload

app = typer.Typer(
    help="Probe pools: what each missing edge would have done, found out offline.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

PoolPath = Annotated[Path, typer.Argument(metavar="POOL", help="Folder of the pool.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
WorkloadName = Annotated[
    str,
    typer.Argument(
        help="A registered workload, module:function of a loader of your own, or a workflow as a "
        "TOML file."
    ),
]
DataPath = Annotated[
    Path | None, typer.Option(help="The workload's data; with a workflow, its queries as JSONL.")
]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="NAME=VALUE", help="Setting of the workload."),
]
CodePath = Annotated[
    Path | None, typer.Option(help="A Python file with the functions of the workflow.")
]

_SAMPLE = 3
"""Questions that an estimate is judged by, at least."""


@app.command()
def generate(
    workload: WorkloadName,
    out: Annotated[Path, typer.Option("--out", help="Folder of the pool; begun or gone on with.")],
    data: DataPath = None,
    split: Annotated[
        list[str] | None,
        typer.Option(help="Part of the questions: train, validation, test. Default: train."),
    ] = None,
    option: Options = None,
    code: CodePath = None,
    edges: Annotated[int, typer.Option(min=1, help="Edges tried for each question.")] = 2,
    controls: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Share of the questions with resample and placebo."),
    ] = 1 / 3,
    rollouts: Annotated[int, typer.Option(min=1, help="Base runs of each question.")] = 1,
    resample_temperature: Annotated[
        float | None,
        typer.Option(min=0.0, max=2.0, help="Of resampled nodes; default: their own."),
    ] = None,
    writer: Annotated[
        Literal["extractive", "model"], typer.Option(help="Who writes messages.")
    ] = "extractive",
    metric: Annotated[str | None, typer.Option(help="Score that classes are made of.")] = None,
    seed: Annotated[int, typer.Option(help="Of edges, controls and the order of questions.")] = 0,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Questions of each split, drawn by the seed.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Model at the endpoint, or embedded model by name."),
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL[=N]",
            help="Endpoint that serves the model, and requests in flight there; several share "
            "the work.",
        ),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the embedded model.")] = 1,
    concurrency: Annotated[
        int,
        typer.Option(min=1, help="Requests in flight at each endpoint, for each process."),
    ] = 8,
    max_calls: Annotated[int | None, typer.Option(min=0, help="Model calls at most.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=0, help="Tokens at most.")] = None,
    max_cost: Annotated[
        float | None, typer.Option(min=0.0, help="Money at most; needs --price.")
    ] = None,
    price: Annotated[
        tuple[float, float] | None,
        typer.Option(
            metavar="PROMPT COMPLETION", help="Money per million tokens of the model at endpoints."
        ),
    ] = None,
    max_minutes: Annotated[
        float | None, typer.Option(min=0.0, help="Begin no probe after so many minutes.")
    ] = None,
    processes: Annotated[
        int,
        typer.Option(min=1, help="Processes that share the questions; one manages 200 calls/s."),
    ] = 1,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="Where the coroutines run.")
    ] = "local",
    ray_workers: Annotated[int, typer.Option(min=1, help="Processes on the Ray cluster.")] = 2,
    ray_address: Annotated[
        str | None, typer.Option(help="Of a Ray cluster; default: RAY_ADDRESS, else this machine.")
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Make again what failed.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Probe three questions, which the pool keeps, and say what the rest would take.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run trial edges and controls for many questions, and keep all of it.

    Started again with the same --out it goes on where it stopped, whatever stopped it. Limits are
    for one command.
    """
    from probes.generate import GenerateSettings
    from probes.plan import ProbeSettings
    from splice.errors import SettingsError
    from splice.ledger import Budget
    from splice.message import MessageSettings
    from splice.models.default import n_places

    probe = ProbeSettings(
        n_edges=edges,
        control_share=controls,
        n_rollouts=rollouts,
        resample_temperature=resample_temperature,
        metric=metric,
        seed=seed,
        message=MessageSettings(writer=writer),
    )
    workloads = _workloads(workload, data, split or ["train"], option or [], code)
    first = next(iter(workloads.values()))
    make_models = partial(
        _models, first.workflow, model, threads, tuple(endpoint or ()), concurrency, price
    )
    if engine == "ray" and processes > 1:
        raise SettingsError("--processes is for the local engine; with Ray give --ray-workers")
    models = make_models()
    n_workers = ray_workers if engine == "ray" else processes
    n_requests = n_workers * n_places(endpoint or (), concurrency)
    settings = GenerateSettings(
        limit=limit,
        concurrency=_open_questions(models, n_requests),
        budget=Budget(max_calls=max_calls, max_tokens=max_tokens, max_cost=max_cost),
        max_seconds=None if max_minutes is None else max(max_minutes * 60, 1e-3),
        retry_failed=retry_failed,
    )
    with ExitStack() as stack:
        ray = None
        if engine == "ray":
            from probes.ray_engine import RayEngine

            ray = stack.enter_context(
                RayEngine(make_models, n_workers=ray_workers, address=ray_address)
            )
        command = _Command(workloads, models, make_models, out, probe, settings, processes, ray)
        if dry_run:
            command.estimate(as_json)
        else:
            command.generate(as_json)


@app.command()
def status(pool: PoolPath, as_json: AsJson = False) -> None:
    """Say what a pool is and how far it is; also while it is being made."""
    from probes.pool import Damage, is_in_use, read_manifest, summarised

    damage: list[Damage] = []
    manifest = summarised(pool, read_manifest(pool), damage, is_hashed=False)
    is_busy = is_in_use(pool)
    if as_json:
        import json

        fields = manifest.model_dump(mode="json", exclude={"splits", "files", "parts"})
        fields["n_by_split"] = {split: len(ids) for split, ids in manifest.splits.items()}
        fields["is_in_use"] = is_busy
        fields["damage"] = [line.model_dump() for line in damage]
        typer.echo(json.dumps(fields, indent=1))
        return
    assert manifest.counts is not None
    for line in _status_lines(manifest, manifest.counts, is_busy):
        _say(line)
    for hurt in damage:
        _say(f"{hurt.file}:{hurt.line}: {hurt.reason}; generating again makes it anew", err=True)


@app.command()
def inspect(
    pool: PoolPath,
    html: Annotated[Path | None, typer.Option(help="Also write a page, into this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what is in a pool: outcomes, the noise floor, which edges matter."""
    from probes.inspection import inspect as look
    from probes.inspection_text import inspection_text
    from splice.files import write_whole

    found = look(pool)
    typer.echo(found.model_dump_json() if as_json else inspection_text(found))
    if html is not None:
        from probes.inspection_page import inspection_page

        write_whole(html, inspection_page(found))
        _say(f"wrote {html}", err=True)


@app.command()
def merge(
    pools: Annotated[list[Path], typer.Argument(metavar="POOL...", help="Folders of pools.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the new pool.")],
    as_json: AsJson = False,
) -> None:
    """Make one pool of several, such as one for each data set."""
    from probes.merge import merge as run_merge

    merged = run_merge(pools, out)
    if as_json:
        typer.echo(merged.model_dump_json(exclude={"manifest": {"splits", "files", "parts"}}))
        return
    counts = merged.manifest.counts
    assert counts is not None
    _say(
        f"{counts.n_questions:,} questions and {counts.n_probes:,} probes of {len(pools)} pools are "
        f"in {out}"
    )


@app.command()
def refresh(
    pool: PoolPath,
    workload: WorkloadName,
    out: Annotated[Path, typer.Option("--out", help="Folder of the new pool.")],
    data: DataPath = None,
    option: Options = None,
    code: CodePath = None,
    as_json: AsJson = False,
) -> None:
    """Compute diagnoses, features and evidence of a pool again, with those of this version.

    They follow from workflow and traces, so no model is asked. Workload, data and options are those
    that the pool was generated with.
    """
    from probes.pool import read_manifest
    from probes.refresh import refresh as run_refresh

    splits = [str(split) for split in read_manifest(pool).splits]
    found = run_refresh(_workloads(workload, data, splits, option or [], code), pool, out)
    if as_json:
        typer.echo(found.model_dump_json(exclude={"manifest": {"splits", "files", "parts"}}))
        return
    for damage in found.damage:
        _say(f"note: {damage.file}:{damage.line}: {damage.reason}; left out", err=True)
    if found.n_left_out:
        _say(f"note: {found.n_left_out:,} records have no trace any more; left out", err=True)
    if found.n_changed:
        _say(
            f"note: {found.n_changed:,} base runs are of another version of the workflow; their "
            "numbers are computed on today's roles and tasks",
            err=True,
        )
    counts = found.manifest.counts
    assert counts is not None
    _say(f"{counts.n_questions:,} questions and {counts.n_probes:,} probes are in {out}")


@app.command()
def export(
    pool: PoolPath,
    out: Annotated[Path, typer.Option("--out", help="Folder of the tables.")],
    form: Annotated[
        Literal["parquet", "csv"], typer.Option("--format", help="Of the tables.")
    ] = "parquet",
    as_json: AsJson = False,
) -> None:
    """Write the numbers of a pool as tables, without any text.

    One row for each probe and one for each base run, with scores, classes, features, evidence and
    costs; and the manifest.
    """
    from probes.export import export as run_export

    written = run_export(pool, out, format=form)
    if as_json:
        typer.echo(written.model_dump_json())
        return
    _say(f"wrote {written.n_probes:,} probes and {written.n_bases:,} base runs into {out}")


# --- what the commands share -----------------------------------------------------------------


def _say(text: str, err: bool = False) -> None:
    """Print text; names in it may come from a file of anybody's."""
    from splice.report.display import visible

    typer.echo(visible(text), err=err)


def _workloads(
    name: str, data: Path | None, splits: list[str], options: list[str], code: Path | None
) -> Mapping[Split, Workload]:
    """The workload by split."""
    from typing import get_args

    from splice.queries import Split as SplitName
    from splice.workload import open_workload

    known = get_args(SplitName)
    for split in splits:
        if split not in known:
            raise typer.BadParameter(f"--split {split!r}; it is one of {', '.join(known)}")
    chosen = parsed_options(options)
    return {
        split: open_workload(name, data, split=split, options=chosen, code=code)
        for split in known
        if split in splits
    }


def _models(
    workflow: Workflow,
    name: str | None,
    threads: int,
    endpoints: tuple[str, ...],
    concurrency: int,
    price: tuple[float, float] | None,
) -> Models:
    """What answers the agents; nothing for a workflow without agents."""
    from splice.models.default import default_model
    from splice.records import Price

    if not workflow.agents:
        return {}
    return default_model(
        workflow,
        name,
        threads=threads,
        endpoints=endpoints,
        concurrency=concurrency,
        price=None if price is None else Price(prompt=price[0], completion=price[1]),
    )


def _open_questions(models: Models, n_requests: int) -> int:
    """Questions in flight that keep so many requests in flight.

    Between two requests of a question the generator is at work on it, so there are half as many
    again. The embedded model answers one request at a time.
    """
    from splice.models.local import LocalModel

    return 1 if isinstance(models, LocalModel) else n_requests + (n_requests + 1) // 2


class _Command(NamedTuple):
    """A pool that is to be generated."""

    workloads: Mapping[Split, Workload]
    models: Models
    make_models: Callable[[], Models]
    out: Path
    probe: ProbeSettings
    settings: GenerateSettings
    n_processes: int
    engine: Engine | None

    def generate(self, as_json: bool) -> None:
        """Generate the pool, and say what was done."""
        made = self._made(self.settings)
        if as_json:
            typer.echo(made.model_dump_json(exclude={"manifest": {"splits", "files"}}))
            return
        _say(_summary(made, self.out))

    def estimate(self, as_json: bool) -> None:
        """Probe a few questions unless the pool has as many, and say what the rest will take."""
        from probes.estimate import estimate

        few = max(0, _SAMPLE - _n_finished(self.out))
        made = self._made(self.settings.model_copy(update={"at_most": few}))
        found = estimate(self.out, made.n_questions - made.n_done, self.settings.concurrency)
        if found is None:
            _say("no question is finished, so there is nothing to judge by", err=True)
            raise typer.Exit(1)
        if as_json:
            typer.echo(found.model_dump_json())
            return
        for line in _estimate_lines(found):
            _say(line)

    def _made(self, settings: GenerateSettings) -> Generated:
        from probes.processes import generate_in_processes

        self._introduce()
        with _progress() as progress:
            if self.n_processes > 1:
                made = generate_in_processes(
                    self.workloads,
                    self.make_models,
                    self.out,
                    n_processes=self.n_processes,
                    probe=self.probe,
                    settings=settings,
                    progress=progress,
                )
            else:
                made = asyncio.run(self._made_here(settings, progress))
        for note in made.notes:
            _say(f"note: {note}", err=True)
        return made

    async def _made_here(
        self, settings: GenerateSettings, progress: Callable[[Progress], None]
    ) -> Generated:
        from probes.generate import generate as run_generator

        try:
            return await run_generator(
                self.workloads,
                self.models,
                self.out,
                probe=self.probe,
                settings=settings,
                engine=self.engine,
                progress=progress,
            )
        finally:
            if not isinstance(self.models, Mapping):
                await self.models.aclose()

    def _introduce(self) -> None:
        first = next(iter(self.workloads.values()))
        asked = "no model"
        if not isinstance(self.models, Mapping):
            identity = self.models.identity(None)
            asked = f"model {identity.name} ({identity.provider})"
        counts = ", ".join(f"{len(w.examples):,} {split}" for split, w in self.workloads.items())
        _say(f"{first.name}: {counts} questions; {asked}; the pool is {self.out}", err=True)


def _n_finished(out: Path) -> int:
    from probes.estimate import estimate

    if not (out / "manifest.json").exists():
        return 0
    found = estimate(out, 1, 1)
    return 0 if found is None else found.n_seen


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    from splice.report.progress import bars

    with bars(("questions",)) as show:

        def tell(progress: Progress) -> None:
            note = f"{progress.n_probes:,} probes, {progress.n_calls:,} calls"
            if progress.cost:
                note += f", cost {progress.cost:.4g}"
            if progress.n_failed:
                note += f", {progress.n_failed:,} failed"
            show("questions", progress.n_done, progress.n_questions, note)

        yield tell


def _summary(made: Generated, out: Path) -> str:
    why = {
        "done": "done",
        "budget": "stopped: the budget is used up",
        "time": "stopped: the time is up",
    }[made.stop_reason]
    lines = [
        f"{why}; {made.n_done:,} of {made.n_questions:,} questions are complete",
        f"this command made {made.n_bases:,} base runs and {made.n_probes:,} probes with "
        f"{made.n_calls:,} calls and {made.n_tokens:,} tokens in {_duration(made.elapsed_s)}",
    ]
    if made.n_failed:
        lines.append(f"{made.n_failed:,} of them failed: --retry-failed makes them again")
    if made.n_done < made.n_questions:
        lines.append("the same command goes on")
    else:
        lines.append(f"next: splice probes inspect {out}")
    return "\n".join(lines)


def _status_lines(manifest: Manifest, counts: Counts, is_busy: bool) -> Iterator[str]:
    from splice.report.display import counted

    models = ", ".join(model.name for model in manifest.models) or "no model"
    yield f"{manifest.workload}; {models}; {'being made' if is_busy else 'at rest'}"
    splits = ", ".join(f"{len(ids):,} {split}" for split, ids in manifest.splits.items())
    yield f"{counted(counts.n_questions, 'question')} begun ({splits or 'none'})"
    if manifest.n_wanted is not None:
        yield f"the last command was asked for {counted(manifest.n_wanted, 'base run')}"
    failed = f", {counts.n_failed_bases:,} of them failed" if counts.n_failed_bases else ""
    yield f"{counted(counts.n_bases, 'base run')}{failed}"
    arms = ", ".join(f"{n:,} {arm}" for arm, n in counts.by_arm.items())
    yield f"{counted(counts.n_probes, 'probe')}{f' ({arms})' if arms else ''}"
    if counts.by_outcome:
        yield "outcomes: " + ", ".join(f"{n:,} {name}" for name, n in counts.by_outcome.items())
    cost = "unknown" if counts.cost is None else f"{counts.cost:.4g}"
    yield f"{counted(counts.n_calls, 'call')}, {counted(counts.n_tokens, 'token')}, cost {cost}"


def _estimate_lines(found: Estimate) -> Iterator[str]:
    from splice.report.display import aligned

    yield (
        f"{found.n_left:,} questions are left; judged by {found.n_seen:,} that are finished, with "
        f"{found.concurrency:,} in flight:"
    )
    rows = [
        ["", "estimate", "95% interval"],
        _row("calls", found.calls),
        _row("prompt tokens", found.prompt_tokens),
        _row("completion tokens", found.completion_tokens),
        ["cost", "unknown", ""] if found.cost is None else _row("cost", found.cost, "{:,.2f}"),
        _row("minutes", found.seconds, "{:,.1f}", 1 / 60),
    ]
    yield from aligned(rows)
    yield "what was probed for this is in the pool; without --dry-run the same command goes on"


def _row(name: str, amount: Amount, form: str = "{:,.0f}", scale: float = 1.0) -> list[str]:
    between = (
        "unknown"
        if amount.low is None or amount.high is None
        else f"{form.format(amount.low * scale)} to {form.format(amount.high * scale)}"
    )
    return [name, form.format(amount.mean * scale), between]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
