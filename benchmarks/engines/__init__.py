"""One small module for each engine, all of the same shape.

An engine module has a `NAME` for the table, the `DISTRIBUTIONS` whose versions are printed, and
`build(graph, body)`, which prepares a graph once and returns the coroutine function that runs it.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple, Protocol, cast

from benchmarks.graphs import Body, Graph, Run


class Engine(Protocol):
    """What an engine module offers."""

    NAME: str
    DISTRIBUTIONS: tuple[str, ...]

    def build(self, graph: Graph, body: Body) -> Run:
        """Prepare `graph`; what this costs is not measured."""
        ...


class Engines(NamedTuple):
    """Engines that can be measured here, and those that can't."""

    present: tuple[Engine, ...]
    left_out: tuple[str, ...]
    """Module names of engines whose package is not installed."""


_PACKAGES = {
    "bare": "asyncio",
    "bare_wait": "asyncio",
    "splice": "splice",
    "langgraph": "langgraph",
    "langgraph_saver": "langgraph",
    "haystack": "haystack",
    "pydantic_graph": "pydantic_graph",
}
"""The package that each engine module needs, in the order of the table."""


def installed() -> Engines:
    """Import every engine whose package is installed."""
    present = [name for name, package in _PACKAGES.items() if find_spec(package)]
    left_out = tuple(name for name in _PACKAGES if name not in present)
    modules = [import_module(f"benchmarks.engines.{name}") for name in present]
    return Engines(tuple(cast(Engine, module) for module in modules), left_out)
