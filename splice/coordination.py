"""The coordinator: what is done about each abstention of a run, so that the run goes on.

    Ambiguous Query      ask the user one question, with the readings that the node named
    Insufficient Input   deliver the item if it is held elsewhere, else ask the user for it
    Missing Capability   offer what the workflow declares as supported instead, else fall back
    Misrouting           send the request to the agent that was named, and its result to the readers

Abstentions are taken in canonical order, upstream first, and after each action those that are left
are looked at anew. What an action delivers becomes private material of its reader (`Query.context`),
so the reader's request has changed; it and what its new output reaches run again, and every other
node keeps its recorded run. No request is made twice.

Source: EARS, as read in method 3.7; bounds, order and what counts as held elsewhere are ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Annotated, Final, NamedTuple, TypeAlias

from pydantic import Field

from splice.abstention import clarifying_question, missing_item
from splice.errors import QueryError, SettingsError, WriteBlocked
from splice.executor import Models, Recording, RunSettings, execute, extract_answer
from splice.ledger import Account
from splice.prompts import one_line, quote, without_surrogates
from splice.records import (
    Abstention,
    Action,
    CallRecord,
    ChatMessage,
    ClarifyingQuestion,
    CoordinationResult,
    CoordinationStop,
    Document,
    FailureKind,
    ModelIdentity,
    NodeId,
    NodeRun,
    Query,
    Record,
    ToolCall,
    Trace,
)
from splice.registry import alternatives_for, named_agent
from splice.rendering import neighbours
from splice.resolving import Statement, find_item, readings
from splice.text import contains, is_refusal, norm, token_f1
from splice.tools import ToolMemory, in_thread
from splice.trial import check_models
from splice.workflow import Agent, Tool, Workflow

Ask: TypeAlias = Callable[[ClarifyingQuestion], str | Awaitable[str | None] | None]
"""Answers a question to the user; None: there is no answer. A sync one runs in a worker thread."""

_MOST_QUESTIONS: Final = 2
"""Questions to the user about one node: one that is still unclear then will not become clear."""

_PASSING: Final = frozenset[FailureKind](("model", "timeout", "run_timeout", "budget"))
"""Failures that the same request may be spared another time."""

_SAME_LACK: Final = 0.5
"""Token F1 of two missing items from which they count as one."""


class CoordinationSettings(Record):
    """How abstentions are dealt with."""

    run: RunSettings = RunSettings()
    """Its budget is for everything together: the base run, requests and what runs again."""
    max_reroutes: Annotated[int, Field(ge=0)] = 2
    """Agents that one node's request is sent to, one after another, before it falls back."""
    max_actions: Annotated[int, Field(ge=0)] = 12
    """Actions in one run that ask the user or run something; then the rest falls back. A handful of
    nodes that each need two."""
    coordinator: NodeId | None = None
    """Node that an abstention which can't be resolved falls back to: it reads it and answers. None:
    the output node, if it is an agent that reads the abstaining node; else there is none."""


def check_settings(workflow: Workflow, settings: CoordinationSettings) -> None:
    """Refuse settings that do not fit the workflow.

    Raises:
        SettingsError: the coordinator is no node.
    """
    name = settings.coordinator
    if name is not None and name not in workflow.by_id:
        raise SettingsError(
            f"coordinator {name!r} is no node; there are {', '.join(workflow.by_id)}"
        )


class Means(NamedTuple):
    """What a coordinated run is made with."""

    workflow: Workflow
    models: Models
    settings: CoordinationSettings
    ask: Ask | None = None
    """None: the first question ends the run, unanswered."""
    account: Account | None = None
    """Spending shared with the base run."""
    recording: Recording | None = None
    """Where node runs of an interrupted run are found, and where new ones are kept."""
    on_trace: Callable[[Trace], object] | None = None
    """Told of each run that is made."""


async def coordinate_from(means: Means, base: Trace) -> CoordinationResult:
    """Deal with each abstention of a base run.

    Raises:
        SettingsError: other models answered in the base run, or the coordinator is no node.
    """
    check_settings(means.workflow, means.settings)
    check_models(means.workflow, base, means.models)
    coordination = _Coordination(means, trace=base, asked=base.query, calls=base.calls)
    coordination.remember(base.node_runs)
    return await coordination.finish()


async def resume_from(
    means: Means, result: CoordinationResult, answer: str | None
) -> CoordinationResult:
    """Go on with a coordinated run: from its question, or from where a failure ended it.

    Args:
        means: as in the run so far.
        result: how far it came.
        answer: to `result.question`; None: there is none.

    Raises:
        QueryError: there is an answer and no question.
        SettingsError: other models answered so far, or the coordinator is no node.
    """
    check_settings(means.workflow, means.settings)
    check_models(means.workflow, result.trace, means.models)
    if answer is not None and result.question is None:
        raise QueryError("there is an answer, and the result has no open question")
    coordination = _Coordination(
        means, trace=result.trace, asked=result.query, calls=result.calls, actions=result.actions
    )
    coordination.earlier += result.earlier
    if result.unfinished is not None:
        coordination.query = result.unfinished.query
        coordination.earlier += (
            run for run in result.unfinished.node_runs if run not in result.trace.node_runs
        )
    # What failed is asked again: the reason may be gone, and nothing was learned from it.
    made = (*coordination.earlier, *result.trace.node_runs)
    coordination.remember(run for run in made if run.failure is None)
    return await coordination.finish(result, answer)


class _Ended(Exception):
    """The run can't go on for now."""

    def __init__(self, stop_reason: CoordinationStop, problem: str | None = None) -> None:
        super().__init__(stop_reason)
        self.stop_reason: CoordinationStop = stop_reason
        self.problem = problem


class _RunMemory(ToolMemory):
    """Tool returns of the run so far. What was written is not written again; what is new is made."""

    def __init__(self, runs: Iterable[NodeRun]) -> None:
        # A reused call is the copy of one that an earlier run made.
        super().__init__(
            run.model_copy(
                update={"tool_calls": tuple(c for c in run.tool_calls if not c.is_reused)}
            )
            for run in runs
        )

    def recall(self, node: NodeId, tool: Tool, arguments: str) -> ToolCall | None:
        """What the same call returned before; None: it is new."""
        try:
            return super().recall(node, tool, arguments)
        except WriteBlocked:
            return None


class _Coordination:
    """The state of one coordinated run."""

    def __init__(
        self,
        means: Means,
        *,
        trace: Trace,
        asked: Query,
        calls: Iterable[CallRecord],
        actions: Iterable[Action] = (),
    ) -> None:
        self.means = means
        self.workflow = means.workflow
        self.settings = means.settings
        self.trace = trace
        self.asked = asked
        self.query = trace.query
        """With all that was delivered since: what the next run reads."""
        self.calls = list(calls)
        self.actions = list(actions)
        self.earlier: list[NodeRun] = []
        self.known: dict[NodeId, list[NodeRun]] = {}
        """Runs that are taken as they are where their input comes up again."""
        self.question: ClarifyingQuestion | None = None
        self.unfinished: Trace | None = None

    def remember(self, runs: Iterable[NodeRun]) -> None:
        """Take these runs as they are from now on."""
        for run in runs:
            known = self.known.setdefault(run.node, [])
            if not any(run is other for other in known):
                known.append(run)

    async def finish(
        self, before: CoordinationResult | None = None, answer: str | None = None
    ) -> CoordinationResult:
        """Deal with all abstentions, and put the result together.

        Args:
            before: the result to go on from; None: this is the beginning.
            answer: to the question of `before`.
        """
        stop_reason: CoordinationStop = "done"
        problem = None
        try:
            if before is not None:
                await self._take_up(before, answer)
            elif self.trace.is_over_budget:
                raise _Ended("budget", "the base run used up the budget")
            while (run := self._next()) is not None:
                if self._is_spent:
                    stop_reason = "max_actions"
                await self._act(run)
        except _Ended as ended:
            stop_reason, problem = ended.stop_reason, ended.problem
        final = self.trace.node_runs
        try:
            said = self._answer()
        except Exception as error:
            # A fault of the caller's own rule must not cost the run that was paid for.
            said, problem = None, f"the answer rule: {type(error).__name__}: {error}"
        return CoordinationResult(
            query=self.asked,
            answer=said,
            trace=self.trace,
            actions=tuple(self.actions),
            question=self.question,
            stop_reason=stop_reason,
            problem=None if problem is None else one_line(problem),
            unfinished=self.unfinished,
            earlier=tuple(run for run in self.earlier if run not in final),
            calls=tuple(self.calls),
        )

    async def _take_up(self, before: CoordinationResult, answer: str | None) -> None:
        """Make what was missing of the run, and deliver the answer to its question."""
        if before.unfinished is not None or before.trace.is_over_budget:
            rerun = await self._run_again(self.query)
            if self.actions and before.unfinished is not None:
                self.actions[-1] = _with_rerun(self.actions[-1], rerun)
        if before.question is not None:
            await self._take(self.trace.by_node[before.question.node], before.question, answer)

    def _next(self) -> NodeRun | None:
        """The first abstention, in canonical order, that is not dealt with."""
        for run in self.trace.node_runs:
            if run.abstention is not None and not any(
                action.is_final and _is_about(action, run) for action in self.actions
            ):
                return run
        return None

    @property
    def _is_spent(self) -> bool:
        """Whether there have been as many actions as there may be; plain fallbacks cost nothing."""
        n = sum(not action.is_final or bool(action.rerun) for action in self.actions)
        return n >= self.settings.max_actions

    async def _act(self, run: NodeRun) -> None:
        """Deal with one abstention, as far as one action goes."""
        abstention = _abstention(run)
        if self._is_spent:
            most = self.settings.max_actions
            self.actions.append(_fallback(run, f"the run has had its {most} actions"))
        elif (upstream := self._passed_on(run)) is not None:
            await self._fall_back(run, f"it passes on what {upstream} lacks")
        elif abstention.category == "Ambiguous Query":
            await self._clarify(run, options=readings(abstention))
        elif abstention.category == "Insufficient Input":
            await self._fill(run)
        elif abstention.category == "Missing Capability":
            await self._offer(run)
        else:
            await self._reroute(run)

    # --- the user ----------------------------------------------------------------------------

    async def _clarify(
        self, run: NodeRun, *, options: tuple[str, ...] = (), item: str | None = None
    ) -> None:
        """Ask the user, unless that was done, and deliver the answer.

        A question that another node has had answered is answered by the same words.
        """
        question = ClarifyingQuestion(
            node=run.node,
            category=_abstention(run).category,
            text=self._question_text(run, item),
            options=tuple(one_line(option, limit=200) for option in options),
            item=None if item is None else one_line(item),
        )
        had = [action for action in self.actions if action.question is not None]
        same = [action for action in had if _asks(action) == norm(question.text)]
        of_node = [action for action in had if action.node == run.node]
        if len(of_node) >= _MOST_QUESTIONS or any(action.node == run.node for action in same):
            await self._fall_back(run, "the user was asked and it did not help")
        elif same:
            await self._take(run, question, same[-1].answer)
        else:
            await self._take(run, question, await self._put(question))

    def _question_text(self, run: NodeRun, item: str | None) -> str:
        abstention = _abstention(run)
        if abstention.category == "Insufficient Input" and item is None:
            # The node found nothing and named nothing, so what it was to find is what is missing.
            task = self.workflow.subtask(run.node, self.query) or self.query.text
            task = one_line(task, limit=400)
            return task if task.endswith("?") else f"Can you provide this: {task.rstrip(' .:')}?"
        return one_line(clarifying_question(abstention), limit=500)

    async def _put(self, question: ClarifyingQuestion) -> str | None:
        """The user's answer; None: there is none.

        Raises:
            _Ended: nobody is there to answer; the question stays open.
        """
        if self.means.ask is None:
            self.question = question
            raise _Ended("needs_answer")
        try:
            coming = await in_thread(self.means.ask, question)
            answer = await coming if inspect.isawaitable(coming) else coming
            if answer is not None and not isinstance(answer, str):
                raise TypeError(f"it returned {type(answer).__name__}, not a str or None")
        except Exception as error:
            # What the application gets wrong must not cost the run that was paid for.
            self.question = question
            raise _Ended("needs_answer", f"ask: {type(error).__name__}: {error}") from None
        return answer

    async def _take(self, run: NodeRun, question: ClarifyingQuestion, answer: str | None) -> None:
        """Deliver the user's answer to the node that needs it."""
        said = without_surrogates(answer or "").strip() or None
        action = Action(
            kind="alternative" if question.category == "Missing Capability" else "clarify",
            node=run.node,
            abstention=_abstention(run),
            question=question,
            answer=said,
            delivered=said,
        )
        if said is None:
            self.actions.append(action)
            await self._fall_back(run, "the user has no answer")
            return
        told = Document(title="The user's answer", text=f"{question.text}\n{said}")
        if not await self._deliver({run.node: told}, action):
            self.actions.append(action)
            await self._fall_back(run, "the answer says nothing new")

    async def _offer(self, run: NodeRun) -> None:
        """Ask the user whether something that is supported would do."""
        agent = self.workflow.by_id[run.node]
        options = alternatives_for(agent, _abstention(run)) if isinstance(agent, Agent) else ()
        if options:
            await self._clarify(run, options=options)
        else:
            await self._fall_back(run, "no supported alternative is declared")

    # --- what is held elsewhere --------------------------------------------------------------

    async def _fill(self, run: NodeRun) -> None:
        """Deliver the missing item from where it is held; else ask the user for it."""
        abstention = _abstention(run)
        item = missing_item(abstention)
        if is_refusal(item):
            await self._clarify(run)
            return
        answers = [
            Statement(action.node, action.answer, action.question.text, is_finding=True)
            for action in self.actions
            if action.question is not None and action.answer is not None
        ]
        found = find_item(self.workflow, self.trace, run.node, item, answers)
        if found is not None:
            action = Action(
                kind="fill",
                node=run.node,
                abstention=abstention,
                item=one_line(item),
                source=found.source,
                delivered=found.text,
            )
            title = f"From {found.source}" if found.source is not None else "From the question"
            told = Document(title=title, text=found.text)
            if await self._deliver({run.node: told}, action):
                return
        await self._clarify(run, item=item)

    # --- other agents ------------------------------------------------------------------------

    async def _reroute(self, run: NodeRun) -> None:
        """Send the request to the agent that was named, and what it says to those that read `run`.

        An agent that names another one in its turn is followed, as far as reroutes go.
        """
        asker, why = run.node, _abstention(run)
        tried = {run.node}
        reason = "no reroute is left"
        for _ in range(self.settings.max_reroutes):
            target = named_agent(self.workflow, asker, why)
            if target is None:
                reason = "it names no agent that is known"
                break
            if target in tried:
                reason = f"{target} has had this request"
                break
            if target in self.workflow.elsewhere:
                self.actions.append(
                    Action(
                        kind="handover",
                        node=run.node,
                        abstention=_abstention(run),
                        target=target,
                        reason=one_line(self.workflow.elsewhere[target]),
                    )
                )
                return
            tried.add(target)
            said, rerun = await self._request(run, target)
            if said.status == "ok":
                await self._pass_on(run, said, rerun)
                return
            reason = f"{target} can't act either: {_trouble(said)}"
            self.actions.append(_rerouted(run, target, rerun, reason=one_line(reason)))
            if said.abstention is None or said.abstention.category != "Misrouting":
                break
            if self._is_spent:
                break
            asker, why = target, said.abstention
        await self._fall_back(run, reason)

    async def _request(self, run: NodeRun, target: NodeId) -> tuple[NodeRun, tuple[NodeId, ...]]:
        """What `target` says to the request of an abstaining node, and the nodes that ran for it.

        What it has said in this run already will do if somebody who waits for the request did not
        read it. Otherwise it gets the abstaining node's task and what other nodes had told that
        one, apart from the workflow, so that its own part in the run stays as it is.

        Raises:
            _Ended: it could not be asked.
        """
        recorded = self.trace.by_node[target]
        is_after = target in self.workflow.hops[run.node]
        if recorded.status == "ok" and not is_after and self._unaware(run.node, target):
            return recorded, ()
        given = [
            Document(title=f"From {parent}", text=quote(said.output))
            for parent in run.received
            if (said := self.trace.by_node[parent]).status == "ok" and said.output is not None
        ]
        request = self.workflow.subtask(run.node, self.query) or self.query.text
        query = Query(
            text=self.query.text,
            id=self.query.id,
            context={target: (*self.query.context.get(target, ()), *given)},
            subtasks={target: request},
        )
        trace, reused = await self._execute(_alone(self.workflow, target), query)
        said = trace.by_node[target]
        if said not in self.earlier:
            self.earlier.append(said)
        self.remember(trace.node_runs)
        if said.failure is not None and said.failure.kind in _PASSING:
            problem = f"node {target!r} failed: {said.failure.message}"
            raise _Ended("budget" if trace.is_over_budget else "failed", problem)
        return said, () if reused else (target,)

    def _unaware(self, node: NodeId, target: NodeId) -> tuple[NodeId, ...]:
        """Readers of `node` that do not read `target`."""
        plan = self.workflow.plan
        return tuple(r for r in plan.children[node] if target not in (r, *plan.parents[r]))

    async def _pass_on(self, run: NodeRun, said: NodeRun, rerun: tuple[NodeId, ...]) -> None:
        """Deliver what another agent said to those that read the abstaining node."""
        is_recorded = said is self.trace.by_node[said.node]
        plan = self.workflow.plan
        readers = self._unaware(run.node, said.node) if is_recorded else plan.children[run.node]
        told = Document(
            title=f"From {said.node}, who got the request of {run.node}",
            text=quote(said.output or ""),
        )
        action = _rerouted(run, said.node, rerun, delivered=said.output)
        if not await self._deliver(dict.fromkeys(readers, told), action):
            self.actions.append(action)

    # --- what is left ------------------------------------------------------------------------

    async def _fall_back(self, run: NodeRun, reason: str) -> None:
        """Leave an abstention to the coordinator, if there is one, or as it is."""
        node, coordinator = run.node, self.settings.coordinator
        output, parents = self.workflow.output, self.workflow.plan.parents
        if coordinator is None and isinstance(self.workflow.by_id[output], Agent):
            coordinator = output if node in parents[output] else None
        if coordinator in (None, node):
            self.actions.append(_fallback(run, reason))
            return
        action = _fallback(run, reason, target=coordinator)
        if node not in parents[coordinator] and not self._is_spent:
            text = one_line(f"{_abstention(run).category}: {_abstention(run).rationale}")
            told = Document(title=f"From {node}, which could not act", text=text)
            action = action.model_copy(update={"delivered": text})
            if await self._deliver({coordinator: told}, action):
                return
        self.actions.append(action)

    def _passed_on(self, run: NodeRun) -> NodeId | None:
        """The node upstream whose abstention, which nothing resolved, is what this one is about."""
        for other in self.trace.node_runs:
            if other.abstention is None or other.node == run.node:
                continue
            is_left = any(
                action.kind in ("fallback", "handover") and _is_about(action, other)
                for action in self.actions
            )
            if is_left and run.node in self.workflow.hops[other.node] and _same_lack(run, other):
                return other.node
        return None

    def _answer(self) -> str | None:
        """The answer of the trace, or that of the node which got the output node's request."""
        run = self.trace.by_node[self.workflow.output]
        for action in reversed(self.actions):
            if action.kind == "reroute" and action.is_final and _is_about(action, run):
                taken = run.model_copy(update={"status": "ok", "output": action.delivered})
                return extract_answer(self.workflow, taken)
        return self.trace.answer

    # --- running again -----------------------------------------------------------------------

    async def _deliver(self, documents: Mapping[NodeId, Document], action: Action) -> bool:
        """Deliver documents to nodes and let the run go on; False: each of them is there already.

        The action is taken note of even if the run fails.
        """
        context = dict(self.query.context)
        for node, told in documents.items():
            had = context.get(node, ())
            if told not in had:
                context[node] = (*had, told)
        if context == self.query.context:
            return False
        self.actions.append(action)
        rerun = await self._run_again(self.query.model_copy(update={"context": context}))
        self.actions[-1] = _with_rerun(action, rerun)
        return True

    async def _run_again(self, query: Query) -> tuple[NodeId, ...]:
        """Run everything whose input has changed; the nodes that ran.

        Raises:
            _Ended: a node failed that had not failed before, or the budget is used up.
        """
        self.query = query
        new, reused = await self._execute(self.workflow, query)
        self.remember(new.node_runs)
        problem = _new_failure(self.trace, new)
        if problem is not None:
            self.unfinished = new
            raise _Ended("budget" if new.is_over_budget else "failed", problem)
        self.earlier += [run for run in self.trace.node_runs if run is not new.by_node[run.node]]
        self.trace = new
        return tuple(
            run.node for run in new.node_runs if run.node not in reused and run.status != "skipped"
        )

    async def _execute(self, workflow: Workflow, query: Query) -> tuple[Trace, set[NodeId]]:
        """A run on what is recorded, and the nodes that were not run for it."""
        reused: set[NodeId] = set()
        recording = self.means.recording

        def recorded(
            node: NodeId, messages: tuple[ChatMessage, ...], model: ModelIdentity | None
        ) -> NodeRun | None:
            known = (run for run in reversed(self.known.get(node, ())) if run.input == messages)
            run = next(known, None)
            if run is None and recording is not None:
                run = recording.memo(node, messages, model)
            if run is not None:
                reused.add(node)
            return run

        trace = await execute(
            workflow,
            query,
            self.means.models,
            settings=self.settings.run.model_copy(update={"rollout": self.trace.rollout}),
            account=self.means.account,
            memo=recorded,
            tool_memory=_RunMemory((*self.earlier, *self.trace.node_runs)),
            on_node=recording.on_node if recording is not None else None,
            ledger=self.calls,
            keep_keys=recording is not None,
            stage="coordinate",
        )
        if self.means.on_trace is not None:
            self.means.on_trace(trace)
        return trace, reused


def _abstention(run: NodeRun) -> Abstention:
    assert run.abstention is not None
    return run.abstention


def _trouble(run: NodeRun) -> str:
    """Why a node did not act."""
    if run.abstention is not None:
        return f"{run.abstention.category}: {run.abstention.rationale}"
    return run.failure.message if run.failure is not None else run.status


def _is_about(action: Action, run: NodeRun) -> bool:
    return action.node == run.node and action.abstention == run.abstention


def _asks(action: Action) -> str:
    return norm(action.question.text) if action.question is not None else ""


def _fallback(run: NodeRun, reason: str, target: NodeId | None = None) -> Action:
    return Action(
        kind="fallback",
        node=run.node,
        abstention=_abstention(run),
        target=target,
        reason=one_line(reason),
    )


def _rerouted(
    run: NodeRun,
    target: NodeId,
    rerun: tuple[NodeId, ...],
    *,
    delivered: str | None = None,
    reason: str | None = None,
) -> Action:
    return Action(
        kind="reroute",
        node=run.node,
        abstention=_abstention(run),
        target=target,
        delivered=delivered,
        rerun=rerun,
        reason=reason,
    )


def _with_rerun(action: Action, rerun: tuple[NodeId, ...]) -> Action:
    return action.model_copy(update={"rerun": (*action.rerun, *rerun)})


def _alone(workflow: Workflow, node: NodeId) -> Workflow:
    """One node of a workflow by itself; the others are agents elsewhere to it."""
    others = {name: what for name, what in neighbours(workflow, node).items() if one_line(what)}
    return workflow.changed(
        nodes=(workflow.by_id[node],),
        edges=(),
        output=node,
        answer="whole",
        elsewhere={**others, **workflow.elsewhere},
    )


def _new_failure(before: Trace, after: Trace) -> str | None:
    """The first node that failed and had not failed before, or that a budget kept from being asked."""
    if after.stop_reason is not None:
        return after.stop_reason
    for run in after.node_runs:
        failure = run.failure
        if failure is None or run.status != "failed":
            continue
        if failure.kind == "budget" or before.by_node[run.node].status != "failed":
            return f"node {run.node!r} failed: {failure.message}"
    return None


def _same_lack(run: NodeRun, upstream: NodeRun) -> bool:
    """Whether an abstention only passes on one from upstream: it names that node, or its item."""
    own, other = _abstention(run), _abstention(upstream)
    if own.category != other.category:
        return False
    is_same = token_f1(missing_item(own), missing_item(other)) >= _SAME_LACK
    return is_same or contains(own.rationale, upstream.node)
