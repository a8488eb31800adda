"""One question: its base run, then its probes one after another.

The coroutine is the same on one machine and on many: it is given what is known of the question, and
hands over each record as soon as it is finished.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from inspect import isawaitable
from typing import Final, NamedTuple, Protocol, TypeAlias

from probes.plan import Planned, ProbeSettings, Question, next_probe
from probes.records import (
    BaseRecord,
    ProbeRecord,
    classify,
    probe_id,
)
from splice.diagnosis import diagnose, find_gap, score_edge
from splice.errors import BudgetExceeded
from splice.executor import Models, execute
from splice.features import query_features
from splice.ledger import Account, spending
from splice.line import evidence_of, writer_model
from splice.message import placebo, verify, write_message
from splice.records import (
    CallRecord,
    CandidateEdge,
    EdgeScore,
    SpliceMessage,
    Trace,
    Trial,
    digest,
)
from splice.trial import resample, run_trial
from splice.workflow import Workflow
from splice.workload import Example, Scorer, Scores

OUTSIDE: Final = frozenset({"model", "timeout", "run_timeout"})
"""Kinds of node failure that say nothing about the workflow: the model could not be reached."""


class Known(NamedTuple):
    """What an earlier command has found out about a question."""

    base: BaseRecord | None = None
    trace: Trace | None = None
    """Of the base run; there unless it failed."""
    probes: Mapping[str, ProbeRecord] = {}
    """By id."""


class Finished(NamedTuple):
    """A record, and the trace that it refers to."""

    record: BaseRecord | ProbeRecord
    trace: Trace | None


Emit: TypeAlias = Callable[[Finished], Awaitable[bool]]
"""Keeps a finished record, and says whether there is time for another one."""


class Probing(Protocol):
    """Whatever probes one question after another: here, or on another machine."""

    async def probe_question(self, question: Question, known: Known, emit: Emit) -> bool:
        """Make what is missing of a question; see `Prober.probe_question`."""
        ...


class _Lane:
    """Lets one computation at a time pass between what has come in from the network.

    The event loop takes everything in the order in which it became ready. Were all computations
    ready at once, a reply that came in would wait for all of them, and with it the request that may
    be sent in its place.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> None:
        await self._lock.acquire()
        try:
            await asyncio.sleep(0)
        except BaseException:
            self._lock.release()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()


class Prober:
    """What all questions of a workload share: models, settings, scorer."""

    def __init__(
        self,
        models: Models,
        *,
        score: Scorer,
        metric: str,
        settings: ProbeSettings,
        account: Account | None = None,
    ) -> None:
        """Keep what is shared.

        Args:
            models: what answers the agents.
            score: the workload's scorer.
            metric: the score that classes are made of.
            settings: which probes are made, and how.
            account: spending shared by all questions.
        """
        self.models = models
        self.metric = metric
        self.settings = settings
        self.account = account
        self._score = score
        self._lane = _Lane()

    async def probe_question(self, question: Question, known: Known, emit: Emit) -> bool:
        """Make what is missing of a question: the base run, then each probe.

        Args:
            question: what to run.
            known: what was found out before.
            emit: gets each record as soon as it is finished, and says whether to go on.

        Returns:
            Whether the question is complete.

        Raises:
            BudgetExceeded: the budget is used up; what was finished has been handed over.
        """
        base, trace, goes_on = known.base, known.trace, True
        if base is None:
            base, trace = await self._base(question)
            async with self._lane:
                goes_on = await emit(Finished(base, trace))
        if base.failure is not None or trace is None:
            return True
        probes = dict(known.probes)
        while (planned := next_probe(question, self.settings, _outcomes(probes))) is not None:
            if not goes_on:
                return False
            probe, tried = await self._probe(question, base, trace, planned, probes)
            probes[probe.id] = probe
            async with self._lane:
                goes_on = await emit(Finished(probe, tried))
        return True

    async def _base(self, question: Question) -> tuple[BaseRecord, Trace]:
        began = time.perf_counter()
        example, workflow = question.example, question.workflow
        settings = self.settings.run.model_copy(update={"rollout": question.rollout})
        trace = await execute(
            workflow, example.query, self.models, settings=settings, account=self.account
        )
        _refuse_unpaid(trace)
        failure, scores = _outside_failure(trace), None
        if failure is None:
            scores, failure = await self._scored(example, trace.answer)
        found: dict[str, object] = {}
        if failure is None:
            async with self._lane:
                diagnosis = diagnose(workflow, trace)
                features = query_features(workflow, trace, diagnosis)
            found = {
                "scores": scores,
                "score": None if scores is None else scores[self.metric],
                "diagnosis": diagnosis,
                "features": features,
            }
        record = base_record(
            question,
            answer=trace.answer,
            failed_nodes=tuple(run.node for run in trace.node_runs if run.status == "failed"),
            failure=failure,
            ledger=spending(trace.calls),
            elapsed_s=time.perf_counter() - began,
            **found,
        )
        return record, trace

    async def _probe(
        self,
        question: Question,
        base: BaseRecord,
        trace: Trace,
        planned: Planned,
        probes: Mapping[str, ProbeRecord],
    ) -> tuple[ProbeRecord, Trace | None]:
        began = time.perf_counter()
        calls: list[CallRecord] = []
        trial = await self._trial(question, trace, planned, probes, calls)
        found: dict[str, object] = {"outcome": "no_message"}
        if trial is not None:
            _refuse_unpaid(trial.trace)
            found = await self._weighed(question, base, trace, trial)
        record = probe_record(
            base,
            planned,
            edge_score(base, question.workflow, trace, planned.edge),
            ledger=spending(tuple(calls)),
            elapsed_s=time.perf_counter() - began,
            **found,
        )
        return record, None if trial is None else trial.trace

    async def _trial(
        self,
        question: Question,
        base: Trace,
        planned: Planned,
        probes: Mapping[str, ProbeRecord],
        calls: list[CallRecord],
    ) -> Trial | None:
        """The trial of one arm; None if there is nothing to deliver."""
        workflow, edge, settings = question.workflow, planned.edge, self.settings
        if planned.arm == "resample":
            trial = await resample(
                workflow,
                base,
                edge,
                self.models,
                settings=settings.run,
                temperature=settings.resample_temperature,
                account=self.account,
            )
            calls.extend(trial.trace.calls)
            return trial
        if planned.arm == "placebo":
            real = probes[probe_id(question.base_id, "edge", edge.ends)].message
            seed = int(question.base_id[:8], 16)
            # An edge whose worker died has left no message to be imitated.
            message: SpliceMessage | None = placebo(real, seed) if real is not None else None
        else:
            message = await write_message(
                workflow,
                base,
                find_gap(workflow, base, edge),
                model=writer_model(workflow, self.models, edge.source, edge.receiver),
                settings=settings.message,
                account=self.account,
                calls=calls,
            )
            message = verify(workflow, base, message) if message is not None else None
        if message is None:
            return None
        return await run_trial(
            workflow,
            base,
            message,
            self.models,
            settings=settings.run,
            account=self.account,
            calls=calls,
        )

    async def _weighed(
        self, question: Question, base: BaseRecord, trace: Trace, trial: Trial
    ) -> dict[str, object]:
        """Outcome, candidate answer, scores, class and evidence of a trial."""
        message = None if trial.message.key.text == "" else trial.message
        found: dict[str, object] = {"message": message, "rerun": trial.rerun}
        if trial.stop_reason is not None:
            outcome = "stopped" if _outside_failure(trial.trace) is None else "failed"
            return {**found, "outcome": outcome, "reason": trial.stop_reason}
        answer = trial.trace.answer
        scores, problem = base.scores, None
        if answer != base.answer:
            scores, problem = await self._scored(question.example, answer)
        if scores is None or base.score is None:
            return {**found, "outcome": "failed", "reason": problem}
        delta = scores[self.metric] - base.score
        async with self._lane:
            evidence = evidence_of(question.workflow, trace, trial)
        return {
            **found,
            "outcome": "done",
            "evidence": evidence,
            "answer": answer,
            "scores": scores,
            "delta": delta,
            "outcome_class": classify(delta, self.settings.epsilon),
            "is_decisive": answer != base.answer,
        }

    async def _scored(
        self, example: Example, answer: str | None
    ) -> tuple[Scores | None, str | None]:
        """The scores of an answer, or why there are none: a scorer is anybody's code."""
        try:
            found = self._score(example, answer)
            return (await found if isawaitable(found) else found), None
        except Exception as error:
            return None, f"the scorer raised {type(error).__name__}: {error}"[:500]


def base_record(question: Question, **found: object) -> BaseRecord:
    """The record of a question's base run: what the question says, and what was found."""
    query = question.example.query
    return BaseRecord.model_validate(
        {
            "id": question.base_id,
            "workload": question.workload,
            "split": question.split,
            "query_id": query.id,
            "query": digest(query.model_dump_json()),
            "rollout": question.rollout,
            "question_kind": question.example.kind,
            "workflow": question.workflow.fingerprint,
            "n_candidates": len(question.workflow.candidate_edges),
            "gap_edges": question.example.gap_edges,
            **found,
        }
    )


def probe_record(
    base: BaseRecord, planned: Planned, scored: EdgeScore, **found: object
) -> ProbeRecord:
    """The record of a probe: what was planned and known before, and what was found."""
    ends, known = planned.edge.ends, base.gap_edges
    return ProbeRecord.model_validate(
        {
            "id": probe_id(base.id, planned.arm, ends),
            "base": base.id,
            "workload": base.workload,
            "split": base.split,
            "query_id": base.query_id,
            "rollout": base.rollout,
            "arm": planned.arm,
            "edge": planned.edge,
            "place": planned.place,
            "is_gap": None if known is None else ends in known,
            "p_decisive": scored.p_decisive,
            "features": scored.features,
            **found,
        }
    )


def edge_score(
    base: BaseRecord, workflow: Workflow, trace: Trace, edge: CandidateEdge
) -> EdgeScore:
    """The score in the base record; made anew for an edge that the diagnosis leaves out."""
    known = base.diagnosis.edges if base.diagnosis is not None else ()
    found = (scored for scored in known if scored.edge.ends == edge.ends)
    return next(found, None) or score_edge(workflow, trace, edge)


def _outcomes(probes: Mapping[str, ProbeRecord]) -> dict[str, str]:
    return {id: record.outcome for id, record in probes.items()}


def _refuse_unpaid(trace: Trace) -> None:
    """Turn a run that a budget cut short into the error that it is here.

    Raises:
        BudgetExceeded: a node could not be asked.
    """
    if trace.is_over_budget:
        raise BudgetExceeded("the budget is used up")


def _outside_failure(trace: Trace) -> str | None:
    """What went wrong outside of the workflow; None: nothing."""
    for run in trace.node_runs:
        if run.failure is not None and run.failure.kind in OUTSIDE:
            return f"node {run.node!r}: {run.failure.message}"[:500]
    return None
