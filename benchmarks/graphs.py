"""The workloads as plain data, the node body that every engine runs, and the right answers."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

Body: TypeAlias = Callable[[str, Sequence[str]], Coroutine[None, None, str]]
"""`await body(node, inputs)`: what a node does with its parents' outputs, in declared order. A node
without parents is given the query text as its only input."""

Run: TypeAlias = Callable[[str], Awaitable[str | None]]
"""`await run(query)`: one workflow, from the query to the output of its sink."""


@dataclass(frozen=True)
class Graph:
    """A workflow without an engine; nodes stand in an order in which parents come first."""

    name: str
    parents: dict[str, tuple[str, ...]]
    delays_s: dict[str, float] = field(default_factory=dict)
    """Seconds that a node waits, as it would for a model; a node that is not listed does not."""

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """All nodes, parents first."""
        return tuple(self.parents)

    @cached_property
    def sink(self) -> str:
        """The node whose output is the answer."""
        return self.nodes[-1]

    @cached_property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """All edges, source first."""
        return tuple((p, node) for node, parents in self.parents.items() for p in parents)

    @cached_property
    def children(self) -> dict[str, tuple[str, ...]]:
        """Nodes that read a node's output."""
        return {
            node: tuple(child for child in self.nodes if node in self.parents[child])
            for node in self.nodes
        }

    @cached_property
    def levels(self) -> dict[str, int]:
        """Length of the longest path that ends in a node, in edges."""
        levels: dict[str, int] = {}
        for node, parents in self.parents.items():
            levels[node] = 1 + max((levels[p] for p in parents), default=-1)
        return levels

    @cached_property
    def critical_path_s(self) -> float:
        """Seconds that the slowest path waits: no engine can be faster."""
        ends: dict[str, float] = {}
        for node, parents in self.parents.items():
            start = max((ends[p] for p in parents), default=0.0)
            ends[node] = start + self.delays_s.get(node, 0.0)
        return max(ends.values())


def chain(length: int) -> Graph:
    """Nodes in a row."""
    names = [f"n{i}" for i in range(length)]
    parents = {name: tuple(names[max(0, i - 1) : i]) for i, name in enumerate(names)}
    return Graph(f"chain of {length}", parents)


def layered(widths: Sequence[int], *, name: str | None = None, delay_s: float = 0.0) -> Graph:
    """Layers of the given widths; each node reads the whole layer before it."""
    parents: dict[str, tuple[str, ...]] = {}
    above: tuple[str, ...] = ()
    for depth, width in enumerate(widths):
        layer = tuple(f"n{depth}_{i}" for i in range(width))
        parents |= dict.fromkeys(layer, above)
        above = layer
    label = name or f"layered {'-'.join(map(str, widths))}"
    return Graph(label, parents, dict.fromkeys(parents, delay_s) if delay_s else {})


def fan(width: int) -> Graph:
    """One node, then `width` side by side, then one that reads them all."""
    return layered((1, width, 1), name=f"fan 1-{width}-1")


def random_dag(size: int, seed: int, *, most_parents: int = 3) -> Graph:
    """A random graph with one root; its last node reads all that nobody else reads.

    Args:
        size: number of nodes, at least 2.
        seed: the same seed gives the same graph.
        most_parents: most parents of a node other than the last.
    """
    rng = random.Random(seed)
    names = [f"n{i}" for i in range(size - 1)]
    parents: dict[str, tuple[str, ...]] = {names[0]: ()}
    for i, name in enumerate(names[1:], start=1):
        chosen = rng.sample(range(i), min(i, rng.randint(1, most_parents)))
        parents[name] = tuple(names[j] for j in sorted(chosen))
    read = {p for sources in parents.values() for p in sources}
    parents["sink"] = tuple(name for name in names if name not in read)
    return Graph(f"random DAG of {size}", parents)


def skewed() -> Graph:
    """Two branches of unlike pace: an engine that waits for a whole level takes twice as long.

    Both hang from one node: Haystack runs entry components that wait on nothing but the caller as
    if they were one level, and that is not what is measured here.
    """
    return Graph(
        "skewed",
        {"start": (), "a": ("start",), "b": ("start",), "c": ("b",), "sink": ("a", "c")},
        {"start": 0.0, "a": 0.100, "b": 0.005, "c": 0.100, "sink": 0.001},
    )


def mix(node: str, inputs: Sequence[str]) -> str:
    """A short text that differs if the node, an input or their order does."""
    return str(zlib.crc32("|".join((node, *inputs)).encode()))


def body_of(graph: Graph) -> Body:
    """The node body of `graph`: wait as long as the node does, then mix the inputs."""
    if not graph.delays_s:

        async def at_once(node: str, inputs: Sequence[str]) -> str:
            return mix(node, inputs)

        return at_once

    async def later(node: str, inputs: Sequence[str]) -> str:
        await asyncio.sleep(graph.delays_s[node])
        return mix(node, inputs)

    return later


def answer_to(graph: Graph, query: str) -> str:
    """The right answer, computed without any engine."""
    outputs: dict[str, str] = {}
    for node, parents in graph.parents.items():
        outputs[node] = mix(node, [outputs[p] for p in parents] if parents else [query])
    return outputs[graph.sink]
