"""`splice ears`: judges are calibrated, interactions curated, agents that may abstain evaluated."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from splice.errors import DataError, ModelError, SettingsError, StoreError
from splice.evaluate_cli import parsed_options

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from splice.ears.calibration import Approve, Calibration, CalibrationSettings, Revision, Round
    from splice.ears.curation import Curation, CurationSettings
    from splice.ears.ensemble import JudgeCard
    from splice.ears.evaluation import AbstentionResult, Arm
    from splice.ears.interactions import Interaction
    from splice.ears.judging import Guideline, Verdict
    from splice.models.protocol import ChatModel
    from splice.records import ModelIdentity
    from splice.report.progress import Show
    from splice.workload import Workload

app = typer.Typer(
    help="Judge, curate and evaluate agents that may abstain.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Out = Annotated[Path, typer.Option("--out", help="Folder for all that comes of it; one run each.")]
Data = Annotated[Path | None, typer.Option(help="File or folder with the workload's data.")]
Split = Annotated[
    Literal["train", "validation", "test"], typer.Option(help="Which part of the workload.")
]
Option = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="NAME=VALUE", help="Setting of the workload."),
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Rows, drawn by the seed; default: all of them.")
]
Threads = Annotated[int, typer.Option(min=1, help="Threads of the embedded model.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Requests in flight.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_NAME_RULE = "NAME is letters, digits, `_`, `.` or `-`"


@app.command()
def evaluate(
    ctx: typer.Context,
    workload: Annotated[
        str, typer.Argument(help="A labelled workload, or module:function of a loader.")
    ],
    out: Out,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=MODE[:MODEL]",
            help="An agent to compare, such as tuned=prompted:+./agent.gguf. MODE is `baseline` "
            "(told nothing about abstaining) or `prompted`. Default: both, with the default model.",
        ),
    ] = None,
    data: Data = None,
    split: Split = "validation",
    option: Option = None,
    limit: Limit = None,
    threads: Threads = 1,
    concurrency: Concurrency = 8,
    seed: Annotated[int, typer.Option(help="Of the draw and of resampling.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Compare agents on labelled requests: who carries out and who abstains, and rightly.

    Arms run one after another. Started again with the same --out it goes on where it stopped;
    another arm asks for nothing but its own replies.
    """
    from splice.ears.evaluation import DEFAULT_ARMS
    from splice.evaluation import drawn
    from splice.files import write_whole
    from splice.workload import find_loader

    arms = tuple(map(_arm, arm)) if arm else DEFAULT_ARMS
    _refuse_repeated("--arm", [one.name for one in arms])
    loaded = find_loader(workload)(data, split=split, options=parsed_options(option or []))
    loaded = loaded.model_copy(update={"examples": drawn(loaded.examples, limit, seed)})
    result = asyncio.run(_evaluated(loaded, arms, out, split, threads, concurrency, seed))
    write_whole(out / "table.txt", f"{result.text()}\n")
    _keep_command(ctx, out)
    typer.echo(result.model_dump_json() if as_json else result.text())


async def _evaluated(
    workload: Workload,
    arms: Sequence[Arm],
    out: Path,
    split: str,
    threads: int,
    concurrency: int,
    seed: int,
) -> AbstentionResult:
    from splice.ears.evaluation import run
    from splice.evaluation import claim
    from splice.models.default import default_model
    from splice.records import digest
    from splice.report.progress import bars

    workflows = {workload.workflow_of(example).fingerprint for example in workload.examples}
    claim(
        out,
        {
            "workload": workload.name,
            "split": split,
            "sources": dict(workload.sources),
            "examples": digest("\n".join(example.query.id for example in workload.examples)),
            "workflow": digest("\n".join(sorted(workflows))),
        },
    )
    _note(
        f"{len(workload.examples)} examples of {workload.name}; arms "
        f"{', '.join(arm.name for arm in arms)}; replies are kept in {out}"
    )

    def open_model(name: str | None) -> ChatModel:
        return default_model(workload.workflow, name, threads=threads)

    with bars([arm.name for arm in arms]) as show:
        return await run(
            workload,
            arms,
            open_model,
            out,
            split=split,
            seed=seed,
            concurrency=concurrency,
            progress=show,
        )


def _arm(text: str) -> Arm:
    """An arm given as `NAME=MODE[:MODEL]`; another form is wrong usage."""
    from splice.ears.evaluation import MODES, Arm

    name, equals, rest = text.partition("=")
    mode, colon, model = rest.partition(":")
    known = next((known for known in MODES if known == mode), None)
    if not equals or known is None or not _NAME.fullmatch(name) or (colon and not model):
        raise typer.BadParameter(
            f"--arm {text!r} is not NAME=MODE[:MODEL]: {_NAME_RULE}, and MODE is one of "
            f"{', '.join(MODES)}"
        )
    return Arm(name=name, mode=known, model=model or None)


# --- calibrate -------------------------------------------------------------------------------


@app.command()
def calibrate(
    ctx: typer.Context,
    seed_set: Annotated[
        str,
        typer.Argument(
            metavar="SET", help="Labelled interactions as a .jsonl file, or a labelled workload."
        ),
    ],
    out: Out,
    judge: Annotated[
        str | None, typer.Option(help="Model that is calibrated; default: the default model.")
    ] = None,
    critic: Annotated[
        str | None, typer.Option(help="Model that revises; default: the default model.")
    ] = None,
    approve: Annotated[
        Literal["ask", "held-out"],
        typer.Option(
            help="Who approves a revision: you, or the accuracy on the third that is held out."
        ),
    ] = "ask",
    theta: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Accuracy that must be reached.")
    ] = 0.80,
    rounds: Annotated[int, typer.Option(min=1, help="Guidelines judged at most.")] = 10,
    guideline: Annotated[
        Path | None, typer.Option(help="Text to begin with; default: the annotation hierarchy.")
    ] = None,
    data: Data = None,
    split: Split = "train",
    option: Option = None,
    limit: Limit = None,
    threads: Threads = 1,
    concurrency: Concurrency = 8,
    seed: Annotated[int, typer.Option(help="Of the draw and of what is held out.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Revise a judge's guideline until it labels a seed set as people did.

    Writes the best version as guideline.txt. Started again with the same --out it goes on where it
    stopped: no verdict is asked for and no revision is put before you twice.
    """
    from splice._version import __version__
    from splice.ears.calibration import CalibrationSettings
    from splice.ears.flywheel import CALIBRATION_FILE, GUIDELINE_FILE, CalibrationCard
    from splice.ears.judging import default_guideline
    from splice.files import write_whole

    if approve == "ask" and not _is_terminal():
        raise typer.BadParameter(
            "there is no terminal to ask at: use --approve held-out, which approves what does not "
            "lower the accuracy on the third that is held out"
        )
    first = default_guideline() if guideline is None else _guideline(guideline)
    read = _interactions(seed_set, data, split, option, limit, seed)
    settings = CalibrationSettings(
        theta=theta, max_rounds=rounds, seed=seed, concurrency=concurrency
    )
    made, asked = asyncio.run(
        _calibrated(read, out, judge, critic, approve == "ask", first, threads, settings)
    )
    card = CalibrationCard(
        engine_version=__version__,
        source=read.source,
        judge=asked.judge,
        critic=asked.critic,
        calibration=made,
    )
    write_whole(out / CALIBRATION_FILE, f"{card.model_dump_json(indent=1)}\n")
    write_whole(out / GUIDELINE_FILE, f"{made.best.guideline.text}\n")
    _keep_command(ctx, out)
    typer.echo(card.model_dump_json() if as_json else card.text())
    _note(f"wrote version {made.best.guideline.version} to {out / GUIDELINE_FILE}")


class _Calibrating(NamedTuple):
    judge: ModelIdentity
    critic: ModelIdentity


async def _calibrated(
    read: _Read,
    out: Path,
    judge_name: str | None,
    critic_name: str | None,
    asks: bool,
    first: Guideline,
    threads: int,
    settings: CalibrationSettings,
) -> tuple[Calibration, _Calibrating]:
    from splice.ears.calibration import calibrate, keeps_held_out
    from splice.evaluation import claim

    judge = _judging_model(judge_name, threads)
    critic = judge if critic_name == judge_name else _judging_model(critic_name, threads)
    asked = _Calibrating(judge.identity(None), critic.identity(None))
    claim(
        out,
        {
            "seed_set": read.digest,
            "judge": asked.judge.model_dump(),
            "guideline": first.digest,
            "seed": settings.seed,
        },
    )
    _note(f"{len(read.interactions)} interactions of {read.source}; verdicts are kept in {out}")
    approve: Approve = _is_approved if asks else keeps_held_out
    try:
        made = await calibrate(
            read.interactions,
            judge,
            critic,
            approve,
            out,
            guideline=first,
            settings=settings,
            on_round=_say_round,
        )
    finally:
        await judge.aclose()
        if critic is not judge:
            await critic.aclose()
    return made, asked


def _say_round(made: Round) -> None:
    from splice.ears.flywheel import judged_share

    held_out = judged_share(made.held_out)
    _note(
        f"round {made.number}: version {made.guideline.version}, accuracy "
        f"{made.score.accuracy:.3f}, held out {held_out.value:.3f} "
        f"{held_out.interval:.3f}"
    )


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _is_approved(revision: Revision) -> bool:
    """Show a revision and ask whether to go on with it."""
    from splice.ears.calibration import guideline_diff

    before, after = revision.current_held_out, revision.proposed_held_out
    _note(
        f"\nThe critic says:\n{revision.patterns.strip() or '(nothing)'}\n\n"
        f"{guideline_diff(revision.current, revision.proposed)}\n\n"
        f"Accuracy on the {before.n} interactions that are held out: {before.accuracy:.3f} before, "
        f"{after.accuracy:.3f} after."
    )
    return typer.confirm(f"Go on with version {revision.proposed.version}?", err=True)


# --- curate ----------------------------------------------------------------------------------


class _Judge(NamedTuple):
    """A judge as the command line gives it."""

    name: str
    model: str
    guideline: Guideline


@app.command()
def curate(
    ctx: typer.Context,
    out: Out,
    judge: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=MODEL[,GUIDELINE]",
            help="A judge: its model, and a file with its guideline; default: the annotation "
            "hierarchy. Give one option for each judge.",
        ),
    ],
    interactions: Annotated[
        str | None,
        typer.Argument(metavar="INTERACTIONS", help="A .jsonl file, or a labelled workload."),
    ] = None,
    traces: Annotated[
        Path | None, typer.Option(help="In place of INTERACTIONS: a file written by --store.")
    ] = None,
    workflow: Annotated[
        Path | None, typer.Option(help="The workflow of --traces, as TOML.")
    ] = None,
    code: Annotated[
        Path | None, typer.Option(help="A Python file with the workflow's functions and tools.")
    ] = None,
    k: Annotated[
        int | None,
        typer.Option("--k", min=1, help="Judges that must agree; default: all of them."),
    ] = None,
    on_disagreement: Annotated[
        Literal["keep", "drop", "human"],
        typer.Option(help="What becomes of an interaction without an accepted label."),
    ] = "keep",
    data: Data = None,
    split: Split = "train",
    option: Option = None,
    limit: Limit = None,
    threads: Threads = 1,
    concurrency: Concurrency = 8,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Have judges label interactions, and make training instances of what they agree on.

    Writes instances.jsonl, human.jsonl for a person to look at, and card.json. Judges are asked one
    after another. Started again with the same --out it goes on where it stopped; another judge asks
    for nothing but its own verdicts.
    """
    from splice.ears.curation import CurationSettings

    judges = tuple(map(_judge, judge))
    _refuse_repeated("--judge", [one.name for one in judges])
    if k is not None and k > len(judges):
        raise typer.BadParameter(f"--k {k}: there are {len(judges)} judges")
    read = _curated_interactions(
        interactions, traces, workflow, code, data, split, option, limit, seed
    )
    settings = CurationSettings(k=k, on_disagreement=on_disagreement)
    verdicts, cards = asyncio.run(_judged(read, judges, out, threads, concurrency))
    text, as_text = _curated(read, verdicts, cards, settings, out)
    _keep_command(ctx, out)
    typer.echo(text if as_json else as_text)
    _note(f"wrote the instances to {out / 'instances.jsonl'}")


def _judge(text: str) -> _Judge:
    """A judge given as `NAME=MODEL[,GUIDELINE]`; another form is wrong usage."""
    from splice.ears.judging import default_guideline

    name, _, rest = text.partition("=")
    model, comma, guideline = rest.partition(",")
    if not model or not _NAME.fullmatch(name) or (comma and not guideline):
        raise typer.BadParameter(f"--judge {text!r} is not NAME=MODEL[,GUIDELINE]: {_NAME_RULE}")
    return _Judge(name, model, _guideline(Path(guideline)) if guideline else default_guideline())


async def _judged(
    read: _Read, judges: Sequence[_Judge], out: Path, threads: int, concurrency: int
) -> tuple[tuple[Verdict, ...], tuple[JudgeCard, ...]]:
    """Ask one judge after another; each has a folder of its own.

    Raises:
        ModelError: a judge gave no answer about an interaction; the verdicts that came are kept.
    """
    from splice.ears.ensemble import judge_card
    from splice.ears.judging import VerdictFile, judge_all
    from splice.evaluation import claim
    from splice.report.progress import bars

    claim(out, {"interactions": read.source})
    for judge in judges:
        model = _judging_model(judge.model, threads)
        identity = model.identity(None)
        await model.aclose()
        about = {"model": identity.model_dump(), "guideline": judge.guideline.digest}
        claim(out / "judges" / judge.name, about)
    _note(f"{len(read.interactions)} interactions of {read.source}; verdicts are kept in {out}")
    found: list[Verdict] = []
    cards: list[JudgeCard] = []
    with bars([judge.name for judge in judges]) as show:
        for judge in judges:
            model = _judging_model(judge.model, threads)
            try:
                with VerdictFile(out / "judges" / judge.name / "verdicts.jsonl") as known:
                    verdicts = await judge_all(
                        read.interactions,
                        judge.guideline,
                        model,
                        name=judge.name,
                        known=known,
                        concurrency=concurrency,
                        progress=_stage(show, judge.name),
                    )
            finally:
                await model.aclose()
            cards.append(
                judge_card(judge.name, model.identity(None), judge.guideline.digest, verdicts)
            )
            found += verdicts
    _refuse_missing(found)
    return tuple(found), tuple(cards)


def _stage(show: Show, name: str) -> Callable[[int, int], None]:
    return lambda n_done, n_all: show(name, n_done, n_all)


def _refuse_missing(verdicts: Sequence[Verdict]) -> None:
    """An outage is no vote: it must not count as one."""
    missing = [verdict for verdict in verdicts if not verdict.is_answered]
    if missing:
        per_judge = Counter(verdict.judge for verdict in missing)
        told = ", ".join(f"{name!r} about {n}" for name, n in per_judge.items())
        raise ModelError(
            f"judges gave no answer: {told} ({missing[0].problem}); all verdicts that came are "
            "kept, and the same command asks for the rest",
            reason="no_answer",
        )


def _curated(
    read: _Read,
    verdicts: Sequence[Verdict],
    cards: Sequence[JudgeCard],
    settings: CurationSettings,
    out: Path,
) -> tuple[str, str]:
    """Curate and write; the card as JSON and for people."""
    from hashlib import sha256

    from splice.ears.curation import curate, write_curated
    from splice.ears.ensemble import curation_card
    from splice.ears.flywheel import CURATION_FILE, INSTANCES_FILE
    from splice.files import write_whole

    curation: Curation = curate(read.interactions, verdicts, settings)
    write_curated(out / INSTANCES_FILE, curation.instances)
    write_curated(out / "human.jsonl", curation.for_human)
    files = {
        name: sha256((out / name).read_bytes()).hexdigest()
        for name in (INSTANCES_FILE, "human.jsonl")
    }
    card = curation_card(read.source, curation, cards, files)
    write_whole(out / CURATION_FILE, f"{card.model_dump_json(indent=1)}\n")
    return card.model_dump_json(), card.text()


def _curated_interactions(
    interactions: str | None,
    traces: Path | None,
    workflow: Path | None,
    code: Path | None,
    data: Path | None,
    split: Literal["train", "validation", "test"],
    option: list[str] | None,
    limit: int | None,
    seed: int,
) -> _Read:
    if (interactions is None) == (traces is None):
        raise typer.BadParameter("give either INTERACTIONS or --traces")
    if (workflow is None) != (traces is None):
        raise typer.BadParameter("--traces and --workflow go together")
    if code is not None and workflow is None:
        raise typer.BadParameter("--code goes with --workflow")
    if traces is None or workflow is None:
        return _interactions(interactions or "", data, split, option, limit, seed)
    if data is not None or option:
        raise typer.BadParameter("--data and --option go with a workload, not with --traces")
    return _read(str(traces), _traced(traces, workflow, code), limit, seed)


def _traced(store: Path, workflow: Path, code: Path | None) -> tuple[Interaction, ...]:
    """The interactions of the agents in a store of runs."""
    from splice.code import load_code
    from splice.ears.curation import from_traces
    from splice.store import read_store
    from splice.workflow import load_workflow

    functions, tools = load_code(code) if code is not None else ({}, ())
    loaded = load_workflow(workflow, functions=functions, tools=tools)
    contents = read_store(store)
    for damage in contents.damage:
        _note(f"{store}:{damage.line}: {damage.reason}; left out")
    found = from_traces(loaded, contents.traces.values())
    if not found:
        raise StoreError(f"{store} holds no run in which an agent of {loaded.name!r} replied")
    return found


# --- flywheel --------------------------------------------------------------------------------


@app.command("flywheel")
def flywheel_(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of the flywheel.")],
    add: Annotated[
        bool, typer.Option("--add", help="Record a cycle from the three folders.")
    ] = False,
    calibration: Annotated[
        Path | None, typer.Option(help="Folder of `splice ears calibrate`.")
    ] = None,
    curation: Annotated[Path | None, typer.Option(help="Folder of `splice ears curate`.")] = None,
    evaluation: Annotated[
        Path | None, typer.Option(help="Folder of `splice ears evaluate`; its last arm counts.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(min=0.0, help="Of one call to the cheapest judge.")
    ] = None,
    relative_cost: Annotated[
        list[float] | None,
        typer.Option(min=0.0, help="Of one call to a judge, in calls to the cheapest; for each."),
    ] = None,
    curation_cost: Annotated[
        float | None, typer.Option(min=0.0, help="Of the judges' labels for the training data.")
    ] = None,
    gpu_hours: Annotated[
        float | None, typer.Option(min=0.0, help="Of training, summed over the GPUs.")
    ] = None,
    gpu_price: Annotated[float | None, typer.Option(min=0.0, help="Of a GPU for an hour.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the cycles of calibrating, curating, training and evaluating, and what to run next.

    With prices it also says from how many queries on a trained agent is cheaper than judging every
    reply before it is used.
    """
    from splice.ears.cost import ensemble_cost
    from splice.ears.flywheel import add_cycle, flywheel

    costs = _costs(
        {
            "--price": price,
            "--relative-cost": ensemble_cost(relative_cost) if relative_cost else None,
            "--curation-cost": curation_cost,
            "--gpu-hours": gpu_hours,
            "--gpu-price": gpu_price,
        }
    )
    folders = {"--calibration": calibration, "--curation": curation, "--evaluation": evaluation}
    if not add and any(folders.values()):
        raise typer.BadParameter(f"{', '.join(folders)} go with --add")
    if add:
        if calibration is None or curation is None or evaluation is None:
            raise typer.BadParameter(f"--add needs {_missing(folders)}")
        add_cycle(folder, calibration=calibration, curation=curation, evaluation=evaluation)
    found = flywheel(folder)
    if as_json:
        typer.echo(json.dumps({**found.model_dump(mode="json"), "costs": costs}))
        return
    typer.echo(found.text())
    if costs is not None:
        typer.echo(f"\n{_cost_text(costs)}")


def _missing(given: Mapping[str, object]) -> str:
    return ", ".join(name for name, value in given.items() if value is None)


def _costs(given: dict[str, float | None]) -> dict[str, float | None] | None:
    """Gate and training in money, and where they break even; None: nothing was given."""
    from splice.ears.cost import break_even, gate_cost, offline_cost

    if all(value is None for value in given.values()):
        return None
    known = {name: value for name, value in given.items() if value is not None}
    if len(known) < len(given):
        raise typer.BadParameter(f"costs need {_missing(given)} too")
    price, relative = known["--price"], known["--relative-cost"]
    offline = offline_cost(known["--curation-cost"], known["--gpu-hours"], known["--gpu-price"])
    return {
        "gate_per_1000_queries": gate_cost(1000, price, relative),
        "offline": offline,
        "break_even_queries": break_even(offline, price, relative),
    }


def _cost_text(costs: dict[str, float | None]) -> str:
    even = costs["break_even_queries"]
    return "\n".join(
        (
            f"Judging every reply costs {costs['gate_per_1000_queries']:,.2f} for 1,000 queries;",
            f"curating and training once costs {costs['offline']:,.2f}.",
            "They never break even, as judging costs nothing."
            if even is None
            else f"They break even at {even:,.0f} queries.",
        )
    )


# --- what the commands share -----------------------------------------------------------------


class _Read(NamedTuple):
    """Interactions that were read."""

    source: str
    """The file, store or workload, as the command line names it."""
    interactions: tuple[Interaction, ...]
    digest: str
    """Of all that they hold."""


def _interactions(
    source: str,
    data: Path | None,
    split: Literal["train", "validation", "test"],
    option: list[str] | None,
    limit: int | None,
    seed: int,
) -> _Read:
    """Interactions of a `.jsonl` file or of a labelled workload."""
    from splice.ears.curation import read_interactions
    from splice.ears.evaluation import interaction_of
    from splice.workload import find_loader

    options = parsed_options(option or [])
    if source.endswith(".jsonl"):
        if data is not None or options:
            raise typer.BadParameter(f"--data and --option go with a workload; {source} is a file")
        return _read(source, read_interactions(source), limit, seed)
    loaded = find_loader(source)(data, split=split, options=options)
    found = tuple(interaction_of(loaded, example) for example in loaded.examples)
    if not found:
        raise DataError(f"workload {loaded.name!r} has no example in split {split!r}")
    return _read(f"{loaded.name}, {split}", found, limit, seed)


def _read(source: str, interactions: Sequence[Interaction], limit: int | None, seed: int) -> _Read:
    """At most `limit` interactions, drawn by `seed` whatever their order."""
    import random

    from splice.records import digest

    ids = sorted(interaction.id for interaction in interactions)
    if limit is not None and limit < len(ids):
        ids = random.Random(f"{seed}:limit").sample(ids, limit)
    chosen = set(ids)
    kept = tuple(interaction for interaction in interactions if interaction.id in chosen)
    lines = sorted(interaction.model_dump_json() for interaction in kept)
    return _Read(source, kept, digest("\n".join(lines)))


def _guideline(path: Path) -> Guideline:
    """A guideline from a text file.

    Raises:
        SettingsError: the file can't be read or is empty.
    """
    from splice.ears.judging import Guideline
    from splice.files import read_text

    text = read_text(path, SettingsError).strip()
    if not text:
        raise SettingsError(f"{path}: the guideline is empty")
    return Guideline(version=1, text=text)


def _judging_model(name: str | None, threads: int) -> ChatModel:
    """A model for judging, which belongs to no workflow of the user's."""
    from splice.models.default import default_model
    from splice.workflow import Agent, Workflow

    judging = Workflow(nodes=(Agent(id="judge", role="You judge."),), edges=(), output="judge")
    return default_model(judging, name, threads=threads)


def _refuse_repeated(option: str, names: Sequence[str]) -> None:
    name, n = Counter(names).most_common(1)[0]
    if n > 1:
        raise typer.BadParameter(f"{option}: there are {n} named {name!r}")


def _keep_command(ctx: typer.Context, out: Path) -> None:
    """Write what was asked for beside what came of it, so that it can be run again."""
    from splice.ears.flywheel import COMMAND_FILE
    from splice.files import write_whole

    words = ["splice", "ears", ctx.command.name or ""]
    for param in ctx.command.params:
        name = param.name or ""
        source = ctx.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        value = ctx.params[name]
        if param.param_type_name == "argument":
            words.insert(3, str(value))
        elif value is True:
            words.append(param.opts[0])
        else:
            for one in value if isinstance(value, (list, tuple)) else (value,):
                words += [param.opts[0], str(one)]
    write_whole(out / COMMAND_FILE, f"{shlex.join(words)}\n")


def _note(text: str) -> None:
    """Say something on stderr; names in it may come from a file of anybody's."""
    from splice.report.display import visible

    typer.echo(visible(text), err=True)
