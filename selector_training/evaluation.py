"""How well learned parts do on a split: base scores, edges, and what is adopted after a trial.

Everything is counted by question: rows of one question are averaged first, and intervals resample
questions (`splice.statistics.paired_gain`). A table holds only the edges that were probed, a few for
each question and drawn at random, so a ranker is judged by its choice among these.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from selector_training.admission import Admission, admissions
from selector_training.counting import SEED, by_question, gain
from selector_training.fit import (
    FitSettings,
    Fitted,
    gain_forecaster,
    out_of_fold_scores,
    selector_without,
)
from selector_training.tables import (
    BaseRow,
    DecisiveProbe,
    LabelledEdge,
    ProbeRow,
    Question,
    Tables,
    decisive_probes,
    labelled_edges,
)
from splice.features import ATTRIBUTION
from splice.learned import PartName, Trees, edge_rank
from splice.queries import Split
from splice.records import Probability, Record
from splice.report.display import WIDTH, aligned, counted, wrap
from splice.selector import decide
from splice.statistics import Bin, Gain, auc, calibration, paired_gain, spearman

N_SHUFFLES: Final = 20
"""Shuffles of the evidence that are averaged; one alone is a matter of luck."""

_ROUNDING: Final = 1e-9

Weighting: TypeAlias = Literal["headroom", "none"]


class BaseScores(Record):
    """How near predicted base scores come to the actual ones."""

    name: Literal["learned", "hand-set"]
    n: int
    """Base runs."""
    calibration: tuple[Bin, ...]
    """By quintile of the prediction."""
    spearman: float | None
    auc: float | None
    """Of headroom for a score below 1."""


class Chances(Record):
    """How well the chance of an edge is predicted, over the probed edges."""

    part: Literal["decisive", "beneficial"]
    name: Literal["learned", "hand-set"]
    n: int
    n_true: int
    log_loss: float
    """Mean, in nats."""
    constant_log_loss: float
    """Of the best constant, which is known only afterwards."""
    auc: float | None


class Ranker(Record):
    """One way to choose an edge."""

    name: str
    hits: Gain
    """Share of the questions whose first edge is a hit; of equal edges the expected share."""
    learned_more: Gain | None
    """The share of the learned ranker less this one; None: this is it, or there is none."""


class Ranking(Record):
    """All ways to choose, over the questions in which there is something to find."""

    target: Literal["gap", "decisive"]
    """A hit is a true gap edge, or an edge whose trial changed the answer."""
    n_questions: int
    """With at least two probed edges, one of them a hit."""
    rankers: tuple[Ranker, ...]


class Tier(Record):
    """One way to decide after a trial, over the decisive probes of the edge arm."""

    name: str
    weighting: Weighting | None
    """Of the decision rule; None: the rule has no part in it."""
    n_adopted: float
    """Of shuffled evidence the mean over shuffles, here and below."""
    n_fixed: float
    """Adopted and beneficial."""
    n_broken: float
    """Adopted and harmful."""
    fix_ratio: Probability | None
    """Fixed of fixed and broken; None: neither."""
    gain: Gain
    """Score change of what is adopted, by question with a decisive probe."""
    learned_more: Gain | None
    """The gain of the learned selector under the same weighting less this one."""


class Report(Record):
    """What learned parts do on one split."""

    schema_version: Literal[1] = 1
    split: Split
    n_questions: int
    n_bases: int
    n_edges: int
    """Probed edges of which it is known what they did."""
    n_decisive: int
    """Of the edges, those whose trial changed the answer."""
    n_decisive_questions: int
    """Questions with such an edge."""
    base_scores: tuple[BaseScores, ...]
    chances: tuple[Chances, ...]
    rankings: tuple[Ranking, ...]
    admissions: tuple[Admission, ...]
    tiers: tuple[Tier, ...]


def evaluate(fitted: Fitted, tables: Tables, split: Split, settings: FitSettings) -> Report:
    """Measure learned parts on a split.

    Args:
        fitted: the parts.
        tables: with the questions of `split`, and with the training questions that the parts were
            fitted on: without these there is no selector to compare with that has to do without
            attribution.
        split: what to measure on.
        settings: how that selector, and one that forecasts the gain, are fitted.
    """
    own = tables.of_split(split)
    edges = labelled_edges(own)
    cases = decisive_probes(own, ("edge",))
    return Report(
        split=split,
        n_questions=len(own.questions),
        n_bases=len(own.bases),
        n_edges=len(edges),
        n_decisive=len(cases),
        n_decisive_questions=len({case.probe.base.question for case in cases}),
        base_scores=tuple(_base_scores(fitted, own.bases)),
        chances=tuple(_chances(fitted, edges)),
        rankings=tuple(_rankings(fitted, own, edges)),
        admissions=admissions(fitted, edges),
        tiers=tuple(_tiers(fitted, tables, own, cases, settings)),
    )


# --- before a trial --------------------------------------------------------------------------


def _learned_scores(fitted: Fitted, bases: Sequence[BaseRow]) -> list[float]:
    """Predicted base scores; the hand-set ones if no part predicts them."""
    trees = fitted.trees("headroom")
    if trees is None or not bases:
        return [base.predicted_score for base in bases]
    return trees.probabilities([base.features for base in bases])


def _base_scores(fitted: Fitted, bases: Sequence[BaseRow]) -> Iterator[BaseScores]:
    if not bases:
        return
    actual = [base.score for base in bases]
    is_imperfect = [score < 1 - _ROUNDING for score in actual]
    if fitted.trees("headroom") is not None:
        yield _of_scores("learned", _learned_scores(fitted, bases), actual, is_imperfect)
    by_hand = [base.predicted_score for base in bases]
    yield _of_scores("hand-set", by_hand, actual, is_imperfect)


def _of_scores(
    name: Literal["learned", "hand-set"],
    predicted: Sequence[float],
    actual: Sequence[float],
    is_imperfect: Sequence[bool],
) -> BaseScores:
    return BaseScores(
        name=name,
        n=len(actual),
        calibration=calibration(predicted, actual),
        spearman=spearman(predicted, actual),
        auc=auc([1 - score for score in predicted], is_imperfect),
    )


def _chances(fitted: Fitted, edges: Sequence[LabelledEdge]) -> Iterator[Chances]:
    if not edges:
        return
    rows = [edge.features for edge in edges]
    changed = [edge.is_decisive for edge in edges]
    if (decisive := fitted.trees("decisive")) is not None:
        yield _of_chances("decisive", "learned", decisive.probabilities(rows), changed)
    by_hand = [edge.probe.p_decisive for edge in edges]
    yield _of_chances("decisive", "hand-set", by_hand, changed)
    if (beneficial := fitted.trees("beneficial")) is not None:
        improved = [edge.is_beneficial for edge in edges]
        yield _of_chances("beneficial", "learned", beneficial.probabilities(rows), improved)


def _of_chances(
    part: Literal["decisive", "beneficial"],
    name: Literal["learned", "hand-set"],
    predicted: Sequence[float],
    marks: Sequence[bool],
) -> Chances:
    return Chances(
        part=part,
        name=name,
        n=len(marks),
        n_true=sum(marks),
        log_loss=_log_loss(predicted, marks),
        constant_log_loss=_log_loss([sum(marks) / len(marks)] * len(marks), marks),
        auc=auc(predicted, marks),
    )


def _log_loss(predicted: Sequence[float], marks: Sequence[bool]) -> float:
    given = (chance if mark else 1 - chance for chance, mark in zip(predicted, marks, strict=True))
    return -sum(math.log(max(chance, 1e-15)) for chance in given) / len(marks)


_LEARNED: Final = "learned"

_BY_PART: Final[Mapping[str, PartName]] = {
    _LEARNED: "decisive",
    "learned, beneficial": "beneficial",
}
"""Rankers that go by trees."""

_BY_FEATURE: Final[Mapping[str, Callable[[ProbeRow], float]]] = {
    "hand-set weights": lambda probe: probe.p_decisive,
    "terminal distance": lambda probe: -probe.features["dist_t"],
    "content coverage": lambda probe: probe.features["coverage"],
    "random": lambda probe: 0.0,
}
"""Rankers that need no trees; all edges are equal to `random`."""


def _rankings(fitted: Fitted, own: Tables, edges: Sequence[LabelledEdge]) -> Iterator[Ranking]:
    probed = [probe for probe in own.probes if probe.arm == "edge"]
    is_gap = {_name(probe): probe.is_gap for probe in probed if probe.is_gap is not None}
    is_decisive = {_name(edge.probe): edge.is_decisive for edge in edges}
    by_ranker = _scores_by_ranker(fitted, probed)
    yield _ranking("gap", probed, is_gap, by_ranker)
    yield _ranking("decisive", probed, is_decisive, by_ranker)


_Name: TypeAlias = tuple[str, str]
"""Pool and id of a probe."""


def _name(probe: ProbeRow) -> _Name:
    return probe.base.pool, probe.id


def _scores_by_ranker(fitted: Fitted, probed: Sequence[ProbeRow]) -> dict[str, dict[_Name, float]]:
    """By ranker: the score of each probed edge, the best the highest."""
    rows = [probe.edge_features for probe in probed]
    found: dict[str, dict[_Name, float]] = {}
    for ranker, part in _BY_PART.items():
        trees = fitted.trees(part)
        if trees is not None and rows:
            chances = trees.probabilities(rows)
            found[ranker] = {
                _name(probe): edge_rank(chance, probe.p_decisive)
                for probe, chance in zip(probed, chances, strict=True)
            }
    for ranker, score in _BY_FEATURE.items():
        found[ranker] = {_name(probe): score(probe) for probe in probed}
    return found


def _ranking(
    target: Literal["gap", "decisive"],
    probed: Sequence[ProbeRow],
    is_hit: Mapping[_Name, bool],
    by_ranker: Mapping[str, Mapping[_Name, float]],
) -> Ranking:
    runs: dict[tuple[str, str], list[ProbeRow]] = defaultdict(list)
    for probe in probed:
        if _name(probe) in is_hit:
            runs[probe.base.key].append(probe)
    asked = [
        run for run in runs.values() if len(run) > 1 and any(is_hit[_name(probe)] for probe in run)
    ]
    questions = [run[0].base.question for run in asked]
    hits = {
        ranker: by_question(questions, [_hit(run, scores, is_hit) for run in asked])
        for ranker, scores in by_ranker.items()
    }
    return Ranking(
        target=target,
        n_questions=len(set(questions)),
        rankers=tuple(
            Ranker(
                name=ranker,
                hits=gain(found),
                learned_more=_more(hits.get(_LEARNED), found) if ranker != _LEARNED else None,
            )
            for ranker, found in (hits.items() if asked else ())
        ),
    )


def _hit(
    run: Sequence[ProbeRow], scores: Mapping[_Name, float], is_hit: Mapping[_Name, bool]
) -> float:
    """Share of hits among the edges with the highest score."""
    names = [_name(probe) for probe in run]
    best = max(scores[name] for name in names)
    first = [is_hit[name] for name in names if scores[name] == best]
    return sum(first) / len(first)


def _more(learned: Sequence[float] | None, other: Sequence[float]) -> Gain | None:
    return None if learned is None else paired_gain(other, learned, seed=SEED)


# --- after a trial ---------------------------------------------------------------------------


class _Cases(NamedTuple):
    """Decisive probes with the predicted scores of their base answers."""

    probes: Sequence[DecisiveProbe]
    base_scores: Sequence[float]

    @property
    def questions(self) -> list[Question]:
        return [case.probe.base.question for case in self.probes]

    def rows(self) -> list[dict[str, float]]:
        return [
            case.features(score) for case, score in zip(self.probes, self.base_scores, strict=True)
        ]

    def adopted(
        self, judge: Trees, rows: Sequence[Mapping[str, float]], weighting: Weighting
    ) -> list[float]:
        """1 for each probe whose candidate answer is adopted, else 0."""
        return [
            float(
                decide(found, base_score=score, weighting=weighting, margin=0.0).action == "adopt"
            )
            for found, score in zip(judge.outcomes(rows), self.base_scores, strict=True)
        ]


def _tiers(
    fitted: Fitted,
    tables: Tables,
    own: Tables,
    probes: Sequence[DecisiveProbe],
    settings: FitSettings,
) -> Iterator[Tier]:
    if not probes:
        return
    scores = dict(
        zip((base.key for base in own.bases), _learned_scores(fitted, own.bases), strict=True)
    )
    cases = _Cases(probes, [scores[case.probe.base.key] for case in probes])
    yield _tier("never", None, cases, [0.0] * len(probes), None)
    yield _tier("always", None, cases, [1.0] * len(probes), None)
    trees = fitted.trees("selector")
    if trees is not None:
        fitted_with = out_of_fold_scores(tables, settings)
        ablated = selector_without(tables, fitted_with, settings, ATTRIBUTION)
        for weighting in get_args(Weighting):
            yield from _learned_tiers(trees, ablated, cases, weighting)
        if (forecaster := gain_forecaster(tables, fitted_with, settings)) is not None:
            better = [float(chance > 0.5) for chance in forecaster.probabilities(cases.rows())]
            yield _tier("gain forecast", None, cases, better, None)
    helps = [float(case.trial.outcome_class == "beneficial") for case in probes]
    yield _tier("oracle", None, cases, helps, None)


def _learned_tiers(
    judge: Trees,
    ablated: Trees | None,
    cases: _Cases,
    weighting: Weighting,
) -> Iterator[Tier]:
    rows = cases.rows()
    learned = cases.adopted(judge, rows, weighting)
    yield _tier("learned", weighting, cases, learned, None)
    shuffles = [cases.adopted(judge, shuffled, weighting) for shuffled in _shuffles(cases, rows)]
    if shuffles:
        means = np.mean(shuffles, axis=0).tolist()
        yield _tier("shuffled", weighting, cases, means, learned)
    if ablated is not None:
        without = cases.adopted(ablated, rows, weighting)
        yield _tier("no attribution", weighting, cases, without, learned)


def _shuffles(
    cases: _Cases, rows: Sequence[Mapping[str, float]]
) -> Iterator[list[dict[str, float]]]:
    """Rows in which each question has the evidence of another; none if there is one question."""
    held: dict[Question, list[DecisiveProbe]] = defaultdict(list)
    for case in cases.probes:
        held[case.probe.base.question].append(case)
    order = sorted(held)
    draw = random.Random(SEED)
    for _ in range(N_SHUFFLES if len(order) > 1 else 0):
        draw.shuffle(order)
        giver = dict(zip(order, order[1:] + order[:1], strict=True))
        places: dict[Question, int] = defaultdict(int)
        shuffled = []
        for question, row in zip(cases.questions, rows, strict=True):
            given = held[giver[question]]
            shuffled.append({**row, **given[places[question] % len(given)].trial.evidence})
            places[question] += 1
        yield shuffled


def _tier(
    name: str,
    weighting: Weighting | None,
    cases: _Cases,
    adopted: Sequence[float],
    learned: Sequence[float] | None,
) -> Tier:
    def total(outcomes: Collection[str]) -> float:
        return sum(
            share
            for share, case in zip(adopted, cases.probes, strict=True)
            if case.trial.outcome_class in outcomes
        )

    def gains(shares: Sequence[float]) -> list[float]:
        changes = [
            share * case.trial.delta for share, case in zip(shares, cases.probes, strict=True)
        ]
        return by_question(cases.questions, changes)

    fixed, broken = total({"beneficial"}), total({"harmful"})
    return Tier(
        name=name,
        weighting=weighting,
        n_adopted=sum(adopted),
        n_fixed=fixed,
        n_broken=broken,
        fix_ratio=fixed / (fixed + broken) if fixed + broken else None,
        gain=gain(gains(adopted)),
        learned_more=None if learned is None else _more(gains(learned), gains(adopted)),
    )


# --- the page --------------------------------------------------------------------------------


def report_text(report: Report) -> str:
    """A report as a page of text."""
    if not report.n_questions:
        return f"No questions of split {report.split}: nothing was measured."
    blocks = [
        _opening(report),
        *map(_base_scores_text, report.base_scores),
        _chances_text(report.chances),
        *map(_ranking_text, report.rankings),
        _admissions_text(report.admissions),
        _tiers_text(report),
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _wrapped(*texts: str) -> list[str]:
    return [line for text in texts for line in wrap(text, WIDTH)]


def _opening(report: Report) -> list[str]:
    seen = (
        ["The parts were fitted on these questions: the numbers are better than they will be."]
        if report.split == "train"
        else []
    )
    return _wrapped(
        f"Learned parts on split {report.split}: {counted(report.n_questions, 'question')}, "
        f"{counted(report.n_bases, 'base run')}, {counted(report.n_edges, 'probed edge')}",
        *seen,
        f"An exported table holds only the edges that were probed, here "
        f"{report.n_edges / report.n_bases:.1f} for each base run, drawn at random. To choose "
        "among these is easier than among all candidate edges.",
        "Intervals: 95%, paired bootstrap over questions.",
    )


def _base_scores_text(found: BaseScores) -> list[str]:
    rows = [
        ["quintile of the prediction", "n", "from", "to", "predicted", "actual"],
        *(
            [
                str(place),
                f"{quintile.n:,}",
                f"{quintile.low:.2f}",
                f"{quintile.high:.2f}",
                f"{quintile.mean_predicted:.3f}",
                f"{quintile.mean_actual:.3f}",
            ]
            for place, quintile in enumerate(found.calibration, 1)
        ),
    ]
    return [
        f"Base score, {found.name}: Spearman {_number(found.spearman, '+.2f')}, AUC for a score "
        f"below 1 {_number(found.auc, '.2f')}",
        *aligned(rows),
    ]


def _chances_text(chances: Sequence[Chances]) -> list[str]:
    rows = [
        ["", "n", "true", "log loss", "of the best constant", "AUC"],
        *(
            [
                f"{found.part}, {found.name}",
                f"{found.n:,}",
                f"{found.n_true:,}",
                f"{found.log_loss:z.3f}",
                f"{found.constant_log_loss:z.3f}",
                _number(found.auc, ".2f"),
            ]
            for found in chances
        ),
    ]
    return ["Chances of an edge", *aligned(rows)] if chances else []


_HITS: Final = {
    "gap": "First edge is a true gap edge",
    "decisive": "First edge changes the answer",
}


def _ranking_text(ranking: Ranking) -> list[str]:
    title = (
        f"{_HITS[ranking.target]}: {counted(ranking.n_questions, 'question')} with such an edge "
        "among two or more that were probed"
    )
    rows = [
        ["ranker", "precision", "interval", "learned less it", "interval"],
        *(
            [
                ranker.name,
                f"{ranker.hits.mean:.3f}",
                f"{ranker.hits.interval:.3f}",
                *_difference(ranker.learned_more),
            ]
            for ranker in ranking.rankers
        ),
    ]
    return [*_wrapped(title), *(aligned(rows) if ranking.rankers else ())]


def _admissions_text(found: Sequence[Admission]) -> list[str]:
    rows = [
        ["order", "b", "trials", "decisive", "always", "interval", "oracle", "interval"],
        *(
            [
                one.order,
                f"{one.budget:g}",
                f"{one.n_trials:,}",
                f"{one.n_decisive:,}",
                f"{one.always.mean:+.3f}",
                f"{one.always.interval:.3f}",
                f"{one.oracle.mean:+.3f}",
                f"{one.oracle.interval:.3f}",
            ]
            for one in found
        ),
    ]
    if not found:
        return []
    return [
        "Which queries get a trial: gain over all questions, on probed edges",
        *aligned(rows),
        *_wrapped(
            "b: share of the base runs that get a trial. always, oracle: every candidate answer is "
            "adopted, or only better ones. promise: the chance that the trial helps; of hand-set "
            "scores, headroom times the chance that it changes the answer."
        ),
    ]


def _tiers_text(report: Report) -> list[str]:
    title = (
        f"After a trial that changed the answer: {counted(report.n_decisive, 'probe')} of "
        f"{counted(report.n_decisive_questions, 'question')}"
    )
    rows = [
        ["", "adopt", "fix", "harm", "ratio", "gain", "interval", "less it", "interval"],
        *(_tier_row(tier.name, tier) for tier in report.tiers if tier.weighting is None),
    ]
    for weighting in get_args(Weighting):
        own = [tier for tier in report.tiers if tier.weighting == weighting]
        if own:
            rows.append([f"weighting {weighting}"] + [""] * (len(rows[0]) - 1))
            rows += [_tier_row(f"  {tier.name}", tier) for tier in own]
    if not report.tiers:
        return [title]
    return [
        title,
        *aligned(rows),
        *_wrapped(
            "ratio: fix of fix and harm. gain: mean score change of what is adopted, by question with "
            "a decisive probe. less it: the gain of learned, with the same weighting, less this one. "
            "weighting: of gain and loss in the decision rule. shuffled: each "
            f"question has the evidence of another, mean of {N_SHUFFLES} shuffles. no attribution: "
            "fitted again without the features that say where new content came from. gain forecast: "
            "trees forecast the score change itself, and what is above 0 is adopted."
        ),
    ]


def _tier_row(name: str, tier: Tier) -> list[str]:
    return [
        name,
        f"{tier.n_adopted:.4g}",
        f"{tier.n_fixed:.4g}",
        f"{tier.n_broken:.4g}",
        _number(tier.fix_ratio, ".2f"),
        f"{tier.gain.mean:+.3f}",
        f"{tier.gain.interval:.3f}",
        *_difference(tier.learned_more),
    ]


def _difference(gain: Gain | None) -> tuple[str, str]:
    return ("-", "-") if gain is None else (f"{gain.mean:+.3f}", f"{gain.interval:.3f}")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
