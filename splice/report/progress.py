"""Progress on stderr: a bar for each stage, or a line now and then where there is no terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol


class Show(Protocol):
    """Shows how far a stage is."""

    def __call__(self, stage: str, n_done: int, n_all: int, note: str = "") -> None:
        """Say that `n_done` of `n_all` are done."""
        ...


_EVERY = 10
"""Where there is no terminal, a line for every so many things that are done."""


@contextmanager
def bars(stages: Sequence[str]) -> Iterator[Show]:
    """Show progress by stage while the block runs."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    told: dict[str, int] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks = {stage: progress.add_task(stage, total=None, note="") for stage in stages}

        def show(stage: str, n_done: int, n_all: int, note: str = "") -> None:
            progress.update(tasks[stage], completed=n_done, total=n_all, note=note)
            is_due = n_done % _EVERY == 0 or n_done == n_all
            if not console.is_terminal and is_due and told.get(stage) != n_done:
                told[stage] = n_done
                line = f"{stage}: {n_done} of {n_all}{', ' if note else ''}{note}"
                console.print(line, highlight=False, markup=False, soft_wrap=True)

        yield show
