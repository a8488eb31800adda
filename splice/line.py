"""The line: query -> execute -> trace -> diagnose -> message -> trial -> evidence -> select -> decide."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field

from splice.diagnosis import Diagnoser, diagnose, find_gap
from splice.errors import ModelError
from splice.evidence import gather_evidence
from splice.executor import Models, Recording, RunSettings
from splice.ledger import Account
from splice.message import MessageSettings, verify, write_message
from splice.models.protocol import ChatModel
from splice.records import (
    CallRecord,
    Decision,
    Diagnosis,
    Evidence,
    Likelihoods,
    Record,
    RepairResult,
    Trace,
    Trial,
)
from splice.selector import RuleSelector, Selector, SelectorInput, decide
from splice.trial import check_models, run_trial
from splice.workflow import Agent, Workflow


class RepairSettings(Record):
    """How a query is repaired."""

    run: RunSettings = RunSettings()
    message: MessageSettings = MessageSettings()
    min_headroom: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Predicted room for improvement below which no trial is made."""
    min_p_decisive: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Predicted probability below which the best edge is not tried."""
    admit_by: Literal["headroom", "promise"] = "headroom"
    """What orders the queries of a batch before its budget is given out; see `admit`."""
    weighting: Literal["headroom", "none"] = "headroom"
    """Whether gains are weighted by headroom and losses by the base score (method 2.8)."""
    margin: Annotated[float, Field(ge=0.0)] = 0.0
    """By how much the gain side must exceed the loss side."""


async def repair_from(
    workflow: Workflow,
    base: Trace,
    models: Models,
    *,
    settings: RepairSettings,
    selector: Selector | None = None,
    diagnoser: Diagnoser = diagnose,
    diagnosis: Diagnosis | None = None,
    account: Account | None = None,
    recording: Recording | None = None,
    is_admitted: bool = True,
) -> RepairResult:
    """Repair one query from its base run: at most one trial, and a decision that may keep the old.

    Args:
        workflow: the workflow that recorded `base`.
        base: the base run.
        models: what answered in the base run.
        settings: how to repair.
        selector: gives the outcome probabilities; None: the documented rules.
        diagnoser: finds headroom and edges.
        diagnosis: of this base run, where it was made already.
        account: spending shared with other runs.
        recording: where node runs of an interrupted trial are found, and where new ones are kept.
        is_admitted: False if the batch's budget has no trial for this query.
    """
    check_models(workflow, base, models)
    diagnosis = diagnosis or diagnoser(workflow, base)
    calls = list(base.calls)

    def result(stop_reason: str, decision: Decision, **found: object) -> RepairResult:
        is_adopted = decision.action == "adopt"
        trial = found.get("trial")
        answer = trial.trace.answer if is_adopted and isinstance(trial, Trial) else base.answer
        return RepairResult.model_validate(
            {
                "query": base.query,
                "answer": answer,
                "base": base,
                "diagnosis": diagnosis,
                "decision": decision,
                "stop_reason": stop_reason,
                "calls": tuple(calls),
                **found,
            }
        )

    def keep(stop_reason: str, reason: str, **found: object) -> RepairResult:
        decision = Decision(
            action="retain",
            reason=reason,
            base_score=diagnosis.base_score,
            weighting=settings.weighting,
            margin=settings.margin,
        )
        return result(stop_reason, decision, **found)

    if refusal := _refusal(diagnosis, settings, is_admitted):
        return keep("no_trial_admitted", refusal)
    if not diagnosis.edges or diagnosis.edges[0].p_decisive < settings.min_p_decisive:
        return keep("no_edge", "no missing edge is promising enough to try")
    edge = diagnosis.edges[0]
    gap = find_gap(workflow, base, edge.edge)
    message = await write_message(
        workflow,
        base,
        gap,
        model=writer_model(workflow, models, edge.edge.source, edge.edge.receiver),
        settings=settings.message,
        account=account,
        calls=calls,
    )
    # A placebo states nothing that could be checked.
    if message is not None and settings.message.writer != "placebo":
        message = verify(workflow, base, message)
    if message is None:
        reason = f"{edge.edge.source} holds nothing that {edge.edge.receiver} lacks"
        return keep("no_message", reason, edge=edge, gap=gap)
    trial = await run_trial(
        workflow,
        base,
        message,
        models,
        settings=settings.run,
        account=account,
        calls=calls,
        recording=recording,
    )
    tried = {"edge": edge, "gap": gap, "message": message, "trial": trial}
    if trial.stop_reason is not None:
        stop = "budget" if trial.trace.is_over_budget else "trial_stopped"
        return keep(stop, f"the trial stopped: {trial.stop_reason}", **tried)
    if trial.trace.answer == base.answer:
        tried["evidence"] = evidence_of(workflow, base, trial)
        return keep("not_decisive", "the trial gave the same answer", **tried)
    tried["evidence"], decision = await weigh(
        workflow, base, trial, diagnosis, selector=selector, settings=settings
    )
    calls += selector_calls(decision)
    return result("decided", decision, **tried)


def evidence_of(workflow: Workflow, base: Trace, trial: Trial) -> Evidence:
    """Process evidence of a trial of `workflow`."""
    receiver = trial.message.receiver
    return gather_evidence(
        base,
        trial,
        query=base.query,
        subtask=workflow.subtask(receiver, base.query),
        private=[doc.shown for doc in workflow.private(receiver, base.query)],
        edges=workflow.edges,
    )


async def weigh(
    workflow: Workflow,
    base: Trace,
    trial: Trial,
    diagnosis: Diagnosis,
    *,
    selector: Selector | None,
    settings: RepairSettings,
) -> tuple[Evidence, Decision]:
    """Gather the evidence of a finished trial, ask the selector, and decide.

    A selector that can't be asked adopts nothing.
    """
    evidence = evidence_of(workflow, base, trial)
    try:
        likelihoods = await _judge(
            selector or RuleSelector(), workflow, base, trial, diagnosis, evidence
        )
    except ModelError as error:
        return evidence, Decision(
            action="retain",
            reason=f"the selector could not be asked: {error}",
            base_score=diagnosis.base_score,
            weighting=settings.weighting,
            margin=settings.margin,
        )
    decision = decide(
        likelihoods,
        base_score=diagnosis.base_score,
        weighting=settings.weighting,
        margin=settings.margin,
    )
    return evidence, decision


def selector_calls(decision: Decision) -> tuple[CallRecord, ...]:
    """Attempts at model calls that the selector made for a decision."""
    return decision.likelihoods.calls if decision.likelihoods is not None else ()


async def _judge(
    selector: Selector,
    workflow: Workflow,
    base: Trace,
    trial: Trial,
    diagnosis: Diagnosis,
    evidence: Evidence,
) -> Likelihoods:
    """The selector's view of the trial."""
    case = SelectorInput(
        question=base.query.text,
        workflow=workflow.description or workflow.name,
        base_score=diagnosis.base_score,
        base_answer=base.answer,
        candidate_answer=trial.trace.answer,
        evidence=evidence,
    )
    return await selector.judge(case)


def _refusal(diagnosis: Diagnosis, settings: RepairSettings, is_admitted: bool) -> str | None:
    """Why no trial is made; None if one is."""
    if diagnosis.admission == "never":
        if diagnosis.clarifying_questions:
            return "the query is ambiguous: a question to the user helps, an edge doesn't"
        return "no edge of this workflow can carry anything new"
    if not is_admitted:
        return "the batch's budget went to queries with more room for improvement"
    if diagnosis.admission != "abstention" and diagnosis.headroom < settings.min_headroom:
        return f"headroom {diagnosis.headroom:.2f} is below {settings.min_headroom:.2f}"
    return None


def writer_model(
    workflow: Workflow, models: Models, source: str, receiver: str
) -> ChatModel | None:
    """The model that writes messages: the source's, else the receiver's; None for functions."""
    if not isinstance(models, Mapping):
        return models
    for name in (source, receiver):
        node = workflow.by_id[name]
        if isinstance(node, Agent):
            named = node.model.name
            if named is None:
                return next(iter(models.values())) if len(models) == 1 else None
            return models.get(named)
    return None


def admit(
    diagnoses: Sequence[Diagnosis],
    ids: Sequence[str],
    *,
    budget_fraction: float,
    settings: RepairSettings,
) -> frozenset[int]:
    """Places of the queries that get a trial: at most `floor(budget_fraction * n)`.

    By headroom: abstentions that an edge could resolve come first, then the others by headroom; ties
    by how promising the best edge is, then by query id, then by place. Ties are the rule where
    headroom is predicted from a few signs: broken by id alone they would be drawn by lot.

    By promise: the chance that the trial of the best edge helps, whoever abstained. A wrong answer
    that no edge can change is room for improvement too, and a trial there is wasted.

    Source: method 2.3 and 7.2 for the order by headroom; the other is our own.
    """
    n = math.floor(budget_fraction * len(diagnoses) + 1e-9)
    eligible = [
        place
        for place, diagnosis in enumerate(diagnoses)
        if diagnosis.edges and _refusal(diagnosis, settings, is_admitted=True) is None
    ]

    def rank(place: int) -> tuple[bool, float, float]:
        diagnosis = diagnoses[place]
        if settings.admit_by == "promise":
            return False, -diagnosis.promise, 0.0
        first = diagnosis.edges[0]
        return diagnosis.admission != "abstention", -diagnosis.headroom, -first.p_decisive

    eligible.sort(key=lambda place: (*rank(place), ids[place], place))
    return frozenset(eligible[:n])
