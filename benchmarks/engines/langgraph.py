"""LangGraph without a checkpointer: all outputs in one state channel, merged by a reducer.

A channel for each node, read through its own input schema, was tried and is no faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from langgraph.graph import END, START, StateGraph

from benchmarks.graphs import Body, Graph, Run

if TYPE_CHECKING:
    from langgraph.checkpoint.base import BaseCheckpointSaver
    from langgraph.graph.state import CompiledStateGraph

NAME = "LangGraph"
DISTRIBUTIONS = ("langgraph",)


def merged(outputs: dict[str, str], more: dict[str, str]) -> dict[str, str]:
    """Both, as a new dictionary."""
    return {**outputs, **more}


class State(TypedDict):
    """What the nodes share."""

    query: str
    outputs: Annotated[dict[str, str], merged]


def compiled(
    graph: Graph, body: Body, saver: BaseCheckpointSaver[Any] | None
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The graph in LangGraph's terms."""
    builder: StateGraph[Any, Any, Any, Any] = StateGraph(State)

    def add(node: str) -> None:
        parents = graph.parents[node]

        async def run_node(state: State) -> dict[str, dict[str, str]]:
            outputs = state["outputs"]
            inputs = [outputs[parent] for parent in parents] if parents else [state["query"]]
            return {"outputs": {node: await body(node, inputs)}}

        builder.add_node(node, run_node)

    for node in graph.nodes:
        add(node)
    for node, parents in graph.parents.items():
        if not parents:
            builder.add_edge(START, node)
        else:
            builder.add_edge(parents[0] if len(parents) == 1 else list(parents), node)
    builder.add_edge(graph.sink, END)
    return builder.compile(checkpointer=saver)


def build(graph: Graph, body: Body) -> Run:
    """Prepare `graph`."""
    application = compiled(graph, body, None)
    config: Any = {"recursion_limit": len(graph.nodes) + 5}

    async def run(query: str) -> str:
        state = await application.ainvoke({"query": query, "outputs": {}}, config)
        answer: str = state["outputs"][graph.sink]
        return answer

    return run
