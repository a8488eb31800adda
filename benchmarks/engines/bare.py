"""asyncio alone, the faster way: each node starts those that it has made ready."""

from __future__ import annotations

from asyncio import TaskGroup

from benchmarks.graphs import Body, Graph, Run

NAME = "bare asyncio, task group"
DISTRIBUTIONS: tuple[str, ...] = ()


def build(graph: Graph, body: Body) -> Run:
    """Prepare `graph`."""
    roots = [node for node in graph.nodes if not graph.parents[node]]
    n_parents = {node: len(parents) for node, parents in graph.parents.items()}

    async def run(query: str) -> str:
        outputs: dict[str, str] = {}
        waiting = dict(n_parents)

        async def run_node(node: str) -> None:
            parents = graph.parents[node]
            inputs = [outputs[parent] for parent in parents] if parents else [query]
            outputs[node] = await body(node, inputs)
            for child in graph.children[node]:
                waiting[child] -= 1
                if not waiting[child]:
                    tasks.create_task(run_node(child))

        async with TaskGroup() as tasks:
            for root in roots:
                tasks.create_task(run_node(root))
        return outputs[graph.sink]

    return run
