"""A diagnosis as a page of text: room for improvement, missing edges, and what speaks for them."""

from __future__ import annotations

from collections.abc import Sequence

from splice.learned import Contribution, EdgeExplanation, Explanation
from splice.records import EdgeScore, Trace
from splice.report.display import (
    LABEL,
    WIDTH,
    counted,
    in_quotes,
    joined,
    labelled,
    shortened,
    wrap,
)
from splice.report.facts import base_lines, gap_line, note_lines

_MOST_CONTRIBUTIONS = 4
"""Contributions that are shown; what comes after them moved little."""


_LEAST_SHOWN = 0.01
"""Log-odds below which a contribution is not worth a word."""


def explanation_text(trace: Trace, explanation: Explanation, *, n_edges: int) -> str:
    """A diagnosis as plain text, at most 100 columns wide.

    Args:
        trace: the base run.
        explanation: of this run.
        n_edges: edges to show; the rest is counted.
    """
    diagnosis = explanation.diagnosis
    lines = [
        *wrap(f"Query {trace.query.id} in workflow {trace.workflow}", WIDTH),
        "",
        *labelled("Query", [shortened(trace.query.text, 500)]),
        *labelled(
            "Base answer",
            [
                in_quotes(trace.answer),
                *base_lines(diagnosis),
                *_moved_by(explanation.base_score),
            ],
        ),
    ]
    for label, texts in note_lines(diagnosis):
        lines += labelled(label[: LABEL - 1], [f"- {shortened(text, 200)}" for text in texts])
    shown = list(zip(diagnosis.edges, explanation.edges, strict=True))[:n_edges]
    for place, (scored, explained) in enumerate(shown, 1):
        lines += ["", *labelled(f"Edge {place}", _edge_lines(scored, explained))]
    if not diagnosis.edges:
        lines += ["", *labelled("Edges", ["(none could carry anything new)"])]
    if rest := len(diagnosis.edges) - len(shown):
        lines += ["", *labelled("", [f"{counted(rest, 'more edge')}: --top shows more"])]
    return "\n".join(lines)


def _edge_lines(scored: EdgeScore, explained: EdgeExplanation) -> list[str]:
    edge = scored.edge
    chances = f"changes the answer with probability {scored.p_decisive:.2f}"
    if scored.p_beneficial is not None:
        chances += f", for the better with {scored.p_beneficial:.2f}"
    items = [gap_line(item, edge.source) for item in explained.gap.items]
    lines = [
        f"{edge.source} -> {edge.receiver}, {edge.kind.replace('_', ' ')}: {chances}",
        f"- {shortened(scored.reason, 200)}",
        *_moved_by(explained.contributions),
    ]
    # A fact that connects what the receiver can read all along names nothing that it could not.
    return [*lines, f"{edge.receiver} needs and can't read:", *items] if items else lines


def _moved_by(contributions: Sequence[Contribution]) -> list[str]:
    shown = [
        f"{moved.feature} = {moved.value:.3g} ({moved.log_odds:+.2f})"
        for moved in contributions[:_MOST_CONTRIBUTIONS]
        if abs(moved.log_odds) >= _LEAST_SHOWN
    ]
    return [f"- log-odds moved by {joined(shown)}"] if shown else []
