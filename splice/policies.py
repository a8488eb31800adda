"""Policies: what else could be done with a base run, for the same queries in the same batch.

Each policy is a small function over the engine: it gets a bench and one question with its base run,
and returns what it would answer and every call that it made beyond the base run. Trials are shared:
policies that would make the same trial of the same question make it once, and each of them is
charged for all of it.

Definitions are those of method 2.10 and section 6; where it leaves a choice, the docstring says
which was made.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, NamedTuple, TypeAlias

from splice.errors import BudgetExceeded, ModelError
from splice.executor import Memo, Models, book_call, execute
from splice.ledger import Account
from splice.line import RepairSettings, repair_from, selector_calls, weigh
from splice.message import MessageSettings
from splice.models.protocol import ChatModel
from splice.prompts import quote, render
from splice.records import (
    CallRecord,
    ChatMessage,
    Diagnosis,
    Edge,
    EdgeScore,
    ModelIdentity,
    ModelSettings,
    NodeId,
    NodeRun,
    Query,
    Record,
    RepairResult,
    Request,
    Stage,
    Trace,
)
from splice.selector import RuleSelector, Selector
from splice.text import norm
from splice.trial import resample, warmer
from splice.workflow import Workflow


class Outcome(Record):
    """What one policy made of one question."""

    answer: str | None
    """The final answer; None: there is none."""
    calls: tuple[CallRecord, ...] = ()
    """Every attempt at a model call beyond the base run."""
    candidate: str | None = None
    """The answer that the base answer was weighed against."""
    is_tried: bool = False
    """Whether there was a candidate at all."""
    edge: Edge | None = None
    """The edge that was tried, where one edge was."""
    replaces_base: bool = False
    """Whether the policy needs no base run, so that none is charged."""


class BaseRun(NamedTuple):
    """One question with its base run, which all policies share."""

    workflow: Workflow
    trace: Trace
    diagnosis: Diagnosis

    @property
    def query(self) -> Query:
        """The question."""
        return self.trace.query


IsBetter: TypeAlias = Callable[[Query, str | None, str | None], Awaitable[bool]]
"""Whether the second answer to a query scores higher than the first; the oracle alone may ask."""


class Bench:
    """What the policies of one batch share: models, settings, and trials made already."""

    def __init__(
        self,
        models: Models,
        *,
        settings: RepairSettings = RepairSettings(),
        selector: Selector | None = None,
        language: Selector | None = None,
        is_better: IsBetter | None = None,
        account: Account | None = None,
        seed: int = 0,
        n_votes: int = 2,
        retry_temperature: float = 0.7,
    ) -> None:
        """Keep what the policies need.

        Args:
            models: what answers the agents, in base runs and after.
            settings: how to repair.
            selector: of the policies that have one; None: the documented rules.
            language: the language-model selector of the policy that compares it.
            is_better: by the workload's score; only the oracle asks it.
            account: spending shared with the base runs.
            seed: of the random edge and of coins.
            n_votes: whole runs that voting adds to the base run.
            retry_temperature: of whole runs that are made again; at 0 they would be copies.
        """
        self.models = models
        self.settings = settings
        self.selector = selector
        self.language = language
        self.is_better = is_better
        self.account = account
        self.seed = seed
        self.n_votes = n_votes
        self.retry_temperature = retry_temperature
        self._repairs: dict[tuple[str, int, Edge, MessageSettings], asyncio.Task[RepairResult]] = {}
        self._reruns: dict[tuple[str, int], asyncio.Task[Trace]] = {}

    def rng(self, base: BaseRun, purpose: str) -> random.Random:
        """Random numbers of one question for one purpose, whatever ran before."""
        return random.Random(f"{self.seed}:{purpose}:{base.query.id}:{base.trace.rollout}")

    async def repaired(
        self, base: BaseRun, edge: EdgeScore, message: MessageSettings | None = None
    ) -> RepairResult:
        """The repair of a question that tries `edge`; made once however many policies ask.

        Args:
            base: the question.
            edge: to try.
            message: how its message is written; None: as the bench's settings say.
        """
        message = message or self.settings.message
        key = (base.query.id, base.trace.rollout, edge.edge.ends, message)
        if key not in self._repairs:
            only = base.diagnosis.model_copy(update={"edges": (edge,)})
            repair = repair_from(
                base.workflow,
                base.trace,
                self.models,
                settings=self.settings.model_copy(update={"message": message}),
                selector=self.selector,
                diagnosis=only,
                account=self.account,
            )
            self._repairs[key] = asyncio.create_task(repair)
        return await self._repairs[key]

    async def run(
        self,
        base: BaseRun,
        workflow: Workflow,
        *,
        nth: int = 0,
        memo: Memo | None = None,
        stage: Stage = "run",
    ) -> Trace:
        """Run `workflow` on a question, on the `nth` rollout after that of its base run."""
        return await execute(
            workflow,
            base.query,
            self.models,
            settings=self.settings.run.model_copy(update={"rollout": base.trace.rollout + nth}),
            account=self.account,
            memo=memo,
            stage=stage,
        )

    async def run_again(self, base: BaseRun, nth: int) -> Trace:
        """The `nth` whole run (from 1) at the retry temperature; made once."""
        key = (base.query.id, base.trace.rollout + nth)
        if key not in self._reruns:
            run = self.run(base, warmer(base.workflow, self.retry_temperature), nth=nth)
            self._reruns[key] = asyncio.create_task(run)
        return await self._reruns[key]

    def judge(self) -> ChatModel:
        """The model that compares answers: the one that the run was given, or the first of them."""
        return next(iter(self.models.values())) if isinstance(self.models, Mapping) else self.models


Policy: TypeAlias = Callable[[Bench, BaseRun], Awaitable[Outcome]]


async def static(bench: Bench, base: BaseRun) -> Outcome:
    """The base answer, at no cost beyond the base run."""
    return Outcome(answer=base.trace.answer)


async def splice(bench: Bench, base: BaseRun) -> Outcome:
    """The most promising edge is tried; the selector adopts or retains."""
    return await _with_selector(bench, base, _top(base))


async def always(bench: Bench, base: BaseRun) -> Outcome:
    """The same trial; every candidate answer is adopted."""
    outcome = await _with_selector(bench, base, _top(base))
    return outcome.model_copy(update={"answer": outcome.candidate}) if outcome.is_tried else outcome


async def never(bench: Bench, base: BaseRun) -> Outcome:
    """The same trial; no candidate answer is adopted. Shows what trials cost by themselves."""
    outcome = await _with_selector(bench, base, _top(base))
    return outcome.model_copy(update={"answer": base.trace.answer})


async def oracle(bench: Bench, base: BaseRun) -> Outcome:
    """The same trial; adopted exactly if its answer scores higher. An upper bound, not a policy."""
    outcome = await _with_selector(bench, base, _top(base))
    if not outcome.is_tried or bench.is_better is None:
        return outcome.model_copy(update={"answer": base.trace.answer})
    is_better = await bench.is_better(base.query, base.trace.answer, outcome.candidate)
    answer = outcome.candidate if is_better else base.trace.answer
    return outcome.model_copy(update={"answer": answer})


async def random_edge(bench: Bench, base: BaseRun) -> Outcome:
    """A uniform edge among those that could be tried; message and selector as for `splice`."""
    edges = base.diagnosis.edges
    edge = bench.rng(base, "edge").choice(edges) if edges else None
    return await _with_selector(bench, base, edge)


async def verifier(bench: Bench, base: BaseRun) -> Outcome:
    """The same trial as `splice`; a model that sees question and two answers alone decides."""
    outcome = await _with_selector(bench, base, _top(base))
    return await _verified(bench, base, outcome)


async def rerun(bench: Bench, base: BaseRun) -> Outcome:
    """The receiver of the most promising edge, and what follows, once more: no edge, no message.

    The nodes keep their temperature and get the next rollout's seed, so at temperature 0 this
    measures how far the model is from repeating itself. The selector decides, as for `splice`.
    """
    if not base.diagnosis.edges or base.diagnosis.admission == "never":
        return Outcome(answer=base.trace.answer)
    edge = base.diagnosis.edges[0].edge
    trial = await resample(
        base.workflow,
        base.trace,
        edge,
        bench.models,
        settings=bench.settings.run,
        account=bench.account,
    )
    trace = trial.trace
    answer = base.trace.answer
    calls = trace.calls
    if trace.answer != answer:
        _, decision = await weigh(
            base.workflow,
            base.trace,
            trial,
            base.diagnosis,
            selector=bench.selector,
            settings=bench.settings,
        )
        answer = trace.answer if decision.action == "adopt" else answer
        calls = (*calls, *selector_calls(decision))
    return _taken(trace).model_copy(update={"answer": answer, "calls": calls})


async def full_rerun(bench: Bench, base: BaseRun) -> Outcome:
    """The whole workflow again at a higher temperature; the new answer is taken."""
    return _taken(await bench.run_again(base, 1))


async def voting(bench: Bench, base: BaseRun) -> Outcome:
    """The majority of the base answer and whole runs again; without one, the base answer."""
    traces = [await bench.run_again(base, nth) for nth in range(1, bench.n_votes + 1)]
    answers = [base.trace.answer, *(trace.answer for trace in traces)]
    forms = [None if answer is None else norm(answer) for answer in answers]
    votes = Counter(form for form in forms if form is not None).most_common(1)
    winner, n = votes[0] if votes else (None, 0)
    chosen = answers[forms.index(winner)] if 2 * n > len(answers) else base.trace.answer
    calls = tuple(call for trace in traces for call in trace.calls)
    return Outcome(answer=chosen, calls=calls, candidate=chosen, is_tried=True)


async def edge_expansion(bench: Bench, base: BaseRun) -> Outcome:
    """All missing forward edges added before the run, outputs relayed verbatim.

    It is a workflow of its own: no base run is charged, and no budget fraction applies.
    """
    missing = (edge.ends for edge in base.workflow.candidate_edges)
    expanded = base.workflow.changed(edges=(*base.workflow.edges, *missing))
    trace = await bench.run(base, expanded)
    return _taken(trace).model_copy(update={"replaces_base": True})


async def nexa(bench: Bench, base: BaseRun) -> Outcome:
    """Nexa on a fixed skeleton: edges from the base outputs, one sequential pass, committed.

    Base outputs are the drafts; allowed edges are the missing forward edges; untrained, the policy
    adds an edge where the cosine distance of two drafts is over 0.35, at most the two most distant.
    Receivers and what follows run again with the current outputs verbatim; without an edge nothing
    runs.

    Source: arXiv 2605.15573 as digested in method 6; the adaptation is ours.
    """
    edges = _nexa_edges(base)
    if not edges:
        return Outcome(answer=base.trace.answer)

    def recorded(
        node: NodeId, messages: tuple[ChatMessage, ...], model: ModelIdentity | None
    ) -> NodeRun | None:
        run = base.trace.by_node[node]
        return run if run.input == messages else None

    joined = base.workflow.changed(edges=(*base.workflow.edges, *edges))
    trace = await bench.run(base, joined, memo=recorded, stage="trial")
    return _taken(trace).model_copy(update={"edge": edges[0] if len(edges) == 1 else None})


async def nexa_rollback(bench: Bench, base: BaseRun) -> Outcome:
    """Nexa's candidate, adopted or not by a model that sees question and two answers alone."""
    return await _verified(bench, base, await nexa(bench, base))


async def splice_rules(bench: Bench, base: BaseRun) -> Outcome:
    """The same trial as `splice`; the documented rules decide."""
    return await _with_selector(bench, base, _top(base), selector=RuleSelector())


async def splice_language(bench: Bench, base: BaseRun) -> Outcome:
    """The same trial as `splice`; the language-model selector decides."""
    return await _with_selector(bench, base, _top(base), selector=bench.language)


async def key_statement(bench: Bench, base: BaseRun) -> Outcome:
    """As `splice`, with nothing but the key statement in the message."""
    message = bench.settings.message.model_copy(update={"max_lines": 0})
    return await _with_selector(bench, base, _top(base), message=message)


async def filler(bench: Bench, base: BaseRun) -> Outcome:
    """As `splice`, with a message of the same length that says nothing."""
    message = bench.settings.message.model_copy(update={"writer": "placebo"})
    return await _with_selector(bench, base, _top(base), message=message)


async def model_written(bench: Bench, base: BaseRun) -> Outcome:
    """As `splice`, with a message that the source's model writes."""
    message = bench.settings.message.model_copy(update={"writer": "model"})
    return await _with_selector(bench, base, _top(base), message=message)


class PolicyKind(NamedTuple):
    """A policy, and how a batch deals with it."""

    run: Policy
    is_budgeted: bool = True
    """Whether only queries that the budget admits are given to it."""
    admission: Literal["headroom", "random"] = "headroom"
    """How a budget chooses its queries."""


POLICIES: Mapping[str, PolicyKind] = {
    "static": PolicyKind(static, is_budgeted=False),
    "splice": PolicyKind(splice),
    "always": PolicyKind(always),
    "never": PolicyKind(never),
    "random_edge": PolicyKind(random_edge),
    "rerun": PolicyKind(rerun),
    "verifier": PolicyKind(verifier),
    "full_rerun": PolicyKind(full_rerun),
    "voting": PolicyKind(voting),
    "edge_expansion": PolicyKind(edge_expansion, is_budgeted=False),
    "nexa": PolicyKind(nexa),
    "nexa_rollback": PolicyKind(nexa_rollback),
    "oracle": PolicyKind(oracle),
}
"""Policies that a comparison needs, in the order of tables."""

ABLATIONS: Mapping[str, PolicyKind] = {
    "splice_rules": PolicyKind(splice_rules),
    "splice_language": PolicyKind(splice_language),
    "random_query": PolicyKind(splice, admission="random"),
    "key_statement": PolicyKind(key_statement),
    "filler": PolicyKind(filler),
    "model_written": PolicyKind(model_written),
}
"""`splice` with one part exchanged (method 2.10); run where they are named."""

ALL_POLICIES: Mapping[str, PolicyKind] = {**POLICIES, **ABLATIONS}


# --- what policies share ---------------------------------------------------------------------


def _top(base: BaseRun) -> EdgeScore | None:
    return base.diagnosis.edges[0] if base.diagnosis.edges else None


async def _with_selector(
    bench: Bench,
    base: BaseRun,
    edge: EdgeScore | None,
    *,
    message: MessageSettings | None = None,
    selector: Selector | None = None,
) -> Outcome:
    """The trial of `edge`, adopted or not by the selector.

    Args:
        bench: what the policies share.
        base: the question.
        edge: to try; None: there is none.
        message: how its message is written; None: as the bench's settings say.
        selector: decides instead of the bench's.
    """
    if edge is None:
        return Outcome(answer=base.trace.answer)
    result = await bench.repaired(base, edge, message)
    trial, answer = result.trial, result.answer
    calls = result.calls[len(base.trace.calls) :]
    # A trial that stopped half-way has no candidate answer to weigh.
    is_tried = trial is not None and trial.stop_reason is None
    if trial is not None and selector is not None and result.stop_reason == "decided":
        _, decision = await weigh(
            base.workflow,
            base.trace,
            trial,
            base.diagnosis,
            selector=selector,
            settings=bench.settings,
        )
        answer = trial.trace.answer if decision.action == "adopt" else base.trace.answer
        others = tuple(call for call in calls if call.stage != "select")
        calls = (*others, *selector_calls(decision))
    return Outcome(
        answer=answer,
        calls=calls,
        candidate=trial.trace.answer if trial is not None and is_tried else None,
        is_tried=is_tried,
        edge=edge.edge.ends,
    )


def _taken(trace: Trace) -> Outcome:
    """The answer of another run, taken as it is."""
    return Outcome(answer=trace.answer, calls=trace.calls, candidate=trace.answer, is_tried=True)


_NEXA_DISTANCE = 0.35
_NEXA_EDGES = 2


def _nexa_edges(base: BaseRun) -> list[Edge]:
    """The edges between the drafts that differ most, in canonical order of receivers."""
    drafts = {run.node: _features(run.output or "") for run in base.trace.node_runs}
    apart = [
        (1 - _cosine(drafts[edge.source], drafts[edge.receiver]), edge.ends)
        for edge in base.workflow.candidate_edges
        if base.trace.by_node[edge.source].output is not None
    ]
    far = sorted(
        ((d, edge) for d, edge in apart if d > _NEXA_DISTANCE),
        key=lambda entry: (-entry[0], entry[1]),
    )
    chosen = {edge for _, edge in far[:_NEXA_EDGES]}
    return [edge for _, edge in apart if edge in chosen]


def _features(text: str) -> Counter[str]:
    """Words and character trigrams of a text with their counts."""
    text = norm(text)
    return Counter([*text.split(), *(text[i : i + 3] for i in range(len(text) - 2))])


def _cosine(a: Counter[str], b: Counter[str]) -> float:
    """Cosine similarity in [0, 1]; 0 if one of them is empty."""
    product = sum(n * b[feature] for feature, n in a.items())
    length = sum(n * n for n in a.values()) * sum(n * n for n in b.values())
    return product / length**0.5 if length else 0.0


_CHOICE = re.compile(r"\b([AB])\b")
_JUDGE = ModelSettings(max_tokens=8)


async def _verified(bench: Bench, base: BaseRun, outcome: Outcome) -> Outcome:
    """The outcome with its answer chosen by comparison of the two answers.

    The model is asked twice, with the answers in either order; the candidate is adopted only if it
    is preferred both times, so that a liking for one place decides nothing.
    """
    old, new = base.trace.answer, outcome.candidate
    if not outcome.is_tried or new == old:
        return outcome.model_copy(update={"answer": old})
    if old is None or new is None:
        return outcome.model_copy(update={"answer": old if new is None else new})
    calls: list[CallRecord] = []
    first = await _preferred(bench, base.query, old, new, calls)
    second = await _preferred(bench, base.query, new, old, calls)
    answer = new if (first, second) == ("B", "A") else old
    return outcome.model_copy(update={"answer": answer, "calls": (*outcome.calls, *calls)})


async def _preferred(
    bench: Bench, query: Query, first: str, second: str, calls: list[CallRecord]
) -> str | None:
    """Which of two answers a model prefers, `A` or `B`; None if it doesn't say."""
    prompt = render(
        "compare_answers", question=quote(query.text), first=quote(first), second=quote(second)
    )
    request = Request(
        messages=(ChatMessage(role="user", content=prompt),),
        settings=_JUDGE,
        stage="select",
        query_id=query.id,
    )
    try:
        completion = await book_call(bench.judge(), request, bench.account, calls)
    except (ModelError, BudgetExceeded):
        return None
    found = _CHOICE.findall(completion.text)
    return found[-1] if found else None
