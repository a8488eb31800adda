"""How many nodes a trial executes, checked against running everything.

Each of many random workflows gets a message over a random edge that it does not have. A node must
run again if and only if it received the message or a parent's output is not what it was. What that
is comes from a plain evaluation of the whole workflow, with and without the message, that shares no
code with the engine. Half of the nodes pass every change on; the others pass on one bit of it or
nothing, as agents do whose answer stays the same.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import splice
from benchmarks.graphs import Graph, random_dag
from splice.executor import execute
from splice.models.scripted import ScriptedModel
from splice.records import MessageLine, SpliceMessage
from splice.trial import run_trial
from splice.workflow import Function, Workflow

_QUERY = "query"
_MESSAGE = "what the source found"


class WrongTrial(Exception):
    """Raised if a trial and running everything differ."""


@dataclass(frozen=True)
class World:
    """A workflow whose nodes pass on all, a little or nothing of what they read."""

    graph: Graph
    masks: dict[str, int]

    def output(self, node: str, inputs: Sequence[str]) -> str:
        """What `node` makes of its inputs."""
        return str(zlib.crc32("|".join((node, *inputs)).encode()) & self.masks[node])

    def outputs(self, receiver: str | None = None) -> dict[str, str]:
        """All outputs, by running everything; `receiver` reads the message too."""
        found: dict[str, str] = {}
        for node, parents in self.graph.parents.items():
            inputs = [found[parent] for parent in parents] or [_QUERY]
            found[node] = self.output(node, [*inputs, _MESSAGE] if node == receiver else inputs)
        return found

    def expected(self, receiver: str) -> tuple[set[str], dict[str, str]]:
        """Nodes whose input the message to `receiver` changes, and all outputs with it."""
        before, after = self.outputs(), self.outputs(receiver)
        needed = {
            node
            for node, parents in self.graph.parents.items()
            if node == receiver or any(before[parent] != after[parent] for parent in parents)
        }
        return needed, after


def random_world(seed: int) -> World:
    """A world of 4 to 30 nodes."""
    rng = random.Random(seed)
    graph = random_dag(rng.randint(4, 30), seed)
    masks = {node: rng.choice((-1, -1, -1, 1, 1, 0)) for node in graph.nodes}
    return World(graph, masks)


def descendants(graph: Graph, node: str) -> set[str]:
    """Everything that `node` reaches."""
    found: set[str] = set()
    for name, parents in graph.parents.items():
        if any(parent == node or parent in found for parent in parents):
            found.add(name)
    return found


def workflow_of(world: World, executed: list[str]) -> Workflow:
    """The world as a workflow that writes down which nodes are called."""

    def function(node: str) -> Function:
        async def call(given: splice.NodeInput) -> str:
            executed.append(node)
            inputs = list(given.parents.values()) or [given.query.text]
            return world.output(node, [*inputs, given.message.text] if given.message else inputs)

        return Function(id=node, call=call)

    nodes = tuple(function(node) for node in world.graph.nodes)
    return Workflow(name="world", nodes=nodes, edges=world.graph.edges, output=world.graph.sink)


def random_edge(workflow: Workflow, rng: random.Random) -> tuple[str, str] | None:
    """An edge that the workflow lacks and that goes forward in its canonical order; None: none.

    The receiver is drawn first, so that late nodes, which have more possible sources, are not drawn
    more often than early ones.
    """
    order, parents = workflow.plan.order, workflow.plan.parents
    sources = {
        receiver: [source for source in order[:place] if source not in parents[receiver]]
        for place, receiver in enumerate(order)
    }
    receivers = [receiver for receiver, possible in sources.items() if possible]
    if not receivers:
        return None
    receiver = rng.choice(receivers)
    return rng.choice(sources[receiver]), receiver


async def try_one(seed: int) -> Counter[str] | None:
    """One trial: nodes executed, by way of re-running; None if no edge can be added.

    Raises:
        WrongTrial: the trial ran other nodes, or gave other outputs, than running everything says.
    """
    world = random_world(seed)
    graph = world.graph
    executed: list[str] = []
    workflow = workflow_of(world, executed)
    if (edge := random_edge(workflow, random.Random(f"edge {seed}"))) is None:
        return None
    source, receiver = edge
    base = await execute(workflow, splice.Query(text=_QUERY), ScriptedModel({}))
    executed.clear()
    key = MessageLine(text=_MESSAGE, spans=())
    message = SpliceMessage(source=source, receiver=receiver, key=key, writer="extractive")
    trial = await run_trial(workflow, base, message, ScriptedModel({}))

    needed, after = world.expected(receiver)
    _check(seed, "executed", sorted(executed), sorted(needed))
    _check(seed, "receipt", sorted(trial.rerun), sorted(needed))
    _check(seed, "outputs", {run.node: run.output for run in trial.trace.node_runs}, after)
    order, level = workflow.plan.order, graph.levels[receiver]
    return Counter(
        needed=len(needed),
        splice=len(executed),
        descendants=1 + len(descendants(graph, receiver)),
        supersteps=sum(graph.levels[node] >= level for node in graph.nodes),
        position=len(order) - order.index(receiver),
        everything=len(graph.nodes),
    )


def _check(seed: int, what: str, found: object, right: object) -> None:
    if found != right:
        raise WrongTrial(f"world {seed}: {what} {found}; running everything says {right}")


async def measure_trials(n_trials: int) -> dict[str, Any]:
    """Nodes executed over `n_trials` random workflows, by way of re-running.

    Raises:
        WrongTrial: one of them executed a node too many or too few.
    """
    totals: Counter[str] = Counter()
    n_done, seed = 0, 0
    while n_done < n_trials:
        counts = await try_one(seed)
        seed += 1
        if counts is not None:
            totals += counts
            n_done += 1
    return {"n_trials": n_done, "nodes": dict(totals)}
