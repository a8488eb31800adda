"""`splice selector`: fit learned parts on tables of probe pools, and measure them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(
    help="Learned parts: fitted on probe pools, in place of hand-set scores.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

TablePaths = Annotated[
    list[Path],
    typer.Argument(metavar="TABLES...", help="Folders that `splice probes export` wrote."),
]


@app.command()
def train(
    tables: TablePaths,
    out: Annotated[Path, typer.Option("--out", help="Folder for the learned parts.")],
    seed: Annotated[int, typer.Option(help="Of the folds.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Threads; the result is the same.")] = 1,
) -> None:
    """Fit boosted trees on the training questions of exported tables.

    Writes card.json, the trees and a model card, and prints how they do on the validation split.
    """
    from selector_training.evaluation import evaluate as run_evaluation
    from selector_training.evaluation import report_text
    from selector_training.fit import FitSettings, fit, write
    from selector_training.tables import read_tables

    settings = FitSettings(seed=seed, n_jobs=jobs)
    read = read_tables(tables)
    own = read.of_split("train")
    n_questions, n_probes = len(own.questions), len(own.probes)
    _say(f"fitting on {n_questions:,} training questions with {n_probes:,} probes", err=True)
    fitted = fit(read, settings)
    text = report_text(run_evaluation(fitted, read, "validation", settings))
    write(fitted, out, text)
    _say(text)
    for name in ("decisive", "beneficial", "selector"):
        if name not in fitted.texts:
            _say(f"note: too few training questions for the part {name!r}", err=True)
    _say(f"wrote the parts {', '.join(fitted.texts)} into {out}", err=True)


@app.command()
def evaluate(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of learned parts.")],
    tables: TablePaths,
    split: Annotated[
        Literal["train", "validation", "test"], typer.Option(help="Which part of the questions.")
    ] = "validation",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure learned parts on a split: base scores, edges, and what they would adopt."""
    from selector_training.evaluation import evaluate as run_evaluation
    from selector_training.evaluation import report_text
    from selector_training.fit import FitSettings, read_fitted
    from selector_training.tables import read_tables

    report = run_evaluation(read_fitted(folder), read_tables(tables), split, FitSettings())
    if as_json:
        typer.echo(report.model_dump_json())
    else:
        _say(report_text(report))


def _say(text: str, err: bool = False) -> None:
    """Print text; names in it may come from a file of anybody's."""
    from splice.report.display import visible

    typer.echo(visible(text), err=err)
