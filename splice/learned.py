"""Learned parts: base scores, edges and outcomes predicted by boosted trees.

A folder of learned parts holds `card.json` and the trees as LightGBM's own text, one file a part.
Nothing in it is unpickled or run. What the card says about a file is checked before it is used: the
digest of the file, the names of its features, and that this version computes features by these names.

The card also holds the range of each feature in training. What lies outside of it is named in the
diagnosis and in the likelihoods: a prediction there is a guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

from pydantic import Field, StringConstraints, ValidationError

from splice.diagnosis import WEIGHTS, diagnose, find_gap, rank_edges
from splice.errors import WeightsError
from splice.features import (
    BY_HAND,
    CASE_FEATURES,
    EDGE_FEATURES,
    QUERY_FEATURES,
    Feature,
    case_features,
    query_features,
)
from splice.files import read_text
from splice.records import Diagnosis, EdgeScore, Gap, Likelihoods, Record, Trace
from splice.selector import SelectorInput, normalised
from splice.workflow import Workflow

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

PartName: TypeAlias = Literal["headroom", "decisive", "beneficial", "selector"]

PART_FEATURES: Final[Mapping[PartName, tuple[Feature, ...]]] = {
    "headroom": QUERY_FEATURES,
    "decisive": (*EDGE_FEATURES, BY_HAND, *QUERY_FEATURES),
    "beneficial": (*EDGE_FEATURES, BY_HAND, *QUERY_FEATURES),
    "selector": CASE_FEATURES,
}
"""What each part may look at; which of these it does look at, its card says."""


class Range(Record):
    """A feature, and where its values lay in training."""

    name: str
    low: float
    high: float


class Part(Record):
    """One file of trees."""

    file: Annotated[str, StringConstraints(pattern=r"^[a-z_]+\.txt$")]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    """Of the file's bytes."""
    features: Annotated[tuple[Range, ...], Field(min_length=1)]
    """In the order in which the trees have them."""
    constant: tuple[Range, ...] = ()
    """Features with one value in all of training, which the trees therefore don't have."""
    n_rows: int
    """Rows it was fitted on."""


class ScorePart(Part):
    """Trees whose sum is a log-odds, and its calibration."""

    slope: float = 1.0
    intercept: float = 0.0
    """The prediction is `1 / (1 + exp(-(slope * sum + intercept)))`."""


class OutcomePart(Part):
    """Three groups of trees, for beneficial, neutral and harmful."""

    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """The sums are divided by it before they are normalised."""


class TrainingPool(Record):
    """A feature table that the parts were fitted on."""

    name: str
    sha256: str
    """Of its manifest."""
    workloads: tuple[str, ...]
    models: tuple[str, ...]
    n_questions: int
    n_probes: int


class Card(Record):
    """What a folder of learned parts holds and where it comes from."""

    schema_version: Literal[1] = 1
    headroom: ScorePart | None = None
    """Predicts the score of the base answer."""
    decisive: ScorePart | None = None
    """Predicts whether a trial of an edge changes the answer."""
    beneficial: ScorePart | None = None
    """Predicts whether a trial of an edge makes the answer better than a control would."""
    selector: OutcomePart | None = None
    """Predicts how a trial turned out."""
    thresholds: Mapping[str, float] = {}
    """Headroom above which a query is among the share `key` of the training questions; for
    `RepairSettings.min_headroom` where queries come one by one."""
    pools: tuple[TrainingPool, ...] = ()
    packages: Mapping[str, str] = {}
    """Version by package, of what the parts were fitted with."""


class Learned:
    """The parts of one folder, read and checked."""

    def __init__(self, card: Card, trees: Mapping[PartName, Trees], rank_by: PartName) -> None:
        """Keep the parts; `load_learned` makes one."""
        self.card = card
        self._trees = trees
        self._rank_by = rank_by

    def diagnose(self, workflow: Workflow, trace: Trace) -> Diagnosis:
        """Diagnose as `splice.diagnose` does, with learned scores in place of the hand-set ones.

        Which edges may be tried, and whether an abstention admits a trial, stays as it is there.
        """
        found = diagnose(workflow, trace)
        query = query_features(workflow, trace, found)
        base_score = found.base_score
        outside: list[str] = []
        if (headroom := self._trees.get("headroom")) is not None:
            (learned,) = headroom.probabilities([query])
            # No answer is worth nothing, which a pool in which nobody declines can't teach.
            base_score = min(learned, base_score) if query["a_declines"] else learned
            outside += headroom.outside([query])
        edges = found.edges
        rows = [_edge_row(query, scored) for scored in edges]
        for part, field in _FIELD.items():
            if edges and (trees := self._trees.get(part)) is not None:
                chances = trees.probabilities(rows)
                edges = tuple(
                    scored.model_copy(update={field: chance})
                    for scored, chance in zip(edges, chances, strict=True)
                )
                outside += trees.outside(rows)
        return found.model_copy(
            update={
                "base_score": base_score,
                "edges": rank_edges(workflow, trace, edges, by=self._rank(found)),
                "outside": tuple(dict.fromkeys(outside)),
            }
        )

    def _rank(self, found: Diagnosis) -> Callable[[EdgeScore], float]:
        """What edges are put in order by; `found` is by hand-set scores."""
        by_hand = {scored.edge.ends: scored.p_decisive for scored in found.edges}
        field = _FIELD[self._rank_by]
        return lambda scored: edge_rank(getattr(scored, field), by_hand[scored.edge.ends])

    def moved(
        self, workflow: Workflow, trace: Trace, found: Diagnosis
    ) -> tuple[tuple[Contribution, ...], list[tuple[Contribution, ...]]]:
        """What moved the base score and the rank of each edge of `found`, which `diagnose` made."""
        by_hand = diagnose(workflow, trace)
        query = query_features(workflow, trace, by_hand)
        headroom, ranker = self._trees.get("headroom"), self._trees.get(self._rank_by)
        scored_by_hand = {scored.edge.ends: scored for scored in by_hand.edges}
        rows = [_edge_row(query, scored_by_hand[scored.edge.ends]) for scored in found.edges]
        return (
            headroom.contributions([query])[0] if headroom else (),
            ranker.contributions(rows) if ranker and rows else _by_hand(found),
        )

    @property
    def selector(self) -> EvidenceSelector | None:
        """The selector; None if the folder holds none."""
        trees = self._trees.get("selector")
        return None if trees is None else EvidenceSelector(trees)


def edge_rank(learned: float, by_hand: float) -> float:
    """What edges are put in order by: the mean of the log-odds of a learned and a hand-set chance.

    The learned one knows which edges change answers, the other one which close a gap. On training
    questions of multi-hop pools, out of fold, the two together found as many useful edges as the
    learned one alone, and nearly as many true gap edges as the other one alone.
    """
    return (_log_odds(learned) + _log_odds(by_hand)) / 2


def _log_odds(chance: float) -> float:
    bounded = min(max(chance, 1e-9), 1 - 1e-9)
    return math.log(bounded / (1 - bounded))


def _edge_row(query: Mapping[str, float], scored: EdgeScore) -> dict[str, float]:
    """What the trees of an edge look at; `scored` by the hand-set weights."""
    return {**query, **scored.features, BY_HAND.name: scored.p_decisive}


_FIELD: Final[Mapping[PartName, Literal["p_decisive", "p_beneficial"]]] = {
    "decisive": "p_decisive",
    "beneficial": "p_beneficial",
}


class Contribution(Record):
    """How much one feature moved a prediction."""

    feature: str
    value: float
    log_odds: float
    """What it added to the log-odds, before calibration."""


class EdgeExplanation(Record):
    """What moved the prediction for one edge, and what the edge could carry."""

    contributions: tuple[Contribution, ...]
    """The largest first."""
    gap: Gap


class Explanation(Record):
    """A diagnosis, and what moved its predictions."""

    diagnosis: Diagnosis
    base_score: tuple[Contribution, ...]
    """The largest first; empty where the hand-set score was used, which gives its reasons itself."""
    edges: tuple[EdgeExplanation, ...]
    """For each edge of the diagnosis, in its order."""


def explain(workflow: Workflow, trace: Trace, learned: Learned | None) -> Explanation:
    """Diagnose a base run, and say what moved the predictions.

    Args:
        workflow: that recorded `trace`.
        trace: the base run.
        learned: the parts that predict; None: the hand-set scores.
    """
    diagnosis = diagnose(workflow, trace) if learned is None else learned.diagnose(workflow, trace)
    query: tuple[Contribution, ...] = ()
    edges = _by_hand(diagnosis)
    if learned is not None:
        query, edges = learned.moved(workflow, trace, diagnosis)
    return Explanation(
        diagnosis=diagnosis,
        base_score=query,
        edges=tuple(
            EdgeExplanation(contributions=moved, gap=find_gap(workflow, trace, scored.edge))
            for scored, moved in zip(diagnosis.edges, edges, strict=True)
        ),
    )


def _by_hand(diagnosis: Diagnosis) -> list[tuple[Contribution, ...]]:
    return [
        _largest_first(
            Contribution(
                feature=name,
                value=scored.features[name],
                log_odds=weight * scored.features[name],
            )
            for name, weight in WEIGHTS.items()
        )
        for scored in diagnosis.edges
    ]


def _largest_first(contributions: Iterable[Contribution]) -> tuple[Contribution, ...]:
    moved = (contribution for contribution in contributions if contribution.log_odds)
    return tuple(sorted(moved, key=lambda contribution: -abs(contribution.log_odds)))


class EvidenceSelector:
    """Selector that goes by the process evidence; it asks no model and costs nothing."""

    def __init__(self, trees: Trees) -> None:
        """Keep the trees of an outcome part; `Learned.selector` makes one."""
        self._trees = trees

    async def judge(self, case: SelectorInput) -> Likelihoods:
        """Likelihoods from the evidence, the base score and what the two answers look like."""
        row = case_features(case.base_score, case.base_answer, case.candidate_answer, case.evidence)
        (found,) = self._trees.outcomes([row])
        return found.model_copy(update={"outside": self._trees.outside([row])})


# --- the trees -------------------------------------------------------------------------------


class Trees:
    """One file of trees, ready to predict."""

    def __init__(self, part: Part, text: str, where: str, known: Sequence[Feature]) -> None:
        """Read the trees.

        Args:
            part: what the card says about the file.
            text: of the file.
            where: its name, for errors.
            known: features that this version computes for such a part.

        Raises:
            WeightsError: the file is no model of LightGBM, or its features are others than those
                of the card, or than those that are computed.
        """
        self._part = part
        self._names = [feature.name for feature in part.features]
        fitted = [feature.name for feature in (*part.features, *part.constant)]
        computed = [feature.name for feature in known]
        if not set(fitted) <= set(computed):
            raise WeightsError(_differing(where, "was fitted on", fitted, computed))
        import lightgbm

        try:
            self._booster = lightgbm.Booster(model_str=text)
        except lightgbm.basic.LightGBMError as error:
            raise WeightsError(f"{where} holds no trees of LightGBM: {error}") from None
        found = self._booster.feature_name()
        if found != self._names:
            raise WeightsError(_differing(where, "holds trees over", found, self._names))
        n_sums = 3 if isinstance(part, OutcomePart) else 1
        if self._booster.num_model_per_iteration() != n_sums:
            raise WeightsError(
                f"{where} holds {self._booster.num_model_per_iteration()} groups of trees instead "
                f"of {n_sums}"
            )

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features that are looked at."""
        return tuple(self._names)

    def sums(self, rows: Sequence[Mapping[str, float]]) -> NDArray[float64]:
        """The sums of the trees' leaves: (n_rows,), or (n_rows, 3) of an outcome part."""
        # More threads take longer: there are a few hundred small trees.
        return self._booster.predict(self._matrix(rows), raw_score=True, num_threads=1)  # type: ignore[return-value]

    def probabilities(self, rows: Sequence[Mapping[str, float]]) -> list[float]:
        """Calibrated predictions of a score part, in [0, 1]."""
        part = self._part
        assert isinstance(part, ScorePart)
        return [_sigmoid(part.slope * total + part.intercept) for total in self.sums(rows).tolist()]

    def outcomes(self, rows: Sequence[Mapping[str, float]]) -> list[Likelihoods]:
        """Calibrated likelihoods of an outcome part."""
        part = self._part
        assert isinstance(part, OutcomePart)
        return [normalised(sums, part.temperature) for sums in self.sums(rows).tolist()]

    def contributions(self, rows: Sequence[Mapping[str, float]]) -> list[tuple[Contribution, ...]]:
        """What each feature added to the sum of a score part, the largest first; SHAP values."""
        found = self._booster.predict(self._matrix(rows), pred_contrib=True, num_threads=1)
        return [
            _largest_first(
                Contribution(feature=name, value=row[name], log_odds=added)
                for name, added in zip(self._names, moved[:-1].tolist(), strict=True)
            )
            for row, moved in zip(rows, found, strict=True)
        ]

    def outside(self, rows: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
        """Features that leave their range of the training rows in any of these rows."""
        return tuple(
            feature.name
            for feature in (*self._part.features, *self._part.constant)
            if any(not feature.low <= row[feature.name] <= feature.high for row in rows)
        )

    def _matrix(self, rows: Sequence[Mapping[str, float]]) -> NDArray[float64]:
        import numpy

        return numpy.array([[row[name] for name in self._names] for row in rows], numpy.float64)


def _sigmoid(log_odds: float) -> float:
    return 1.0 / (1.0 + math.exp(-min(max(log_odds, -700.0), 700.0)))


def _differing(where: str, verb: str, found: Sequence[str], wanted: Sequence[str]) -> str:
    return (
        f"{where} {verb} other features than expected.\n"
        f"  there: {', '.join(found)}\n  expected: {', '.join(wanted)}"
    )


# --- folders ---------------------------------------------------------------------------------


def load_learned(
    folder: str | Path, *, rank_by: Literal["decisive", "beneficial"] = "decisive"
) -> Learned:
    """Read a folder of learned parts.

    Args:
        folder: with `card.json`.
        rank_by: which chance orders the edges, together with the hand-set one: that the trial
            changes the answer, or that it makes it better than a control would.

    Raises:
        WeightsError: a file is missing or not what the card says, or a part was fitted on features
            that this version does not compute.
    """
    folder = Path(folder)
    card = _read_card(folder)
    parts: dict[PartName, Part | None] = {
        "headroom": card.headroom,
        "decisive": card.decisive,
        "beneficial": card.beneficial,
        "selector": card.selector,
    }
    if rank_by == "beneficial" and card.beneficial is None:
        raise WeightsError(f"{folder} holds no part that predicts whether a trial is beneficial")
    trees = {
        name: _read_trees(folder, name, part) for name, part in parts.items() if part is not None
    }
    return Learned(card, trees, rank_by)


def _read_card(folder: Path) -> Card:
    text = read_text(folder / "card.json", WeightsError)
    try:
        return Card.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, first["loc"]))
        raise WeightsError(f"{folder / 'card.json'}: {at}: {first['msg']}") from None


def _read_trees(folder: Path, name: PartName, part: Part) -> Trees:
    path = folder / part.file
    text = read_text(path, WeightsError)
    known = PART_FEATURES[name]
    if sha256(text.encode()).hexdigest() != part.sha256:
        held = [feature.name for feature in part.features]
        raise WeightsError(
            f"{path} is not the file that card.json describes: its SHA-256 differs. "
            + _differing(str(path), "should have", held, [feature.name for feature in known])
        )
    return Trees(part, text, str(path), known)


@cache
def shipped() -> Learned:
    """The parts that come with the package."""
    with as_file(files("splice") / "shipped") as folder:
        return load_learned(folder)
