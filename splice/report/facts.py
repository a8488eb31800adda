"""What a result says, in lines that text and HTML share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from splice.ledger import Spending, spending
from splice.records import (
    CallRecord,
    Decision,
    Diagnosis,
    Evidence,
    GapItem,
    MessageLine,
    NodeId,
    NodeRun,
    Receipt,
    RepairResult,
    SpliceMessage,
    Stage,
    Trace,
    Trial,
)
from splice.report.display import aligned, as_percent, counted, joined, shortened

if TYPE_CHECKING:
    pass

STOPS: Mapping[str, str] = {
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


def base_lines(diagnosis: Diagnosis) -> list[str]:
    """Predicted base score, headroom, and what moved them."""
    return [
        f"predicted base score {diagnosis.base_score:.2f}, headroom {diagnosis.headroom:.2f}; "
        f"{_ADMISSIONS[diagnosis.admission]}",
        *(f"- {shortened(reason, 200)}" for reason in diagnosis.base_reasons),
        *_outside_lines(diagnosis.outside, "the diagnosis"),
    ]


def _outside_lines(features: Sequence[str], what: str) -> list[str]:
    """That something lies outside of the range of the training data, if it does."""
    if not features:
        return []
    return [f"- outside of what {what} was fitted on, so a guess: {joined(features)}"]


def gap_line(item: GapItem, source: NodeId) -> str:
    """One gap item, where it was named, and whether the source holds it."""
    held = f"held by {source}" if item.is_held else f"not held by {source}"
    return f'- "{shortened(item.text, 120)}", named in the {item.named_in}, {held}'


def edge_lines(result: RepairResult) -> list[str]:
    """The edge that was tried, and why."""
    if result.edge is None:
        return ["(none)"]
    edge = result.edge.edge
    lines = [
        f"{edge.source} -> {edge.receiver}, {edge.kind.replace('_', ' ')}, predicted to change the "
        f"answer with probability {result.edge.p_decisive:.2f}",
        f"- {shortened(result.edge.reason, 200)}",
    ]
    others = [score for score in result.diagnosis.edges if score.edge != edge]
    if others:
        shown = joined(
            f"{score.edge.source} -> {score.edge.receiver} {score.p_decisive:.2f}"
            for score in others[:3]
        )
        lines.append(f"- not tried: {shown}{', ...' if len(others) > 3 else ''}")
    return lines


def message_heading(message: SpliceMessage) -> str:
    """Who told whom, and who wrote it."""
    how = "quoted by rule" if message.writer == "extractive" else "written by a model"
    return f"{message.source} -> {message.receiver}, {how}"


def _origins(line: MessageLine, source: NodeRun | None) -> str:
    """Where the spans of a message line come from, with the names of tools."""
    calls = () if source is None else source.tool_calls
    names = {f"tool:{k}": f"tool:{k} ({shortened(call.name, 40)})" for k, call in enumerate(calls)}
    return joined(
        f"{names.get(span.origin, span.origin)} {span.start}-{span.end}" for span in line.spans
    )


def message_lines(result: RepairResult, message: SpliceMessage) -> list[tuple[str, str, str]]:
    """The lines of a message as (role, text, origins)."""
    source = result.base.by_node.get(message.source)
    return [
        (role, line.text, _origins(line, source) or "no span")
        for role, line in (
            ("key", message.key),
            *((line.item or "more", line) for line in message.lines),
        )
    ]


def message_remarks(message: SpliceMessage) -> list[str]:
    """Focus of a message, what its source does not have, and what was dropped."""
    remarks = []
    if message.focus is not None:
        about = joined(shortened(name, 120) for name in (message.focus, *message.also))
        remarks.append(f"focus: {about}")
    if message.not_found:
        remarks.append(f"not found: {joined(shortened(item, 60) for item in message.not_found)}")
    if message.n_dropped:
        remarks.append(
            f"left out: {counted(message.n_dropped, 'line')} with a quotation that the source's "
            "material does not hold verbatim"
        )
    return remarks


def trial_lines(trial: Trial) -> list[str]:
    """What a trial did: one line for each node that ran again, one for each reason to reuse."""
    lines = [
        f"re-run {line.node}: {_reason(line)}" for line in trial.receipt if line.action == "rerun"
    ]
    reused: dict[str, list[NodeId]] = {}
    for line in trial.receipt:
        if line.action == "reused":
            reused.setdefault(_reason(line), []).append(line.node)
    lines += [f"reused {joined(nodes)}: {reason}" for reason, nodes in reused.items()]
    if trial.stop_reason is not None:
        lines.append(f"stopped: {shortened(trial.stop_reason, 200)}")
    return lines


def _reason(line: Receipt) -> str:
    changed = f" ({joined(line.changed)})" if line.changed else ""
    return _REASONS[line.reason] + changed


def evidence_lines(evidence: Evidence, receiver: NodeId) -> list[str]:
    """The main process evidence in words and numbers."""
    moved = (
        f"{receiver} moved by {as_percent(evidence.move_w)} of its words: "
        f"{evidence.n_add} added, {evidence.n_del} dropped"
    )
    if evidence.n_del:
        moved += (
            f" ({as_percent(evidence.del_supported)} of these are supported by its own context)"
        )
    return [moved, *_provenance_lines(evidence), *_answer_lines(evidence)]


def _provenance_lines(evidence: Evidence) -> list[str]:
    uptake = (
        "no word and no number of the message was taken up"
        if evidence.is_ignored
        else f"{as_percent(evidence.uptake)} of the message's words were taken up"
    )
    lines = [uptake]
    if evidence.n_add:
        lines.append(
            f"added words come {as_percent(evidence.msg_only)} from the message alone, "
            f"{as_percent(evidence.ctx_only)} from its own context alone, "
            f"{as_percent(evidence.both)} from both, {as_percent(evidence.untraceable)} from neither"
        )
        lines.append(_survival_line(evidence))
    if evidence.num_msg or evidence.num_ctx or evidence.num_untraceable:
        lines.append(
            f"added numbers come {as_percent(evidence.num_msg)} from the message, "
            f"{as_percent(evidence.num_ctx)} from its own context, "
            f"{as_percent(evidence.num_untraceable)} from neither"
        )
    if evidence.num_dropped:
        lines.append(f"{as_percent(evidence.num_dropped)} of its numbers were dropped")
    return lines


def _survival_line(evidence: Evidence) -> str:
    shares = [f"{as_percent(share)} at depth {k}" for k, share in enumerate(evidence.survival, 1)]
    shares.append(f"{as_percent(evidence.surv_final)} in the answer")
    return f"added words survive: {joined(shares)}"


def _answer_lines(evidence: Evidence) -> list[str]:
    numbers = "its numbers differ" if evidence.is_number_changed else "its numbers are the same"
    lines = [
        f"the answer changed by {as_percent(evidence.ans_change)} (1 - token F1), {numbers}, "
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


class Side(NamedTuple):
    """One side of the decision rule."""

    name: Literal["gain", "loss"]
    formula: str
    value: float


def both_sides(decision: Decision) -> tuple[Side, Side] | None:
    """Both sides of the rule, as computed; None if no candidate answer was judged."""
    p, gain, loss = decision.likelihoods, decision.gain_side, decision.loss_side
    if p is None or gain is None or loss is None:
        return None
    if decision.weighting == "none":
        return (
            Side("gain", f"p_beneficial = {gain:.3f}", gain),
            Side("loss", f"p_harmful = {loss:.3f}", loss),
        )
    score = decision.base_score
    return (
        Side(
            "gain",
            f"p_beneficial x headroom = {p.beneficial:.2f} x {1 - score:.2f} = {gain:.3f}",
            gain,
        ),
        Side("loss", f"p_harmful x base score = {p.harmful:.2f} x {score:.2f} = {loss:.3f}", loss),
    )


def _comparison(decision: Decision) -> str:
    """How the two sides of the rule compare, margin included."""
    gain, loss = decision.gain_side or 0.0, decision.loss_side or 0.0
    ahead = gain - loss - decision.margin
    sign = ">" if ahead > 0 else "<" if ahead < 0 else "="
    margin = f" + margin {decision.margin:.3f}" if decision.margin else ""
    return f"{gain:.3f} {sign} {loss:.3f}{margin}"


def verdict_lines(decision: Decision) -> tuple[str, str]:
    """The decision, and how the sides of its rule compare."""
    action = f"{decision.action.upper()}: {shortened(decision.reason, 250)}"
    p = decision.likelihoods
    if p is None or both_sides(decision) is None:
        return action, "the rule was not applied: there was no other answer to judge"
    return action, (
        f"{_comparison(decision)}; beneficial {p.beneficial:.2f}, neutral {p.neutral:.2f}, "
        f"harmful {p.harmful:.2f}"
    )


def decision_lines(decision: Decision) -> list[str]:
    """The decision with both sides of the rule."""
    action, comparison = verdict_lines(decision)
    sides = [f"- {side.name}: {side.formula}" for side in both_sides(decision) or ()]
    outside = decision.likelihoods.outside if decision.likelihoods else ()
    return [action, *sides, comparison, *_outside_lines(outside, "the selector")]


def note_lines(diagnosis: Diagnosis) -> list[tuple[str, tuple[str, ...]]]:
    """What the diagnosis asks people for, as (label, texts); only what there is."""
    notes = (
        ("Clarify", diagnosis.clarifying_questions),
        ("Missing", diagnosis.missing_inputs),
        ("Unsupported", diagnosis.unsupported),
    )
    return [(label, texts) for label, texts in notes if texts]


def trouble(run: NodeRun) -> str:
    """Why a node gave no ordinary output."""
    if run.abstention is not None:
        return (
            f"{run.status} ({run.abstention.category}): {shortened(run.abstention.rationale, 200)}"
        )
    if run.failure is not None:
        return f"{run.status} ({run.failure.kind}): {shortened(run.failure.message, 200)}"
    return run.status


def trouble_lines(result: RepairResult) -> list[str]:
    """Nodes that abstained, failed, were withheld or skipped, in the base run and in the trial."""
    lines = [f"{run.node} {trouble(run)}" for run in result.base.node_runs if run.status != "ok"]
    if result.base.stop_reason is not None:
        lines.append(f"the run ended early: {shortened(result.base.stop_reason, 200)}")
    if result.trial is None:
        return lines
    rerun = set(result.trial.rerun)
    return lines + [
        f"in the trial, {run.node} {trouble(run)}"
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
    return _CostRow(stage, f"{spent.n_calls:,}{cached}", _tokens(spent), as_money(_cost(spent)))


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


def cost_rows(calls: Sequence[CallRecord]) -> list[_CostRow]:
    """Cost by stage, in the order of the stages, and in total."""
    by_stage: dict[str, list[CallRecord]] = {stage: [] for stage in get_args(Stage)}
    for call in calls:
        by_stage[call.stage].append(call)
    rows = [_cost_row(stage, made) for stage, made in by_stage.items() if made]
    return [*rows, _cost_row("total", calls)]


def cost_table(calls: Sequence[CallRecord]) -> list[str]:
    """Calls, tokens and money by stage, as aligned lines."""
    return aligned([_CostRow("stage", "calls", "tokens", "money"), *cost_rows(calls)])


def as_money(cost: float | None) -> str:
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
    return joined(f"{n} {outcome}" for n, outcome in counts if n)


def _multiple(calls: Sequence[CallRecord]) -> float | None:
    """Tokens of all stages over tokens of the run stage; None if it can't be known."""
    spent = spending(tuple(calls))
    base = spending(tuple(call for call in calls if call.stage == "run"))
    return None if spent.n_uncounted or not base.tokens else spent.tokens / base.tokens


def cost_lines(calls: Sequence[CallRecord]) -> list[str]:
    """The cost multiple, the outcomes that are not plain, and the table by stage."""
    multiple = _multiple(calls)
    known = "unknown" if multiple is None else f"{multiple:.2f}"
    return [*spent_lines(calls), f"cost multiple {known}: all tokens over those of the base run"]


_PROVIDERS: Mapping[str, str] = {
    "local": "embedded, on this machine",
    "endpoint": "endpoint",
    "scripted": "scripted",
}


def model_lines(traces: Iterable[Trace]) -> list[str]:
    """Which models answered, and where they run."""
    models = {run.model for trace in traces for run in trace.node_runs if run.model is not None}
    return [
        f"{shortened(model.name, 60)} ({_PROVIDERS.get(model.provider, model.provider)})"
        for model in sorted(models, key=lambda model: (model.provider, model.name))
    ]


def spent_lines(calls: Sequence[CallRecord]) -> list[str]:
    """What one run spent."""
    spent = spending(tuple(calls))
    lines = [
        f"{counted(spent.n_calls, 'call')}, {_tokens(spent)} tokens, money {as_money(_cost(spent))}"
    ]
    if counts := _outcome_counts(calls):
        left_out = "; what failed attempts used is unknown and left out" if spent.n_failed else ""
        lines.append(f"of all attempts: {counts}{left_out}")
    return lines


def finished_trial(result: RepairResult) -> Trial | None:
    """The trial of a result, if it could be finished."""
    trial = result.trial
    return trial if trial is not None and trial.stop_reason is None else None


def stop_text(result: RepairResult) -> str:
    """How far the repair went, in words."""
    return STOPS.get(result.stop_reason, result.stop_reason)
