"""Microseconds for a node with nothing to do; wall time over critical path where nodes wait.

All engines take turns within each round, in one process, so that a busy moment of the machine hits
all of them; the median over all runs is reported. Garbage collection stays on, but what imports and
warm-up left behind is frozen, so that no engine pays for another one's modules.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from benchmarks.engines import Engine
from benchmarks.graphs import (
    Graph,
    Run,
    answer_to,
    body_of,
    chain,
    fan,
    layered,
    random_dag,
    skewed,
)

OVERHEAD = (chain(20), fan(8), layered((1, 3, 4, 3, 1)), random_dag(200, seed=7))
"""Nodes that return at once: all the time that passes is the engine's."""

SKEWED = skewed()

LATENCY = layered((1, 3, 4, 3, 1), delay_s=0.050)
"""12 nodes of 50 ms in five layers: 250 ms on the critical path."""

CROWD = 100
"""Workflows at once."""

IN_A_ROW = 5
"""Runs of one engine before the next has its turn. One alone would mostly measure how much of the
processor's caches the engine before it has taken."""

Values: TypeAlias = dict[str, Any]
"""By engine: a number, or `{"refused": reason}`."""


class Workload:
    """One graph, prepared for every engine that gives the right answer on it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.runs: dict[str, Run] = {}
        self.seconds: dict[str, list[float]] = {}
        self._refused: Values = {}

    async def admit(self, engine: Engine) -> None:
        """Prepare the graph for `engine` and let it answer twice, which also warms it up."""
        try:
            run = engine.build(self.graph, body_of(self.graph))
            for query in ("first", "second"):
                self.check(engine.NAME, query, await run(query))
        except Exception as error:
            self._refused[engine.NAME] = {"refused": f"{type(error).__name__}: {error}"}
        else:
            self.runs[engine.NAME] = run
            self.seconds[engine.NAME] = []

    def check(self, name: str, query: str, answer: str | None) -> None:
        """Refuse an answer that is not the right one.

        Raises:
            ValueError: an edge did not carry what it should, or a query got another one's answer.
        """
        if answer != answer_to(self.graph, query):
            raise ValueError(f"{name}, {self.graph.name}: answer {answer!r} to {query!r} is wrong")

    async def measure(self, rounds: int, *, in_a_row: int = 1) -> None:
        """Time every engine in turn."""
        for turn in range(rounds):
            for name, run in self.runs.items():
                for place in range(in_a_row):
                    query = f"query {turn}.{place}"
                    start = time.perf_counter()
                    answer = await run(query)
                    self.seconds[name].append(time.perf_counter() - start)
                    self.check(name, query, answer)

    def medians(self, unit_s: float) -> Values:
        """Median time by engine in units of `unit_s` seconds."""
        found = {name: statistics.median(all_s) / unit_s for name, all_s in self.seconds.items()}
        return found | self._refused


async def prepare(graph: Graph, engines: Sequence[Engine]) -> Workload:
    """Prepare `graph` for every engine."""
    workload = Workload(graph)
    for engine in engines:
        await workload.admit(engine)
    return workload


@contextmanager
def settled() -> Iterator[None]:
    """Take what was allocated so far out of the garbage collector's sight."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def overhead(
    engines: Sequence[Engine], rounds: int, graphs: Sequence[Graph] = OVERHEAD
) -> dict[str, Values]:
    """Microseconds a node, by graph and engine, where nodes return at once."""
    workloads = [await prepare(graph, engines) for graph in graphs]
    with settled():
        for _ in range(rounds):
            for workload in workloads:
                await workload.measure(1, in_a_row=IN_A_ROW)
    return {w.graph.name: w.medians(1e-6 * len(w.graph.nodes)) for w in workloads}


async def barrier(engines: Sequence[Engine], rounds: int, graph: Graph = SKEWED) -> Values:
    """Wall time over critical path, by engine, where two branches differ in pace."""
    workload = await prepare(graph, engines)
    with settled():
        await workload.measure(rounds)
    return workload.medians(graph.critical_path_s)


async def crowd(
    engines: Sequence[Engine], rounds: int, graph: Graph = LATENCY, size: int = CROWD
) -> dict[str, Values]:
    """Many workflows at once: wall time over critical path, and CPU microseconds a node."""
    workload = await prepare(graph, engines)
    cpu_s: dict[str, list[float]] = {name: [] for name in workload.runs}
    with settled():
        for turn in range(rounds):
            queries = [f"query {turn}.{place}" for place in range(size)]
            for name, run in workload.runs.items():
                start, cpu_start = time.perf_counter(), time.process_time()
                answers = await asyncio.gather(*(run(query) for query in queries))
                cpu_s[name].append(time.process_time() - cpu_start)
                workload.seconds[name].append(time.perf_counter() - start)
                for query, answer in zip(queries, answers, strict=True):
                    workload.check(name, query, answer)
    n_nodes = size * len(graph.nodes)
    cpu_us = {name: statistics.median(all_s) / n_nodes * 1e6 for name, all_s in cpu_s.items()}
    return {"wall": workload.medians(graph.critical_path_s), "cpu_us": cpu_us}


async def measure_speed(engines: Sequence[Engine], rounds: int) -> dict[str, Any]:
    """Everything in this module; workloads that wait are measured in fewer rounds."""
    few = max(3, rounds // 4)
    return {
        "rounds": rounds,
        "overhead_us": await overhead(engines, rounds),
        "barrier": await barrier(engines, few),
        "crowd": await crowd(engines, few),
    }
