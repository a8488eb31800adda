"""pydantic-graph's builder: a step for each node, a join before each node with several parents."""

from __future__ import annotations

from typing import Any

from pydantic_graph import GraphBuilder, reduce_dict_update

from benchmarks.graphs import Body, Graph, Run

NAME = "pydantic-graph"
DISTRIBUTIONS = ("pydantic-graph",)


def build(graph: Graph, body: Body) -> Run:
    """Prepare `graph`."""
    builder: Any = GraphBuilder(input_type=str, output_type=dict[str, str])

    def step_for(node: str) -> Any:
        parents = graph.parents[node]

        async def run_node(context: Any) -> dict[str, str]:
            values = context.inputs
            inputs = [values[parent] for parent in parents] if parents else [values]
            return {node: await body(node, inputs)}

        return builder.step(run_node, node_id=node)

    steps = {node: step_for(node) for node in graph.nodes}
    # Outputs arrive at a join in any order, so each travels under its node's name.
    joins = {
        node: builder.join(reduce_dict_update, initial_factory=dict, node_id=f"join_{node}")
        for node, parents in graph.parents.items()
        if len(parents) > 1
    }
    roots = [steps[node] for node, parents in graph.parents.items() if not parents]
    builder.add(builder.edge_from(builder.start_node).to(*roots))
    for node, children in graph.children.items():
        if children:
            targets = [joins.get(child, steps[child]) for child in children]
            builder.add(builder.edge_from(steps[node]).to(*targets))
    for node, join in joins.items():
        builder.add(builder.edge_from(join).to(steps[node]))
    builder.add(builder.edge_from(steps[graph.sink]).to(builder.end_node))
    application = builder.build()

    async def run(query: str) -> str:
        outputs: dict[str, str] = await application.run(inputs=query)
        return outputs[graph.sink]

    return run
