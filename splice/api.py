"""The doors: run, repair and coordinate, async and sync.

The sync doors work in scripts and, where an event loop is already running, in notebooks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from splice.concurrency import Progress, each
from splice.coordination import (
    Ask,
    CoordinationSettings,
    Means,
    check_settings,
    coordinate_from,
    resume_from,
)
from splice.diagnosis import Diagnoser, diagnose
from splice.errors import QueryError, SettingsError
from splice.executor import Models, Recording, RunSettings, execute, memo_key
from splice.ledger import Account, open_account
from splice.line import RepairSettings, admit, repair_from
from splice.models.default import default_model
from splice.models.protocol import ChatModel
from splice.records import (
    ChatMessage,
    CoordinationResult,
    ModelIdentity,
    NodeId,
    NodeRun,
    Query,
    RepairBatch,
    RepairResult,
    Trace,
)
from splice.selector import Selector
from splice.selectors import open_selector
from splice.store import TraceStore
from splice.workflow import Workflow

T = TypeVar("T")


async def arun(
    workflow: Workflow,
    query: Query | str,
    *,
    model: Models | None = None,
    settings: RunSettings = RunSettings(),
    store: TraceStore | None = None,
) -> Trace:
    """Run a workflow on one query and record it.

    Args:
        workflow: what to run.
        query: a query, or its text.
        model: what answers the agents: one model, or models by the name that nodes use. None: the
            endpoint of the environment, else the embedded local model.
        settings: limits, rollout and budget.
        store: gets each node run as it ends, and the trace. Node runs that it holds already are
            not run again, so an interrupted run goes on where it stopped.

    Raises:
        QueryError: the query does not fit the workflow.
        SettingsError: a model is missing.
    """
    models = _models(workflow, model)
    return await _base_run(workflow, _query(query), models, settings, None, store)


async def arepair(
    workflow: Workflow,
    query: Query | str | None = None,
    *,
    model: Models | None = None,
    base: Trace | None = None,
    settings: RepairSettings = RepairSettings(),
    selector: Selector | str | Path | None = None,
    diagnoser: Diagnoser = diagnose,
    store: TraceStore | None = None,
) -> RepairResult:
    """Run a workflow on one query, try the most promising missing edge, keep the better answer.

    Args:
        workflow: what to repair.
        query: a query, or its text; not needed with `base`, which has its own.
        model: as in `arun`.
        base: a recorded base run to start from; None: the workflow is run first.
        settings: how to run and repair.
        selector: gives the outcome probabilities: a selector, or the folder of a trained one; None:
            the documented rules.
        diagnoser: finds headroom and candidate edges.
        store: gets every node run as it ends, then the result; an interrupted repair goes on from
            it.

    Raises:
        QueryError: the query does not fit the workflow or `base`, or neither of them is given.
        TraceMismatch: another workflow recorded `base`.
        SettingsError: a model is missing.
    """
    models = _models(workflow, model)
    chosen = open_selector(selector)
    account = open_account(settings.run.budget)
    base = await _base(workflow, query, base, models, settings.run, account, store)
    result = await repair_from(
        workflow,
        base,
        models,
        settings=settings,
        selector=chosen,
        diagnoser=diagnoser,
        account=account,
        recording=_recording(workflow, store, base.rollout),
    )
    if store is not None:
        store.put_result(result)
    return result


async def arepair_many(
    workflow: Workflow,
    queries: Sequence[Query | str],
    *,
    model: Models | None = None,
    budget_fraction: float = 0.5,
    concurrency: int = 8,
    settings: RepairSettings = RepairSettings(),
    selector: Selector | str | Path | None = None,
    diagnoser: Diagnoser = diagnose,
    store: TraceStore | None = None,
    progress: Progress | None = None,
) -> RepairBatch:
    """Run all queries, then give trials to those with the most room for improvement.

    Args:
        workflow: what to repair.
        queries: queries, or their texts.
        model: as in `arun`.
        budget_fraction: at most `floor(budget_fraction * n)` queries get a trial.
        concurrency: queries in flight, at least 1; the endpoint's own limits hold beside it.
        settings: how to run and repair; its budget is for the whole batch.
        selector: gives the outcome probabilities: a selector, or the folder of a trained one; None:
            the documented rules.
        diagnoser: finds headroom and candidate edges.
        store: gets every node run of the base runs as it ends, then the results.
        progress: told of each query that is done; stages are `run` and `repair`.

    Raises:
        QueryError: a query does not fit; raised before the first call.
        SettingsError: a model is missing, or a number is out of range.
    """
    if not 0.0 <= budget_fraction <= 1.0:
        raise SettingsError(f"budget_fraction is {budget_fraction}; it lies between 0 and 1")
    if concurrency < 1:
        raise SettingsError(f"concurrency is {concurrency}; it is at least 1")
    asked = _queries(workflow, queries)
    models = _models(workflow, model)
    judge = open_selector(selector)
    account = open_account(settings.run.budget)
    began = time.perf_counter()

    async def run_one(query: Query) -> Trace:
        return await _base_run(workflow, query, models, settings.run, account, store)

    bases = await each(asked, run_one, concurrency, progress, "run")
    diagnoses = [diagnoser(workflow, base) for base in bases]
    chosen = admit(
        diagnoses,
        [query.id for query in asked],
        budget_fraction=budget_fraction,
        settings=settings,
    )

    async def repair_one(place: int) -> RepairResult:
        result = await repair_from(
            workflow,
            bases[place],
            models,
            settings=settings,
            selector=judge,
            diagnosis=diagnoses[place],
            account=account,
            recording=_recording(workflow, store, bases[place].rollout),
            is_admitted=place in chosen,
        )
        if store is not None:
            store.put_result(result)
        return result

    results = await each(range(len(asked)), repair_one, concurrency, progress, "repair")
    return RepairBatch(
        results=tuple(results),
        budget_fraction=budget_fraction,
        n_trials=sum(result.trial is not None for result in results),
        stop_reason=_batch_stop(results),
        elapsed_s=time.perf_counter() - began,
    )


async def acoordinate(
    workflow: Workflow,
    query: Query | str | None = None,
    *,
    model: Models | None = None,
    base: Trace | None = None,
    ask: Ask | None = None,
    settings: CoordinationSettings = CoordinationSettings(),
    store: TraceStore | None = None,
) -> CoordinationResult:
    """Run a workflow on one query, and deal with each abstention so that the run goes on.

    Args:
        workflow: what to run.
        query: a query, or its text; not needed with `base`, which has its own.
        model: as in `arun`.
        base: a recorded base run to start from; None: the workflow is run first.
        ask: answers questions to the user, sync or async; None: the first question ends the run and
            stands in the result, for `aresume`.
        settings: how to run and to deal with abstentions.
        store: gets every node run as it ends, and each trace; an interrupted run goes on from it.

    Raises:
        QueryError: the query does not fit the workflow or `base`, or neither of them is given.
        TraceMismatch: another workflow recorded `base`.
        SettingsError: a model is missing, or the coordinator is no node.
    """
    check_settings(workflow, settings)
    models = _models(workflow, model)
    account = open_account(settings.run.budget)
    base = await _base(workflow, query, base, models, settings.run, account, store)
    means = _means(workflow, models, ask, settings, account, store, base.rollout)
    return await coordinate_from(means, base)


async def aresume(
    workflow: Workflow,
    result: CoordinationResult,
    answer: str | None = None,
    *,
    model: Models | None = None,
    ask: Ask | None = None,
    settings: CoordinationSettings = CoordinationSettings(),
    store: TraceStore | None = None,
) -> CoordinationResult:
    """Go on with a coordinated run: from its open question, or from where a failure ended it.

    Nodes that the answer does not affect keep their recorded runs; nodes that failed run again.

    Args:
        workflow: what `result` was made with.
        result: how far the run came; also one that was stored, in another process.
        answer: to `result.question`; None: the user has none, so that the run falls back.
        model: as in `arun`; the same models as before.
        ask: answers further questions; None: the next one ends the run again.
        settings: as in `acoordinate`; the budget is for what is spent from here on.
        store: as in `acoordinate`.

    Raises:
        QueryError: there is an answer and the result has no question.
        TraceMismatch: another workflow recorded the result.
        SettingsError: a model is missing or another one than before.
    """
    workflow.check_trace(result.trace)
    models, account = _models(workflow, model), open_account(settings.run.budget)
    means = _means(workflow, models, ask, settings, account, store, result.trace.rollout)
    return await resume_from(means, result, answer)


def run(
    workflow: Workflow,
    query: Query | str,
    *,
    model: Models | None = None,
    settings: RunSettings = RunSettings(),
    store: TraceStore | None = None,
) -> Trace:
    """Run a workflow on one query and record it; `arun` without `await`."""
    models = _models(workflow, model)
    return _wait(arun(workflow, query, model=models, settings=settings, store=store), models)


def repair(
    workflow: Workflow,
    query: Query | str | None = None,
    *,
    model: Models | None = None,
    base: Trace | None = None,
    settings: RepairSettings = RepairSettings(),
    selector: Selector | str | Path | None = None,
    diagnoser: Diagnoser = diagnose,
    store: TraceStore | None = None,
) -> RepairResult:
    """Run a workflow on one query and repair it; `arepair` without `await`."""
    models = _models(workflow, model)
    work = arepair(
        workflow,
        query,
        model=models,
        base=base,
        settings=settings,
        selector=selector,
        diagnoser=diagnoser,
        store=store,
    )
    return _wait(work, models)


def repair_many(
    workflow: Workflow,
    queries: Sequence[Query | str],
    *,
    model: Models | None = None,
    budget_fraction: float = 0.5,
    concurrency: int = 8,
    settings: RepairSettings = RepairSettings(),
    selector: Selector | str | Path | None = None,
    diagnoser: Diagnoser = diagnose,
    store: TraceStore | None = None,
    progress: Progress | None = None,
) -> RepairBatch:
    """Run and repair many queries under one budget; `arepair_many` without `await`."""
    models = _models(workflow, model)
    work = arepair_many(
        workflow,
        queries,
        model=models,
        budget_fraction=budget_fraction,
        concurrency=concurrency,
        settings=settings,
        selector=selector,
        diagnoser=diagnoser,
        store=store,
        progress=progress,
    )
    return _wait(work, models)


def coordinate(
    workflow: Workflow,
    query: Query | str | None = None,
    *,
    model: Models | None = None,
    base: Trace | None = None,
    ask: Ask | None = None,
    settings: CoordinationSettings = CoordinationSettings(),
    store: TraceStore | None = None,
) -> CoordinationResult:
    """Run a workflow on one query and deal with abstentions; `acoordinate` without `await`."""
    models = _models(workflow, model)
    work = acoordinate(
        workflow, query, model=models, base=base, ask=ask, settings=settings, store=store
    )
    return _wait(work, models)


def resume(
    workflow: Workflow,
    result: CoordinationResult,
    answer: str | None = None,
    *,
    model: Models | None = None,
    ask: Ask | None = None,
    settings: CoordinationSettings = CoordinationSettings(),
    store: TraceStore | None = None,
) -> CoordinationResult:
    """Go on with a coordinated run; `aresume` without `await`."""
    models = _models(workflow, model)
    work = aresume(workflow, result, answer, model=models, ask=ask, settings=settings, store=store)
    return _wait(work, models)


# --- behind the doors ------------------------------------------------------------------------


def _query(query: Query | str) -> Query:
    return Query(text=query) if isinstance(query, str) else query


def _queries(workflow: Workflow, queries: Sequence[Query | str]) -> list[Query]:
    """Queries with distinct ids, each checked before the first call."""
    if isinstance(queries, str):
        raise QueryError("queries is one text; give a list of them, or ask for one with repair")
    asked = [
        Query(text=query, id=f"q{place}") if isinstance(query, str) else query
        for place, query in enumerate(queries, 1)
    ]
    seen: set[str] = set()
    for query in asked:
        workflow.check_query(query)
        if query.id in seen:
            raise QueryError(f"there are two queries with the id {query.id!r}")
        seen.add(query.id)
    return asked


def _models(workflow: Workflow, model: Models | None) -> Models:
    """The given models, or the default one if the workflow has any agent."""
    if model is not None:
        return model
    return default_model(workflow) if workflow.agents else {}


async def _base(
    workflow: Workflow,
    query: Query | str | None,
    base: Trace | None,
    models: Models,
    settings: RunSettings,
    account: Account | None,
    store: TraceStore | None,
) -> Trace:
    """The base run that was given, checked, or a new one."""
    if base is None:
        if query is None:
            raise QueryError("it needs a query or a base run")
        return await _base_run(workflow, _query(query), models, settings, account, store)
    if query is not None and query not in (base.query, base.query.text):
        raise QueryError(f"the base run is about another query: {base.query.text[:200]!r}")
    workflow.check_trace(base)
    return base


async def _base_run(
    workflow: Workflow,
    query: Query,
    models: Models,
    settings: RunSettings,
    account: Account | None,
    store: TraceStore | None,
) -> Trace:
    """Run a workflow, and record it where there is a store.

    Node runs that the store held already are found by content, never by position: by the node's
    definition, its model, the rollout and the rendered input. A node that failed is run again.
    """
    recording = _recording(workflow, store, settings.rollout)
    trace = await execute(
        workflow,
        query,
        models,
        settings=settings,
        account=account,
        memo=recording.memo if recording is not None else None,
        on_node=recording.on_node if recording is not None else None,
        keep_keys=recording is not None,
    )
    if store is not None:
        store.put_trace(trace)
    return trace


def _means(
    workflow: Workflow,
    models: Models,
    ask: Ask | None,
    settings: CoordinationSettings,
    account: Account | None,
    store: TraceStore | None,
    rollout: int,
) -> Means:
    """What a coordinated run is made with, with a store as it uses one."""
    return Means(
        workflow=workflow,
        models=models,
        settings=settings,
        ask=ask,
        account=account,
        recording=_recording(workflow, store, rollout),
        on_trace=store.put_trace if store is not None else None,
    )


def _recording(workflow: Workflow, store: TraceStore | None, rollout: int) -> Recording | None:
    """A store as the executor uses it; None without one."""
    if store is None:
        return None
    known = store.memo()

    def recorded(
        node: NodeId, messages: tuple[ChatMessage, ...], model: ModelIdentity | None
    ) -> NodeRun | None:
        fingerprint = workflow.node_fingerprints[node]
        return known.get(memo_key(fingerprint, model, rollout, messages))

    def keep(run: NodeRun) -> None:
        store.put_node_run(run)

    return Recording(memo=recorded, on_node=keep)


def _batch_stop(results: Sequence[RepairResult]) -> str:
    """`done`, or `budget` if a node or a trial was stopped by it."""
    traces = [result.base for result in results]
    traces += [result.trial.trace for result in results if result.trial is not None]
    return "budget" if any(trace.is_over_budget for trace in traces) else "done"


def _wait(work: Coroutine[Any, Any, T], models: Models) -> T:
    """Run a coroutine to its end, on a loop of its own.

    Where a loop is running already, as in a notebook, that loop belongs to a thread of its own. The
    models' connections belong to the loop and are closed with it.
    """

    async def finish() -> T:
        try:
            return await work
        finally:
            for model in _distinct(models):
                await model.aclose()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(finish())
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(asyncio.run, finish()).result()


def _distinct(models: Models) -> list[ChatModel]:
    if not isinstance(models, Mapping):
        return [models]
    return list({id(model): model for model in models.values()}.values())
