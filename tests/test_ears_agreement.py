"""Agreement on ratings from 0 to 2: counted by hand, by its symmetries, and as published."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from splice.ears.agreement import (
    ACE_DIMENSIONS,
    AceAgreement,
    AceRatings,
    Agreement,
    MeanAgreement,
    ace_agreement,
    agreement,
    mean_agreement,
)
from splice.statistics import share

NONE = MeanAgreement(accuracy=None, kappa=None, quadratic_kappa=None, tau=None)


def ace(*ratings: int) -> AceRatings:
    return AceRatings(**dict(zip(ACE_DIMENSIONS, ratings, strict=True)))


def test_four_indices_of_a_small_table() -> None:
    found = agreement([0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 2, 0])
    assert found.n == 6
    assert found.accuracy == share(4, 6)
    # By chance (2 * 2 + 2 * 3 + 2 * 1) / 36 = 1/3; (2/3 - 1/3) / (2/3).
    assert found.kappa == pytest.approx(0.5)
    # Squared distances: 1 + 4 = 5; by chance 2 * (3 + 4) + 2 * (2 + 1) + 2 * (8 + 3) = 42, over 6.
    assert found.quadratic_kappa == pytest.approx(1 - 5 / 7)
    # Of 15 pairs 6 agree and 3 disagree; 12 and 11 are not tied on one side.
    assert found.tau == pytest.approx(3 / math.sqrt(12 * 11))


def test_perfect_agreement_is_1_and_a_swap_of_the_ends_is_below_0() -> None:
    same = agreement([0, 1, 2], [0, 1, 2])
    assert (same.kappa, same.quadratic_kappa) == (1.0, 1.0)
    assert same.tau == pytest.approx(1.0)
    swapped = agreement([0, 0, 2, 2], [2, 2, 0, 0])
    assert (swapped.kappa, swapped.quadratic_kappa) == (-1.0, -1.0)
    assert swapped.tau == pytest.approx(-1.0)


def test_a_near_miss_weighs_less_than_a_far_one_in_the_quadratic_kappa_alone() -> None:
    near = agreement([0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 2, 2])
    far = agreement([0, 0, 1, 1, 2, 2], [0, 2, 1, 1, 2, 2])
    assert near.accuracy == far.accuracy
    assert near.quadratic_kappa > far.quadratic_kappa
    assert near.kappa == pytest.approx(far.kappa)


def test_what_ratings_leave_undefined_is_none() -> None:
    assert agreement([], []) == Agreement(
        n=0, accuracy=None, kappa=None, quadratic_kappa=None, tau=None
    )
    same = agreement([2, 2], [2, 2])
    assert same.accuracy == share(2, 2)
    assert (same.kappa, same.quadratic_kappa, same.tau) == (None, None, None)


@pytest.mark.parametrize(("first", "second"), [([2, 2, 2], [0, 1, 2]), ([0, 0], [2, 2])])
def test_a_constant_rater_beside_another_has_kappa_0_and_no_tau(
    first: list[int], second: list[int]
) -> None:
    found = agreement(first, second)
    assert (found.kappa, found.quadratic_kappa, found.tau) == (0.0, 0.0, None)


def test_ratings_that_do_not_pair_up_or_leave_the_scale_are_refused() -> None:
    with pytest.raises(ValueError, match="1 and 2 ratings"):
        agreement([0], [0, 1])
    with pytest.raises(ValueError, match="item 1: a rating is 0, 1 or 2, not 3"):
        agreement([0, 1], [0, 3])
    with pytest.raises(ValueError, match="not nan"):
        agreement([math.nan], [0])


pairs = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=30)


def columns(rows: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [a for a, _ in rows], [b for _, b in rows]


def as_numbers(found: Agreement) -> list[object]:
    indices = (found.kappa, found.quadratic_kappa, found.tau)
    return [found.accuracy, *(None if i is None else pytest.approx(i) for i in indices)]


@settings(deadline=None, max_examples=80)
@given(pairs)
def test_it_does_not_matter_which_rater_comes_first(rows: list[tuple[int, int]]) -> None:
    first, second = columns(rows)
    found = agreement(second, first)
    expected = as_numbers(agreement(first, second))
    assert [found.accuracy, found.kappa, found.quadratic_kappa, found.tau] == expected


@settings(deadline=None, max_examples=80)
@given(pairs, st.randoms(use_true_random=False))
def test_the_order_of_the_items_does_not_matter(
    rows: list[tuple[int, int]], random: object
) -> None:
    shuffled = list(rows)
    random.shuffle(shuffled)
    found = agreement(*columns(shuffled))
    expected = as_numbers(agreement(*columns(rows)))
    assert [found.accuracy, found.kappa, found.quadratic_kappa, found.tau] == expected


@settings(deadline=None, max_examples=80)
@given(pairs)
def test_indices_lie_in_their_ranges_and_are_never_nan(rows: list[tuple[int, int]]) -> None:
    found = agreement(*columns(rows))
    for index in (found.kappa, found.quadratic_kappa, found.tau):
        assert index is None or -1.0 - 1e-9 <= index <= 1.0 + 1e-9
    assert 0.0 <= found.accuracy.value <= 1.0


def test_the_overall_rating_is_the_mean_of_five_over_2() -> None:
    assert ace(2, 2, 2, 2, 2).overall == 1.0
    assert ace(0, 0, 0, 0, 0).overall == 0.0
    assert ace(2, 1, 0, 1, 2).overall == pytest.approx(0.6)


def test_there_are_five_dimensions() -> None:
    assert ACE_DIMENSIONS == (
        "claim_groundedness",
        "goal_fulfillment",
        "user_satisfaction",
        "action_execution_success",
        "response_usability",
    )


@pytest.mark.parametrize("rating", [-1, 3, 1.5, None])
def test_a_rating_off_the_scale_is_refused(rating: object) -> None:
    with pytest.raises(ValidationError, match="response_usability"):
        ace(0, 1, 2, 0, rating)


def test_agreement_on_conversations_is_by_dimension_and_on_average() -> None:
    first = [ace(0, 1, 2, 0, 1), ace(1, 2, 2, 1, 2), ace(2, 0, 1, 2, 0)]
    second = [ace(0, 1, 2, 1, 1), ace(1, 2, 2, 1, 2), ace(2, 0, 1, 2, 0)]
    found = ace_agreement(first, second)
    assert tuple(found.dimensions) == ACE_DIMENSIONS
    assert found.dimensions["goal_fulfillment"].quadratic_kappa == 1.0
    # 0, 1, 2 against 1, 1, 2: squared distance 1; by chance (1 + 1 + 4) + (0 + 0 + 1) + (1 + 1).
    weighted = 1 - 1 * 3 / 9
    assert found.dimensions["action_execution_success"].quadratic_kappa == pytest.approx(weighted)
    assert found.mean.accuracy == pytest.approx((4 + 2 / 3) / 5)
    assert found.mean.quadratic_kappa == pytest.approx((4 + weighted) / 5)
    assert AceAgreement.model_validate_json(found.model_dump_json()) == found


def test_a_mean_with_an_undefined_part_is_undefined() -> None:
    defined, constant = agreement([0, 1], [0, 1]), agreement([2, 2], [2, 2])
    found = mean_agreement([defined, constant])
    assert found.accuracy == 1.0
    assert (found.kappa, found.quadratic_kappa, found.tau) == (None, None, None)
    assert mean_agreement([]) == NONE
    assert ace_agreement([], []).mean == NONE


def test_conversations_that_do_not_pair_up_are_refused() -> None:
    with pytest.raises(ValueError, match="1 and 0 ratings"):
        ace_agreement([ace(0, 0, 0, 0, 0)], [])


PUBLISHED = [
    (70.4, 0.30, 0.38),
    (73.0, 0.53, 0.53),
    (82.0, 0.44, 0.45),
    (89.1, 0.24, 0.20),
    (99.0, 0.57, 0.57),
]
"""Accuracy in percent, quadratic kappa and tau of the five dimensions, on 311 conversations."""


@pytest.mark.parametrize(
    ("index", "published", "digits"),
    [("accuracy", 0.827, 3), ("quadratic_kappa", 0.42, 2), ("tau", 0.43, 2)],
)
def test_published_means_follow_from_the_published_dimensions(
    index: str, published: float, digits: int
) -> None:
    found = mean_agreement(
        [
            Agreement(
                n=311,
                accuracy=share(round(3.11 * accuracy), 311),
                kappa=None,
                quadratic_kappa=kappa,
                tau=tau,
            )
            for accuracy, kappa, tau in PUBLISHED
        ]
    )
    assert round(getattr(found, index), digits) == published


@pytest.mark.parametrize("accuracy", [row[0] for row in PUBLISHED])
def test_published_accuracies_are_shares_of_311_conversations(accuracy: float) -> None:
    found = share(round(3.11 * accuracy), 311)
    assert round(100 * found.value, 1) == accuracy
