"""Pages of text: a repair, a run, a workflow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from splice.records import (
    Edge,
    NodeId,
    NodeRun,
    RepairResult,
    SpliceMessage,
    ToolCall,
    Trace,
    Trial,
)
from splice.report.display import (
    LABEL,
    WIDTH,
    counted,
    depth_by_node,
    in_quotes,
    joined,
    labelled,
    n_cells,
    shortened,
    visible,
    wrap,
)
from splice.report.facts import (
    base_lines,
    cost_lines,
    cost_table,
    decision_lines,
    edge_lines,
    evidence_lines,
    finished_trial,
    gap_line,
    message_heading,
    message_lines,
    message_remarks,
    model_lines,
    note_lines,
    spent_lines,
    stop_text,
    trial_lines,
    trouble,
    trouble_lines,
)

if TYPE_CHECKING:
    pass


def result_text(result: RepairResult) -> str:
    """A repaired query as a page of plain text, at most 100 columns wide."""
    lines = [
        *wrap(f"Query {result.query.id} in workflow {result.base.workflow}", WIDTH),
        "",
        *labelled("Query", [shortened(result.query.text, 500)]),
        *labelled("Base answer", [in_quotes(result.base.answer), *base_lines(result.diagnosis)]),
        *labelled("Nodes", [f"- {line}" for line in trouble_lines(result)]),
    ]
    for label, texts in note_lines(result.diagnosis):
        lines += labelled(label[: LABEL - 1], [f"- {shortened(text, 200)}" for text in texts])
    lines += _repair_fields(result)
    lines += labelled("Answer", [in_quotes(result.answer)])
    lines += labelled("Models", model_lines([result.base]))
    lines += labelled("Cost", cost_lines(result.calls))
    lines += [" " * LABEL + row for row in cost_table(result.calls)]
    return "\n".join(lines)


def _repair_fields(result: RepairResult) -> list[str]:
    """The part of the page from the gap to the decision."""
    lines: list[str] = []
    if result.gap is not None:
        edge = result.gap.edge
        items = [gap_line(item, edge.source) for item in result.gap.items]
        lines += labelled(
            "Gap", [f"{edge.receiver} needs and can't read:", *(items or ["- (none)"])]
        )
    lines += labelled("Edge", edge_lines(result))
    if result.message is not None:
        lines += labelled("Message", _message_text(result, result.message))
    if result.trial is None:
        lines += labelled("Trial", [f"none: {stop_text(result)}"])
    else:
        lines += _trial_fields(result, result.trial)
    return lines + labelled("Decision", decision_lines(result.decision))


def _message_text(result: RepairResult, message: SpliceMessage) -> list[str]:
    return [
        message_heading(message),
        *(
            f"- {shortened(role, 40)}: {in_quotes(text, 250)} [{origins}]"
            for role, text, origins in message_lines(result, message)
        ),
        *(f"- {remark}" for remark in message_remarks(message)),
    ]


def _trial_fields(result: RepairResult, trial: Trial) -> list[str]:
    finished = finished_trial(result)
    lines = labelled("Trial", trial_lines(trial))
    lines += labelled("Candidate", [in_quotes(None if finished is None else trial.trace.answer)])
    if result.evidence is not None:
        evidence = evidence_lines(result.evidence, trial.message.receiver)
        lines += labelled("Evidence", [f"- {line}" for line in evidence])
    return lines


def trace_text(trace: Trace, *, full: bool = False) -> str:
    """A run as text: each node in canonical order, then the answer and totals.

    Args:
        trace: the run.
        full: print inputs, outputs and tool results as they are rather than shortened.
    """
    lines = [
        *wrap(f"Query {trace.query.id} in workflow {trace.workflow}", WIDTH),
        *_text_field("Query", trace.query.text, full),
        "",
    ]
    for number, run in enumerate(trace.node_runs, 1):
        lines += [*wrap(f"{number}. {run.node}: {_node_summary(run)}", WIDTH, hang=3)]
        lines += [*_node_fields(run, full), ""]
    lines += _text_field("Answer", trace.answer, full)
    if trace.stop_reason is not None:
        lines += labelled("Ended early", [shortened(trace.stop_reason, 300)])
    lines += labelled("Models", model_lines([trace]))
    lines += labelled("Totals", [f"{trace.elapsed_s:.2f} s", *spent_lines(trace.calls)])
    return "\n".join(lines)


def _node_summary(run: NodeRun) -> str:
    parts: list[str] = [run.status, f"{run.elapsed_s:.2f} s"]
    if run.usage is not None:
        counts = (run.usage.prompt_tokens, run.usage.completion_tokens)
        prompt, completion = ("unknown" if n is None else f"{n:,}" for n in counts)
        parts.append(f"{prompt} + {completion} tokens")
    if run.model is not None:
        parts.append(f"model {shortened(run.model.name, 40)}")
    if run.is_truncated:
        parts.append("reply cut off at max_tokens")
    return joined(parts)


def _node_fields(run: NodeRun, full: bool) -> list[str]:
    lines = labelled("  received", [_parents(run)])
    for message in run.input:
        lines += _text_field(f"  {message.role}", message.content, full)
    for call in run.tool_calls:
        lines += _tool_fields(call, full)
    if run.abstention is not None or run.failure is not None:
        lines += labelled("  why", [trouble(run)])
    if run.output is not None:
        lines += _text_field("  output", run.output, full)
    if run.raw is not None and (full or run.output is None):
        lines += _text_field("  raw reply", run.raw, full)
    return lines


def _parents(run: NodeRun) -> str:
    if not run.expected:
        return "nothing: it has no parents"
    received = joined(run.received) or "nothing"
    missing = [parent for parent in run.expected if parent not in run.received]
    return f"{received}; missing: {joined(missing)}" if missing else received


def _tool_fields(call: ToolCall, full: bool) -> list[str]:
    reused = ", reused" if call.is_reused else ""
    heading = (
        f"{shortened(call.name, 60)}({shortened(call.arguments, 200)}): {call.outcome}{reused}"
    )
    return [*labelled("  tool", [heading]), *_text_field("", call.result, full)]


def _text_field(label: str, text: str | None, full: bool) -> list[str]:
    """A field with one text: shortened, or in full with its own lines."""
    if not full or text is None:
        return labelled(label, [in_quotes(text)])
    rows = visible(text).split("\n")
    return [f"{label:{LABEL}}{rows[0]}", *(" " * LABEL + row for row in rows[1:])]


def workflow_text(nodes_in_order: Sequence[NodeId], edges: Sequence[Edge], output: NodeId) -> str:
    """A workflow by generation, each node with its parents and children.

    Nodes of one generation don't depend on each other and may run at the same time.
    """
    depths = depth_by_node(nodes_in_order, edges)
    width = max((n_cells(visible(node)) for node in nodes_in_order), default=0)
    lines = [
        f"{counted(len(nodes_in_order), 'node')}, {counted(len(edges), 'edge')}; "
        f"the answer is read from {visible(output)}"
    ]
    for depth in sorted(set(depths.values())):
        lines += ["", f"generation {depth + 1}"]
        for node in nodes_in_order:
            if depths[node] == depth:
                lines += _node_listing(node, edges, output, width)
    return "\n".join(lines)


def _node_listing(node: NodeId, edges: Sequence[Edge], output: NodeId, width: int) -> list[str]:
    reads = [source for source, receiver in edges if receiver == node]
    feeds = [receiver for source, receiver in edges if source == node]
    parts = [f"reads {joined(reads)}"] if reads else []
    parts += [f"feeds {joined(feeds)}"] if feeds else []
    parts += ["gives the answer"] if node == output else []
    name = visible(node)
    indent = 2 + min(width, 40) + 2
    rows = wrap("; ".join(parts), WIDTH - indent, hang=2)
    first = "  " + name + " " * max(indent - 2 - n_cells(name), 2)
    return [(first + rows[0]).rstrip(), *(" " * indent + row for row in rows[1:])]
