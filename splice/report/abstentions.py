"""How often each node abstained, and where it may have done so too often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from splice.records import AbstentionCategory, NodeId, Record, Trace
from splice.report.display import aligned, counted, shortened

_MOST_NODES: Final = 15
"""Nodes in a table, those that abstained most often."""

_NAMES: Final[Mapping[AbstentionCategory, str]] = {
    "Ambiguous Query": "ambiguous",
    "Insufficient Input": "input",
    "Missing Capability": "capability",
    "Misrouting": "misrouted",
}


class NodeAbstentions(Record):
    """Abstentions of one node over several runs."""

    node: NodeId
    n_runs: int
    """Runs in which the node was called."""
    n_abstained: int
    by_category: Mapping[AbstentionCategory, int]
    """How many are of each category that occurs."""
    n_right: int | None
    """Abstentions in runs whose answer was right all the same: each is a doubtful one. None: it is
    not known of every run in which it abstained whether the answer was right."""


def abstentions_by_node(
    runs: Iterable[tuple[Trace, bool | None]],
) -> tuple[NodeAbstentions, ...]:
    """The nodes that abstained, in the order in which the runs bring them.

    Args:
        runs: each with whether its answer is right; None: that is not known.
    """
    called: Counter[NodeId] = Counter()
    found: dict[NodeId, list[tuple[AbstentionCategory, bool | None]]] = {}
    for trace, is_right in runs:
        for run in trace.node_runs:
            called[run.node] += run.status != "skipped"
            if run.abstention is not None:
                found.setdefault(run.node, []).append((run.abstention.category, is_right))
    return tuple(
        NodeAbstentions(
            node=node,
            n_runs=called[node],
            n_abstained=len(own),
            by_category=Counter(category for category, _ in own),
            n_right=_n_right([is_right for _, is_right in own]),
        )
        for node, own in found.items()
    )


def _n_right(known: Sequence[bool | None]) -> int | None:
    return None if None in known else sum(bool(is_right) for is_right in known)


def abstention_table(nodes: Sequence[NodeAbstentions]) -> list[str]:
    """The nodes that abstained as aligned lines, and what the last column says; else nothing."""
    if not nodes:
        return []
    shown = sorted(nodes, key=lambda each: -each.n_abstained)[:_MOST_NODES]
    rows = [
        (
            shortened(each.node, 24),
            f"{each.n_runs}",
            f"{each.n_abstained}",
            *(f"{each.by_category.get(category, 0)}" for category in _NAMES),
            "-" if each.n_right is None else f"{each.n_right}",
        )
        for each in shown
    ]
    lines = aligned([("node", "runs", "abstained", *_NAMES.values(), "right"), *rows])
    n_left_out = len(nodes) - len(shown)
    if n_left_out:
        lines.append(f"and {counted(n_left_out, 'node')} more that abstained less often")
    if any(each.n_right is not None for each in shown):
        lines.append("right: the answer was right all the same, so abstaining may not have been")
    return lines
