"""The workflow of a result as a drawing: boxes, arrows and the added edge."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from splice.records import (
    Edge,
    NodeId,
    NodeRun,
    RepairResult,
)
from splice.report.display import depth_by_node, joined, n_cells, shortened, wrap

if TYPE_CHECKING:
    pass

_BOX_HEIGHT = 46
_PASSING_HEIGHT = 14
"""Room that an edge takes in a column it only passes."""
_ROW_GAP = 18
_COLUMN_GAP = 58
_TOP = 14
_SIDE = 40
_MIN_WIDTH = 520
_NAME_CELLS = 22
_NAME_CELL = 7.3
"""Width of a column of monospaced text at 12 px."""
_TEXT_CELL = 6.6
"""Width of a column of proportional text at 12 px, on the safe side."""
_TEXT_LINE = 16
_LABEL_WIDTH = 460
_LABEL_LINES = 3


class _Slot(NamedTuple):
    """A place in a column: a node (both ends the same) or an edge that passes by."""

    source: NodeId
    receiver: NodeId
    column: int

    @property
    def height(self) -> int:
        return _BOX_HEIGHT if self.source == self.receiver else _PASSING_HEIGHT


class _Place(NamedTuple):
    """Where a slot stands, in pixels."""

    left: float
    right: float
    middle: float


class _Box(NamedTuple):
    """A node as drawn."""

    node: NodeId
    name: str
    state: str
    status: str
    """What the mark shows: the status in the trial if that isn't `ok`, else the one in the run."""
    is_rerun: bool
    left: float
    top: float
    width: float


class _Arrow(NamedTuple):
    path: str
    is_changed: bool
    """Whether its source ran again."""


class _Label(NamedTuple):
    """The message on the added edge."""

    lines: list[str]
    left: float
    top: float
    width: float
    height: float


class _Drawing(NamedTuple):
    width: float
    height: float
    boxes: list[_Box]
    arrows: list[_Arrow]
    added: str | None
    """Path of the added edge."""
    label: _Label | None
    description: str


def draw(result: RepairResult) -> _Drawing:
    """The workflow of a result, laid out in generations from left to right."""
    nodes = tuple(run.node for run in result.base.node_runs)
    chains = _chains(nodes, _forward(nodes, result.edges))
    columns = _columns(nodes, chains)
    places, width = _places(columns)
    bottom = max(places[slot].middle + slot.height / 2 for slot in places)
    rerun = () if result.trial is None else result.trial.rerun
    at = {slot.source: place for slot, place in places.items() if slot[0] == slot[1]}
    added, label, height = None, None, bottom
    if result.edge is not None and {result.edge.edge.source, result.edge.edge.receiver} <= {*at}:
        turns = at[result.edge.edge.source].right + 16, at[result.edge.edge.receiver].left - 22
        label = _label(result, turns, bottom + 22, width)
        height = label.top + label.height
        lane = label.top + label.height / 2
        added = _added_path(at[result.edge.edge.source], at[result.edge.edge.receiver], turns, lane)
    return _Drawing(
        width=width,
        height=height + _TOP,
        boxes=[_box(result, node, at[node]) for node in nodes],
        arrows=[
            _Arrow(_arrow_path([places[slot] for slot in chain]), chain[0].source in rerun)
            for chain in chains
        ],
        added=added,
        label=label,
        description=_description(result),
    )


def _forward(nodes: Sequence[NodeId], edges: Sequence[Edge]) -> list[Edge]:
    """Edges between known nodes, in canonical order; a trace from a file may hold others."""
    order = {node: index for index, node in enumerate(nodes)}
    return [
        (source, receiver)
        for source, receiver in edges
        if source in order and order[source] < order[receiver]
    ]


def _chains(nodes: Sequence[NodeId], edges: Sequence[Edge]) -> list[list[_Slot]]:
    """Each edge as the slots that it passes, one for each column."""
    depths = depth_by_node(nodes, edges)
    return [
        [
            _Slot(source, source, depths[source]),
            *(_Slot(source, receiver, k) for k in range(depths[source] + 1, depths[receiver])),
            _Slot(receiver, receiver, depths[receiver]),
        ]
        for source, receiver in edges
    ]


def _columns(nodes: Sequence[NodeId], chains: Sequence[Sequence[_Slot]]) -> list[list[_Slot]]:
    """Slots by column, ordered so that edges cross less (barycentre heuristic)."""
    depths = depth_by_node(nodes, [(chain[0].source, chain[-1].receiver) for chain in chains])
    slots = [_Slot(node, node, depths[node]) for node in nodes]
    slots += [slot for chain in chains for slot in chain[1:-1]]
    columns: list[list[_Slot]] = [[] for _ in range(max(depths.values()) + 1)]
    for slot in slots:
        columns[slot.column].append(slot)
    before: dict[_Slot, list[_Slot]] = {slot: [] for slot in slots}
    after: dict[_Slot, list[_Slot]] = {slot: [] for slot in slots}
    for chain in chains:
        for slot, following in itertools.pairwise(chain):
            before[following].append(slot)
            after[slot].append(following)
    for _ in range(3):
        _sort(columns, before)
        _sort(columns[::-1], after)
    return columns


def _sort(columns: Sequence[list[_Slot]], neighbours: Mapping[_Slot, Sequence[_Slot]]) -> None:
    """Sort each column by the mean rank of its slots' neighbours in the column before."""
    ranks: dict[_Slot, float] = {}
    for column in columns:
        wanted = _ranks(column)
        for slot in column:
            if near := neighbours[slot]:
                wanted[slot] = sum(ranks[n] for n in near) / len(near)
        column.sort(key=wanted.__getitem__)
        ranks |= _ranks(column)


def _ranks(column: Sequence[_Slot]) -> dict[_Slot, float]:
    """Place of each slot in its column, counted from the middle."""
    return {slot: index - (len(column) - 1) / 2 for index, slot in enumerate(column)}


def _places(columns: Sequence[Sequence[_Slot]]) -> tuple[dict[_Slot, _Place], float]:
    """Where each slot stands, and the width of the whole."""
    widths = [max(_slot_width(slot) for slot in column) for column in columns]
    heights = [
        sum(slot.height for slot in column) + _ROW_GAP * (len(column) - 1) for column in columns
    ]
    inner = sum(widths) + _COLUMN_GAP * (len(columns) - 1)
    width = max(inner + 2 * _SIDE, _MIN_WIDTH)
    places: dict[_Slot, _Place] = {}
    left = (width - inner) / 2
    for column, column_width, height in zip(columns, widths, heights, strict=True):
        top = _TOP + (max(heights) - height) / 2
        for slot in column:
            places[slot] = _Place(left, left + column_width, top + slot.height / 2)
            top += slot.height + _ROW_GAP
        left += column_width + _COLUMN_GAP
    return places, width


def _slot_width(slot: _Slot) -> float:
    """Width of a box: room for its name, its state and its mark."""
    return max(152.0, 46 + _NAME_CELL * n_cells(shortened(slot.source, _NAME_CELLS)))


def _box(result: RepairResult, node: NodeId, place: _Place) -> _Box:
    run = result.base.by_node[node]
    after = None
    if result.trial is not None and node in result.trial.rerun:
        after = result.trial.trace.by_node.get(node)
    return _Box(
        node=node,
        name=shortened(node, _NAME_CELLS),
        state=_state(run, after, has_trial=result.trial is not None),
        status=run.status if after is None or after.status == "ok" else after.status,
        is_rerun=after is not None,
        left=place.left,
        top=place.middle - _BOX_HEIGHT / 2,
        width=place.right - place.left,
    )


def _state(run: NodeRun, after: NodeRun | None, *, has_trial: bool) -> str:
    if after is None:
        if run.status != "ok":
            return run.status
        return "reused" if has_trial else "ran"
    if run.status != after.status:
        return f"{run.status}, then {after.status}"
    return "re-run" if run.status == "ok" else f"{run.status} again"


def _arrow_path(places: Sequence[_Place]) -> str:
    """An edge from the right of its source through the columns between to the receiver's left."""
    path = f"M{places[0].right:.1f} {places[0].middle:.1f}"
    for start, end in itertools.pairwise(places):
        is_last = end is places[-1]
        x = end.left - 3 if is_last else end.left
        bend = (start.right + x) / 2
        path += (
            f"C{bend:.1f} {start.middle:.1f} {bend:.1f} {end.middle:.1f} {x:.1f} {end.middle:.1f}"
        )
        if not is_last:
            path += f"H{end.right:.1f}"
    return path


def _label(result: RepairResult, turns: tuple[float, float], top: float, width: float) -> _Label:
    """The box with the message, below the lowest row and between the turns of the added edge."""
    text = "nothing was delivered" if result.message is None else result.message.key.text
    columns = int(min(width - 60, _LABEL_WIDTH) / _TEXT_CELL)
    lines = wrap(shortened(text, columns * _LABEL_LINES - columns // 2), columns)
    box_width = _TEXT_CELL * max(map(n_cells, lines)) + 28
    left = min(max((sum(turns) - box_width) / 2, 12), width - box_width - 12)
    return _Label(lines, left, top, box_width, _TEXT_LINE * len(lines) + 14)


def _added_path(source: _Place, receiver: _Place, turns: tuple[float, float], lane: float) -> str:
    """The added edge: down in the gap behind its source, below all rows, up before its receiver."""
    leave, arrive = turns
    # Off the middle, where the edges of the workflow leave and arrive.
    start, end = source.middle + 12, receiver.middle + 12
    turn = 8 if arrive > leave else -8
    return (
        f"M{source.right:.1f} {start:.1f}H{leave - 8:.1f}"
        f"Q{leave:.1f} {start:.1f} {leave:.1f} {start + 8:.1f}V{lane - 8:.1f}"
        f"Q{leave:.1f} {lane:.1f} {leave + turn:.1f} {lane:.1f}H{arrive - turn:.1f}"
        f"Q{arrive:.1f} {lane:.1f} {arrive:.1f} {lane - 8:.1f}V{end + 8:.1f}"
        f"Q{arrive:.1f} {end:.1f} {arrive + 8:.1f} {end:.1f}H{receiver.left - 3:.1f}"
    )


def _description(result: RepairResult) -> str:
    """The drawing in words, for those who can't see it."""
    parts = [f"{source} feeds {receiver}" for source, receiver in result.edges]
    if result.edge is not None:
        parts.append(f"added edge: {result.edge.edge.source} to {result.edge.edge.receiver}")
    if result.trial is not None:
        parts.append(f"ran again: {joined(result.trial.rerun)}")
    parts += [f"{run.node} {run.status}" for run in result.base.node_runs if run.status != "ok"]
    return "; ".join(parts)
