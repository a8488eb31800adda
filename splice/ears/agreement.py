"""How far two raters agree on ratings from 0 to 2, and the five ratings of a conversation (ACE).

An index that the ratings leave undefined is None, never NaN: every index without ratings; tau as
soon as one rater only ever gave one rating; kappa if both only ever gave one and the same. A kappa
of one such rater and another who varies is 0: the first tells nothing apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, Final, TypeAlias

from pydantic import Field

from splice.records import Probability, Record
from splice.statistics import Share, cohen_kappa, kendall_tau_b, share

Rating: TypeAlias = Annotated[int, Field(ge=0, le=2)]
"""0: not at all, 1: in part, 2: fully."""

_RATINGS: Final = (0, 1, 2)


class Agreement(Record):
    """How far two raters agree on the same items."""

    n: int
    accuracy: Share | None
    """Items that got the same rating from both."""
    kappa: float | None
    """Cohen's: every disagreement weighs the same."""
    quadratic_kappa: float | None
    """Cohen's, a disagreement weighing the square of its distance: 4 for 0 against 2."""
    tau: float | None
    """Kendall's tau-b."""


def agreement(first: Sequence[int], second: Sequence[int]) -> Agreement:
    """Agreement of two raters on the same items, in the same order.

    Which rater comes first does not matter, nor does the order of the items.

    Raises:
        ValueError: the two rated different numbers of items, or a rating is not 0, 1 or 2.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} ratings do not pair up")
    for place, rating in enumerate((*first, *second)):
        if rating not in _RATINGS:
            raise ValueError(f"item {place % len(first)}: a rating is 0, 1 or 2, not {rating!r}")
    return Agreement(
        n=len(first),
        accuracy=share(sum(a == b for a, b in zip(first, second, strict=True)), len(first)),
        kappa=cohen_kappa(first, second),
        quadratic_kappa=cohen_kappa(first, second, weights="quadratic"),
        tau=kendall_tau_b(first, second),
    )


class MeanAgreement(Record):
    """Indices of agreement, each averaged over several dimensions.

    None where one dimension leaves the index undefined: a mean over the others would be no mean of
    what it is compared with.
    """

    accuracy: Probability | None
    kappa: float | None
    quadratic_kappa: float | None
    tau: float | None


def mean_agreement(found: Sequence[Agreement]) -> MeanAgreement:
    """Plain means over dimensions, each counting the same."""
    return MeanAgreement(
        accuracy=_mean([part.accuracy.value if part.accuracy else None for part in found]),
        kappa=_mean([part.kappa for part in found]),
        quadratic_kappa=_mean([part.quadratic_kappa for part in found]),
        tau=_mean([part.tau for part in found]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


class AceRatings(Record):
    """A conversation's ratings on the five dimensions of ACE.

    Source: EARS 4.2. That the overall rating is the mean on a scale to 1 is ours.
    """

    claim_groundedness: Rating
    goal_fulfillment: Rating
    user_satisfaction: Rating
    action_execution_success: Rating
    response_usability: Rating

    @property
    def overall(self) -> Probability:
        """Mean of the five ratings, over 2."""
        ratings = (
            self.claim_groundedness,
            self.goal_fulfillment,
            self.user_satisfaction,
            self.action_execution_success,
            self.response_usability,
        )
        return fmean(ratings) / 2


ACE_DIMENSIONS: Final = tuple(AceRatings.model_fields)
"""Names of the five dimensions, in the order of tables."""


class AceAgreement(Record):
    """How far two raters agree on the ACE of the same conversations."""

    dimensions: dict[str, Agreement]
    """By the name of the dimension, in the order of `ACE_DIMENSIONS`."""
    mean: MeanAgreement


def ace_agreement(first: Sequence[AceRatings], second: Sequence[AceRatings]) -> AceAgreement:
    """Agreement of two raters on the same conversations, by dimension and on average.

    Raises:
        ValueError: the two rated different numbers of conversations.
    """
    dimensions = {
        name: agreement(
            [getattr(ratings, name) for ratings in first],
            [getattr(ratings, name) for ratings in second],
        )
        for name in ACE_DIMENSIONS
    }
    return AceAgreement(dimensions=dimensions, mean=mean_agreement(list(dimensions.values())))
