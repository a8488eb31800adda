"""LangGraph with its in-memory checkpointer: a thread of its own for each run."""

from __future__ import annotations

from itertools import count
from typing import Any

from langgraph.checkpoint.memory import InMemorySaver

from benchmarks.engines.langgraph import compiled
from benchmarks.graphs import Body, Graph, Run

NAME = "LangGraph, in-memory checkpointer"
DISTRIBUTIONS = ("langgraph", "langgraph-checkpoint")


def build(graph: Graph, body: Body) -> Run:
    """Prepare `graph`."""
    application = compiled(graph, body, InMemorySaver())
    threads = count()

    async def run(query: str) -> str:
        config: Any = {
            "recursion_limit": len(graph.nodes) + 5,
            "configurable": {"thread_id": str(next(threads))},
        }
        state = await application.ainvoke({"query": query, "outputs": {}}, config)
        answer: str = state["outputs"][graph.sink]
        return answer

    return run
