"""A node's own material: what it emitted, what its tools returned, what only it can read."""

from __future__ import annotations

from typing import Final, NamedTuple

from splice.records import NodeId, NodeRun, Span, Trace
from splice.workflow import Workflow

_FINDING_WORDS: Final = 12


class Piece(NamedTuple):
    """One text of a node's material."""

    origin: str
    """`output`, `tool:i` or `document:i`, as in `Span.origin`."""
    text: str


def material(workflow: Workflow, trace: Trace, node: NodeId) -> tuple[Piece, ...]:
    """Everything that `node` holds, its output first.

    What an abstaining or failed node emitted is a statement about itself, not material.
    """
    run = trace.by_node[node]
    pieces = []
    if run.status == "ok" and run.output is not None:
        pieces.append(Piece("output", run.output))
    pieces += [
        Piece(f"tool:{place}", call.result)
        for place, call in enumerate(run.tool_calls)
        if call.outcome == "ok"
    ]
    pieces += [
        Piece(f"document:{place}", document.text)
        for place, document in enumerate(workflow.private(node, trace.query))
    ]
    return tuple(pieces)


def emitted(run: NodeRun) -> str:
    """What a node said about its task; empty if it abstained, failed or was not called."""
    return run.output or "" if run.status == "ok" else ""


def is_finding(output: str) -> bool:
    """Whether an output is short enough to be one fact, which says what it is only with the task.

    Longer ones are texts to pick sentences from.
    """
    return len(output.split()) <= _FINDING_WORDS


def delivered(run: NodeRun | None) -> str:
    """What a node's run gave its successors to read; of an abstention, the rationale."""
    if run is None:
        return ""
    return run.abstention.rationale if run.abstention is not None else run.output or ""


def told(workflow: Workflow, trace: Trace, node: NodeId) -> str:
    """What `node` was told in this run: question, task and its parents' outputs."""
    run = trace.by_node[node]
    parts = [trace.query.text, workflow.subtask(node, trace.query)]
    parts += [delivered(trace.by_node[parent]) for parent in run.received]
    return "\n".join(parts)


def readable(workflow: Workflow, trace: Trace, node: NodeId) -> str:
    """Everything that `node` could read in this run: what it was told and its own material.

    The set `P` of method 2.7 is made of it.
    """
    run = trace.by_node[node]
    parts = [told(workflow, trace, node)]
    parts += [document.shown for document in workflow.private(node, trace.query)]
    parts += [call.result for call in run.tool_calls]
    return "\n".join(parts)


def holds(workflow: Workflow, trace: Trace, node: NodeId, span: Span) -> bool:
    """Whether `span` stands verbatim where it says, in the material of `node`."""
    for piece in material(workflow, trace, node):
        if piece.origin == span.origin:
            is_inside = span.start < span.end <= len(piece.text)
            return is_inside and piece.text[span.start : span.end] == span.text
    return False
