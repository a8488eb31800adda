r"""What abstentions add to repair: to the choice of an edge, to headroom, to what is adopted.

`runs` makes base runs and diagnoses each three times: as it was recorded; with every abstention read
as the plain reply that it is (words such as "not found" are still understood); and with no refusal
understood at all. Nothing runs twice for that: what later nodes made of an abstention stays. How
often the first edge is a true gap edge is set side by side, for the hand-set scores and for learned
parts, which are used as they are. `--vary abstention=phrase,typed,none` does it for several variants
of a workload on the same questions. Replies are kept by content in `OUT/replies.sqlite`, so a folder
of `splice evaluate` may be given as well, and the same command goes on where it was stopped.

`parts` fits the learned parts on exported feature tables, with the features that come from abstaining
or declining and without them, and compares both out of fold and on validation. No model is asked.
What tells of an abstention in another way stays in both: a silent node has no words.

    python -m benchmarks.abstention_signal runs multihop --data DATA... --out runs/abstention \
        --vary abstention=phrase,typed,none --split validation --limit 40 --parts shipped
    python -m benchmarks.abstention_signal parts
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from inspect import isawaitable
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, log_softmax

from selector_training import fit as fitting
from selector_training.counting import SEED, by_question
from selector_training.fit import OUTCOMES, FitSettings
from selector_training.tables import (
    BaseRow,
    DecisiveProbe,
    LabelledEdge,
    ProbeRow,
    Question,
    Tables,
    decisive_probes,
    labelled_edges,
    read_tables,
)
from splice.abstention import is_declining, parse_reply
from splice.concurrency import Progress, each
from splice.diagnosis import INTERCEPT, WEIGHTS, Diagnoser, diagnose
from splice.evaluation import drawn
from splice.executor import Models, execute
from splice.learned import Learned, PartName, edge_rank
from splice.line import RepairSettings
from splice.models.cache import CachedModel
from splice.models.default import default_model
from splice.queries import Split
from splice.records import NodeRun, Record, Trace
from splice.report.display import aligned
from splice.report.progress import bars
from splice.selector import decide, normalised
from splice.selectors import open_parts
from splice.statistics import (
    Gain,
    Interval,
    Share,
    auc,
    mcnemar,
    paired_gain,
    precision_at_1,
    share,
    spearman,
)
from splice.text import is_refusal
from splice.workflow import Workflow
from splice.workload import Example, Options, Workload, find_loader

Floats: TypeAlias = NDArray[np.float64]

# --- reading a trace without the signal ------------------------------------------------------

_UNREAD: Final = " " * 1000
"""A text with so many spaces inside is longer than what is looked at for refusals, and has the same
words, numbers and names as before."""


def as_text(workflow: Workflow, trace: Trace) -> Trace:
    """The trace as if abstentions were outputs: what the node replied, and no more.

    A reply that tried the typed form and missed it counts as an output too.
    """
    runs = [_as_text(run) for run in trace.node_runs]
    answer = trace.answer
    if trace.by_node[workflow.output].status == "abstained":
        answer = next(run.output for run in runs if run.node == workflow.output)
        # In its typed form it would be known for what it is even so.
        if answer is not None and parse_reply(answer).kind == "abstention":
            answer += _UNREAD + "."
    return _with_runs(trace, runs, answer)


def unread(workflow: Workflow, trace: Trace) -> Trace:
    """The same, and no node or answer that declines in words is known for it."""
    plain = as_text(workflow, trace)
    answer = plain.answer
    if answer is not None and is_declining(answer):
        answer = _hidden(answer)
    return _with_runs(plain, [_unread(run) for run in plain.node_runs], answer)


def _as_text(run: NodeRun) -> NodeRun:
    if run.status != "abstained" and not _is_malformed(run):
        return run
    output = run.output if run.raw is None else run.raw
    changes = {"status": "ok", "output": output, "abstention": None, "failure": None}
    return run.model_copy(update=changes)


def _is_malformed(run: NodeRun) -> bool:
    """Whether a node tried to abstain and missed the form."""
    return run.failure is not None and run.failure.kind == "abstention_syntax"


def _unread(run: NodeRun) -> NodeRun:
    if run.status != "ok" or not is_refusal(run.output):
        return run
    return run.model_copy(update={"output": _hidden(run.output or "")})


def _hidden(text: str) -> str:
    """A text that is not known for a refusal; one without any word says nothing anyhow."""
    return f"{text}{_UNREAD}." if any(map(str.isalnum, text)) else text


def _with_runs(trace: Trace, runs: Sequence[NodeRun], answer: str | None) -> Trace:
    # A copy would keep what was derived from the old runs.
    fields = {name: getattr(trace, name) for name in Trace.model_fields}
    return Trace(**{**fields, "node_runs": tuple(runs), "answer": answer})


SIGNAL: Final = "with the signal"

ARMS: Final[Mapping[str, Callable[[Workflow, Trace], Trace]]] = {
    SIGNAL: lambda workflow, trace: trace,
    "words only": as_text,
    "nothing read": unread,
}
"""Ways to read a trace."""

HAND_SET: Final = "hand-set"
LEARNED: Final = "learned"


# --- base runs -------------------------------------------------------------------------------

Says: TypeAlias = Literal["abstained", "malformed", "declined", "failed", "answered"]


class Said(Record):
    """How one node came out of a base run."""

    node: str
    says: Says
    """`malformed`: an abstention that missed the form; `declined`: in words only."""
    lacks: bool
    """It is the receiver of a gap edge: it needs something that another node holds."""


class Case(Record):
    """One question after its base run."""

    query_id: str
    kind: str
    score: float
    """Of the base answer."""
    n_candidates: int
    n_gaps: int
    hits: Mapping[str, Mapping[str, bool]]
    """By diagnoser and arm: whether the first edge is a gap edge."""
    said: tuple[Said, ...]

    @property
    def is_stated(self) -> bool:
        """Whether a receiver of a gap edge abstained."""
        return any(said.lacks and said.says == "abstained" for said in self.said)


async def cases(
    workload: Workload,
    examples: Sequence[Example],
    models: Models,
    *,
    learned: Learned | None,
    concurrency: int,
    prefix: str = "",
    progress: Progress | None = None,
) -> list[Case]:
    """Run questions and diagnose each; only those with an edge to choose whose gaps are known.

    Args:
        workload: of the questions.
        examples: the questions.
        models: what answers the agents.
        learned: parts to diagnose with beside the hand-set scores; None: the latter alone.
        concurrency: questions in flight.
        prefix: before the kind of each question.
        progress: told of each question that is done.
    """
    diagnosers: dict[str, Diagnoser] = {HAND_SET: diagnose}
    if learned is not None:
        diagnosers[LEARNED] = learned.diagnose

    async def one(example: Example) -> Case:
        workflow = workload.workflow_of(example)
        trace = await execute(workflow, example.query, models, settings=RepairSettings().run)
        found = workload.score(example, trace.answer)
        scores = await found if isawaitable(found) else found
        gaps = set(example.gap_edges or ())
        read = {arm: reading(workflow, trace) for arm, reading in ARMS.items()}
        return Case(
            query_id=example.query.id,
            kind=f"{prefix}{example.kind or '-'}",
            score=scores[workload.metrics[0]],
            n_candidates=len(workflow.candidate_edges),
            n_gaps=len(gaps),
            hits={
                name: {arm: _is_hit(diagnoser, workflow, read[arm], gaps) for arm in ARMS}
                for name, diagnoser in diagnosers.items()
            },
            said=tuple(
                Said(
                    node=run.node,
                    says=_says(run),
                    lacks=any(receiver == run.node for _, receiver in gaps),
                )
                for run in trace.node_runs
            ),
        )

    asked = [
        example
        for example in examples
        if example.gap_edges is not None and len(workload.workflow_of(example).candidate_edges) > 1
    ]
    return await each(asked, one, concurrency, progress, "base")


def _is_hit(
    diagnoser: Diagnoser, workflow: Workflow, trace: Trace, gaps: Collection[tuple[str, str]]
) -> bool:
    edges = diagnoser(workflow, trace).edges
    return bool(edges) and edges[0].edge.ends in gaps


def _says(run: NodeRun) -> Says:
    if run.status == "abstained":
        return "abstained"
    if run.status != "ok":
        return "malformed" if _is_malformed(run) else "failed"
    return "declined" if is_refusal(run.output) else "answered"


class Choice(Record):
    """How often the first edge is a gap edge, over the questions that have one."""

    diagnoser: str
    arm: str
    is_stated: bool
    """Only over questions in which a receiver of a gap edge abstained."""
    share: Share
    signal_more: Gain | None
    """The share with the signal less this one; None: this is it."""
    p_mcnemar: float | None
    """Exact two-sided p of questions that only one of the two gets right."""


class NodeCount(Record):
    """How a node came out of the base runs, with a gap before it or without."""

    node: str
    lacks: bool
    n: int
    said: Mapping[Says, int]


class KindCount(Record):
    """The questions of one kind."""

    kind: str
    n: int
    n_with_gaps: int
    base_score: float
    n_abstained: int
    """Node runs that abstained."""
    n_lacking: int
    """Of these, receivers of a gap edge."""
    hits: Mapping[str, int]
    """By arm, with hand-set scores: questions whose first edge is a gap edge."""


class Variant(Record):
    """One variant of a workload."""

    name: str
    n: int
    n_with_gaps: int
    base_score: float
    more_than_first: Gain | None
    """Its base score less that of the first variant; None: this is the first."""
    at_random: float | None
    """Expected share of hits of an edge drawn at random."""
    choices: tuple[Choice, ...]
    abstained: Share | None
    """Node runs that abstained although, or because, they were receivers of a gap edge, of all that
    abstained."""
    stated: Share | None
    """Receivers of a gap edge that abstained, of all such receivers."""
    nodes: tuple[NodeCount, ...]
    kinds: tuple[KindCount, ...]
    cases: tuple[Case, ...]


def variant(name: str, found: Sequence[Case], first: Sequence[Case] | None) -> Variant:
    """Count the cases of one variant.

    Args:
        name: of the variant.
        found: its cases.
        first: those of the variant that it is compared with, in the same order; None: of no other.

    Raises:
        ValueError: there is no case.
    """
    if not found:
        raise ValueError("no question has known gaps and two edges to choose from")
    gaps = [case for case in found if case.n_gaps]
    said = [node for case in found for node in case.said]
    abstained = [node for node in said if node.says == "abstained"]
    lacking = [node for node in said if node.lacks]
    n_stated = sum(node.lacks for node in abstained)
    scores = [case.score for case in found]
    return Variant(
        name=name,
        n=len(found),
        n_with_gaps=len(gaps),
        base_score=fmean(scores),
        more_than_first=None
        if first is None
        else paired_gain([case.score for case in first], scores, seed=SEED),
        at_random=fmean(case.n_gaps / case.n_candidates for case in gaps) if gaps else None,
        choices=(*_choices(gaps, False), *_choices([c for c in gaps if c.is_stated], True)),
        abstained=share(n_stated, len(abstained)),
        stated=share(n_stated, len(lacking)),
        nodes=tuple(_node_counts(said)),
        kinds=tuple(_kind_counts(found)),
        cases=tuple(found),
    )


def _choices(gaps: Sequence[Case], is_stated: bool) -> Iterator[Choice]:
    for diagnoser in gaps[0].hits if gaps else ():
        signal = [case.hits[diagnoser][SIGNAL] for case in gaps]
        for arm in ARMS:
            hits = [case.hits[diagnoser][arm] for case in gaps]
            found = precision_at_1(hits)
            assert found is not None
            only = [a - b for a, b in zip(signal, hits, strict=True)]
            yield Choice(
                diagnoser=diagnoser,
                arm=arm,
                is_stated=is_stated,
                share=found,
                signal_more=None if arm == SIGNAL else paired_gain(hits, signal, seed=SEED),
                p_mcnemar=None if arm == SIGNAL else mcnemar(only.count(1), only.count(-1)),
            )


def _node_counts(said: Sequence[Said]) -> Iterator[NodeCount]:
    for node, lacks in product(dict.fromkeys(one.node for one in said), (True, False)):
        own = [one.says for one in said if (one.node, one.lacks) == (node, lacks)]
        if own:
            counts = {says: own.count(says) for says in dict.fromkeys(own)}
            yield NodeCount(node=node, lacks=lacks, n=len(own), said=counts)


def _kind_counts(found: Sequence[Case]) -> Iterator[KindCount]:
    for kind in sorted({case.kind for case in found}):
        own = [case for case in found if case.kind == kind]
        gaps = [case for case in own if case.n_gaps]
        abstained = [s for case in own for s in case.said if s.says == "abstained"]
        yield KindCount(
            kind=kind,
            n=len(own),
            n_with_gaps=len(gaps),
            base_score=fmean(case.score for case in own),
            n_abstained=len(abstained),
            n_lacking=sum(one.lacks for one in abstained),
            hits={arm: sum(case.hits[HAND_SET][arm] for case in gaps) for arm in ARMS},
        )


def variants_text(found: Sequence[Variant]) -> str:
    """The variants as a page of text."""
    scores = [
        ("variant", "questions", "with a gap", "base score", "less the first", "interval"),
        *(
            (
                one.name,
                str(one.n),
                str(one.n_with_gaps),
                f"{one.base_score:.3f}",
                *_difference(one.more_than_first),
            )
            for one in found
        ),
    ]
    return "\n\n".join(["\n".join(aligned(scores)), *map(_variant_text, found)])


def _variant_text(one: Variant) -> str:
    lines = [f"## {one.name}", ""]
    head = ("", "questions", "precision", "interval", "signal less it", "interval", "p")
    for is_stated, title in (
        (False, "first edge is a true gap edge"),
        (True, "the same, where a receiver of a gap edge abstained"),
    ):
        rows = [
            (
                f"{choice.diagnoser}, {choice.arm}",
                str(choice.share.n),
                f"{choice.share.value:.3f}",
                f"{choice.share.interval:z.3f}",
                *_difference(choice.signal_more),
                "-" if choice.p_mcnemar is None else f"{choice.p_mcnemar:.3f}",
            )
            for choice in one.choices
            if choice.is_stated == is_stated
        ]
        if rows:
            lines += [*aligned([(title, *head[1:]), *rows]), ""]
    if one.at_random is not None:
        lines += [f"an edge drawn at random: {one.at_random:.3f}", ""]
    lines += [
        f"node runs that abstained and lack what another one holds: {_share(one.abstained)}",
        f"node runs that lack what another one holds and abstained: {_share(one.stated)}",
        "",
        *aligned(
            [
                ("node", "lacks a fact", "runs", *_SAYS),
                *(
                    (
                        count.node,
                        "yes" if count.lacks else "no",
                        str(count.n),
                        *(str(count.said.get(says, 0)) for says in _SAYS),
                    )
                    for count in one.nodes
                ),
            ]
        ),
        "",
        *aligned(
            [
                ("kind", "questions", "with a gap", "base score", "abstained", "lacking", *ARMS),
                *(
                    (
                        kind.kind,
                        str(kind.n),
                        str(kind.n_with_gaps),
                        f"{kind.base_score:.3f}",
                        str(kind.n_abstained),
                        str(kind.n_lacking),
                        *(str(kind.hits[arm]) for arm in ARMS),
                    )
                    for kind in one.kinds
                ),
            ]
        ),
    ]
    return "\n".join(lines)


_SAYS: Final[tuple[Says, ...]] = ("abstained", "malformed", "declined", "failed", "answered")


def _share(found: Share | None) -> str:
    if found is None:
        return "-"
    return f"{found.n_hits} of {found.n}, {found.value:.3f} {found.interval:z.3f}"


def _difference(found: Gain | None) -> tuple[str, str]:
    return ("-", "-") if found is None else (f"{found.mean:+z.3f}", f"{found.interval:z.3f}")


# --- learned parts ---------------------------------------------------------------------------

SIGNALS: Final = frozenset(
    {
        "a_declines",
        "n_declining",
        "concerned_declines",
        "w_declines",
        "named_held",
        "u_silent",
        "is_abstention_resolved",
        "is_abstention_new",
        "is_answer_refusal_resolved",
        "is_answer_refusal_new",
    }
)
"""Features that come from abstaining or declining. Of a selector's, `base_declines` and
`new_declines` follow from them; `a_words`, which is 0 for an answer that declines, is counted anew."""


def by_hand(features: Mapping[str, float]) -> float:
    """The hand-set chance of an edge, from its features as `splice.diagnosis.score_edge` does it."""
    z = INTERCEPT + sum(weight * features[name] for name, weight in WEIGHTS.items())
    return 1.0 / (1.0 + math.exp(-z))


def without_signals(tables: Tables) -> Tables:
    """Tables in which no feature tells that anybody abstained or declined.

    The hand-set chances are computed again.
    """

    def base(row: BaseRow) -> BaseRow:
        features = {**_muted(row.features), "a_words": float(row.n_answer_words)}
        return row._replace(features=features)

    def probe(row: ProbeRow) -> ProbeRow:
        features = _muted(row.features)
        trial = row.trial and row.trial._replace(evidence=_muted(row.trial.evidence))
        return row._replace(features=features, p_decisive=by_hand(features), trial=trial)

    return _mapped(tables, base, probe)


def _muted(features: Mapping[str, float]) -> dict[str, float]:
    # Features that are the same in all rows are left out when trees are fitted.
    return {name: 0.0 if name in SIGNALS else value for name, value in features.items()}


def without_best_edge(tables: Tables) -> Tables:
    """Tables without the highest hand-set chance of a query.

    It has the signals in it and can't be computed again, as a table does not hold all edges.
    """

    def base(row: BaseRow) -> BaseRow:
        return row._replace(features={**row.features, "best_edge": 0.0})

    return _mapped(tables, base, lambda row: row)


def without_by_hand(tables: Tables) -> Tables:
    """Tables in which the hand-set chances of edges tell nothing."""
    return _mapped(tables, lambda row: row, lambda row: row._replace(p_decisive=0.5))


def _mapped(
    tables: Tables,
    change_base: Callable[[BaseRow], BaseRow],
    change_probe: Callable[[ProbeRow], ProbeRow],
) -> Tables:
    bases = {row.key: change_base(row) for row in tables.bases}
    return tables._replace(
        bases=tuple(bases.values()),
        probes=tuple(change_probe(row)._replace(base=bases[row.base.key]) for row in tables.probes),
    )


SPLITS: Final[tuple[Split, Split]] = ("train", "validation")

BySplit: TypeAlias = tuple[Floats, Floats]
"""Calibrated predictions for rows of train, out of fold, and of validation: (n,) log-odds, or (n, 3)
log-likelihoods before they are normalised."""


def _fitted(
    objective: fitting.Objective,
    part: PartName,
    rows: Sequence[Sequence[Mapping[str, float]]],
    labels: Sequence[float],
    questions: Sequence[Question],
    settings: FitSettings,
) -> BySplit:
    """Fit a part on its training rows and predict these and those of validation.

    It is fitted as `selector_training.fit.fit` does it, with the same folds, shapes and calibration.
    That drops a part that is no better than a constant and keeps no out-of-fold predictions; a
    comparison needs both arms and all predictions.
    """
    own, others = rows
    data = fitting._data(objective, part, own, labels, questions)
    chosen = fitting._choose(data, settings)
    everything = np.ones(len(own), np.bool_)
    trees = fitting._booster(data, everything, chosen.shape, chosen.n_rounds)
    sums = np.empty((0, *chosen.sums.shape[1:]))
    if others:
        matrix = np.array([[row[name] for name in data.names] for row in others], np.float64)
        sums = np.asarray(trees.predict(matrix, raw_score=True, num_threads=1), np.float64)
    if objective == "multiclass":
        temperature = fitting._temperature(chosen.sums, data.labels)
        return chosen.sums / temperature, sums / temperature
    slope, intercept = fitting._platt(chosen.sums, data.labels)
    return slope * chosen.sums + intercept, slope * sums + intercept


def _fitted_headroom(tables: Tables, settings: FitSettings) -> BySplit:
    bases = [tables.of_split(split).bases for split in SPLITS]
    return _fitted(
        "cross_entropy",
        "headroom",
        [[row.features for row in rows] for rows in bases],
        [row.score for row in bases[0]],
        [row.question for row in bases[0]],
        settings,
    )


def _fitted_edges(
    tables: Tables, part: Literal["decisive", "beneficial"], settings: FitSettings
) -> BySplit:
    edges = [labelled_edges(tables.of_split(split)) for split in SPLITS]
    return _fitted(
        "binary",
        part,
        [[edge.features for edge in found] for found in edges],
        _edge_labels(edges[0], part).tolist(),
        [edge.probe.base.question for edge in edges[0]],
        settings,
    )


def _edge_labels(edges: Sequence[LabelledEdge], part: Literal["decisive", "beneficial"]) -> Floats:
    marks = [edge.is_decisive if part == "decisive" else edge.is_beneficial for edge in edges]
    return np.array(marks, np.float64)


def _fitted_selector(tables: Tables, scores: BySplit, settings: FitSettings) -> BySplit:
    """The selector, with base scores that the headroom part of the same arm predicts.

    It learns from placebos too, but only trials of edges are predicted.
    """
    own = [tables.of_split(split) for split in SPLITS]
    chances = [_chances(arm, found) for arm, found in zip(own, scores, strict=True)]
    trials = [decisive_probes(arm, ("edge", "placebo")) for arm in own]
    found = _fitted(
        "multiclass",
        "selector",
        [
            [case.features(of_run[case.probe.base.key]) for case in cases]
            for cases, of_run in zip(trials, chances, strict=True)
        ],
        [_label(case) for case in trials[0]],
        [case.probe.base.question for case in trials[0]],
        settings,
    )
    of_edges = [[case.probe.arm == "edge" for case in cases] for cases in trials]
    train, validation = (sums[keep] for sums, keep in zip(found, of_edges, strict=True))
    return train, validation


def _chances(tables: Tables, log_odds: Floats) -> dict[tuple[str, str], float]:
    """Predicted base score by base run."""
    keys = [row.key for row in tables.bases]
    return dict(zip(keys, map(float, expit(log_odds)), strict=True))


def _label(case: DecisiveProbe) -> int:
    return OUTCOMES.index(case.trial.outcome_class)


class Row(Record):
    """One number of both arms."""

    split: Split
    """Of train, out of fold."""
    part: str
    metric: str
    n: int
    """Questions."""
    with_signals: float
    without: float
    difference: float
    """With less without. Of log losses, below 0 is better; of all others, above 0."""
    interval: Interval
    """At 95%, of the difference, questions resampled."""
    constant: float | None = None
    """Log loss of the best constant."""


N_RESAMPLES: Final = 1000
"""Of a metric that is no mean over questions."""

Both: TypeAlias = Sequence[Floats]
"""Values of the rows with the signals, and without."""

Statistic: TypeAlias = Callable[[Floats, NDArray[np.intp]], float | None]
"""Of predictions and the places of their rows; None: undefined."""


class _Compared(NamedTuple):
    """Rows that both arms predict."""

    split: Split
    part: str
    questions: Sequence[Question]
    """(n_rows,)."""
    n_resamples: int

    def means(self, metric: str, both: Both, constant: float | None = None) -> Row:
        """A metric that is a mean over questions; `both` are (n_rows,) values of it."""
        own, other = (by_question(self.questions, values.tolist()) for values in both)
        more = paired_gain(other, own, seed=SEED)
        return Row(
            split=self.split,
            part=self.part,
            metric=metric,
            n=more.n,
            with_signals=fmean(own),
            without=fmean(other),
            difference=more.mean,
            interval=more.interval,
            constant=constant,
        )

    def log_loss(self, both: Both, labels: Floats) -> Row:
        """Mean cross-entropy, in nats, of log-odds for labels in [0, 1]."""
        losses = [np.logaddexp(0.0, log_odds) - labels * log_odds for log_odds in both]
        mean = min(max(float(labels.mean()), 1e-15), 1 - 1e-15)
        constant = -(mean * math.log(mean) + (1 - mean) * math.log(1 - mean))
        return self.means("log loss", losses, constant)

    def statistic(self, metric: str, both: Both, statistic: Statistic) -> Iterator[Row]:
        """A metric that is no mean, of (n_rows,) predictions; nothing where it is undefined."""
        everything = np.arange(len(self.questions))
        own, other = (statistic(values, everything) for values in both)
        if own is None or other is None:
            return
        rows: dict[Question, list[int]] = defaultdict(list)
        for place, question in enumerate(self.questions):
            rows[question].append(place)
        groups = [np.array(rows[question]) for question in sorted(rows)]
        rng = np.random.default_rng(SEED)
        differences = []
        for _ in range(self.n_resamples):
            at = np.concatenate([groups[n] for n in rng.integers(0, len(groups), len(groups))])
            first, second = (statistic(values[at], at) for values in both)
            if first is not None and second is not None:
                differences.append(first - second)
        low, high = np.quantile(differences or [own - other], (0.025, 0.975))
        yield Row(
            split=self.split,
            part=self.part,
            metric=metric,
            n=len(groups),
            with_signals=own,
            without=other,
            difference=own - other,
            interval=Interval(low=float(low), high=float(high)),
        )


def compared(tables: Tables, settings: FitSettings, n_resamples: int = N_RESAMPLES) -> list[Row]:
    """Both arms of every part, on both splits.

    Neither arm has the highest hand-set chance of a query (`without_best_edge`). Edges are compared
    without the hand-set chance, with it, and by it alone.
    """
    kept = without_best_edge(tables)
    arms = kept, without_signals(kept)
    scores = [_fitted_headroom(arm, settings) for arm in arms]
    outcomes = [_fitted_selector(arm, own, settings) for arm, own in zip(arms, scores, strict=True)]
    bare = [without_by_hand(arm) for arm in arms]
    edges = {
        "edges": (bare, _both_edge_parts(bare, settings)),
        "edges, hand-set chance in": (arms, _both_edge_parts(arms, settings)),
    }
    found: list[Row] = []
    for place, split in enumerate(SPLITS):
        own = [arm.of_split(split) for arm in arms]
        found += _score_rows(split, own[0], [arm[place] for arm in scores], n_resamples)
        for part, (tabled, fits) in edges.items():
            held = [labelled_edges(arm.of_split(split)) for arm in tabled]
            chances = [[one[place] for one in arm] for arm in fits]
            found += _edge_rows(split, part, held, chances, n_resamples)
        found += _hand_rows(split, [labelled_edges(arm) for arm in own], n_resamples)
        sums = [arm[place] for arm in outcomes]
        found += _selector_rows(split, own, [arm[place] for arm in scores], sums, n_resamples)
    return found


def _both_edge_parts(
    arms: Sequence[Tables], settings: FitSettings
) -> list[tuple[BySplit, BySplit]]:
    """Of each arm the decisive and the beneficial part."""
    return [
        (_fitted_edges(arm, "decisive", settings), _fitted_edges(arm, "beneficial", settings))
        for arm in arms
    ]


def _score_rows(split: Split, own: Tables, scores: Both, n_resamples: int) -> Iterator[Row]:
    if not own.bases:
        return
    rows = _Compared(split, "headroom", [row.question for row in own.bases], n_resamples)
    actual = np.array([row.score for row in own.bases])
    yield from rows.statistic("Spearman", scores, lambda s, at: spearman(s, actual[at]))
    yield from rows.statistic("AUC, full score", scores, _auc_for(actual >= 1 - 1e-9))
    yield rows.log_loss(scores, actual)


def _auc_for(labels: NDArray[np.bool_]) -> Statistic:
    return lambda scores, at: auc(scores, labels[at].tolist())


def _edge_rows(
    split: Split,
    part: str,
    held: Sequence[Sequence[LabelledEdge]],
    chances: Sequence[Both],
    n_resamples: int,
) -> Iterator[Row]:
    """Metrics of the edges.

    Args:
        split: of the edges.
        part: the name of this comparison.
        held: the edges of either arm, in one order.
        chances: of either arm, by the decisive and by the beneficial part.
        n_resamples: draws.
    """
    if not held[0]:
        return
    rows = _Compared(split, part, [edge.probe.base.question for edge in held[0]], n_resamples)
    names: tuple[Literal["decisive", "beneficial"], ...] = ("decisive", "beneficial")
    for place, name in enumerate(names):
        labels = _edge_labels(held[0], name)
        both = [arm[place] for arm in chances]
        yield from rows.statistic(f"AUC, {name}", both, _auc_for(labels > 0))
        yield rows.log_loss(both, labels).model_copy(update={"metric": f"log loss, {name}"})
    ranks = [
        np.array(
            [
                edge_rank(chance, edge.probe.p_decisive)
                for chance, edge in zip(expit(decisive).tolist(), edges, strict=True)
            ]
        )
        for (decisive, _), edges in zip(chances, held, strict=True)
    ]
    yield from _gap_rows(split, part, held[0], ranks, n_resamples)


def _hand_rows(
    split: Split, held: Sequence[Sequence[LabelledEdge]], n_resamples: int
) -> Iterator[Row]:
    ranks = [np.array([edge.probe.p_decisive for edge in edges]) for edges in held]
    yield from _gap_rows(split, "hand-set chance alone", held[0], ranks, n_resamples)


def _gap_rows(
    split: Split, part: str, edges: Sequence[LabelledEdge], ranks: Both, n_resamples: int
) -> Iterator[Row]:
    """Share of the questions whose highest edge is a gap edge, of equal edges the expected share."""
    runs: dict[tuple[str, str], list[int]] = defaultdict(list)
    for place, edge in enumerate(edges):
        if edge.probe.is_gap is not None:
            runs[edge.probe.base.key].append(place)
    asked = [
        run for run in runs.values() if len(run) > 1 and any(edges[n].probe.is_gap for n in run)
    ]
    if asked:
        questions = [edges[run[0]].probe.base.question for run in asked]
        hits = [np.array([_hit(edges, run, arm) for run in asked]) for arm in ranks]
        yield _Compared(split, part, questions, n_resamples).means("gap-hit precision@1", hits)


def _hit(edges: Sequence[LabelledEdge], run: Sequence[int], ranks: Floats) -> float:
    best = max(ranks[n] for n in run)
    return fmean(float(bool(edges[n].probe.is_gap)) for n in run if ranks[n] == best)


def _selector_rows(
    split: Split, own: Sequence[Tables], scores: Both, outcomes: Both, n_resamples: int
) -> Iterator[Row]:
    """Metrics of the selector, over the decisive trials of edges."""
    cases = decisive_probes(own[0], ("edge",))
    if not cases:
        return
    questions = [case.probe.base.question for case in cases]
    rows = _Compared(split, "selector", questions, n_resamples)
    labels = np.array([_label(case) for case in cases])
    losses = [-log_softmax(sums, axis=1)[np.arange(len(cases)), labels] for sums in outcomes]
    shares = np.bincount(labels, minlength=len(OUTCOMES)) / len(labels)
    yield rows.means("log loss", losses, constant=-float(np.mean(np.log(shares[labels]))))
    right = [(sums.argmax(axis=1) == labels).astype(np.float64) for sums in outcomes]
    yield rows.means("accuracy", right)
    gains = [
        _gains(cases, _chances(arm, predicted), sums)
        for arm, predicted, sums in zip(own, scores, outcomes, strict=True)
    ]
    yield rows.means("gain of what is adopted", gains)


def _gains(
    cases: Sequence[DecisiveProbe], scores: Mapping[tuple[str, str], float], outcomes: Floats
) -> Floats:
    """Score change of each trial that is adopted, 0 for the others."""
    changes = []
    for case, sums in zip(cases, outcomes.tolist(), strict=True):
        decision = decide(normalised(sums), base_score=scores[case.probe.base.key])
        changes.append(case.trial.delta if decision.action == "adopt" else 0.0)
    return np.array(changes, np.float64)


def rows_text(found: Sequence[Row]) -> str:
    """The comparison as a page of text."""
    blocks = []
    for split in dict.fromkeys(row.split for row in found):
        title = "train, out of fold" if split == "train" else split
        head = (title, "questions", "with", "without", "difference", "interval", "constant")
        rows = [
            (
                f"{row.part}: {row.metric}",
                str(row.n),
                f"{row.with_signals:z.3f}",
                f"{row.without:z.3f}",
                f"{row.difference:+z.3f}",
                f"{row.interval:z.3f}",
                "-" if row.constant is None else f"{row.constant:.3f}",
            )
            for row in found
            if row.split == split
        ]
        blocks.append("\n".join(aligned([head, *rows])))
    return "\n\n".join(blocks)


# --- the command -----------------------------------------------------------------------------


class Vary(NamedTuple):
    """An option of a workload, with the values to compare."""

    name: str
    values: tuple[str, ...]


def _option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _vary(text: str) -> Vary:
    name, values = _option(text)
    return Vary(name, tuple(values.split(",")))


def _variants(options: Options, vary: Vary | None) -> dict[str, Options]:
    if vary is None:
        return {"as given": options}
    return {value: {**options, vary.name: value} for value in vary.values}


async def _runs(args: argparse.Namespace) -> list[Variant]:
    load = find_loader(args.workload)
    learned = open_parts(args.parts)
    # All are loaded before the first call, so that what is wrong with one is said at once.
    loaded = {
        name: [load(data, split=args.split, options=options) for data in args.data]
        for name, options in _variants(dict(args.option), args.vary).items()
    }
    first = next(iter(loaded.values()))[0]
    model = default_model(first.workflow, args.model, threads=args.threads)
    cached = CachedModel(model, args.out / "replies.sqlite")
    by_name: dict[str, list[Case]] = {}
    try:
        for name, workloads in loaded.items():
            by_name[name] = []
            for data, workload in zip(args.data, workloads, strict=True):
                with bars(("base",)) as progress:
                    by_name[name] += await cases(
                        workload,
                        drawn(workload.examples, args.limit, args.seed),
                        cached,
                        learned=learned,
                        concurrency=args.concurrency,
                        prefix=f"{data.name} " if len(args.data) > 1 else "",
                        progress=progress,
                    )
    finally:
        await cached.aclose()
    found: list[Variant] = []
    for name, own in by_name.items():
        found.append(variant(name, own, found[0].cases if found else None))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.abstention_signal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    either = parser.add_subparsers(dest="command", required=True)
    runs = either.add_parser("runs", help="diagnose base runs with the signal and without")
    runs.add_argument("workload")
    runs.add_argument("--data", type=Path, nargs="+", default=[None], help="pooled")
    runs.add_argument("--split", choices=("train", "validation", "test"), default="validation")
    runs.add_argument("--option", "-o", type=_option, action="append", default=[])
    runs.add_argument("--vary", type=_vary, metavar="NAME=VALUE,VALUE", help="variants to compare")
    runs.add_argument("--limit", type=int, help="questions of each data set; default: all")
    runs.add_argument("--seed", type=int, default=0, help="of the draw of questions")
    runs.add_argument("--model")
    runs.add_argument("--threads", type=int, default=1)
    runs.add_argument("--concurrency", type=int, default=1, help="questions in flight")
    runs.add_argument("--parts", default="shipped", help="learned parts; `rules`: none")
    runs.add_argument("--out", type=Path, required=True)
    parts = either.add_parser("parts", help="fit the learned parts with the signals and without")
    pools = Path(fitting.__file__).with_name("pools")
    parts.add_argument(
        "tables", type=Path, nargs="*", default=[pools / "multihop", pools / "plancraft"]
    )
    for command in (runs, parts):
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, then print."""
    args = _parser().parse_args(argv)
    found: Sequence[Record]
    if args.command == "runs":
        found = variants = asyncio.run(_runs(args))
        text = variants_text(variants)
    else:
        found = rows = compared(read_tables(args.tables), FitSettings())
        text = rows_text(rows)
    print(json.dumps([one.model_dump(mode="json") for one in found]) if args.json else text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
