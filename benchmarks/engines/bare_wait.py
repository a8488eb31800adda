"""asyncio alone, the usual way: a loop that waits for the first node to end."""

from __future__ import annotations

import asyncio

from benchmarks.graphs import Body, Graph, Run

NAME = "bare asyncio, wait loop"
DISTRIBUTIONS: tuple[str, ...] = ()


def build(graph: Graph, body: Body) -> Run:
    """Prepare `graph`."""
    roots = [node for node in graph.nodes if not graph.parents[node]]
    n_parents = {node: len(parents) for node, parents in graph.parents.items()}

    async def run(query: str) -> str:
        outputs: dict[str, str] = {}
        waiting = dict(n_parents)
        running: dict[asyncio.Task[str], str] = {}

        def start(node: str) -> None:
            parents = graph.parents[node]
            inputs = [outputs[parent] for parent in parents] if parents else [query]
            running[asyncio.create_task(body(node, inputs))] = node

        for root in roots:
            start(root)
        while running:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                node = running.pop(task)
                outputs[node] = task.result()
                for child in graph.children[node]:
                    waiting[child] -= 1
                    if not waiting[child]:
                        start(child)
        return outputs[graph.sink]

    return run
