"""An evaluation: every policy over the same base runs of one workload, scored and compared.

Replies are kept in the output folder by content. An evaluation that was interrupted is started
again with the same command: what was answered is not asked again, and the result is the one that an
uninterrupted run would have given. A policy is charged for every call that it would have made
alone, also where another policy made it first.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from inspect import isawaitable
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeAlias

from pydantic import Field

from splice._version import __version__
from splice.concurrency import Progress, each
from splice.diagnosis import Diagnoser, diagnose
from splice.errors import SettingsError, StoreError
from splice.executor import Models, execute
from splice.files import write_whole
from splice.line import RepairSettings, admit
from splice.policies import ALL_POLICIES, POLICIES, BaseRun, Bench, Outcome
from splice.records import CallRecord, Diagnosis, Edge, ModelIdentity, Probability, Query, Record
from splice.report.abstentions import NodeAbstentions, abstentions_by_node
from splice.selector import Selector
from splice.statistics import (
    Bin,
    Gain,
    Share,
    auc,
    calibration,
    counts,
    mcnemar,
    paired_gain,
    precision_at_1,
    spearman,
)
from splice.workload import Example, Scores, Workload

ROLLOUTS = 100
"""Rollouts set apart for each repeat, so that no policy's samples meet those of another repeat."""


class EvaluationSettings(Record):
    """What is evaluated, and how."""

    policies: tuple[str, ...] = tuple(POLICIES)
    """Of `splice.policies.ALL_POLICIES`."""
    budgets: tuple[Annotated[float, Field(ge=0.0, le=1.0)], ...] = (0.5,)
    """Shares of the questions that may get a trial; each is a table of its own."""
    repeats: Annotated[int, Field(ge=1)] = 1
    """Base runs of each question, with the seeds of different rollouts."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Questions drawn by `seed` from the split; None: all."""
    on_half: tuple[str, ...] = ()
    """Policies that are run on a half of the questions, drawn by `seed`, and compared on it."""
    metric: str | None = None
    """The score that policies are compared by; None: the workload's first."""
    epsilon: Annotated[float, Field(ge=0.0)] = 0.01
    """Differences of a score up to this size are no difference."""
    seed: int = 0
    concurrency: Annotated[int, Field(ge=1)] = 8
    repair: RepairSettings = RepairSettings()
    parts: str | None = None
    """Digest of the card of the learned parts; None: hand-set scores and the documented rules."""


class Row(Record):
    """One policy on one question: one line of `outcomes.jsonl`."""

    query_id: str
    kind: str | None
    repeat: int
    policy: str
    budget: float | None
    """None: the policy knows no budget."""
    is_admitted: bool
    is_tried: bool
    is_decisive: bool
    """Whether the candidate answer differs from the base answer, byte for byte."""
    is_adopted: bool
    """Whether the final answer differs from the base answer."""
    edge: Edge | None
    base_answer: str | None
    candidate: str | None
    answer: str | None
    base_scores: Scores
    scores: Scores
    base_tokens: int
    tokens: int
    """Prompt and completion tokens of every call of the policy, its base run included."""
    n_calls: int
    n_uncounted: int
    """Calls whose tokens the server did not tell."""


class PolicyResult(Record):
    """One policy under one budget."""

    policy: str
    budget: float | None
    n: int
    """Questions; repeats of one count once."""
    is_half: bool
    """Whether it ran on a half of the questions."""
    base_score: float
    """Mean of the base answers on the same questions."""
    score: float
    all_scores: Scores
    """Mean by metric."""
    gain: Gain
    p_mcnemar: Probability
    """Exact two-sided p of fixed against broken."""
    fixed: int
    broken: int
    changed: int
    """Answers that were replaced by others of the same score."""
    kept: int
    n_trials: int
    n_decisive: int
    tokens: int
    n_calls: int
    n_uncounted: int
    cost_multiple: float | None
    """Tokens over those of the base runs on the same questions; None: the base runs used none."""
    tokens_per_net_fixed: float | None
    """Tokens beyond the base runs for each net fixed question; None: nothing was won."""


class EdgeChoice(Record):
    """How often one ranker's first edge is a true gap edge (method 2.11)."""

    ranker: str
    share: Share
    """Over the questions with at least one gap edge."""


class DiagnosisResult(Record):
    """What the diagnosis foresaw."""

    calibration: tuple[Bin, ...]
    """Predicted against actual base score, by quintile of the prediction."""
    spearman: float | None
    auc: float | None
    """Of predicted headroom for a base answer that is not perfect; None: there is no such, or no
    other."""
    n_with_gaps: int
    n_gaps_unknown: int
    edge_choice: tuple[EdgeChoice, ...]


class KindResult(Record):
    """Base and final score of one kind of question, for one policy."""

    kind: str
    policy: str
    budget: float | None
    n: int
    base_score: float
    score: float
    fixed: int
    broken: int


class EvaluationResult(Record):
    """An evaluation, as it stands in `result.json`."""

    schema_version: Literal[1] = 1
    engine_version: str
    workload: str
    about: str
    split: str
    sources: Mapping[str, str]
    models: tuple[ModelIdentity, ...]
    settings: EvaluationSettings
    metric: str
    n_questions: int
    policies: tuple[PolicyResult, ...]
    kinds: tuple[KindResult, ...]
    diagnosis: DiagnosisResult
    failed_nodes: int
    """Node runs of the base runs that failed: they count as they are, as wrong answers."""
    abstentions: tuple[NodeAbstentions, ...] = ()
    """The nodes that abstained in base runs; an answer is right if its score is 1."""


class _Scored(NamedTuple):
    """One base run with its scores and what the budgets say."""

    example: Example
    repeat: int
    base: BaseRun
    scores: Scores


async def evaluate(
    workload: Workload,
    models: Models,
    *,
    split: str,
    settings: EvaluationSettings = EvaluationSettings(),
    selector: Selector | None = None,
    language: Selector | None = None,
    diagnoser: Diagnoser = diagnose,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> EvaluationResult:
    """Run all policies over the same base runs, and compare them.

    Args:
        workload: questions, workflow and scorer.
        models: what answers the agents; wrap it in `CachedModel` to make the evaluation resumable.
        split: of the questions; written into the result.
        settings: policies, budgets and statistics.
        selector: of the policies that have one; None: the documented rules.
        language: the selector of the policy `splice_language`, where that is among them.
        diagnoser: finds headroom and candidate edges.
        folder: where `outcomes.jsonl` and `result.json` are written; None: nowhere.
        progress: told of each question that is done; stages are `base` and `policies`.

    Raises:
        SettingsError: a policy or metric that does not exist; raised before the first call.
        QueryError: a question does not fit its workflow; raised before the first call.
    """
    metric = _checked(workload, settings)
    if language is None and "splice_language" in settings.policies:
        raise SettingsError("the policy 'splice_language' needs a language-model selector")
    examples = drawn(workload.examples, settings.limit, settings.seed)
    for example in examples:
        workload.workflow_of(example).check_query(example.query)
    by_id = {example.query.id: example for example in examples}

    known: dict[tuple[str, str | None], Scores] = {}

    async def score(example: Example, answer: str | None) -> Scores:
        # Most policies keep the base answer, and a scorer may run a program or ask a judge.
        key = (example.query.id, answer)
        if key in known:
            return known[key]
        found = workload.score(example, answer)
        scores = await found if isawaitable(found) else found
        if scores.keys() != set(workload.metrics):
            raise SettingsError(
                f"the scorer of {workload.name!r} gave {sorted(scores)}, not {workload.metrics}"
            )
        known[key] = scores
        return scores

    async def is_better(query: Query, old: str | None, new: str | None) -> bool:
        example = by_id[query.id]
        before, after = await score(example, old), await score(example, new)
        return after[metric] - before[metric] > settings.epsilon

    async def base_run(task: tuple[Example, int]) -> _Scored:
        example, repeat = task
        workflow = workload.workflow_of(example)
        trace = await execute(
            workflow,
            example.query,
            models,
            settings=settings.repair.run.model_copy(update={"rollout": repeat * ROLLOUTS}),
        )
        base = BaseRun(workflow, trace, diagnoser(workflow, trace))
        return _Scored(example, repeat, base, await score(example, trace.answer))

    tasks = [(example, repeat) for repeat in range(settings.repeats) for example in examples]
    bases = await each(tasks, base_run, settings.concurrency, progress, "base")
    admitted = _admissions(bases, settings)
    bench = Bench(
        models,
        settings=settings.repair,
        selector=selector,
        language=language,
        is_better=is_better,
        seed=settings.seed,
    )
    half = half_of([example.query.id for example in examples], settings.seed)

    async def all_policies(place: int) -> list[Row]:
        scored = bases[place]
        rows: list[Row] = []
        for name in settings.policies:
            kind = ALL_POLICIES[name]
            chosen = {budget: admitted[kind.admission, budget] for budget in settings.budgets}
            if name in settings.on_half and scored.example.query.id not in half:
                continue
            outcome = (
                await kind.run(bench, scored.base)
                if any(place in places for places in chosen.values()) or not kind.is_budgeted
                else Outcome(answer=scored.base.trace.answer)
            )
            scores = await score(scored.example, outcome.answer)
            for budget in settings.budgets if kind.is_budgeted else (None,):
                is_admitted = budget is None or place in chosen[budget]
                rows.append(_row(scored, name, budget, is_admitted, outcome, scores))
        return rows

    found = await each(range(len(bases)), all_policies, settings.concurrency, progress, "policies")
    rows = [row for rows_of_one in found for row in rows_of_one]
    result = _result(workload, split, settings, metric, bases, rows)
    if folder is not None:
        write_whole(
            folder / "outcomes.jsonl", "".join(f"{row.model_dump_json()}\n" for row in rows)
        )
        write_whole(folder / "result.json", f"{result.model_dump_json(indent=1)}\n")
    return result


def _checked(workload: Workload, settings: EvaluationSettings) -> str:
    """The metric to compare by, once all names are known to exist."""
    for name in (*settings.policies, *settings.on_half):
        if name not in ALL_POLICIES:
            raise SettingsError(f"no policy {name!r}; there are: {', '.join(ALL_POLICIES)}")
    metric = settings.metric or workload.metrics[0]
    if metric not in workload.metrics:
        raise SettingsError(
            f"workload {workload.name!r} has no metric {metric!r}; it has "
            f"{', '.join(workload.metrics)}"
        )
    if not workload.examples:
        raise SettingsError(f"workload {workload.name!r} has no question in this split")
    return metric


def drawn(examples: Sequence[Example], limit: int | None, seed: int) -> tuple[Example, ...]:
    """At most `limit` examples, drawn by `seed` whatever their order, in the order given."""
    if limit is None or limit >= len(examples):
        return tuple(examples)
    ids = sorted(example.query.id for example in examples)
    chosen = set(random.Random(f"{seed}:limit").sample(ids, limit))
    return tuple(example for example in examples if example.query.id in chosen)


def half_of(ids: Collection[str], seed: int) -> frozenset[str]:
    """A random half of the ids, rounded up."""
    return frozenset(random.Random(f"{seed}:half").sample(sorted(ids), (len(ids) + 1) // 2))


_Admission: TypeAlias = Literal["headroom", "random"]


def _admissions(
    bases: Sequence[_Scored], settings: EvaluationSettings
) -> Mapping[tuple[_Admission, float], frozenset[int]]:
    """Places that get a trial, by kind of admission and budget; each repeat is a batch of its own."""
    chosen: dict[tuple[_Admission, float], set[int]] = {}
    for repeat in range(settings.repeats):
        places = [place for place, scored in enumerate(bases) if scored.repeat == repeat]
        found = [bases[place].base.diagnosis for place in places]
        ids = [bases[place].example.query.id for place in places]
        rng = random.Random(f"{settings.seed}:admission:{repeat}")
        lots = {id: rng.random() for id in sorted(ids)}
        drawn_by_lot = [
            _blind(diagnosis, lots[id]) for diagnosis, id in zip(found, ids, strict=True)
        ]
        rules: dict[_Admission, RepairSettings] = {
            "headroom": settings.repair,
            "random": settings.repair.model_copy(
                update={"min_headroom": 0.0, "admit_by": "headroom"}
            ),
        }
        ways: tuple[tuple[_Admission, list[Diagnosis]], ...] = (
            ("headroom", found),
            ("random", drawn_by_lot),
        )
        for admission, diagnoses in ways:
            for budget in settings.budgets:
                admitted = admit(diagnoses, ids, budget_fraction=budget, settings=rules[admission])
                own = chosen.setdefault((admission, budget), set())
                own |= {places[index] for index in admitted}
    return {key: frozenset(places) for key, places in chosen.items()}


def _blind(diagnosis: Diagnosis, lot: float) -> Diagnosis:
    """A diagnosis that says nothing about headroom: a number drawn by lot stands for it."""
    admission = "never" if diagnosis.admission == "never" else "headroom"
    return diagnosis.model_copy(update={"base_score": lot, "admission": admission})


# --- rows ------------------------------------------------------------------------------------


def charged(calls: Sequence[CallRecord]) -> tuple[int, int, int]:
    """Tokens, calls and uncounted calls of what a policy would have sent alone.

    A call that the response cache answered is charged like the call that filled it: who asked first
    is no merit of a policy.
    """
    answered = [call for call in calls if call.outcome in ("ok", "cached")]
    tokens = sum(
        (call.usage.prompt_tokens or 0) + (call.usage.completion_tokens or 0) for call in answered
    )
    unknown = sum(
        call.usage.prompt_tokens is None or call.usage.completion_tokens is None
        for call in answered
    )
    return tokens, len(calls), unknown + len(calls) - len(answered)


def _row(
    scored: _Scored,
    policy: str,
    budget: float | None,
    is_admitted: bool,
    outcome: Outcome,
    scores: Scores,
) -> Row:
    trace = scored.base.trace
    if not is_admitted:
        outcome, scores = Outcome(answer=trace.answer), scored.scores
    base_tokens, base_calls, base_uncounted = charged(trace.calls)
    tokens, n_calls, n_uncounted = charged(outcome.calls)
    if not outcome.replaces_base:
        tokens, n_calls = tokens + base_tokens, n_calls + base_calls
        n_uncounted += base_uncounted
    return Row(
        query_id=scored.example.query.id,
        kind=scored.example.kind,
        repeat=scored.repeat,
        policy=policy,
        budget=budget,
        is_admitted=is_admitted,
        is_tried=outcome.is_tried,
        is_decisive=outcome.is_tried and outcome.candidate != trace.answer,
        is_adopted=outcome.answer != trace.answer,
        edge=outcome.edge,
        base_answer=trace.answer,
        candidate=outcome.candidate,
        answer=outcome.answer,
        base_scores=scored.scores,
        scores=scores,
        base_tokens=base_tokens,
        tokens=tokens,
        n_calls=n_calls,
        n_uncounted=n_uncounted,
    )


# --- results ---------------------------------------------------------------------------------


def _result(
    workload: Workload,
    split: str,
    settings: EvaluationSettings,
    metric: str,
    bases: Sequence[_Scored],
    rows: Sequence[Row],
) -> EvaluationResult:
    groups = dict(_grouped(rows))
    identities = {
        run.model.model_dump_json(): run.model
        for scored in bases
        for run in scored.base.trace.node_runs
        if run.model is not None
    }
    return EvaluationResult(
        engine_version=__version__,
        workload=workload.name,
        about=workload.about,
        split=split,
        sources=workload.sources,
        models=tuple(identities.values()),
        settings=settings,
        metric=metric,
        n_questions=len({scored.example.query.id for scored in bases}),
        policies=policy_results(rows, settings, metric),
        kinds=tuple(
            result
            for (policy, budget), own in groups.items()
            for result in _kind_results(policy, budget, own, settings, metric)
        ),
        diagnosis=_diagnosis_result(bases, settings, metric),
        failed_nodes=sum(
            run.status == "failed" for scored in bases for run in scored.base.trace.node_runs
        ),
        abstentions=abstentions_by_node(
            (scored.base.trace, scored.scores[metric] >= 1 - settings.epsilon) for scored in bases
        ),
    )


def policy_results(
    rows: Sequence[Row], settings: EvaluationSettings, metric: str
) -> tuple[PolicyResult, ...]:
    """Each policy under each budget, over all rows.

    Args:
        rows: of one evaluation, or of several that are pooled: then ids of questions must differ
            from one to another.
        settings: of the evaluation, or what several of them share.
        metric: that policies are compared by; every row has it.
    """
    return tuple(
        _policy_result(policy, budget, own, settings, metric)
        for (policy, budget), own in _grouped(rows)
    )


def _grouped(rows: Sequence[Row]) -> Iterator[tuple[tuple[str, float | None], list[Row]]]:
    """Rows by policy and budget, in the order of policies, then of budgets."""
    keys = list(dict.fromkeys((row.policy, row.budget) for row in rows))
    keys.sort(key=lambda key: (key[1] is not None, key[1] or 0.0))
    order = {name: place for place, name in enumerate(ALL_POLICIES)}
    keys.sort(key=lambda key: order[key[0]])
    for key in keys:
        yield key, [row for row in rows if (row.policy, row.budget) == key]


def _by_question(rows: Sequence[Row], value: Callable[[Row], float]) -> list[list[float]]:
    """(n_questions, n_repeats) values."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row.query_id, []).append(value(row))
    return list(found.values())


def _policy_result(
    policy: str,
    budget: float | None,
    rows: Sequence[Row],
    settings: EvaluationSettings,
    metric: str,
) -> PolicyResult:
    base = _by_question(rows, lambda row: row.base_scores[metric])
    after = _by_question(rows, lambda row: row.scores[metric])
    found = counts(
        [row.base_scores[metric] for row in rows],
        [row.scores[metric] for row in rows],
        eps=settings.epsilon,
    )
    adopted = sum(row.is_adopted for row in rows)
    base_tokens = sum(row.base_tokens for row in rows)
    tokens = sum(row.tokens for row in rows)
    net = found.n_fixed - found.n_broken
    return PolicyResult(
        policy=policy,
        budget=budget,
        n=len(base),
        is_half=policy in settings.on_half,
        base_score=_mean([row.base_scores[metric] for row in rows]),
        score=_mean([row.scores[metric] for row in rows]),
        all_scores={
            name: _mean([row.scores[name] for row in rows])
            for name in rows[0].scores
            if all(name in row.scores for row in rows)
        },
        gain=paired_gain(base, after, seed=settings.seed),
        p_mcnemar=mcnemar(found.n_fixed, found.n_broken),
        fixed=found.n_fixed,
        broken=found.n_broken,
        changed=adopted - found.n_fixed - found.n_broken,
        kept=len(rows) - adopted,
        n_trials=sum(row.is_tried for row in rows),
        n_decisive=sum(row.is_decisive for row in rows),
        tokens=tokens,
        n_calls=sum(row.n_calls for row in rows),
        n_uncounted=sum(row.n_uncounted for row in rows),
        cost_multiple=tokens / base_tokens if base_tokens else None,
        tokens_per_net_fixed=(tokens - base_tokens) / net if net > 0 else None,
    )


def _kind_results(
    policy: str,
    budget: float | None,
    rows: Sequence[Row],
    settings: EvaluationSettings,
    metric: str,
) -> Iterator[KindResult]:
    kinds = sorted({row.kind for row in rows if row.kind is not None})
    for kind in kinds:
        own = [row for row in rows if row.kind == kind]
        base = [row.base_scores[metric] for row in own]
        after = [row.scores[metric] for row in own]
        found = counts(base, after, eps=settings.epsilon)
        yield KindResult(
            kind=kind,
            policy=policy,
            budget=budget,
            n=len({row.query_id for row in own}),
            base_score=_mean(base),
            score=_mean(after),
            fixed=found.n_fixed,
            broken=found.n_broken,
        )


def _diagnosis_result(
    bases: Sequence[_Scored], settings: EvaluationSettings, metric: str
) -> DiagnosisResult:
    predicted = [scored.base.diagnosis.base_score for scored in bases]
    actual = [scored.scores[metric] for scored in bases]
    imperfect = [score < 1 - settings.epsilon for score in actual]
    known = [scored for scored in bases if scored.example.gap_edges is not None]
    gaps = [scored for scored in known if scored.example.gap_edges and scored.base.diagnosis.edges]
    return DiagnosisResult(
        calibration=calibration(predicted, actual),
        spearman=spearman(predicted, actual),
        auc=auc([1 - score for score in predicted], imperfect),
        n_with_gaps=len(gaps),
        n_gaps_unknown=len(bases) - len(known),
        edge_choice=tuple(
            EdgeChoice(ranker=name, share=share)
            for name, hits in _edge_hits(gaps, settings.seed).items()
            if (share := precision_at_1(hits)) is not None
        ),
    )


def _edge_hits(gaps: Sequence[_Scored], seed: int) -> Mapping[str, list[bool]]:
    """By ranker: whether its first edge is a gap edge, for each question that has one."""
    hits: dict[str, list[bool]] = {
        "splice": [],
        "random": [],
        "terminal_distance": [],
        "coverage": [],
    }
    for scored in gaps:
        true = set(scored.example.gap_edges or ())
        workflow, diagnosis = scored.base.workflow, scored.base.diagnosis
        edges = [score.edge.ends for score in diagnosis.edges]
        coverage = {
            score.edge.ends: score.features.get("coverage", 0.0) for score in diagnosis.edges
        }
        declared = sorted(edges, key=lambda edge: (workflow.plan.order.index(edge[1]), edge))
        rng = random.Random(f"{seed}:ranker:{scored.example.query.id}:{scored.repeat}")
        hits["splice"].append(edges[0] in true)
        hits["random"].append(rng.choice(declared) in true)
        hits["terminal_distance"].append(
            min(declared, key=lambda edge: workflow.distances[edge[1]]) in true
        )
        hits["coverage"].append(max(declared, key=lambda edge: coverage[edge]) in true)
    return hits


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# --- the output folder -----------------------------------------------------------------------


def claim(folder: Path, identity: Mapping[str, object]) -> None:
    """Make `folder` the output of one evaluation, or go on with the one that it is.

    Args:
        folder: where results go.
        identity: what makes the evaluation this one: workload, data, questions, model, seed.

    Raises:
        SettingsError: the folder holds another evaluation; the message names what differs.
        StoreError: the folder can't be written.
    """
    path = folder / "evaluation.json"
    wanted = json.loads(json.dumps(identity))
    if path.exists():
        try:
            known = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise StoreError(f"{path}: {error}") from None
        if not isinstance(known, dict):
            raise StoreError(f"{path}: not the description of an evaluation")
        differing = [key for key in wanted if known.get(key) != wanted[key]]
        if differing:
            key = differing[0]
            raise SettingsError(
                f"{folder} holds another evaluation: {key} is {known.get(key)!r} there and "
                f"{wanted[key]!r} here; choose another --out"
            )
        return
    write_whole(path, json.dumps(wanted, indent=1) + "\n")
