"""Fit the learned parts on feature tables of probe pools.

Every part is fitted on questions of split train alone. What is chosen or calibrated goes by
out-of-fold predictions: of trees that have seen no row of the same question. The folds follow from
the questions' ids and a seed, so the order of rows does not matter, and the same tables give the
same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import lightgbm
import numpy as np
from joblib import Parallel, delayed
from numpy.typing import NDArray
from pydantic import Field
from scipy.optimize import minimize, minimize_scalar
from scipy.special import expit, log_softmax, logit

from probes.records import Arm, OutcomeClass
from selector_training.tables import (
    DecisiveProbe,
    Question,
    Tables,
    decisive_probes,
    labelled_edges,
)
from splice._version import __version__
from splice.errors import DataError, WeightsError
from splice.files import read_text, write_whole
from splice.learned import (
    PART_FEATURES,
    Card,
    OutcomePart,
    Part,
    PartName,
    Range,
    ScorePart,
    Trees,
    load_learned,
)
from splice.records import Record, digest
from splice.report.display import counted, joined, visible

Floats: TypeAlias = NDArray[np.float64]
Objective: TypeAlias = Literal["cross_entropy", "binary", "multiclass"]

OUTCOMES: Final[tuple[OutcomeClass, ...]] = ("beneficial", "neutral", "harmful")
"""Classes of the selector, in the order of its groups of trees."""

_SELECTOR_ARMS: Final[tuple[Arm, ...]] = ("edge", "placebo")

BUDGETS: Final = tuple(tenth / 10 for tenth in range(1, 10))
"""Shares of the queries for which a headroom threshold is kept."""


class TreeShape(Record):
    """What the trees of one part may look like."""

    num_leaves: Annotated[int, Field(ge=2)]
    min_data_in_leaf: Annotated[int, Field(ge=1)]
    lambda_l2: Annotated[float, Field(ge=0.0)]


GRID: Final = tuple(
    TreeShape(num_leaves=leaves, min_data_in_leaf=least, lambda_l2=l2)
    for leaves, least, l2 in product((2, 4, 7), (10, 30), (1.0, 10.0))
)
"""Shapes that are tried. Pools hold hundreds of questions, so the trees are small."""

ROUNDS: Final = (20, 50, 100, 200)
"""Numbers of trees that are tried with each shape."""

_LEARNING_RATE: Final = 0.05

_TIE: Final = 1e-3
"""Out-of-fold log losses that differ by less are equal; then the fewest splits win."""


class FitSettings(Record):
    """How parts are fitted."""

    seed: int = 0
    """Of the folds."""
    n_folds: Annotated[int, Field(ge=2)] = 5
    min_questions: Annotated[int, Field(ge=2)] = 50
    """With fewer questions to learn from, the base score is the mean of training and the other
    parts are left out, so that the hand-set weights and rules stay in their place (method 2.3). So it
    is with a part that is no better than a constant out of fold."""
    grid: Annotated[tuple[TreeShape, ...], Field(min_length=1)] = GRID
    n_jobs: int = 1
    """Threads; the result is the same."""


class Choice(NamedTuple):
    """What a part was fitted on, and what was chosen for it."""

    n_questions: int
    n_rows: int
    shape: TreeShape | None
    """None: the trees give a constant."""
    n_rounds: int
    loss: float
    """Out-of-fold log loss on training rows, after calibration, in nats."""
    constant_loss: float
    """Log loss of always predicting the mean of training."""

    @property
    def is_useful(self) -> bool:
        """Better than the mean out of fold; a part that is not has learned nothing."""
        return self.shape is None or self.loss < self.constant_loss


class Fitted(NamedTuple):
    """The parts: what a folder of learned parts holds."""

    card: Card
    texts: Mapping[PartName, str]
    """Trees by part."""
    choices: Mapping[PartName, Choice]
    """Empty for parts that were read from a folder."""

    def trees(self, name: PartName) -> Trees | None:
        """The trees of a part, ready to predict; None if there is no such part."""
        part = part_of(self.card, name)
        if part is None:
            return None
        return Trees(part, self.texts[name], part.file, PART_FEATURES[name])


def part_of(card: Card, name: PartName) -> Part | None:
    """What a card says about a part."""
    found: Part | None = getattr(card, name)
    return found


def read_fitted(folder: str | Path) -> Fitted:
    """Read a folder of learned parts.

    Raises:
        WeightsError: as `splice.learned.load_learned` raises it.
    """
    card = load_learned(folder).card
    parts = {name: part for name in PART_FEATURES if (part := part_of(card, name)) is not None}
    texts = {
        name: read_text(Path(folder) / part.file, WeightsError) for name, part in parts.items()
    }
    return Fitted(card, texts, {})


def fit(tables: Tables, settings: FitSettings) -> Fitted:
    """Fit all parts on the training questions.

    Raises:
        DataError: there are none.
    """
    train = tables.of_split("train")
    if not train.bases:
        raise DataError("the tables hold no base run of split train")
    headroom = _headroom(train, settings)
    base_scores = _by_run(train, headroom)
    edges = labelled_edges(train)
    questions = [edge.probe.base.question for edge in edges]
    rows = [edge.features for edge in edges]
    found: dict[PartName, _Fit | None] = {
        "headroom": headroom,
        "decisive": _edge_part(
            "decisive", rows, [edge.is_decisive for edge in edges], questions, settings
        ),
        "beneficial": _edge_part(
            "beneficial", rows, [edge.is_beneficial for edge in edges], questions, settings
        ),
        "selector": _selector(train, base_scores, settings, without=()),
    }
    parts = {
        name: part for name, part in found.items() if part is not None and part.choice.is_useful
    }
    cards: dict[str, Any] = {name: part.part for name, part in parts.items()}
    card = Card(
        **cards,
        thresholds=_thresholds(list(base_scores.values())),
        pools=tables.pools,
        packages=_packages(),
    )
    return Fitted(
        card=card,
        texts={name: part.text for name, part in parts.items()},
        choices={name: part.choice for name, part in parts.items()},
    )


def predicted_scores(tables: Tables, settings: FitSettings) -> dict[str, float]:
    """Predicted base score by id of the base run, for a selector to be trained on.

    Of training questions they are out of fold: else the selector would learn to trust a base score
    that is better in training than it will be in use (method 2.9).

    Raises:
        DataError: there is no training question, or two pools hold one base run.
    """
    train = tables.of_split("train")
    if not train.bases:
        raise DataError("the tables hold no base run of split train")
    fitted = _headroom(train, settings)
    found = dict(zip((base.id for base in train.bases), fitted.predicted(), strict=True))
    others = [base for base in tables.bases if base.id not in found]
    if others:
        trees = _ready("headroom", fitted)
        scores = trees.probabilities([base.features for base in others])
        found |= dict(zip((base.id for base in others), scores, strict=True))
    if len(found) < len(tables.bases):
        raise DataError("two of the tables hold the same base run; train on one of them")
    return found


ScoreByRun: TypeAlias = Mapping[tuple[str, str], float]
"""Predicted base score by `BaseRow.key`."""


def out_of_fold_scores(tables: Tables, settings: FitSettings) -> ScoreByRun:
    """Predicted base score of each training run, by trees that have not seen its question."""
    train = tables.of_split("train")
    return _by_run(train, _headroom(train, settings)) if train.bases else {}


def selector_without(
    tables: Tables, base_scores: ScoreByRun, settings: FitSettings, features: Collection[str]
) -> Trees | None:
    """A selector fitted as `fit` does it, but without some features; None if there is none.

    Args:
        tables: with the training questions.
        base_scores: what `out_of_fold_scores` gives for them.
        settings: how to fit.
        features: that it does without.
    """
    found = _selector(tables.of_split("train"), base_scores, settings, without=features)
    return None if found is None else _ready("selector", found)


def gain_forecaster(tables: Tables, base_scores: ScoreByRun, settings: FitSettings) -> Trees | None:
    """Trees that forecast the score change of a trial instead of its outcome class.

    They look at what the selector looks at. A prediction of p stands for a change of 2 p - 1.
    None if there are too few questions. Arguments are those of `selector_without`.
    """
    cases = _selector_cases(tables.of_split("train"), base_scores, settings)
    if cases is None:
        return None
    changes = [(1 + case.trial.delta) / 2 for case in cases.probes]
    data = _data("cross_entropy", "selector", cases.rows, changes, cases.questions)
    return _ready("selector", _score_part("selector", data, settings))


def _ready(name: PartName, fitted: _Fit) -> Trees:
    """Trees as they were fitted, ready to predict."""
    return Trees(fitted.part, fitted.text, fitted.part.file, PART_FEATURES[name])


def _by_run(train: Tables, headroom: _ScoreFit) -> ScoreByRun:
    """Out-of-fold predictions of the part that was fitted on these runs."""
    return dict(zip((base.key for base in train.bases), headroom.predicted(), strict=True))


def _thresholds(base_scores: Sequence[float]) -> dict[str, float]:
    """By budget, the headroom that this share of the training runs reaches or exceeds."""
    headroom = 1.0 - np.array(base_scores)
    reached = _rounded(np.quantile(headroom, [1 - budget for budget in BUDGETS]))
    return {f"{budget:.1f}": least for budget, least in zip(BUDGETS, reached, strict=True)}


def _packages() -> dict[str, str]:
    names = ("lightgbm", "numpy", "scipy")
    return {"splice-repair": __version__} | {name: version(name) for name in names}


# --- the parts -------------------------------------------------------------------------------


class _ScoreFit(NamedTuple):
    """A score part as it was fitted."""

    part: ScorePart
    text: str
    sums: Floats
    """(n_rows,) out-of-fold sums."""
    choice: Choice

    def predicted(self) -> list[float]:
        """Out-of-fold predictions, calibrated."""
        return _rounded(expit(self.part.slope * self.sums + self.part.intercept))


class _OutcomeFit(NamedTuple):
    """An outcome part as it was fitted."""

    part: OutcomePart
    text: str
    choice: Choice


_Fit: TypeAlias = _ScoreFit | _OutcomeFit


def _headroom(train: Tables, settings: FitSettings) -> _ScoreFit:
    data = _data(
        "cross_entropy",
        "headroom",
        [base.features for base in train.bases],
        [base.score for base in train.bases],
        [base.question for base in train.bases],
    )
    if data.n_questions >= settings.min_questions:
        found = _score_part("headroom", data, settings)
        if found.choice.is_useful:
            return found
    return _constant_score("headroom", data)


def _edge_part(
    name: PartName,
    rows: Sequence[Mapping[str, float]],
    labels: Sequence[bool],
    questions: Sequence[Question],
    settings: FitSettings,
) -> _ScoreFit | None:
    if len(set(questions)) < settings.min_questions:
        return None
    data = _data("binary", name, rows, [float(label) for label in labels], questions)
    return _score_part(name, data, settings)


class _SelectorCases(NamedTuple):
    """What selectors are fitted on, a row each."""

    probes: Sequence[DecisiveProbe]
    rows: Sequence[Mapping[str, float]]
    questions: Sequence[Question]


def _selector_cases(
    train: Tables, base_scores: ScoreByRun, settings: FitSettings
) -> _SelectorCases | None:
    """The decisive trials; None if they are of too few questions."""
    probes = decisive_probes(train, _SELECTOR_ARMS)
    questions = [case.probe.base.question for case in probes]
    if len(set(questions)) < settings.min_questions:
        return None
    rows = [case.features(base_scores[case.probe.base.key]) for case in probes]
    return _SelectorCases(probes, rows, questions)


def _selector(
    train: Tables, base_scores: ScoreByRun, settings: FitSettings, without: Collection[str]
) -> _OutcomeFit | None:
    cases = _selector_cases(train, base_scores, settings)
    if cases is None:
        return None
    labels = [float(OUTCOMES.index(case.trial.outcome_class)) for case in cases.probes]
    data = _data("multiclass", "selector", cases.rows, labels, cases.questions, without)
    chosen = _choose(data, settings)
    temperature = _temperature(chosen.sums, data.labels)
    choice = Choice(
        n_questions=data.n_questions,
        n_rows=len(data.labels),
        shape=chosen.shape,
        n_rounds=chosen.n_rounds,
        loss=_outcome_loss(chosen.sums / temperature, data.labels),
        constant_loss=_outcome_loss(np.log(_shares(data.labels))[None, :], data.labels),
    )
    text = _trained(data, np.ones(len(data.labels), bool), chosen.shape, chosen.n_rounds)
    return _OutcomeFit(
        OutcomePart(**_facts("selector", data, text), temperature=temperature), text, choice
    )


def _score_part(name: PartName, data: _Data, settings: FitSettings) -> _ScoreFit:
    chosen = _choose(data, settings)
    slope, intercept = _platt(chosen.sums, data.labels)
    text = _trained(data, np.ones(len(data.labels), bool), chosen.shape, chosen.n_rounds)
    part = ScorePart(**_facts(name, data, text), slope=slope, intercept=intercept)
    choice = Choice(
        n_questions=data.n_questions,
        n_rows=len(data.labels),
        shape=chosen.shape,
        n_rounds=chosen.n_rounds,
        loss=_score_loss(slope * chosen.sums + intercept, data.labels),
        constant_loss=_constant_loss(data.labels),
    )
    return _ScoreFit(part, text, chosen.sums, choice)


def _constant_score(name: PartName, data: _Data) -> _ScoreFit:
    """A part that predicts the mean of training: one tree without a split, and slope 0."""
    n = len(data.labels)
    shape = TreeShape(num_leaves=2, min_data_in_leaf=n, lambda_l2=0.0)
    text = _trained(data, np.ones(n, bool), shape, 1)
    mean = float(_platt_targets(data.labels).mean())
    part = ScorePart(**_facts(name, data, text), slope=0.0, intercept=round(float(logit(mean)), 6))
    loss = _constant_loss(data.labels)
    choice = Choice(data.n_questions, n, None, 1, loss, loss)
    return _ScoreFit(part, text, np.zeros(n), choice)


def _facts(name: PartName, data: _Data, text: str) -> dict[str, Any]:
    """What a card says about any part."""
    lows, highs = data.matrix.min(axis=0).tolist(), data.matrix.max(axis=0).tolist()
    return {
        "file": f"{name}.txt",
        "sha256": sha256(text.encode()).hexdigest(),
        "features": tuple(
            Range(name=feature, low=low, high=high)
            for feature, low, high in zip(data.names, lows, highs, strict=True)
        ),
        "constant": data.constant,
        "n_rows": len(data.labels),
    }


# --- trees -----------------------------------------------------------------------------------


class _Data(NamedTuple):
    """Rows to fit a part on."""

    objective: Objective
    names: list[str]
    """Of the features: those that are not the same in all rows."""
    matrix: Floats
    """(n_rows, n_features)."""
    labels: Floats
    """(n_rows,): a score in [0, 1], or the index of a class."""
    questions: Sequence[Question]
    """(n_rows,)."""
    constant: tuple[Range, ...]
    """The other features."""

    @property
    def n_questions(self) -> int:
        return len(set(self.questions))


def _data(
    objective: Objective,
    name: PartName,
    rows: Sequence[Mapping[str, float]],
    labels: Sequence[float],
    questions: Sequence[Question],
    without: Collection[str] = (),
) -> _Data:
    names = [feature.name for feature in PART_FEATURES[name] if feature.name not in without]
    matrix = np.array([[row[feature] for feature in names] for row in rows], np.float64)
    # A part has at least one feature, even if none tells rows apart.
    kept = [
        column for column in range(len(names)) if matrix[:, column].min() < matrix[:, column].max()
    ] or [0]
    return _Data(
        objective,
        [names[column] for column in kept],
        matrix[:, kept],
        np.array(labels, np.float64),
        questions,
        tuple(
            Range(name=name, low=value, high=value)
            for column, (name, value) in enumerate(zip(names, matrix[0].tolist(), strict=True))
            if column not in kept
        ),
    )


class _Candidate(NamedTuple):
    """A shape and a number of rounds, with what they give."""

    shape: TreeShape
    n_rounds: int
    sums: Floats
    """Out of fold."""
    loss: float
    """Out of fold, before calibration."""

    @property
    def size(self) -> tuple[int, int, float]:
        """The simpler, the smaller."""
        shape = self.shape
        return self.n_rounds * (shape.num_leaves - 1), -shape.min_data_in_leaf, -shape.lambda_l2


def _choose(data: _Data, settings: FitSettings) -> _Candidate:
    """The candidate of the lowest out-of-fold log loss; of those that tie with it the simplest."""
    fold_of = _folds(data.questions, settings)
    folds = np.array([fold_of[question] for question in data.questions])
    tasks = list(product(settings.grid, sorted(set(fold_of.values()))))
    found: list[list[Floats]] = Parallel(n_jobs=settings.n_jobs, prefer="threads")(
        delayed(_out_of_fold)(data, folds == fold, shape) for shape, fold in tasks
    )
    loss_of = _outcome_loss if data.objective == "multiclass" else _score_loss
    candidates = []
    for shape in settings.grid:
        own = [(fold, sums) for (s, fold), sums in zip(tasks, found, strict=True) if s is shape]
        for place, n_rounds in enumerate(ROUNDS):
            whole = np.empty((len(folds), *own[0][1][place].shape[1:]))
            for fold, sums in own:
                whole[folds == fold] = sums[place]
            candidates.append(_Candidate(shape, n_rounds, whole, loss_of(whole, data.labels)))
    lowest = min(candidate.loss for candidate in candidates)
    tied = [candidate for candidate in candidates if candidate.loss <= lowest + _TIE]
    return min(tied, key=lambda candidate: candidate.size)


def _folds(questions: Sequence[Question], settings: FitSettings) -> dict[Question, int]:
    """Questions dealt out to folds in the order of a seeded hash, so that folds are of one size."""
    dealt = sorted(
        set(questions), key=lambda q: digest(f"{settings.seed}\0{q.workload}\0{q.query_id}")
    )
    return {question: place % settings.n_folds for place, question in enumerate(dealt)}


def _out_of_fold(data: _Data, is_out: NDArray[np.bool_], shape: TreeShape) -> list[Floats]:
    """Sums for the rows of one fold after each of `ROUNDS`, by trees fitted on the other rows."""
    booster = _booster(data, ~is_out, shape, ROUNDS[-1])
    return [
        np.asarray(
            booster.predict(
                data.matrix[is_out], raw_score=True, num_iteration=n_rounds, num_threads=1
            ),
            np.float64,
        )
        for n_rounds in ROUNDS
    ]


def _trained(data: _Data, rows: NDArray[np.bool_], shape: TreeShape, n_rounds: int) -> str:
    return _booster(data, rows, shape, n_rounds).model_to_string()


def _booster(
    data: _Data, rows: NDArray[np.bool_], shape: TreeShape, n_rounds: int
) -> lightgbm.Booster:
    labels = data.labels[rows]
    settings = {
        "objective": data.objective,
        "learning_rate": _LEARNING_RATE,
        "deterministic": True,
        "force_row_wise": True,
        "num_threads": 1,
        "verbosity": -1,
        **shape.model_dump(),
        **({"num_class": len(OUTCOMES)} if data.objective == "multiclass" else {}),
    }
    # Nothing is drawn: neither rows nor features are sampled, so no seed is given.
    rows_of = lightgbm.Dataset(data.matrix[rows], labels, feature_name=data.names)
    booster = lightgbm.train(settings, rows_of, n_rounds)
    if data.objective == "multiclass":
        _smooth(booster, labels)
    return booster


def _smooth(booster: lightgbm.Booster, labels: Floats) -> None:
    """Shift the sums of each class as if it had been seen once more.

    LightGBM begins with the logarithms of the shares of the classes, and with that of 1e-15 for a
    class that is absent, which would stay impossible for ever.
    """
    seen = np.bincount(labels.astype(int), minlength=len(OUTCOMES)) / len(labels)
    shifts = np.log(_shares(labels)) - np.log(np.maximum(seen, 1e-15))
    # The first round holds one tree for each class.
    first = booster.dump_model(num_iteration=1)["tree_info"]
    for tree, shift in enumerate(shifts.tolist()):
        for leaf in range(first[tree]["num_leaves"]):
            booster.set_leaf_output(tree, leaf, booster.get_leaf_output(tree, leaf) + shift)


def _shares(labels: Floats) -> Floats:
    """(3,) shares of the classes as if each had been seen once more."""
    counts = np.bincount(labels.astype(int), minlength=len(OUTCOMES)) + 1.0
    return np.asarray(counts / counts.sum(), np.float64)


# --- losses and calibration ------------------------------------------------------------------


def _score_loss(sums: Floats, labels: Floats) -> float:
    """Mean cross-entropy, in nats, of log-odds for labels in [0, 1]."""
    return float(np.mean(np.logaddexp(0.0, sums) - labels * sums))


def _constant_loss(labels: Floats) -> float:
    """The same for the mean of the labels."""
    mean = float(_platt_targets(labels).mean())
    return _score_loss(np.full(len(labels), logit(mean)), labels)


def _outcome_loss(sums: Floats, labels: Floats) -> float:
    """Mean cross-entropy, in nats, of (n_rows, 3) or (1, 3) sums for classes by index."""
    logs = np.broadcast_to(log_softmax(sums, axis=1), (len(labels), len(OUTCOMES)))
    return -float(np.mean(logs[np.arange(len(labels)), labels.astype(int)]))


def _platt_targets(labels: Floats) -> Floats:
    """Labels moved away from 0 and 1, as if one more of each kind had been seen."""
    n_true = float(labels.sum())
    high = (n_true + 1) / (n_true + 2)
    low = 1 / (len(labels) - n_true + 2)
    return np.asarray(labels * high + (1 - labels) * low, np.float64)


def _platt(sums: Floats, labels: Floats) -> tuple[float, float]:
    """Slope and intercept that make sums the log-odds of the labels.

    Source: Platt 1999. A departure: labels may be fractions, and the slope is not below 0, as
    out-of-fold sums of trees that learned nothing run against the labels.
    """
    targets = _platt_targets(labels)

    def loss(values: Floats) -> tuple[float, Floats]:
        log_odds = values[0] * sums + values[1]
        off = expit(log_odds) - targets
        return _score_loss(log_odds, targets), np.array([np.mean(off * sums), np.mean(off)])

    found = minimize(
        loss, np.array([1.0, 0.0]), jac=True, method="L-BFGS-B", bounds=[(0.0, None), (None, None)]
    )
    slope, intercept = _rounded(found.x)
    return slope, intercept


def _rounded(values: Floats) -> list[float]:
    """Values to six decimals: the last digits of sums and minima differ from machine to machine."""
    return [round(value, 6) for value in values.tolist()]


_TEMPERATURES: Final = (0.25, 4.0)
"""Few rows must not sharpen the outcomes without end, nor flatten them beyond their shares."""


def _temperature(sums: Floats, labels: Floats) -> float:
    """What sums are divided by to become calibrated log-likelihoods."""
    found = minimize_scalar(
        lambda log: _outcome_loss(sums / math.exp(log), labels),
        bounds=tuple(map(math.log, _TEMPERATURES)),
        method="bounded",
    )
    (temperature,) = _rounded(np.exp([float(found.x)]))
    return temperature


# --- the folder ------------------------------------------------------------------------------


def write(fitted: Fitted, out: str | Path, validation: str) -> None:
    """Write a folder of learned parts; what is there already is replaced.

    Args:
        fitted: the parts.
        out: the folder, made if need be.
        validation: how well they do on the validation split, for the model card.

    Raises:
        StoreError: a file can't be written. The card comes last, so a folder is not read before it
            is complete.
    """
    out = Path(out)
    for name, text in fitted.texts.items():
        write_whole(out / f"{name}.txt", text)
    write_whole(out / "README.md", model_card(fitted, validation))
    write_whole(out / "card.json", fitted.card.model_dump_json(indent=1) + "\n")


_ROLES: Final[Mapping[PartName, str]] = {
    "headroom": "score of the base answer, from the base run",
    "decisive": "whether a trial of an edge changes the answer, from the base run",
    "beneficial": "whether it makes the answer better than a placebo would, from the base run",
    "selector": "beneficial, neutral or harmful, from the process evidence of a trial",
}


def model_card(fitted: Fitted, validation: str) -> str:
    """What the parts are, for people, as Markdown."""
    missing = [name for name in PART_FEATURES if name not in fitted.texts]
    constant = [name for name, choice in fitted.choices.items() if choice.shape is None]
    lines = [
        "# Learned parts for SPLICE",
        "",
        "Boosted trees that take the place of hand-set scores: "
        "`splice.learned.load_learned` reads this folder. Nothing in it is unpickled or run.",
        "",
        "## Trained on",
        "",
        *(
            f"- pool {_code(pool.name)} (manifest {pool.sha256[:12]}): "
            f"{counted(pool.n_questions, 'training question')}, {counted(pool.n_probes, 'probe')}; "
            f"workloads {joined(map(_code, pool.workloads)) or 'none'}; agents "
            f"{joined(map(_code, pool.models)) or 'without a model'}"
            for pool in fitted.card.pools
        ),
        "",
        "## Parts",
        "",
        "| part | predicts | questions | rows | leaves | trees | log loss | of a constant |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_choice_row(name, choice) for name, choice in fitted.choices.items()),
        "",
        "Fitted on questions of split train alone. Shape and number of trees were chosen by "
        "out-of-fold log loss (nats, after calibration in the table), the folds being made of "
        "whole questions; of equal ones the smaller was taken. Scores are calibrated by slope and "
        "intercept, outcomes by a temperature, on out-of-fold sums. The selector was fitted with "
        "out-of-fold base scores. Each outcome counts as seen once more than it was, so that none "
        "is impossible.",
        "",
        "## Validation",
        "",
        "```",
        visible(validation),
        "```",
        "",
        "## Not to be trusted",
        "",
        "- On other workflows, workloads or agents than those above: the trees have seen no other. "
        "A diagnosis and a decision name the features that lie outside of their range in training.",
        "- As proof that a message helps: edges were drawn at random for training, and a change "
        "of the answer can be chance. The controls of the pool say how often.",
        *(
            f"- {_code(name)} predicts the mean of training: too few questions to do better."
            for name in constant
        ),
        *(
            f"- There is no part {_code(name)}: too few questions to learn from, or to do better "
            "than a constant out of fold. Hand-set weights or rules are used in its place."
            for name in missing
        ),
        "",
        "Made with " + joined(f"{name} {number}" for name, number in fitted.card.packages.items()),
        "",
    ]
    return "\n".join(lines)


def _choice_row(name: PartName, choice: Choice) -> str:
    leaves = 1 if choice.shape is None else choice.shape.num_leaves
    return (
        f"| {name} | {_ROLES[name]} | {choice.n_questions:,} | {choice.n_rows:,} | {leaves} | "
        f"{choice.n_rounds} | {choice.loss:.3f} | {choice.constant_loss:.3f} |"
    )


def _code(name: str) -> str:
    """A name as code; it may come from a file of anybody's."""
    return f"`{visible(name).replace('`', '').replace(chr(10), ' ')}`"
