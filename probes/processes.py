"""Several processes of this machine at one pool, for endpoints that are faster than one process.

A process with its event loop sends a few hundred requests a second. Here each process has its own
share of the questions and writes shards of its own, so nothing passes between them but how far they
are. The process that was called holds the pool and puts its manifest right in the end.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from probes.generate import (
    Generated,
    GenerateSettings,
    Plan,
    Progress,
    Run,
    local_probing,
    planned,
    repaired,
)
from probes.plan import ProbeSettings, Question
from probes.pool import Pool
from splice.errors import SettingsError, SpliceError
from splice.executor import Models
from splice.ledger import Budget, total_cost
from splice.queries import Split
from splice.workload import Workload

MakeModels: TypeAlias = Callable[[], Models]
"""Makes the models of one process, which hold locks and connections of their own."""


_COLLECT_EVERY: Final = (50_000, 20, 100)
"""New objects between two searches for garbage, and how many of them go by before a deeper one."""


class _Command(NamedTuple):
    """What every process knows; it is handed on by the fork, not sent."""

    workloads: Mapping[Split, Workload]
    make_models: MakeModels
    plan: Plan
    probe: ProbeSettings
    settings: GenerateSettings


def generate_in_processes(
    workloads: Mapping[Split, Workload],
    make_models: MakeModels,
    folder: str | Path,
    *,
    n_processes: int,
    probe: ProbeSettings = ProbeSettings(),
    settings: GenerateSettings = GenerateSettings(),
    progress: Callable[[Progress], None] | None = None,
) -> Generated:
    """Generate a pool as `probes.generate.generate` does, in several processes.

    Each gets an equal part of the questions, of `settings.concurrency` and of the budget. Not for
    event loops that run already: the processes are forks of this one.

    Args:
        workloads: the workload by split.
        make_models: called once in each process; what it gives is closed there.
        folder: of the pool.
        n_processes: how many.
        probe: which probes are made.
        settings: how much and how fast, all processes together.
        progress: told how far all of them are.

    Raises:
        SpliceError: those of `generate`; one process that raises stops the others, and whatever was
            finished is safe.
    """
    if n_processes < 1:
        raise SettingsError(f"n_processes is {n_processes}; at least 1 is needed")
    began = time.perf_counter()
    plan = planned(workloads, make_models(), probe, settings)
    with Pool(folder, plan.manifest) as pool:
        notes = repaired(pool, settings)
        share = settings.model_copy(
            update={
                "concurrency": math.ceil(settings.concurrency / n_processes),
                "budget": _divided(settings.budget, n_processes),
                "at_most": None
                if settings.at_most is None
                else math.ceil(settings.at_most / n_processes),
            }
        )
        command = _Command(workloads, make_models, plan, probe, share)
        parts = _run_all(command, pool, n_processes, progress)
        return Generated(
            manifest=pool.finish(),
            stop_reason=next((p.stop_reason for p in parts if p.stop_reason != "done"), "done"),
            n_questions=len(plan.questions),
            n_done=sum(part.n_done for part in parts),
            n_bases=sum(part.n_bases for part in parts),
            n_probes=sum(part.n_probes for part in parts),
            n_failed=sum(part.n_failed for part in parts),
            n_calls=sum(part.n_calls for part in parts),
            n_tokens=sum(part.n_tokens for part in parts),
            cost=total_cost(part.cost for part in parts),
            elapsed_s=time.perf_counter() - began,
            notes=notes,
        )


def _divided(budget: Budget, n: int) -> Budget:
    """The part of a budget that one of `n` processes may spend."""
    return Budget(
        max_calls=None if budget.max_calls is None else budget.max_calls // n,
        max_tokens=None if budget.max_tokens is None else budget.max_tokens // n,
        max_cost=None if budget.max_cost is None else budget.max_cost / n,
    )


def _run_all(
    command: _Command,
    pool: Pool,
    n_processes: int,
    progress: Callable[[Progress], None] | None,
) -> list[Generated]:
    """Fork the processes, listen to them, and return what each of them made."""
    context = get_context("fork")
    processes = {}
    for place in range(n_processes):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_work, args=(command, pool, (place, n_processes), theirs), daemon=True
        )
        process.start()
        theirs.close()
        processes[ours] = process
    try:
        return _listen(list(processes), progress)
    finally:
        for process in processes.values():
            process.terminate()
            process.join()


def _listen(
    pipes: Sequence[Connection], progress: Callable[[Progress], None] | None
) -> list[Generated]:
    """What the processes made.

    Raises:
        SpliceError: what one of them raised, or that one died.
    """
    latest: dict[int, Progress] = {}
    made: dict[int, Generated] = {}
    while len(made) < len(pipes):
        for pipe in wait([p for place, p in enumerate(pipes) if place not in made]):
            place = pipes.index(pipe)
            try:
                told = pipes[place].recv()
            except EOFError:
                raise SpliceError(
                    f"process {place + 1} of {len(pipes)} died; what was finished is safe, and the "
                    "same command goes on"
                ) from None
            if isinstance(told, Exception):
                raise told
            if isinstance(told, Generated):
                made[place] = told
                continue
            latest[place] = told
            if progress is not None:
                progress(_together(list(latest.values())))
    return [made[place] for place in range(len(pipes))]


def _together(parts: Sequence[Progress]) -> Progress:
    return Progress(
        n_done=sum(part.n_done for part in parts),
        n_questions=sum(part.n_questions for part in parts),
        n_failed=sum(part.n_failed for part in parts),
        n_probes=sum(part.n_probes for part in parts),
        n_calls=sum(part.n_calls for part in parts),
        n_tokens=sum(part.n_tokens for part in parts),
        cost=total_cost(part.cost for part in parts),
    )


# --- in each process -------------------------------------------------------------------------


def _work(command: _Command, pool: Pool, part: tuple[int, int], pipe: Connection) -> None:
    """Make this process's part of the pool, and tell of it."""
    pool.part = part
    # The process is ours alone and keeps little: to look through all that lives after each 700 new
    # objects, as Python does by default, takes a quarter of its time.
    gc.freeze()
    gc.set_threshold(*_COLLECT_EVERY)
    try:
        pipe.send(asyncio.run(_generate(command, pool, part, pipe)))
    except KeyboardInterrupt:
        pass
    except Exception as error:
        pipe.send(error if isinstance(error, SpliceError) else SpliceError(repr(error)))


async def _generate(
    command: _Command, pool: Pool, part: tuple[int, int], pipe: Connection
) -> Generated:
    parent = os.getppid()

    def tell(progress: Progress) -> None:
        # Nobody is left who would put the manifest right, and nobody sees what is spent.
        if os.getppid() != parent:
            raise SpliceError("the process that began this is gone")
        pipe.send(progress)

    models = command.make_models()
    try:
        run = Run(
            local_probing(command.workloads, models, pool.manifest, command.settings),
            pool,
            [q for q in command.plan.questions if _owner(pool, q, part[1]) == part[0]],
            command.probe,
            command.settings,
            Budget(),
            tell,
        )
        return await run.finish()
    finally:
        if not isinstance(models, Mapping):
            await models.aclose()


def _owner(pool: Pool, question: Question, n_processes: int) -> int:
    """Which process works on a question: the one that writes to its shard, or any by its id."""
    shard = pool.shard_of(question.base_id)
    return (int(question.base_id[:8], 16) if shard is None else shard) % n_processes
