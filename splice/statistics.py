"""What a table of results rests on: paired gains, exact tests, calibration and agreement.

Rows are questions. What the data leave undefined is None, never NaN; lengths that differ, and
values that are missing or not finite, raise `ValueError`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from splice.records import Probability, Record

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]


def _finite(values: ArrayLike) -> Floats:
    import numpy as np

    array = np.asarray(values, dtype=np.float64)
    if not np.isfinite(array).all():
        raise ValueError("a value is missing or not finite")
    return array


def _pair(a: ArrayLike, b: ArrayLike) -> tuple[Floats, Floats]:
    """Two columns of one length."""
    first, second = _finite(a), _finite(b)
    if first.ndim != 1 or second.ndim != 1 or len(first) != len(second):
        raise ValueError(f"two columns of one length wanted, not {first.shape}, {second.shape}")
    return first, second


def _require_equal_lengths(a: Sequence[Any], b: Sequence[Any]) -> None:
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} rows do not pair up")


def _without_float_noise(values: Floats) -> Floats:
    """Values to 12 decimals, so that 0.3 - 0.2 and 0.2 - 0.1 are the same difference."""
    import numpy as np

    # The sum turns -0.0 into 0.0.
    return np.round(values, 12) + 0.0


def _question_means(scores: ArrayLike) -> Floats:
    """(n_questions,) mean score of each question over its repeats."""
    array = _finite(scores)
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[1] == 0):
        raise ValueError(f"(n_questions,) or (n_questions, n_repeats) wanted, not {array.shape}")
    return array if array.ndim == 1 else array.mean(axis=1)


def _differences(base: ArrayLike, other: ArrayLike) -> Floats:
    before, after = _pair(_question_means(base), _question_means(other))
    return _without_float_noise(after - before)


def _is_constant(values: Floats) -> bool:
    return not len(values) or bool((values == values[0]).all())


class Interval(Record):
    """A closed interval of values that the data are compatible with."""

    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """Both ends in the same format; without one, as other records are shown.

        >>> f"{Interval(low=-0.0104, high=0.0688):+.3f}"
        '[-0.010, +0.069]'
        """
        return f"[{self.low:{spec}}, {self.high:{spec}}]" if spec else str(self)


class Gain(Record):
    """Mean paired difference of two systems over the same questions."""

    mean: float
    """Other minus base, in the unit of the scores."""
    interval: Interval
    p_value: Probability
    """Two-sided, for no difference; never 0."""
    n: int
    """Questions."""


class Counts(Record):
    """Questions by the sign of their score change."""

    n_fixed: int
    n_broken: int
    n_equal: int
    """Changed by no more than the tolerance."""


_DRAWS_PER_BLOCK = 2**20
"""Resampled questions held in memory at once; 8 MiB of indices."""


def _resampled_means(differences: Floats, n_resamples: int, seed: int) -> Floats:
    """(n_resamples,) sorted means of as many questions, drawn with replacement."""
    import numpy as np

    rng = np.random.default_rng(seed)
    n = len(differences)
    n_block = max(1, _DRAWS_PER_BLOCK // n)
    means = [
        differences[rng.integers(0, n, (min(n_block, n_resamples - start), n))].mean(axis=1)
        for start in range(0, n_resamples, n_block)
    ]
    return np.sort(_without_float_noise(np.concatenate(means)))


def paired_gain(
    base: ArrayLike,
    other: ArrayLike,
    *,
    seed: int,
    n_resamples: int = 10_000,
    level: float = 0.95,
) -> Gain:
    """Mean gain of `other` over `base`, by a paired bootstrap over questions.

    Questions are resampled, with the same indices for both systems; repeats of a question are
    averaged first, so that they do not pass for more questions. The order of the questions does
    not matter.

    The interval is the expanded percentile interval: its ends are the quantiles `a` and `1 - a` of
    the resampled means, `a = Phi(sqrt(n / (n - 1)) * t_{n-1}((1 - level) / 2))`, where `t` is the
    quantile function of Student's distribution. The p-value is corrected alike. Of `B` resampled
    means let `k` be at 0 or on its far side (the smaller of the two counts), and
    `z = Phi^-1((k + 1) / (B + 1))`; with `T` Student's distribution function it is
    `2 * T_{n-1}(z * sqrt((n - 1) / n))`, at most 1. So the two agree on whether there is a gain, up
    to the resolution of the resamples.

    A departure: the method has plain percentiles, which are too narrow for few questions. Share of
    95% intervals that hold the true gain, for questions that are fixed and broken with the given
    probabilities (summed over all outcomes, B = 10,000), and for a graded score that moves in 35%
    of the questions (2,500 to 6,000 simulated data sets, B = 1,999):

                                  percentile    BCa  expanded  Student's t
        n=40   fixed 0.10, broken 0.03  0.920   0.886     0.943     0.943
        n=60   fixed 0.10, broken 0.03  0.933   0.934     0.935     0.948
        n=200  fixed 0.10, broken 0.03  0.954   0.955     0.958     0.950
        n=60   fixed 0.05, broken 0.05  0.953   0.916     0.953     0.953
        n=200  fixed 0.05, broken 0.05  0.956   0.946     0.958     0.948
        n=20   graded, gain 0.05        0.901   0.871     0.924     0.941
        n=60   graded, gain 0.05        0.941   0.932     0.946     0.952
        n=60   graded, gain 0           0.932   0.924     0.938     0.943
        n=200  graded, gain 0.05        0.952   0.949     0.954     0.954

    Expanded percentiles are the smallest change that keeps 0.93 from 40 questions on and calls no
    more than about 6% of equal systems different. No interval here is right where small gains are
    rare and nothing is lost: if 15% of 60 questions gain 0.25 on average, all four hold the truth
    in 0.89 to 0.93 of the cases. The interval never leaves the range of the differences: for fewer
    than about ten questions it says little, and for one it is a point, with p = 1.

    Args:
        base: (n_questions,) or (n_questions, n_repeats) scores.
        other: the same questions in the same order; the number of repeats may differ.
        seed: of the resampling; the same seed gives the same result.
        n_resamples: bootstrap draws `B`.
        level: nominal coverage of the interval, in (0, 1).

    Raises:
        ValueError: no questions, or scores that do not pair up.

    Source: Hesterberg 2015, What Teachers Should Know About the Bootstrap (interval); Davison and
    Hinkley 1997, section 4.2 (`k + 1` over `B + 1`).
    """
    import numpy as np
    from scipy.special import ndtr, ndtri, stdtr, stdtrit

    if n_resamples < 1 or not 0.0 < level < 1.0:
        raise ValueError(f"{n_resamples} resamples at level {level}: at least 1, and in (0, 1)")
    # Sorted, as a seed would otherwise give another interval for another order of the questions.
    differences = np.sort(_differences(base, other))
    n = len(differences)
    if n == 0:
        raise ValueError("no questions to compare")
    mean = float(_without_float_noise(differences.mean()))
    if n == 1:
        return Gain(mean=mean, interval=Interval(low=mean, high=mean), p_value=1.0, n=1)

    means = _resampled_means(differences, n_resamples, seed)
    expansion = math.sqrt(n / (n - 1))
    tail = ndtr(expansion * stdtrit(n - 1, (1.0 - level) / 2))
    low, high = _without_float_noise(np.quantile(means, (tail, 1.0 - tail)))
    n_beyond = min(np.count_nonzero(means <= 0.0), np.count_nonzero(means >= 0.0))
    z = ndtri((n_beyond + 1) / (n_resamples + 1))
    return Gain(
        mean=mean,
        interval=Interval(low=float(low), high=float(high)),
        p_value=min(1.0, 2.0 * float(stdtr(n - 1, z / expansion))),
        n=n,
    )


def counts(base: ArrayLike, other: ArrayLike, eps: float) -> Counts:
    """Count questions that `other` fixed and broke by more than `eps`.

    Args:
        base: (n_questions,) or (n_questions, n_repeats) scores.
        other: the same questions in the same order.
        eps: 1e-9 for discrete scores, 0.01 for continuous ones (method 2.1).
    """
    differences = _differences(base, other)
    n_fixed = int((differences > eps).sum())
    n_broken = int((differences < -eps).sum())
    n_equal = len(differences) - n_fixed - n_broken
    return Counts(n_fixed=n_fixed, n_broken=n_broken, n_equal=n_equal)


def mcnemar(n_fixed: int, n_broken: int) -> float:
    """Exact two-sided p-value for fixing and breaking being equally likely.

    >>> round(mcnemar(10, 2), 4)
    0.0386
    """
    from scipy.stats import binomtest

    if min(n_fixed, n_broken) < 0:
        raise ValueError(f"counts below 0: {n_fixed}, {n_broken}")
    n = n_fixed + n_broken
    return float(binomtest(n_fixed, n, 0.5).pvalue) if n else 1.0


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """P-values adjusted for being looked at together, in the given order.

    >>> holm([0.01, 0.04, 0.03])
    (0.03, 0.06, 0.06)

    Source: Holm 1979.
    """
    if not all(0.0 <= p <= 1.0 for p in p_values):
        raise ValueError(f"p-values lie in [0, 1]: {list(p_values)}")
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return tuple(adjusted)


class Share(Record):
    """How many of some questions, as a share with its interval."""

    value: Probability
    interval: Interval
    """Wilson's, at 95%."""
    n_hits: int
    n: int


def share(n_hits: int, n: int) -> Share | None:
    """`n_hits` of `n` with its interval; None if there is nothing to have a share of."""
    from scipy.stats import binomtest

    if not n:
        return None
    found = binomtest(n_hits, n).proportion_ci(confidence_level=0.95, method="wilson")
    return Share(
        value=n_hits / n,
        interval=Interval(low=float(found.low), high=float(found.high)),
        n_hits=n_hits,
        n=n,
    )


def precision_at_1(hits: Sequence[bool]) -> Share | None:
    """Share of questions whose first choice was a hit; None if there are no questions."""
    return share(sum(map(bool, hits)), len(hits))


class Bin(Record):
    """Questions with neighbouring predictions, and how they turned out."""

    n: int
    low: float
    """Smallest prediction."""
    high: float
    """Largest prediction."""
    mean_predicted: float
    mean_actual: float


def calibration(predicted: ArrayLike, actual: ArrayLike, n_bins: int = 5) -> tuple[Bin, ...]:
    """Mean prediction and mean outcome by quantile of the prediction, in rising order.

    Equal predictions share a bin, that of their middle rank, since the order among them is
    arbitrary. Bins that stay empty, by ties or for want of rows, are left out.
    """
    import numpy as np
    from scipy.stats import rankdata

    if n_bins < 1:
        raise ValueError(f"at least one bin, not {n_bins}")
    guess, outcome = _pair(predicted, actual)
    if not len(guess):
        return ()
    # In doubled ranks, which are whole numbers, so that a rank on a boundary falls on one side.
    place = (2 * rankdata(guess) - 1) * n_bins // (2 * len(guess))
    return tuple(
        Bin(
            n=int(inside.sum()),
            low=float(guess[inside].min()),
            high=float(guess[inside].max()),
            mean_predicted=float(guess[inside].mean()),
            mean_actual=float(outcome[inside].mean()),
        )
        for inside in (place == index for index in np.unique(place))
    )


def spearman(predicted: ArrayLike, actual: ArrayLike) -> float | None:
    """Rank correlation, ties by their mean rank; None if either side is constant."""
    import numpy as np
    from scipy.stats import rankdata

    a, b = _pair(predicted, actual)
    if _is_constant(a) or _is_constant(b):
        return None
    return float(np.corrcoef(rankdata(a), rankdata(b))[0, 1])


def kendall_tau_b(a: ArrayLike, b: ArrayLike) -> float | None:
    """Kendall's tau-b; None if either side is constant."""
    from scipy.stats import kendalltau

    first, second = _pair(a, b)
    if _is_constant(first) or _is_constant(second):
        return None
    return float(kendalltau(first, second, variant="b").statistic)


def auc(scores: ArrayLike, labels: Sequence[bool]) -> float | None:
    """Probability that a true row scores above a false one, ties half; None without both kinds."""
    from scipy.stats import rankdata

    values, marks = _pair(scores, [bool(label) for label in labels])
    is_true = marks > 0
    n_true = int(is_true.sum())
    n_false = len(is_true) - n_true
    if not n_true or not n_false:
        return None
    rank_sum = float(rankdata(values)[is_true].sum())
    return (rank_sum - n_true * (n_true + 1) / 2) / (n_true * n_false)


def _differs(a: Hashable, b: Hashable) -> float:
    return float(a != b)


def _squared_distance(a: Any, b: Any) -> float:
    if not all(isinstance(label, (int, float)) and math.isfinite(label) for label in (a, b)):
        raise ValueError(f"quadratic weights need labels that are numbers, not {a!r}, {b!r}")
    return float((a - b) ** 2)


def cohen_kappa(
    a: Sequence[Hashable], b: Sequence[Hashable], weights: Literal["quadratic"] | None = None
) -> float | None:
    """Agreement of two raters beyond chance; None if both only ever gave one and the same label.

    With quadratic weights a disagreement counts by the squared distance of the two labels, which
    must be numbers (an unused label between two others keeps them apart).

    >>> cohen_kappa(["met", "met", "unmet", "unmet"], ["met", "unmet", "unmet", "unmet"])
    0.5
    """
    _require_equal_lengths(a, b)
    distance: Callable[[Any, Any], float] = _squared_distance if weights else _differs
    observed = sum(distance(x, y) for x, y in zip(a, b, strict=True))
    by_chance = sum(
        n_x * n_y * distance(x, y) for x, n_x in Counter(a).items() for y, n_y in Counter(b).items()
    )
    return 1.0 - observed * len(a) / by_chance if by_chance else None


class LabelScores(Record):
    """How well one label was predicted."""

    label: str
    precision: Probability | None
    """None: never predicted."""
    recall: Probability | None
    """None: never true."""
    f1: Probability | None
    """None: neither predicted nor true."""
    support: int
    """Rows whose true label it is."""
    n_predicted: int


class Averages(Record):
    """Precision, recall and F1 over all labels, averaged in one way."""

    precision: Probability | None
    recall: Probability | None
    f1: Probability | None


class Classification(Record):
    """Predicted against true labels."""

    n: int
    accuracy: Probability | None
    labels: tuple[LabelScores, ...]
    """In the order in which the labels were given."""
    micro: Averages
    """From counts that are summed over the labels."""
    macro: Averages
    """Each label that was predicted or true counts the same."""
    weighted: Averages
    """Labels count by their support."""


def _scores(label: str, n_right: int, n_predicted: int, support: int) -> LabelScores:
    return LabelScores(
        label=label,
        precision=n_right / n_predicted if n_predicted else None,
        recall=n_right / support if support else None,
        f1=2 * n_right / (n_predicted + support) if n_predicted + support else None,
        support=support,
        n_predicted=n_predicted,
    )


def _averages(rows: Sequence[LabelScores], weights: Sequence[float]) -> Averages:
    """Weighted means; what one label leaves undefined counts as 0 among the others."""
    total = sum(weights)

    def mean(values: Sequence[float | None]) -> float | None:
        weighted = sum(w * (value or 0.0) for w, value in zip(weights, values, strict=True))
        # Rounding can take a mean of ones a hair above 1.
        return min(1.0, weighted / total) if total else None

    return Averages(
        precision=mean([row.precision for row in rows]),
        recall=mean([row.recall for row in rows]),
        f1=mean([row.f1 for row in rows]),
    )


def classification(
    truth: Sequence[str], predicted: Sequence[str | None], labels: Sequence[str]
) -> Classification:
    """Accuracy, and precision, recall and F1 by label and averaged.

    Labels match exactly or not at all. A prediction outside `labels`, such as None for a reply that
    names no label, is a miss for its true label and a false alarm for none.

    Raises:
        ValueError: a true label is not among `labels`, or `labels` repeats one.
    """
    _require_equal_lengths(truth, predicted)
    if len(set(labels)) != len(labels):
        raise ValueError(f"a label is given twice: {list(labels)}")
    if unknown := set(truth) - set(labels):
        raise ValueError(f"true labels {sorted(unknown)} are not among {list(labels)}")

    n_right = Counter(t for t, p in zip(truth, predicted, strict=True) if t == p)
    n_predicted, support = Counter(predicted), Counter(truth)
    rows = tuple(
        _scores(label, n_right[label], n_predicted[label], support[label]) for label in labels
    )
    pooled = _scores("all", n_right.total(), sum(row.n_predicted for row in rows), support.total())
    return Classification(
        n=len(truth),
        accuracy=n_right.total() / len(truth) if truth else None,
        labels=rows,
        micro=Averages(precision=pooled.precision, recall=pooled.recall, f1=pooled.f1),
        macro=_averages(rows, [float(row.f1 is not None) for row in rows]),
        weighted=_averages(rows, [row.support for row in rows]),
    )
