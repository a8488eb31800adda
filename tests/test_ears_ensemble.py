"""How right an ensemble of judges is for each k: counted by hand, and for independent judges."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from splice.ears.curation import Curated, Vote
from splice.ears.ensemble import EnsembleTable, ensemble_table
from splice.ears.interactions import LABELS, Interaction, Label
from splice.statistics import Share

S, A, N, M, _ = LABELS


def row(
    number: int, label: Label | None, *said: Label | None, also: Sequence[Label] = ()
) -> Curated:
    return Curated(
        interaction=Interaction(
            id=f"r{number}",
            source="desk",
            agent="segments",
            context="You select.",
            query="Who?",
            label=label,
            also_right=tuple(also),
        ),
        disposition="kept",
        reason="no_agreement",
        votes=tuple(
            Vote(judge=f"judge{place}", guideline="g", label=vote)
            for place, vote in enumerate(said)
        ),
    )


def table(*rows: Curated) -> EnsembleTable:
    found = ensemble_table(rows)
    assert found is not None
    return found


def hits(found: Share | None) -> tuple[int, int] | None:
    return None if found is None else (found.n_hits, found.n)


def test_independent_judges_gain_precision_and_lose_recall_with_k() -> None:
    rng = random.Random(5)
    rows = []
    for number in range(4000):
        truth = rng.choice(LABELS)
        wrong = [label for label in LABELS if label != truth]
        said = [truth if rng.random() < 0.8 else rng.choice(wrong) for _ in range(4)]
        rows.append(row(number, truth, *said))
    found = table(*rows).by_k
    precisions = [score.precision.value for score in found if score.precision]
    recalls = [score.recall.value for score in found if score.recall]
    assert len(precisions) == len(recalls) == 4
    assert precisions == sorted(precisions)
    assert recalls == sorted(recalls, reverse=True)
    # All four right, and all four wrong in the same way.
    right, wrong_alike = 0.8**4, 4 * 0.05**4
    assert recalls[-1] == pytest.approx(right, abs=4 * math.sqrt(right * (1 - right) / 3200))
    assert precisions[-1] >= right / (right + wrong_alike) - 0.005


def test_abstentions_are_counted_for_every_k_and_every_judge() -> None:
    found = table(
        row(1, M, M, M), row(2, M, M, S), row(3, N, M, None), row(4, S, S, S), row(5, S, N, N)
    )
    one, two = found.by_k
    assert (found.n, found.n_abstentions) == (5, 3)
    # r2 has one vote for either label, so that none is accepted.
    assert (one.n_accepted, hits(one.precision), hits(one.recall)) == (3, (1, 3), (1, 3))
    assert (hits(one.any_precision), hits(one.any_recall)) == ((2, 3), (2, 3))
    assert (two.n_accepted, hits(two.precision), hits(two.recall)) == (2, (1, 2), (1, 3))
    first, second = found.judges
    assert (hits(first.precision), hits(first.recall)) == ((2, 4), (2, 3))
    assert (hits(second.precision), hits(second.recall)) == ((1, 2), (1, 3))


def test_nothing_accepted_has_no_precision() -> None:
    (only, _) = table(row(1, M, M, S)).by_k
    assert only.precision is None
    assert hits(only.recall) == (0, 1)


def test_a_label_that_is_as_right_counts_as_right() -> None:
    (only,) = table(row(1, A, N, also=[N])).by_k
    assert hits(only.precision) == hits(only.recall) == (1, 1)


def test_without_a_known_label_there_is_no_table() -> None:
    assert ensemble_table([row(1, None, M)]) is None
    assert ensemble_table([]) is None
