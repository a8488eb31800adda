"""Learned parts as they are fitted: what they learn, what they don't, and the same bytes each time."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from test_probe_table import MANIFEST

from probes.pool import write_manifest
from selector_training.fit import (
    FitSettings,
    Fitted,
    TreeShape,
    fit,
    model_card,
    out_of_fold_scores,
    part_of,
    read_fitted,
    selector_without,
    write,
)
from selector_training.tables import (
    BaseRow,
    ProbeRow,
    Question,
    Tables,
    TrialFacts,
    read_tables,
)
from splice.errors import DataError
from splice.features import (
    ATTRIBUTION,
    CASE_FEATURES,
    EDGE_FEATURES,
    EVIDENCE_FEATURES,
    QUERY_FEATURES,
)
from splice.learned import PART_FEATURES, TrainingPool, load_learned
from splice.queries import Split

SETTINGS = FitSettings(grid=(TreeShape(num_leaves=2, min_data_in_leaf=10, lambda_l2=1.0),))
"""One shape, as what is tested here does not hang on it."""

POOL = TrainingPool(
    name="toy", sha256="0" * 64, workloads=("toy",), models=("m",), n_questions=1, n_probes=1
)


def base(
    query_id: str, score: float, split: Split = "train", rollout: int = 0, **features: float
) -> BaseRow:
    return BaseRow(
        id=f"{query_id}-{rollout}",
        pool="0" * 64,
        question=Question("toy", query_id),
        split=split,
        rollout=rollout,
        score=score,
        predicted_score=0.5,
        n_answer_words=2,
        features={feature.name: 0.0 for feature in QUERY_FEATURES} | features,
    )


def trial(outcome_class: str, delta: float, **evidence: float) -> TrialFacts:
    found = {feature.name: 0.0 for feature in EVIDENCE_FEATURES} | evidence
    return TrialFacts(outcome_class, outcome_class != "same", delta, 3, found)  # type: ignore[arg-type]


def tried(of: BaseRow, receiver: str, facts: TrialFacts | None, **features: float) -> ProbeRow:
    return ProbeRow(
        id=f"{of.id}-{receiver}",
        base=of,
        arm="edge",
        edge=("a", receiver),
        outcome="no_message" if facts is None else "done",
        is_gap=bool(features.get("bridge")),
        p_decisive=0.5,
        epsilon=0.01,
        features={feature.name: 0.0 for feature in EDGE_FEATURES} | features,
        trial=facts,
    )


def planted(n_train: int, n_validation: int = 0, *, is_noise: bool = False) -> Tables:
    """Questions whose numbers say what happens, or say nothing.

    An answer that declines scores low. An edge over which a bridge leads changes the answer. What
    stands in message and context helps, and what stands in neither does harm.
    """
    draw = random.Random(7)
    bases, probes = [], []
    for n in range(n_train + n_validation):
        declines = n % 2
        score = draw.uniform(0.0, 0.3) if declines else min(1.0, draw.uniform(0.7, 1.3))
        shown = draw.randint(0, 1) if is_noise else declines
        own = base(
            f"q{n:03}",
            round(score, 2),
            "train" if n < n_train else "validation",
            a_declines=float(shown),
            q_words=float(draw.randint(5, 20)),
        )
        bases.append(own)
        bridged = draw.randint(0, 1)
        for place, receiver in enumerate(("b", "c")):
            is_decisive = place == bridged
            kind = draw.choice(("beneficial", "neutral", "harmful"))
            said = {"beneficial": "both", "harmful": "untraceable", "neutral": "ctx_only"}[kind]
            change = {"beneficial": 0.3, "harmful": -0.3, "neutral": 0.0}[kind]
            shown_bridge = draw.randint(0, 1) if is_noise else int(is_decisive)
            facts = trial(kind, change, **{said: 1.0}, uptake=draw.random())
            probes.append(
                tried(
                    own,
                    receiver,
                    facts if is_decisive else None,
                    bridge=float(shown_bridge),
                    coverage=round(draw.random(), 2),
                )
            )
    return Tables(tuple(bases), tuple(probes), (POOL,))


def write_tables(folder: Path, tables: Tables, order: Callable[[list[int]], object]) -> Path:
    """Tables as a folder that can be read, with the rows in some order."""
    write_manifest(folder, MANIFEST)
    write_rows(folder / "bases.csv", [base_cells(row) for row in tables.bases], order)
    write_rows(folder / "probes.csv", [probe_cells(row) for row in tables.probes], order)
    return folder


def write_rows(
    path: Path, rows: Sequence[Mapping[str, object]], order: Callable[[list[int]], object]
) -> None:
    places = list(range(len(rows)))
    order(places)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows[place] for place in places)


def base_cells(row: BaseRow) -> dict[str, object]:
    return {
        "base": row.id,
        "workload": row.question.workload,
        "split": row.split,
        "query_id": row.question.query_id,
        "rollout": row.rollout,
        "predicted_score": row.predicted_score,
        "score_base": row.score,
        "n_base_answer_words": row.n_answer_words,
        **{f"query_feature_{name}": value for name, value in row.features.items()},
    }


def probe_cells(row: ProbeRow) -> dict[str, object]:
    found = row.trial
    return {
        "probe": row.id,
        "base": row.base.id,
        "arm": row.arm,
        "source": row.edge[0],
        "receiver": row.edge[1],
        "outcome": row.outcome,
        "outcome_class": found.outcome_class if found else "",
        "is_decisive": int(found.is_decisive) if found else "",
        "is_gap": int(bool(row.is_gap)),
        "p_decisive": row.p_decisive,
        "delta": found.delta if found else "",
        "n_answer_words": found.n_answer_words if found else "",
        **{f"edge_feature_{name}": value for name, value in row.features.items()},
        **{
            f"evidence_{feature.name}": found.evidence[feature.name] if found else ""
            for feature in EVIDENCE_FEATURES
        },
    }


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    return fit(planted(80), SETTINGS)


# --- what is learned -------------------------------------------------------------------------


def test_a_planted_base_score_is_found(fitted: Fitted) -> None:
    trees = fitted.trees("headroom")
    assert trees is not None
    kept = [feature.name for feature in QUERY_FEATURES]
    good, bad = trees.probabilities(
        [
            {name: 10.0 * (name == "q_words") for name in kept} | {"a_declines": x}
            for x in (0.0, 1.0)
        ]
    )
    assert good > 0.75
    assert bad < 0.25


@pytest.mark.parametrize("part", ["decisive", "beneficial"])
def test_a_planted_edge_is_found(fitted: Fitted, part: str) -> None:
    trees = fitted.trees(part)  # type: ignore[arg-type]
    assert trees is not None
    rows = planted(80).probes
    chances = trees.probabilities([row.edge_features for row in rows])
    bridged = [c for c, row in zip(chances, rows, strict=True) if row.features["bridge"]]
    other = [c for c, row in zip(chances, rows, strict=True) if not row.features["bridge"]]
    assert min(bridged) > max(other)


def test_planted_outcomes_are_found(fitted: Fitted) -> None:
    trees = fitted.trees("selector")
    assert trees is not None
    empty = {feature.name: 0.0 for feature in CASE_FEATURES}
    sums = trees.sums([empty | {name: 1.0} for name in ("both", "ctx_only", "untraceable")])
    assert sums.argmax(axis=1).tolist() == [0, 1, 2]


def test_nothing_is_kept_of_what_is_learned_from_noise() -> None:
    found = fit(planted(80, is_noise=True), SETTINGS)
    assert "decisive" not in found.texts
    for name, choice in found.choices.items():
        assert choice.shape is None or choice.loss < choice.constant_loss, name
    assert "There is no part `decisive`" in model_card(found, "")


def test_rows_of_one_question_stay_in_one_fold() -> None:
    draw = random.Random(3)
    bases = []
    for n in range(60):
        score = float(draw.randint(0, 1))
        bases += [base(f"q{n:02}", score, rollout=r, q_words=float(n)) for r in range(12)]
    found = fit(Tables(tuple(bases), (), ()), SETTINGS)
    # Trees that had seen other rollouts of a question would know its score.
    assert found.choices["headroom"].loss > found.choices["headroom"].constant_loss - 0.02


def test_only_the_training_split_has_a_say(fitted: Fitted) -> None:
    other = planted(80, 20)
    assert fit(other, SETTINGS).texts == fitted.texts
    assert fit(other, SETTINGS).card == fitted.card


# --- what a card says ------------------------------------------------------------------------


def test_the_card_has_the_features_that_vary_with_their_ranges(fitted: Fitted) -> None:
    part = fitted.card.headroom
    assert part is not None
    assert [(r.name, r.low, r.high) for r in part.features] == [
        ("q_words", 5.0, 20.0),
        ("a_declines", 0.0, 1.0),
    ]
    assert part.n_rows == 80
    assert fitted.card.pools == (POOL,)
    assert "lightgbm" in fitted.card.packages


def test_thresholds_fall_as_the_budget_grows(fitted: Fitted) -> None:
    values = list(fitted.card.thresholds.values())
    assert list(fitted.card.thresholds) == [f"0.{tenth}" for tenth in range(1, 10)]
    assert values == sorted(values, reverse=True)
    # Half of the answers decline, and these have the headroom.
    assert values[2] > 0.7
    assert values[6] < 0.3


# --- too little to learn from ----------------------------------------------------------------


def test_few_questions_give_the_mean_score_and_leave_the_rest_to_hand_set_parts(
    tmp_path: Path,
) -> None:
    tables = planted(40)
    found = fit(tables, SETTINGS)
    assert list(found.texts) == ["headroom"]
    mean = sum(row.score for row in tables.bases) / 40
    trees = found.trees("headroom")
    assert trees is not None
    rows = [row.features for row in tables.bases]
    assert trees.probabilities(rows) == pytest.approx([mean] * 40, abs=0.01)
    assert trees.contributions(rows[:1]) == [()]
    write(found, tmp_path / "parts", "")
    assert load_learned(tmp_path / "parts").selector is None
    card = (tmp_path / "parts" / "README.md").read_text("utf-8")
    assert "`headroom` predicts the mean of training" in card
    assert "no part `selector`" in card


@pytest.mark.parametrize("n", [1, 3])
def test_one_question_is_enough_for_a_mean(n: int) -> None:
    found = fit(Tables(tuple(base(f"q{i}", 1.0) for i in range(n)), (), ()), SETTINGS)
    trees = found.trees("headroom")
    assert trees is not None
    assert 0.5 < trees.probabilities([base("q", 1.0).features])[0] < 1.0


def test_without_training_questions_nothing_is_fitted() -> None:
    with pytest.raises(DataError, match="no base run of split train"):
        fit(planted(0, 10), SETTINGS)


@pytest.mark.parametrize("kept", [{"beneficial", "neutral"}, {"harmful"}])
def test_an_outcome_that_was_never_seen_stays_possible(kept: set[str], tmp_path: Path) -> None:
    tables = planted(200)
    probes = [p for p in tables.probes if p.trial is None or p.trial.outcome_class in kept]
    found = fit(tables._replace(probes=tuple(probes)), SETTINGS)
    write(found, tmp_path / "parts", "")
    assert load_learned(tmp_path / "parts").selector is not None
    trees = found.trees("selector")
    assert trees is not None
    (sums,) = trees.sums([{feature.name: 0.0 for feature in CASE_FEATURES}]).tolist()
    absent = {"beneficial", "neutral", "harmful"} - kept
    for name, value in zip(("beneficial", "neutral", "harmful"), sums, strict=True):
        assert value > -8
        if name in absent:
            assert value < -4


# --- files -----------------------------------------------------------------------------------


def test_the_same_tables_give_the_same_bytes_in_any_order_of_rows_and_with_any_threads(
    tmp_path: Path,
) -> None:
    tables = planted(60)
    orders: Sequence[Callable[[list[int]], object]] = (
        lambda places: None,
        lambda places: places.reverse(),
        random.Random(1).shuffle,
    )
    written = []
    for number, order in enumerate(orders):
        read = read_tables([write_tables(tmp_path / f"tables{number}", tables, order)])
        settings = SETTINGS.model_copy(update={"n_jobs": 1 + number})
        write(fit(read, settings), tmp_path / f"parts{number}", "numbers")
        written.append(files(tmp_path / f"parts{number}"))
    assert written[0] == written[1] == written[2]
    assert list(written[0]) == [
        "README.md", "beneficial.txt", "card.json", "decisive.txt", "headroom.txt", "selector.txt",
    ]  # fmt: skip


def test_what_was_written_is_read_again(fitted: Fitted, tmp_path: Path) -> None:
    write(fitted, tmp_path / "parts", "what validation says")
    again = read_fitted(tmp_path / "parts")
    assert (again.card, again.texts) == (fitted.card, fitted.texts)
    text = (tmp_path / "parts" / "README.md").read_text("utf-8")
    assert "what validation says" in text
    assert "pool `toy`" in text


def test_a_hostile_name_stays_in_its_place_in_the_model_card(
    fitted: Fitted, tmp_path: Path
) -> None:
    pool = POOL.model_copy(update={"name": "x`\n# \x1b[31mowned"})
    card = fitted.card.model_copy(update={"pools": (pool,)})
    write(fitted._replace(card=card), tmp_path / "parts", "")
    text = (tmp_path / "parts" / "README.md").read_text("utf-8")
    assert "\n# \\x1b[31mowned" not in text
    assert "\x1b" not in text


def test_features_with_one_value_are_kept_apart_with_that_value() -> None:
    card = fit(planted(80), SETTINGS).card
    for name, table in PART_FEATURES.items():
        part = part_of(card, name)
        assert part is not None
        looked_at = {feature.name for feature in part.features}
        constant = {feature.name for feature in part.constant}
        assert looked_at | constant == {feature.name for feature in table}
        assert not looked_at & constant
        assert all(feature.low == feature.high for feature in part.constant)
        assert constant


def test_a_selector_can_be_fitted_without_some_features() -> None:
    found = selector_without(
        planted(80), out_of_fold_scores(planted(80), SETTINGS), SETTINGS, ATTRIBUTION
    )
    assert found is not None
    names = set(found.features)
    assert "uptake" in names
    assert not names & ATTRIBUTION
