"""What people see of a run and of a repair: pages of text, tables, and HTML.

Whatever comes from a query, an agent, a tool or a file may be hostile. In text, every character
that could drive a terminal or reorder a line is shown as an escape; in HTML it is escaped twice,
for the eye and for the parser.
"""

from __future__ import annotations

import difflib
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

from splice.ledger import Spending, spending
from splice.records import (
    CallRecord,
    Decision,
    Edge,
    Evidence,
    GapItem,
    MessageLine,
    NodeId,
    NodeRun,
    Receipt,
    Record,
    RepairBatch,
    RepairResult,
    SpliceMessage,
    Stage,
    ToolCall,
    Trace,
    Trial,
    digest,
)

if TYPE_CHECKING:
    import jinja2
    from rich.table import Table

_WIDTH = 100
"""Columns of a page of text."""
_LABEL = 13
"""Columns of the labels at the left of a page."""
_LONGEST = 1200
"""Columns that one line of a page takes before it is wrapped, whatever a trace puts into it."""

_STOPS: Mapping[str, str] = {
    "no_trial_admitted": "no trial was admitted",
    "no_edge": "no missing edge is promising enough",
    "no_message": "the source holds nothing to deliver",
    "budget": "the budget is used up",
}
_ADMISSIONS: Mapping[str, str] = {
    "headroom": "a trial is weighed by headroom",
    "abstention": "a trial comes first, since a node said that it lacks input",
    "never": "no trial can help",
}
_REASONS: Mapping[str, str] = {
    "message": "it received the message",
    "input_changed": "its input changed",
    "input_unchanged": "input unchanged",
    "not_reached": "not reached",
}


# --- text --------------------------------------------------------------------------------------

# Everything but tab and newline that is no glyph: C0 and C1 controls, lone surrogates, line
# separators, bidirectional controls, zero-width characters and tags. The two joiners stay: Persian,
# Indic scripts and emoji need them.
_UNSEEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e"
    r"\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    r"""Show control characters, terminal escapes and bidirectional overrides as escapes.

    Tabs and newlines stay.

    >>> print(visible("\x1b[31mred\u202e"))
    \x1b[31mred\u202e
    """
    return _UNSEEN.sub(lambda found: _escape(found.group()), text.replace("\r\n", "\n"))


def _escape(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _cells(text: str) -> int:
    """Terminal columns that `text` takes."""
    if text.isascii():
        return len(text)
    return sum(
        0
        if unicodedata.category(character) in ("Mn", "Me", "Cf")
        else 2
        if unicodedata.east_asian_width(character) in "WF"
        else 1
        for character in text
    )


def _cut(text: str, width: int) -> str:
    """The longest start of `text` that fits into `width` columns; at least one character."""
    # Marks take no column, but thousands of them on one letter are no text either.
    text = text[: 4 * width]
    taken = 0
    for end, character in enumerate(text):
        taken += _cells(character)
        if taken > width:
            return text[: max(end, 1)]
    return text


def _short(text: str, width: int) -> str:
    """`text` as one line of at most `width` columns, cut with "..." if need be."""
    line = visible(" ".join(text[: 20 * width].split()))
    is_whole = len(text) <= 20 * width and _cells(line) <= width
    return line if is_whole else _cut(line, width - 3).rstrip() + "..."


def _wrap(text: str, width: int, hang: int = 0) -> list[str]:
    """`text` as lines of at most `width` columns, all but the first indented by `hang`."""
    lines: list[str] = []
    line = ""
    for word in _short(text, _LONGEST).split(" "):
        while word:
            room = width - _cells(line) - (1 if line.strip() else 0)
            if _cells(word) <= room:
                line = f"{line} {word}" if line.strip() else line + word
                break
            if line.strip():
                lines.append(line)
                line = " " * hang
                continue
            piece = _cut(word, room)
            lines.append(line + piece)
            line, word = " " * hang, word[len(piece) :]
    return [*lines, line] if line.strip() or not lines else lines


def _field(label: str, lines: Iterable[str]) -> list[str]:
    """A labelled part of a page; a line that starts with `- ` hangs by its dash."""
    wrapped = [
        part
        for line in lines
        for part in _wrap(line, _WIDTH - _LABEL, hang=2 if line.startswith("- ") else 0)
    ]
    labels = [label] + [""] * len(wrapped)
    return [
        f"{label:{_LABEL}}{part}".rstrip() for label, part in zip(labels, wrapped, strict=False)
    ]


def _quoted(text: str | None, width: int = 300) -> str:
    """A text in quotation marks, or a word for what is missing."""
    if text is None:
        return "(none)"
    return f'"{_short(text, width)}"' if text.strip() else "(empty)"


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _percent(share: float) -> str:
    return f"{share:.0%}"


# --- what a result says, for text and HTML alike -------------------------------------------------


def _base_lines(result: RepairResult) -> list[str]:
    diagnosis = result.diagnosis
    return [
        f"predicted base score {diagnosis.base_score:.2f}, headroom {diagnosis.headroom:.2f}; "
        f"{_ADMISSIONS[diagnosis.admission]}",
        *(f"- {_short(reason, 200)}" for reason in diagnosis.base_reasons),
    ]


def _gap_line(item: GapItem, source: NodeId) -> str:
    held = f"held by {source}" if item.is_held else f"not held by {source}"
    return f'- "{_short(item.text, 120)}", named in the {item.named_in}, {held}'


def _edge_lines(result: RepairResult) -> list[str]:
    if result.edge is None:
        return ["(none)"]
    edge = result.edge.edge
    lines = [
        f"{edge.source} -> {edge.receiver}, {edge.kind.replace('_', ' ')}, predicted to change the "
        f"answer with probability {result.edge.p_decisive:.2f}",
        f"- {_short(result.edge.reason, 200)}",
    ]
    others = [score for score in result.diagnosis.edges if score.edge != edge]
    if others:
        shown = _listed(
            f"{score.edge.source} -> {score.edge.receiver} {score.p_decisive:.2f}"
            for score in others[:3]
        )
        lines.append(f"- not tried: {shown}{', ...' if len(others) > 3 else ''}")
    return lines


def _message_heading(message: SpliceMessage) -> str:
    how = "quoted by rule" if message.writer == "extractive" else "written by a model"
    return f"{message.source} -> {message.receiver}, {how}"


def _origins(line: MessageLine, source: NodeRun | None) -> str:
    """Where the spans of a message line come from, with the names of tools."""
    calls = () if source is None else source.tool_calls
    names = {f"tool:{k}": f"tool:{k} ({_short(call.name, 40)})" for k, call in enumerate(calls)}
    return _listed(
        f"{names.get(span.origin, span.origin)} {span.start}-{span.end}" for span in line.spans
    )


def _message_lines(result: RepairResult, message: SpliceMessage) -> list[tuple[str, str, str]]:
    """The lines of a message as (role, text, origins)."""
    source = result.base.by_node.get(message.source)
    return [
        (role, line.text, _origins(line, source) or "no span")
        for role, line in (
            ("key", message.key),
            *((line.item or "more", line) for line in message.lines),
        )
    ]


def _message_remarks(message: SpliceMessage) -> list[str]:
    remarks = []
    if message.focus is not None:
        remarks.append(f"focus: {_short(message.focus, 120)}")
    if message.not_found:
        remarks.append(f"not found: {_listed(_short(item, 60) for item in message.not_found)}")
    if message.n_dropped:
        remarks.append(
            f"left out: {_count(message.n_dropped, 'line')} with a quotation that the source's "
            "material does not hold verbatim"
        )
    return remarks


def _trial_lines(trial: Trial) -> list[str]:
    """What a trial did: one line for each node that ran again, one for each reason to reuse."""
    lines = [
        f"re-run {line.node}: {_reason(line)}" for line in trial.receipt if line.action == "rerun"
    ]
    reused: dict[str, list[NodeId]] = {}
    for line in trial.receipt:
        if line.action == "reused":
            reused.setdefault(_reason(line), []).append(line.node)
    lines += [f"reused {_listed(nodes)}: {reason}" for reason, nodes in reused.items()]
    if trial.stop_reason is not None:
        lines.append(f"stopped: {_short(trial.stop_reason, 200)}")
    return lines


def _reason(line: Receipt) -> str:
    changed = f" ({_listed(line.changed)})" if line.changed else ""
    return _REASONS[line.reason] + changed


def _evidence_lines(evidence: Evidence, receiver: NodeId) -> list[str]:
    """The main process evidence in words and numbers."""
    moved = (
        f"{receiver} moved by {_percent(evidence.move_w)} of its words: "
        f"{evidence.n_add} added, {evidence.n_del} dropped"
    )
    if evidence.n_del:
        moved += f" ({_percent(evidence.del_supported)} of these are supported by its own context)"
    return [moved, *_provenance_lines(evidence), *_answer_lines(evidence)]


def _provenance_lines(evidence: Evidence) -> list[str]:
    uptake = (
        "no word and no number of the message was taken up"
        if evidence.is_ignored
        else f"{_percent(evidence.uptake)} of the message's words were taken up"
    )
    lines = [uptake]
    if evidence.n_add:
        lines.append(
            f"added words come {_percent(evidence.msg_only)} from the message alone, "
            f"{_percent(evidence.ctx_only)} from its own context alone, "
            f"{_percent(evidence.both)} from both, {_percent(evidence.untraceable)} from neither"
        )
        lines.append(_survival_line(evidence))
    if evidence.num_msg or evidence.num_ctx or evidence.num_untraceable:
        lines.append(
            f"added numbers come {_percent(evidence.num_msg)} from the message, "
            f"{_percent(evidence.num_ctx)} from its own context, "
            f"{_percent(evidence.num_untraceable)} from neither"
        )
    if evidence.num_dropped:
        lines.append(f"{_percent(evidence.num_dropped)} of its numbers were dropped")
    return lines


def _survival_line(evidence: Evidence) -> str:
    shares = [f"{_percent(share)} at depth {k}" for k, share in enumerate(evidence.survival, 1)]
    shares.append(f"{_percent(evidence.surv_final)} in the answer")
    return f"added words survive: {_listed(shares)}"


def _answer_lines(evidence: Evidence) -> list[str]:
    numbers = "its numbers differ" if evidence.is_number_changed else "its numbers are the same"
    lines = [
        f"the answer changed by {_percent(evidence.ans_change)} (1 - token F1), {numbers}, "
        f"{evidence.ans_len_ratio:.2g} times as long"
    ]
    if evidence.copies_source:
        nearer = "nearer to" if evidence.copies_source > 0 else "farther from"
        lines.append(
            f"it is {nearer} the source's own answer than before ({evidence.copies_source:+.2f})"
        )
    facts = (
        (evidence.is_absorbed, "the change was absorbed before the answer"),
        (evidence.is_abstention_resolved, "the receiver abstained before and answers now"),
        (evidence.is_abstention_new, "a node abstains that did not before"),
        (evidence.is_answer_refusal_resolved, "the old answer declined, the new one does not"),
        (evidence.is_answer_refusal_new, "the new answer declines, the old one did not"),
    )
    return lines + [text for holds, text in facts if holds]


class _Side(NamedTuple):
    """One side of the decision rule."""

    name: Literal["gain", "loss"]
    formula: str
    value: float


def _sides(decision: Decision) -> tuple[_Side, _Side] | None:
    """Both sides of the rule, as computed; None if no candidate answer was judged."""
    p, gain, loss = decision.likelihoods, decision.gain_side, decision.loss_side
    if p is None or gain is None or loss is None:
        return None
    if decision.weighting == "none":
        return (
            _Side("gain", f"p_beneficial = {gain:.3f}", gain),
            _Side("loss", f"p_harmful = {loss:.3f}", loss),
        )
    score = decision.base_score
    return (
        _Side(
            "gain",
            f"p_beneficial x headroom = {p.beneficial:.2f} x {1 - score:.2f} = {gain:.3f}",
            gain,
        ),
        _Side("loss", f"p_harmful x base score = {p.harmful:.2f} x {score:.2f} = {loss:.3f}", loss),
    )


def _comparison(decision: Decision) -> str:
    """How the two sides of the rule compare, margin included."""
    gain, loss = decision.gain_side or 0.0, decision.loss_side or 0.0
    ahead = gain - loss - decision.margin
    sign = ">" if ahead > 0 else "<" if ahead < 0 else "="
    margin = f" + margin {decision.margin:.3f}" if decision.margin else ""
    return f"{gain:.3f} {sign} {loss:.3f}{margin}"


def _verdict_lines(decision: Decision) -> tuple[str, str]:
    """The decision, and how the sides of its rule compare."""
    action = f"{decision.action.upper()}: {_short(decision.reason, 250)}"
    p = decision.likelihoods
    if p is None or _sides(decision) is None:
        return action, "the rule was not applied: there was no other answer to judge"
    return action, (
        f"{_comparison(decision)}; beneficial {p.beneficial:.2f}, neutral {p.neutral:.2f}, "
        f"harmful {p.harmful:.2f}"
    )


def _decision_lines(decision: Decision) -> list[str]:
    action, comparison = _verdict_lines(decision)
    sides = [f"- {side.name}: {side.formula}" for side in _sides(decision) or ()]
    return [action, *sides, comparison]


def _note_lines(result: RepairResult) -> list[tuple[str, tuple[str, ...]]]:
    """What the diagnosis asks people for, as (label, texts); only what there is."""
    diagnosis = result.diagnosis
    notes = (
        ("Clarify", diagnosis.clarifying_questions),
        ("Missing", diagnosis.missing_inputs),
        ("Unsupported", diagnosis.unsupported),
    )
    return [(label, texts) for label, texts in notes if texts]


def _trouble(run: NodeRun) -> str:
    """Why a node gave no ordinary output."""
    if run.abstention is not None:
        return f"{run.status} ({run.abstention.category}): {_short(run.abstention.rationale, 200)}"
    if run.failure is not None:
        return f"{run.status} ({run.failure.kind}): {_short(run.failure.message, 200)}"
    return run.status


def _trouble_lines(result: RepairResult) -> list[str]:
    """Nodes that abstained, failed, were withheld or skipped, in the base run and in the trial."""
    lines = [f"{run.node} {_trouble(run)}" for run in result.base.node_runs if run.status != "ok"]
    if result.base.stop_reason is not None:
        lines.append(f"the run ended early: {_short(result.base.stop_reason, 200)}")
    if result.trial is None:
        return lines
    rerun = set(result.trial.rerun)
    return lines + [
        f"in the trial, {run.node} {_trouble(run)}"
        for run in result.trial.trace.node_runs
        if run.status != "ok" and run.node in rerun
    ]


# --- cost --------------------------------------------------------------------------------------


class _CostRow(NamedTuple):
    """Cost of one stage, as texts."""

    stage: str
    calls: str
    tokens: str
    money: str


def _cost_row(stage: str, calls: Sequence[CallRecord]) -> _CostRow:
    spent = spending(tuple(calls))
    cached = f" + {spent.n_cached} cached" if spent.n_cached else ""
    return _CostRow(stage, f"{spent.n_calls:,}{cached}", _tokens(spent), _money(_cost(spent)))


def _tokens(spent: Spending) -> str:
    """Tokens that were counted, and for how many calls there is no count."""
    if not spent.n_uncounted:
        return "unknown" if _is_all_failed(spent) else f"{spent.tokens:,}"
    return f"{spent.tokens:,} + {spent.n_uncounted} uncounted" if spent.tokens else "unknown"


def _cost(spent: Spending) -> float | None:
    return None if _is_all_failed(spent) else spent.cost


def _is_all_failed(spent: Spending) -> bool:
    """Whether nothing is known about the calls: no server counts an attempt that failed."""
    return spent.n_calls > 0 and spent.n_calls == spent.n_failed


def _cost_rows(calls: Sequence[CallRecord]) -> list[_CostRow]:
    """Cost by stage, in the order of the stages, and in total."""
    by_stage: dict[str, list[CallRecord]] = {stage: [] for stage in get_args(Stage)}
    for call in calls:
        by_stage[call.stage].append(call)
    rows = [_cost_row(stage, made) for stage, made in by_stage.items() if made]
    return [*rows, _cost_row("total", calls)]


def _cost_table(calls: Sequence[CallRecord]) -> list[str]:
    rows = [_CostRow("stage", "calls", "tokens", "money"), *_cost_rows(calls)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]))) for row in rows
    ]


def _money(cost: float | None) -> str:
    """Money in the unit of the price table; an unknown price is never 0."""
    if cost is None:
        return "unknown"
    if 0 < cost < 1e-6:
        return f"{cost:.1e}"
    whole, _, decimals = f"{cost:,.6f}".rstrip("0").partition(".")
    return f"{whole}.{decimals}" if decimals else whole


def _outcome_counts(calls: Sequence[CallRecord]) -> str:
    """How many attempts did not go as planned."""
    outcomes = [call.outcome for call in calls]
    counts = ((outcomes.count(o), o) for o in ("cached", "retried", "failed", "aborted"))
    return _listed(f"{n} {outcome}" for n, outcome in counts if n)


def _multiple(calls: Sequence[CallRecord]) -> float | None:
    """Tokens of all stages over tokens of the run stage; None if it can't be known."""
    spent = spending(tuple(calls))
    base = spending(tuple(call for call in calls if call.stage == "run"))
    return None if spent.n_uncounted or not base.tokens else spent.tokens / base.tokens


def _cost_lines(calls: Sequence[CallRecord]) -> list[str]:
    multiple = _multiple(calls)
    known = "unknown" if multiple is None else f"{multiple:.2f}"
    return [*_spent_lines(calls), f"cost multiple {known}: all tokens over those of the base run"]


def _spent_lines(calls: Sequence[CallRecord]) -> list[str]:
    spent = spending(tuple(calls))
    lines = [
        f"{_count(spent.n_calls, 'call')}, {_tokens(spent)} tokens, money {_money(_cost(spent))}"
    ]
    if counts := _outcome_counts(calls):
        left_out = "; what failed attempts used is unknown and left out" if spent.n_failed else ""
        lines.append(f"of all attempts: {counts}{left_out}")
    return lines


# --- pages of text -------------------------------------------------------------------------------


def result_text(result: RepairResult) -> str:
    """A repaired query as a page of plain text, at most 100 columns wide."""
    lines = [
        *_wrap(f"Query {result.query.id} in workflow {result.base.workflow}", _WIDTH),
        "",
        *_field("Query", [_short(result.query.text, 500)]),
        *_field("Base answer", [_quoted(result.base.answer), *_base_lines(result)]),
        *_field("Nodes", [f"- {line}" for line in _trouble_lines(result)]),
    ]
    for label, texts in _note_lines(result):
        lines += _field(label[: _LABEL - 1], [f"- {_short(text, 200)}" for text in texts])
    lines += _repair_fields(result)
    lines += _field("Answer", [_quoted(result.answer)])
    lines += _field("Cost", _cost_lines(result.calls))
    lines += [" " * _LABEL + row for row in _cost_table(result.calls)]
    return "\n".join(lines)


def _repair_fields(result: RepairResult) -> list[str]:
    """The part of the page from the gap to the decision."""
    lines: list[str] = []
    if result.gap is not None:
        edge = result.gap.edge
        items = [_gap_line(item, edge.source) for item in result.gap.items]
        lines += _field("Gap", [f"{edge.receiver} needs and can't read:", *(items or ["- (none)"])])
    lines += _field("Edge", _edge_lines(result))
    if result.message is not None:
        lines += _field("Message", _message_text(result, result.message))
    if result.trial is None:
        lines += _field("Trial", [f"none: {_stop(result)}"])
    else:
        lines += _trial_fields(result, result.trial)
    return lines + _field("Decision", _decision_lines(result.decision))


def _message_text(result: RepairResult, message: SpliceMessage) -> list[str]:
    return [
        _message_heading(message),
        *(
            f"- {_short(role, 40)}: {_quoted(text, 250)} [{origins}]"
            for role, text, origins in _message_lines(result, message)
        ),
        *(f"- {remark}" for remark in _message_remarks(message)),
    ]


def _trial_fields(result: RepairResult, trial: Trial) -> list[str]:
    finished = _finished(result)
    lines = _field("Trial", _trial_lines(trial))
    lines += _field("Candidate", [_quoted(None if finished is None else trial.trace.answer)])
    if result.evidence is not None:
        evidence = _evidence_lines(result.evidence, trial.message.receiver)
        lines += _field("Evidence", [f"- {line}" for line in evidence])
    return lines


def _stop(result: RepairResult) -> str:
    return _STOPS.get(result.stop_reason, result.stop_reason)


def trace_text(trace: Trace, *, full: bool = False) -> str:
    """A run as text: each node in canonical order, then the answer and totals.

    Args:
        trace: the run.
        full: print inputs, outputs and tool results as they are rather than shortened.
    """
    lines = [
        *_wrap(f"Query {trace.query.id} in workflow {trace.workflow}", _WIDTH),
        *_text_field("Query", trace.query.text, full),
        "",
    ]
    for number, run in enumerate(trace.node_runs, 1):
        lines += [*_wrap(f"{number}. {run.node}: {_node_summary(run)}", _WIDTH, hang=3)]
        lines += [*_node_fields(run, full), ""]
    lines += _text_field("Answer", trace.answer, full)
    if trace.stop_reason is not None:
        lines += _field("Ended early", [_short(trace.stop_reason, 300)])
    lines += _field("Totals", [f"{trace.elapsed_s:.2f} s", *_spent_lines(trace.calls)])
    return "\n".join(lines)


def _node_summary(run: NodeRun) -> str:
    parts: list[str] = [run.status, f"{run.elapsed_s:.2f} s"]
    if run.usage is not None:
        counts = (run.usage.prompt_tokens, run.usage.completion_tokens)
        prompt, completion = ("unknown" if n is None else f"{n:,}" for n in counts)
        parts.append(f"{prompt} + {completion} tokens")
    if run.model is not None:
        parts.append(f"model {_short(run.model.name, 40)}")
    if run.is_truncated:
        parts.append("reply cut off at max_tokens")
    return _listed(parts)


def _node_fields(run: NodeRun, full: bool) -> list[str]:
    lines = _field("  received", [_parents(run)])
    for message in run.input:
        lines += _text_field(f"  {message.role}", message.content, full)
    for call in run.tool_calls:
        lines += _tool_fields(call, full)
    if run.abstention is not None or run.failure is not None:
        lines += _field("  why", [_trouble(run)])
    if run.output is not None:
        lines += _text_field("  output", run.output, full)
    if run.raw is not None and (full or run.output is None):
        lines += _text_field("  raw reply", run.raw, full)
    return lines


def _parents(run: NodeRun) -> str:
    if not run.expected:
        return "nothing: it has no parents"
    received = _listed(run.received) or "nothing"
    missing = [parent for parent in run.expected if parent not in run.received]
    return f"{received}; missing: {_listed(missing)}" if missing else received


def _tool_fields(call: ToolCall, full: bool) -> list[str]:
    reused = ", reused" if call.is_reused else ""
    heading = f"{_short(call.name, 60)}({_short(call.arguments, 200)}): {call.outcome}{reused}"
    return [*_field("  tool", [heading]), *_text_field("", call.result, full)]


def _text_field(label: str, text: str | None, full: bool) -> list[str]:
    """A field with one text: shortened, or in full with its own lines."""
    if not full or text is None:
        return _field(label, [_quoted(text)])
    rows = visible(text).split("\n")
    return [f"{label:{_LABEL}}{rows[0]}", *(" " * _LABEL + row for row in rows[1:])]


def workflow_text(nodes_in_order: Sequence[NodeId], edges: Sequence[Edge], output: NodeId) -> str:
    """A workflow by generation, each node with its parents and children.

    Nodes of one generation don't depend on each other and may run at the same time.
    """
    depths = _depths(nodes_in_order, edges)
    width = max((_cells(visible(node)) for node in nodes_in_order), default=0)
    lines = [
        f"{_count(len(nodes_in_order), 'node')}, {_count(len(edges), 'edge')}; "
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
    parts = [f"reads {_listed(reads)}"] if reads else []
    parts += [f"feeds {_listed(feeds)}"] if feeds else []
    parts += ["gives the answer"] if node == output else []
    name = visible(node)
    indent = 2 + min(width, 40) + 2
    rows = _wrap("; ".join(parts), _WIDTH - indent, hang=2)
    first = "  " + name + " " * max(indent - 2 - _cells(name), 2)
    return [(first + rows[0]).rstrip(), *(" " * indent + row for row in rows[1:])]


def _depths(nodes: Sequence[NodeId], edges: Sequence[Edge]) -> dict[NodeId, int]:
    """Generation by node: one more than the deepest of its parents'."""
    depths: dict[NodeId, int] = {}
    for node in nodes:
        parents = [depths[s] for s, receiver in edges if receiver == node and s in depths]
        depths[node] = 1 + max(parents, default=-1)
    return depths


# --- batches -------------------------------------------------------------------------------------

IsCorrect: TypeAlias = Callable[[str | None, str], bool]
"""Whether an answer (None: there is none) is right for the query with this id."""


class ScoredRow(Record):
    """One query of a batch, scored where its reference is known."""

    query_id: str
    question: str
    base: str | None
    edge: str | None
    """The edge that was tried, as `source -> receiver`; None if there was no trial."""
    candidate: str | None
    """The trial's answer; None if there is none."""
    decision: Literal["adopt", "retain"]
    base_correct: bool | None
    candidate_correct: bool | None
    """None if the reference is unknown or there was no finished trial."""
    final_correct: bool | None

    @property
    def outcome(self) -> Literal["fixed", "broken", "changed", "kept"] | None:
        """What the repair did to the query; None if it adopted and the reference is unknown."""
        if self.decision == "retain":
            return "kept"
        if self.base_correct is None or self.final_correct is None:
            return None
        if self.base_correct == self.final_correct:
            return "changed"
        return "fixed" if self.final_correct else "broken"


def result_rows(batch: RepairBatch, is_correct: IsCorrect | None) -> tuple[ScoredRow, ...]:
    """The queries of a batch, scored by `is_correct`; None: no reference is known."""
    return tuple(_scored(result, is_correct) for result in batch.results)


def _scored(result: RepairResult, is_correct: IsCorrect | None) -> ScoredRow:
    finished = _finished(result)

    def score(answer: str | None) -> bool | None:
        return None if is_correct is None else is_correct(answer, result.query.id)

    edge = None if result.trial is None else result.trial.message
    return ScoredRow(
        query_id=result.query.id,
        question=result.query.text,
        base=result.base.answer,
        edge=None if edge is None else f"{edge.source} -> {edge.receiver}",
        candidate=None if finished is None else finished.trace.answer,
        decision=result.decision.action,
        base_correct=score(result.base.answer),
        candidate_correct=None if finished is None else score(finished.trace.answer),
        final_correct=score(result.answer),
    )


def _finished(result: RepairResult) -> Trial | None:
    """The trial of a result, if it could be finished."""
    trial = result.trial
    return trial if trial is not None and trial.stop_reason is None else None


_OUTCOME_STYLES: Mapping[str | None, str] = {"fixed": "green", "broken": "red", "changed": "yellow"}


def batch_table(rows: Sequence[ScoredRow]) -> Table:
    """A batch as a table, one row for each query."""
    from rich.table import Table
    from rich.text import Text

    table = Table("query", "base", "edge", "candidate", "decision", "outcome")
    for row in rows:
        texts = (row.question, row.base, row.edge, row.candidate, row.decision)
        # Text and not str: rich would read square brackets in an answer as markup.
        cells = [Text("-" if text is None else _short(text, 80)) for text in texts]
        style = _OUTCOME_STYLES.get(row.outcome, "")
        table.add_row(*cells, Text(row.outcome or "unknown", style=style))
    return table


def batch_totals(rows: Sequence[ScoredRow], batch: RepairBatch) -> str:
    """What a batch gained, what it broke, and what it cost."""
    decisive = sum(_is_decisive(result) for result in batch.results)
    stopped = "" if batch.stop_reason == "done" else f", stopped by: {batch.stop_reason}"
    calls = tuple(call for result in batch.results for call in result.calls)
    lines = [
        *_field("Queries", [f"{len(batch.results)}{stopped}"]),
        *_field(
            "Trials",
            [
                f"{batch.n_trials} (at most {_percent(batch.budget_fraction)} of the queries), "
                f"{decisive} decisive"
            ],
        ),
        *_field("Right", [_right_line(rows)]),
        *_field("Outcomes", [_outcome_line(rows)]),
        *_field("Cost", [*_cost_lines(calls), _net_line(rows, calls)]),
    ]
    return "\n".join([*lines, *(" " * _LABEL + row for row in _cost_table(calls))])


def _is_decisive(result: RepairResult) -> bool:
    trial = _finished(result)
    return trial is not None and trial.trace.answer != result.base.answer


def _right_line(rows: Sequence[ScoredRow]) -> str:
    known = [row for row in rows if row.base_correct is not None]
    if not known:
        return "unknown: no references were given"
    base = [bool(row.base_correct) for row in known]
    always = [
        bool(row.base_correct if row.candidate_correct is None else row.candidate_correct)
        for row in known
    ]
    counts = (
        ("base", sum(base)),
        ("final", sum(bool(row.final_correct) for row in known)),
        ("always adopt", sum(always)),
        ("oracle", sum(map(max, base, always))),
    )
    return f"{_listed(f'{name} {n}' for name, n in counts)} of {len(known)}"


def _outcome_line(rows: Sequence[ScoredRow]) -> str:
    outcomes = [row.outcome for row in rows]
    counts = [f"{outcomes.count(o)} {o}" for o in ("fixed", "broken", "changed", "kept")]
    unknown = outcomes.count(None)
    return _listed([*counts, f"{unknown} unknown"] if unknown else counts)


def _net_line(rows: Sequence[ScoredRow], calls: Sequence[CallRecord]) -> str:
    """What one net fixed query cost beyond the base run."""
    outcomes = [row.outcome for row in rows]
    net = outcomes.count("fixed") - outcomes.count("broken")
    if net <= 0:
        return f"cost per net fixed query: undefined, net fixed is {net}"
    spent = spending(tuple(call for call in calls if call.stage != "run"))
    tokens = "unknown" if spent.n_uncounted else f"{spent.tokens / net:,.0f}"
    money = _money(None if spent.cost is None else spent.cost / net)
    return f"cost per net fixed query, beyond the base run: {tokens} tokens, money {money}"


# --- the drawing -------------------------------------------------------------------------------

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


def _drawing(result: RepairResult) -> _Drawing:
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
    depths = _depths(nodes, edges)
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
    depths = _depths(nodes, [(chain[0].source, chain[-1].receiver) for chain in chains])
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
    return max(152.0, 46 + _NAME_CELL * _cells(_short(slot.source, _NAME_CELLS)))


def _box(result: RepairResult, node: NodeId, place: _Place) -> _Box:
    run = result.base.by_node[node]
    after = None
    if result.trial is not None and node in result.trial.rerun:
        after = result.trial.trace.by_node.get(node)
    return _Box(
        node=node,
        name=_short(node, _NAME_CELLS),
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
    if run.status == after.status == "ok":
        return "re-run"
    return f"{run.status}, then {after.status}"


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
    lines = _wrap(_short(text, columns * _LABEL_LINES - columns // 2), columns)
    box_width = _TEXT_CELL * max(map(_cells, lines)) + 28
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
        parts.append(f"ran again: {_listed(result.trial.rerun)}")
    parts += [f"{run.node} {run.status}" for run in result.base.node_runs if run.status != "ok"]
    return "; ".join(parts)


# --- HTML ----------------------------------------------------------------------------------------

_SHOWN = 2000
"""Characters of a text that the page shows; the JSON has all of them."""


class _Piece(NamedTuple):
    """A part of an output."""

    text: str
    is_changed: bool


class _Change(NamedTuple):
    """A node that ran again, before and after."""

    node: NodeId
    before: list[_Piece]
    after: list[_Piece]
    why_before: str | None
    """Why there is no ordinary output; None if there is one."""
    why_after: str | None


def result_html(result: RepairResult) -> str:
    """A repaired query as one self-contained piece of HTML, for notebooks.

    It has no script, loads nothing, and its styles reach nothing outside of it.
    """
    return _environment().get_template("result.html.j2").render(_context(result))


def result_page(result: RepairResult) -> str:
    """A repaired query as an HTML document of its own."""
    return _environment().get_template("page.html.j2").render(_context(result))


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("splice"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _finalize(value: object) -> object:
    """Make every text visible and short on its way into a page, so that no field is forgotten."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return visible(_clipped(value))


def _context(result: RepairResult) -> dict[str, object]:
    trial, decision = result.trial, result.decision
    finished = _finished(result)
    return {
        # Several results on one page must not share ids; a result's text may hold lone
        # surrogates, so its JSON can't be digested.
        "uid": digest(result_text(result))[:12],
        "result": result,
        "drawing": _drawing(result),
        "answers": _answer_cards(result, finished),
        "base_lines": _base_lines(result),
        "trouble_lines": _trouble_lines(result),
        "notes": _note_lines(result),
        "edge_lines": _edge_lines(result),
        "message_lines": [] if result.message is None else _message_lines(result, result.message),
        "message_heading": None if result.message is None else _message_heading(result.message),
        "message_remarks": [] if result.message is None else _message_remarks(result.message),
        "trial_lines": [f"none: {_stop(result)}"] if trial is None else _trial_lines(trial),
        "changes": [] if trial is None else _changes(result.base, trial),
        "evidence_lines": []
        if result.evidence is None or trial is None
        else _evidence_lines(result.evidence, trial.message.receiver),
        "verdict_lines": _verdict_lines(decision),
        "bars": _bars(decision),
        "cost_lines": _cost_lines(result.calls),
        "cost_rows": _cost_rows(result.calls),
    }


def _answer_cards(result: RepairResult, finished: Trial | None) -> list[tuple[str, str | None]]:
    candidate = [] if finished is None else [("Candidate answer", finished.trace.answer)]
    return [("Base answer", result.base.answer), *candidate, ("Final answer", result.answer)]


def _clipped(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _bars(decision: Decision) -> list[tuple[_Side, float]]:
    """Both sides of the rule with their lengths in percent of the longer one."""
    sides = _sides(decision)
    if sides is None:
        return []
    longest = max(side.value for side in sides) or 1.0
    return [(side, 100 * max(side.value, 0.0) / longest) for side in sides]


def _changes(base: Trace, trial: Trial) -> list[_Change]:
    """The nodes that ran again, in canonical order."""
    changes = []
    for node in trial.rerun:
        old, new = base.by_node.get(node), trial.trace.by_node.get(node)
        before, after = _word_changes(_output(old), _output(new))
        changes.append(_Change(node, before, after, _why_no_output(old), _why_no_output(new)))
    return changes


def _output(run: NodeRun | None) -> str:
    return "" if run is None or run.output is None else _clipped(run.output)


def _why_no_output(run: NodeRun | None) -> str | None:
    if run is None:
        return "not reached"
    return None if run.status == "ok" else _trouble(run)


def _word_changes(before: str, after: str) -> tuple[list[_Piece], list[_Piece]]:
    """Both texts in pieces, told apart by whether the other one has them too."""
    old, new = (re.findall(r"\s*\S+", text) for text in (before, after))
    matcher = difflib.SequenceMatcher(None, [w.strip() for w in old], [w.strip() for w in new])
    old_pieces: list[_Piece] = []
    new_pieces: list[_Piece] = []
    for tag, old_start, old_end, new_start, new_end in matcher.get_opcodes():
        old_pieces += _pieces(old[old_start:old_end], tag != "equal")
        new_pieces += _pieces(new[new_start:new_end], tag != "equal")
    return old_pieces, new_pieces


def _pieces(words: Sequence[str], is_changed: bool) -> list[_Piece]:
    """Words as a piece, after the space before them: a marked space looks like a word."""
    text = "".join(words)
    marked = text.lstrip()
    pieces = _Piece(text[: len(text) - len(marked)], False), _Piece(marked, is_changed)
    return [piece for piece in pieces if piece.text]
