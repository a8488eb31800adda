"""`splice evaluate`: one workload, all policies, one table."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from splice.evaluation import EvaluationResult, EvaluationSettings
    from splice.learned import Learned
    from splice.models.protocol import ChatModel
    from splice.workload import Workload


def evaluate(
    workload: Annotated[
        str,
        typer.Argument(help="A registered workload, or module:function of a loader of your own."),
    ],
    out: Annotated[
        Path, typer.Option("--out", help="Folder for replies and results; one evaluation each.")
    ],
    data: Annotated[
        Path | None, typer.Option(help="File or folder with the workload's data.")
    ] = None,
    split: Annotated[
        Literal["train", "validation", "test"], typer.Option(help="Which part of the questions.")
    ] = "validation",
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="NAME=VALUE", help="Setting of the workload."),
    ] = None,
    policies: Annotated[
        str | None, typer.Option(help="Policies, separated by commas; default: all.")
    ] = None,
    budget: Annotated[
        list[float] | None,
        typer.Option(min=0.0, max=1.0, help="Share of the questions that may get a trial."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Questions, drawn by the seed; default: all.")
    ] = None,
    half: Annotated[
        str | None, typer.Option(help="Policies that only a random half of the questions gets.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Base runs of each question.")] = 1,
    metric: Annotated[str | None, typer.Option(help="Score to compare by.")] = None,
    seed: Annotated[int, typer.Option(help="Of draws, random edges and resampling.")] = 0,
    weighting: Annotated[
        Literal["headroom", "none"], typer.Option(help="Weights of the decision rule.")
    ] = "headroom",
    admit_by: Annotated[
        Literal["headroom", "promise"],
        typer.Option(help="Which queries get a trial: the most headroom, or the likeliest gain."),
    ] = "headroom",
    parts: Annotated[
        Path | None,
        typer.Option(
            help="Folder of learned parts, or `shipped` for those that come with the package; "
            "default: hand-set scores and the documented rules."
        ),
    ] = None,
    language: Annotated[
        Path | None, typer.Option(help="Trained language model, for the policy splice_language.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Model at the endpoint, or embedded model by name."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the embedded model.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Questions in flight.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare repair policies on a workload.

    Runs every policy over the same base runs and prints score, gain with its interval, fixed and
    broken questions, and cost. Started again with the same --out it goes on where it stopped.
    """
    from splice.evaluation import EvaluationSettings
    from splice.evaluation_table import evaluation_text
    from splice.files import write_whole
    from splice.line import RepairSettings
    from splice.policies import POLICIES
    from splice.records import digest
    from splice.selectors import open_parts
    from splice.workload import find_loader

    learned = open_parts(parts)
    settings = EvaluationSettings(
        policies=_names(policies) or tuple(POLICIES),
        budgets=tuple(budget or (0.5,)),
        repeats=repeats,
        limit=limit,
        on_half=_names(half),
        metric=metric,
        seed=seed,
        concurrency=concurrency,
        repair=RepairSettings(weighting=weighting, admit_by=admit_by),
        parts=None if learned is None else digest(learned.card.model_dump_json()),
    )
    loaded = find_loader(workload)(data, split=split, options=parsed_options(option or []))
    result = asyncio.run(
        _evaluated(loaded, split, settings, out, model, threads, learned, language)
    )
    text = evaluation_text(result)
    write_whole(out / "table.txt", f"{text}\n")
    typer.echo(result.model_dump_json() if as_json else text)


async def _evaluated(
    workload: Workload,
    split: str,
    settings: EvaluationSettings,
    out: Path,
    name: str | None,
    threads: int,
    learned: Learned | None,
    language: Path | None,
) -> EvaluationResult:
    """Evaluate with replies kept in `out`, and progress on stderr."""
    from splice.diagnosis import diagnose
    from splice.evaluation import claim, drawn
    from splice.evaluation import evaluate as run_evaluation
    from splice.models.cache import CachedModel
    from splice.models.default import default_model
    from splice.records import digest
    from splice.report.progress import bars
    from splice.selectors import open_selector

    examples = drawn(workload.examples, settings.limit, settings.seed)
    asked: ChatModel = default_model(workload.workflow, name, threads=threads)
    identity = asked.identity(None)
    workflows = {workload.workflow_of(example).fingerprint for example in examples}
    claim(
        out,
        {
            "workload": workload.name,
            "split": split,
            "sources": dict(workload.sources),
            "questions": digest("\n".join(example.query.id for example in examples)),
            "workflow": digest("\n".join(sorted(workflows))),
            "model": identity.model_dump(),
            "seed": settings.seed,
        },
    )
    typer.echo(
        f"{len(examples)} questions of {workload.name}; model {identity.name} "
        f"({identity.provider}); replies are kept in {out}",
        err=True,
    )
    cached = CachedModel(asked, out / "replies.sqlite")
    try:
        with bars(("base", "policies")) as progress:
            return await run_evaluation(
                workload,
                cached,
                split=split,
                settings=settings,
                selector=None if learned is None else learned.selector,
                language=None if language is None else open_selector(language),
                diagnoser=diagnose if learned is None else learned.diagnose,
                folder=out,
                progress=progress,
            )
    finally:
        await cached.aclose()


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def parsed_options(given: list[str]) -> Mapping[str, str]:
    """Options given as `NAME=VALUE`; another form is wrong usage."""
    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"--option {text!r} is not NAME=VALUE")
        options[name] = value
    return options
