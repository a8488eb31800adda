"""SPLICE, with the full trace of every run in memory."""

from __future__ import annotations

import splice
from benchmarks.graphs import Body, Graph, Run
from splice.models.scripted import ScriptedModel
from splice.workflow import Function, Workflow

NAME = "SPLICE"
DISTRIBUTIONS = ("splice-repair",)


def workflow_of(graph: Graph, body: Body) -> Workflow:
    """The graph as a workflow of functions."""

    def function(node: str) -> Function:
        async def call(given: splice.NodeInput) -> str:
            return await body(node, list(given.parents.values()) or [given.query.text])

        return Function(id=node, call=call)

    nodes = tuple(function(node) for node in graph.nodes)
    return Workflow(name="benchmark", nodes=nodes, edges=graph.edges, output=graph.sink)


def build(graph: Graph, body: Body) -> Run:
    """Prepare `graph`."""
    workflow = workflow_of(graph, body)
    model = ScriptedModel({})

    async def run(query: str) -> str | None:
        trace = await splice.arun(workflow, splice.Query(text=query), model=model)
        return trace.answer

    return run
