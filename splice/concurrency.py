"""Doing many things at a time, and saying how far they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
R = TypeVar("R")

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called as `progress(stage, n_done, n_all)` after each thing that is done."""


async def each(
    items: Sequence[T],
    work: Callable[[T], Coroutine[Any, Any, R]],
    concurrency: int,
    progress: Progress | None,
    stage: str,
) -> list[R]:
    """Do `work` for each item, `concurrency` at a time; results in the order of the items.

    The first error cancels what is in flight and is raised.
    """
    results: dict[int, R] = {}
    places = iter(range(len(items)))

    async def worker() -> None:
        for place in places:
            results[place] = await work(items[place])
            if progress is not None:
                progress(stage, len(results), len(items))

    workers = [asyncio.create_task(worker()) for _ in range(min(concurrency, len(items)))]
    try:
        await asyncio.gather(*workers)
    except BaseException:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        raise
    return [results[place] for place in range(len(items))]
