"""`splice selfcheck`: planted gaps are found, and where nothing helps nothing is gained."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from splice.selfcheck import SelfCheck


def selfcheck(
    seeds: Annotated[int, typer.Option(min=2, help="Question sets of each world.")] = 8,
    questions: Annotated[int, typer.Option(min=10, help="Questions of each set.")] = 14,
    seed: Annotated[int, typer.Option(help="Of names, agents and resampling.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the whole machinery on made-up questions with known gaps.

    Evaluates worlds in which exactly one edge carries what is missing, and worlds in which no edge
    can help. Needs no model and takes some ten seconds. Exit code 1: something is wrong.
    """
    from splice.selfcheck import SelfCheckSettings, run_selfcheck

    settings = SelfCheckSettings(n_seeds=seeds, n_questions=questions, seed=seed)
    report(asyncio.run(run_selfcheck(settings, progress=_show)), as_json=as_json)


def report(check: SelfCheck, *, as_json: bool = False) -> None:
    """Print a check, and end with exit code 1 if something is wrong."""
    from splice.selfcheck import selfcheck_text

    typer.echo(check.model_dump_json() if as_json else selfcheck_text(check))
    if not check.ok:
        raise typer.Exit(1)


def _show(world: str, n_done: int, n_all: int) -> None:
    """A line on stderr for each world that is done."""
    if n_done == n_all:
        typer.echo(f"{world}: {n_done} seeds done", err=True)
