"""Haystack: a pipeline of components with typed sockets, run asynchronously."""

from __future__ import annotations

import os

# Read when the package is imported; a benchmark must not report itself to anyone.
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

from haystack import Pipeline, component

from benchmarks.graphs import Body, Graph, Run

NAME = "Haystack"
DISTRIBUTIONS = ("haystack-ai",)


@component
class Node:
    """A component that reads one socket for each parent."""

    def __init__(self, name: str, parents: tuple[str, ...], body: Body) -> None:
        """Open the sockets."""
        self._name = name
        self._sockets = parents or ("query",)
        self._body = body
        component.set_input_types(self, **dict.fromkeys(self._sockets, str))

    @component.output_types(output=str)
    def run(self, **inputs: str) -> dict[str, str]:
        """Not used: the pipeline is run asynchronously."""
        raise NotImplementedError

    @component.output_types(output=str)
    async def run_async(self, **inputs: str) -> dict[str, str]:
        """Run the body on the sockets in declared order."""
        return {"output": await self._body(self._name, [inputs[name] for name in self._sockets])}


def build(graph: Graph, body: Body) -> Run:
    """Prepare `graph`."""
    pipeline = Pipeline()
    for node, parents in graph.parents.items():
        pipeline.add_component(node, Node(node, parents, body))
    for source, receiver in graph.edges:
        pipeline.connect(f"{source}.output", f"{receiver}.{source}")
    roots = [node for node, parents in graph.parents.items() if not parents]

    async def run(query: str) -> str:
        outputs = await pipeline.run_async(
            {root: {"query": query} for root in roots}, concurrency_limit=len(graph.nodes)
        )
        answer: str = outputs[graph.sink]["output"]
        return answer

    return run
