"""Statistics against tables worked by hand, their symmetries, and worlds whose truth is known."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from splice.statistics import (
    Gain,
    Interval,
    auc,
    calibration,
    classification,
    cohen_kappa,
    counts,
    holm,
    kendall_tau_b,
    mcnemar,
    paired_gain,
    precision_at_1,
    spearman,
)

N_RESAMPLES = 999

scores = st.integers(0, 10).map(lambda tenths: tenths / 10)
paired_scores = st.lists(st.tuples(scores, scores), min_size=1, max_size=30).map(
    lambda rows: ([base for base, _ in rows], [other for _, other in rows])
)


def gain(base: object, other: object, **options: object) -> Gain:
    return paired_gain(base, other, **{"seed": 3, "n_resamples": N_RESAMPLES} | options)


def outcomes(n_fixed: int, n_broken: int, n_equal: int) -> tuple[list[float], list[float]]:
    """Scores of a base system and of another that fixed and broke so many questions."""
    base = [0.0] * n_fixed + [1.0] * n_broken + [1.0] * n_equal
    other = [1.0] * n_fixed + [0.0] * n_broken + [1.0] * n_equal
    return base, other


def test_a_gain_states_mean_interval_p_value_and_number_of_questions() -> None:
    found = paired_gain(*outcomes(30, 10, 60), seed=0)
    assert found.n == 100
    assert found.mean == pytest.approx(0.2)
    # Normal theory: sd = sqrt(0.4 - 0.04) = 0.6, standard error 0.06, t_99 = 1.984, z = 3.33.
    assert found.interval.low == pytest.approx(0.2 - 1.984 * 0.0603, abs=0.015)
    assert found.interval.high == pytest.approx(0.2 + 1.984 * 0.0603, abs=0.015)
    assert 0.0004 < found.p_value < 0.004


def test_no_difference_is_an_interval_of_nothing_with_p_1() -> None:
    found = gain([0.2, 0.5, 1.0], [0.2, 0.5, 1.0])
    assert found == Gain(mean=0.0, interval=Interval(low=0.0, high=0.0), p_value=1.0, n=3)


def test_one_question_is_a_point_that_says_nothing_about_significance() -> None:
    found = gain([0.0], [1.0])
    assert found == Gain(mean=1.0, interval=Interval(low=1.0, high=1.0), p_value=1.0, n=1)


def test_the_p_value_is_never_0() -> None:
    found = gain([0.0] * 60, [1.0] * 60)
    assert found.interval == Interval(low=1.0, high=1.0)
    # The far tail of 999 resamples is empty: (0 + 1) / 1000, twice, and a little more by t.
    assert 2 / 1000 < found.p_value < 4 / 1000


def test_noise_of_floating_point_is_no_difference() -> None:
    assert 0.1 + 0.2 != 0.3
    assert gain([0.3] * 9, [0.1 + 0.2] * 9).interval == Interval(low=0.0, high=0.0)
    base, other = [[0.1, 0.2, 0.3]] * 9, [[0.3, 0.2, 0.1]] * 9
    assert gain(base, other).p_value == 1.0


def test_a_seed_gives_one_result_and_another_seed_another() -> None:
    columns = outcomes(9, 4, 47)
    assert gain(*columns, seed=1) == gain(*columns, seed=1)
    assert len({gain(*columns, seed=seed).p_value for seed in range(5)}) > 1


def test_resampling_in_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = outcomes(9, 4, 47)
    whole = gain(*columns)
    monkeypatch.setattr("splice.statistics._DRAWS_PER_BLOCK", 60 * 7)
    assert gain(*columns) == whole


def test_a_higher_level_gives_a_wider_interval() -> None:
    narrow, wide = (gain(*outcomes(9, 4, 47), level=level).interval for level in (0.8, 0.99))
    assert wide.low < narrow.low < narrow.high < wide.high


@settings(deadline=None, max_examples=60)
@given(paired_scores)
def test_the_interval_holds_the_mean_and_stays_within_the_differences(
    columns: tuple[list[float], list[float]],
) -> None:
    found = gain(*columns)
    differences = np.subtract(columns[1], columns[0])
    assert found.mean == pytest.approx(differences.mean(), abs=1e-9)
    assert found.interval.low <= found.mean <= found.interval.high
    assert differences.min() - 1e-9 <= found.interval.low
    assert found.interval.high <= differences.max() + 1e-9
    assert 0.0 < found.p_value <= 1.0


@settings(deadline=None, max_examples=60)
@given(paired_scores, st.randoms(use_true_random=False))
def test_the_order_of_the_questions_does_not_matter(
    columns: tuple[list[float], list[float]], random: object
) -> None:
    rows = list(zip(*columns, strict=True))
    random.shuffle(rows)
    assert gain(*zip(*rows, strict=True)) == gain(*columns)


@settings(deadline=None, max_examples=60)
@given(paired_scores, st.integers(-50, 50))
def test_shifting_both_systems_changes_nothing(
    columns: tuple[list[float], list[float]], tenths: int
) -> None:
    base, other = (np.asarray(column) + tenths / 10 for column in columns)
    assert gain(base, other) == gain(*columns)


@settings(deadline=None, max_examples=60)
@given(paired_scores, st.integers(1, 4))
def test_identical_repeats_change_nothing(
    columns: tuple[list[float], list[float]], n_repeats: int
) -> None:
    base, other = (np.repeat(np.asarray(column)[:, None], n_repeats, axis=1) for column in columns)
    assert gain(base, other) == gain(*columns)


@settings(deadline=None, max_examples=30)
@given(paired_scores)
def test_swapping_the_systems_swaps_the_signs(columns: tuple[list[float], list[float]]) -> None:
    base, other = columns
    forth, back = (paired_gain(*pair, seed=3) for pair in ((base, other), (other, base)))
    assert back.mean == pytest.approx(-forth.mean, abs=1e-9)
    # Up to the resamples, which are drawn for one order of the differences.
    width = forth.interval.high - forth.interval.low
    assert back.interval.low == pytest.approx(-forth.interval.high, abs=0.1 * width + 1e-9)
    assert back.interval.high == pytest.approx(-forth.interval.low, abs=0.1 * width + 1e-9)
    assert back.p_value == pytest.approx(forth.p_value, abs=0.03)


def test_repeats_are_averaged_by_question_and_may_differ_in_number() -> None:
    base = [[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
    assert gain(base, [1.0, 1.0, 1.0]) == gain([0.5, 1.0, 0.0], [1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("n_fixed", "n_broken", "is_gain"), [(20, 3, True), (12, 2, True), (6, 4, False), (3, 2, False)]
)
def test_interval_and_p_value_agree_on_whether_there_is_a_gain(
    n_fixed: int, n_broken: int, is_gain: bool
) -> None:
    found = gain(*outcomes(n_fixed, n_broken, 60 - n_fixed - n_broken))
    assert (found.interval.low > 0) == (found.p_value < 0.05) == is_gain


@pytest.mark.parametrize(
    ("base", "other", "message"),
    [
        ([], [], "no questions"),
        ([0.0, 1.0], [1.0], "one length"),
        ([[0.0, 1.0]], [1.0, 0.0], "one length"),
        ([0.0, None], [1.0, 1.0], "missing or not finite"),
        ([0.0, math.nan], [1.0, 1.0], "missing or not finite"),
        ([0.0, 1.0], [1.0, math.inf], "missing or not finite"),
        ([[]], [1.0], "n_repeats"),
        ([[[1.0]]], [[[1.0]]], "n_repeats"),
        (1.0, 1.0, "n_repeats"),
    ],
)
def test_scores_that_do_not_pair_up_are_refused(base: object, other: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gain(base, other)


@pytest.mark.parametrize("options", [{"level": 0.0}, {"level": 1.0}, {"n_resamples": 0}])
def test_impossible_settings_of_the_bootstrap_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        gain([0.0, 1.0], [1.0, 1.0], **options)


def test_results_are_frozen_and_go_through_json() -> None:
    found = gain(*outcomes(9, 4, 47))
    assert Gain.model_validate_json(found.model_dump_json()) == found
    with pytest.raises(ValidationError):
        found.mean = 1.0


def test_importing_the_module_loads_no_numerical_library() -> None:
    code = "import sys, splice.statistics; print({'numpy', 'scipy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def tables(n: int, p_fix: float, p_break: float) -> Iterator[tuple[float, int, int]]:
    """Every table of fixed and broken questions that is not too rare, with its probability."""
    p_equal = 1 - p_fix - p_break
    for n_fixed, n_broken in product(range(n + 1), repeat=2):
        n_equal = n - n_fixed - n_broken
        if n_equal < 0:
            continue
        ways = math.comb(n, n_fixed) * math.comb(n - n_fixed, n_broken)
        probability = ways * p_fix**n_fixed * p_break**n_broken * p_equal**n_equal
        if probability > 1e-6:
            yield probability, n_fixed, n_broken


def exact_coverage(n: int, p_fix: float, p_break: float) -> float:
    """Probability that the interval of `n` such questions holds the true gain.

    Summed over the tables, not simulated: what is left to chance are the resamples. Tables too
    rare to be visited count as missed.
    """
    return sum(
        probability
        for seed, (probability, n_fixed, n_broken) in enumerate(tables(n, p_fix, p_break))
        if holds(
            paired_gain(
                *outcomes(n_fixed, n_broken, n - n_fixed - n_broken),
                seed=seed,
                n_resamples=300_000 // n,
            ),
            p_fix - p_break,
        )
    )


def holds(found: Gain, truth: float) -> bool:
    return found.interval.low <= truth <= found.interval.high


def changed_f1(rng: np.random.Generator, n: int, favour: float) -> tuple[np.ndarray, np.ndarray]:
    """Token F1 of two systems; 35% of the questions move, by 2 * Beta(favour, 1.5) - 1."""
    moved = rng.random(n) < 0.35
    return np.zeros(n), np.where(moved, 2 * rng.beta(favour, 1.5, n) - 1, 0.0)


def simulated_coverage(n: int, favour: float, n_worlds: int = 1000) -> float:
    truth = 0.35 * (2 * favour / (favour + 1.5) - 1)
    rng = np.random.default_rng(20)
    found = (gain(*changed_f1(rng, n, favour), seed=seed) for seed in range(n_worlds))
    return sum(holds(each, truth) for each in found) / n_worlds


def test_the_tables_of_a_world_are_all_there() -> None:
    assert sum(probability for probability, *_ in tables(60, 0.1, 0.03)) > 0.9999


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "p_fix", "p_break"), [(40, 0.1, 0.03), (60, 0.1, 0.03), (200, 0.1, 0.03)]
)
def test_intervals_of_right_and_wrong_hold_a_known_gain(
    n: int, p_fix: float, p_break: float
) -> None:
    assert exact_coverage(n, p_fix, p_break) >= 0.93


@pytest.mark.slow
@pytest.mark.parametrize("n", [60, 200])
def test_intervals_of_a_graded_score_hold_a_known_gain(n: int) -> None:
    assert simulated_coverage(n, favour=2.0) >= 0.93


@pytest.mark.slow
@pytest.mark.parametrize(("n", "p"), [(60, 0.05), (200, 0.05), (60, 0.15)])
def test_two_equal_systems_are_told_apart_in_one_of_twenty_comparisons(n: int, p: float) -> None:
    assert 0.94 <= exact_coverage(n, p, p) <= 0.97


@pytest.mark.slow
def test_two_equal_systems_with_a_graded_score_are_rarely_told_apart() -> None:
    assert simulated_coverage(60, favour=1.5) >= 0.94


def test_questions_are_counted_by_the_sign_of_their_change() -> None:
    found = counts([0.0, 0.0, 1.0, 1.0, 0.5], [1.0, 1.0, 0.0, 1.0, 0.5], eps=1e-9)
    assert (found.n_fixed, found.n_broken, found.n_equal) == (2, 1, 2)


def test_a_change_of_exactly_the_tolerance_is_none() -> None:
    assert 0.56 - 0.55 > 0.01
    found = counts([0.55, 0.56, 0.55, 0.57], [0.56, 0.55, 0.57, 0.55], eps=0.01)
    assert (found.n_fixed, found.n_broken, found.n_equal) == (1, 1, 2)


def test_repeats_are_counted_as_one_question() -> None:
    found = counts([[0.0, 1.0], [1.0, 1.0]], [[1.0, 0.0], [1.0, 0.0]], eps=1e-9)
    assert (found.n_fixed, found.n_broken, found.n_equal) == (0, 1, 1)


@pytest.mark.parametrize(
    ("n_fixed", "n_broken", "p_value"),
    [
        # 2 * (C(12,0) + C(12,1) + C(12,2)) / 2**12 = 2 * 79 / 4096
        (10, 2, 158 / 4096),
        (2, 10, 158 / 4096),
        (5, 0, 2 / 32),
        (1, 0, 1.0),
        (3, 3, 1.0),
        (0, 0, 1.0),
    ],
)
def test_mcnemar_sums_the_binomial_tails(n_fixed: int, n_broken: int, p_value: float) -> None:
    assert mcnemar(n_fixed, n_broken) == pytest.approx(p_value)


def test_mcnemar_refuses_counts_below_0() -> None:
    with pytest.raises(ValueError, match="below 0"):
        mcnemar(3, -1)


def test_holm_multiplies_by_the_hypotheses_left_and_never_falls() -> None:
    # Sorted 0.01 * 4, 0.012 * 3 (raised to 0.04), 0.03 * 2, 0.9 * 1.
    assert holm([0.03, 0.9, 0.01, 0.012]) == pytest.approx((0.06, 0.9, 0.04, 0.04))
    assert holm([0.6, 0.7]) == (1.0, 1.0)
    assert holm([0.2]) == (0.2,)
    assert holm([]) == ()


@pytest.mark.parametrize("p_value", [-0.1, 1.1, math.nan])
def test_holm_refuses_what_is_no_p_value(p_value: float) -> None:
    with pytest.raises(ValueError, match="p-values"):
        holm([0.5, p_value])


def test_precision_at_1_comes_with_wilsons_interval() -> None:
    found = precision_at_1([True] * 8 + [False] * 2)
    assert found is not None
    assert (found.value, found.n_hits, found.n) == (0.8, 8, 10)
    # z = 1.96: centre (8 + z*z/2) / (10 + z*z), half width z * sqrt(1.6 + z*z/4) / (10 + z*z)
    assert found.interval.low == pytest.approx(0.4902, abs=5e-5)
    assert found.interval.high == pytest.approx(0.9433, abs=5e-5)


def test_precision_at_1_without_questions_is_not_defined() -> None:
    assert precision_at_1([]) is None


def test_precision_at_1_of_no_hit_and_of_all_hits_stays_in_0_to_1() -> None:
    for hits, value in (([False] * 5, 0.0), ([True] * 5, 1.0)):
        found = precision_at_1(hits)
        assert found is not None
        assert found.value == value
        assert 0.0 <= found.interval.low <= value <= found.interval.high <= 1.0


def test_calibration_puts_a_fifth_of_the_rows_into_each_bin() -> None:
    predicted = [0.9, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0]
    table = calibration(predicted, [float(p > 0.5) for p in predicted])
    assert [row.n for row in table] == [2, 2, 2, 2, 2]
    assert [(row.low, row.high) for row in table] == [
        (0.1, 0.2),
        (0.3, 0.4),
        (0.5, 0.6),
        (0.7, 0.8),
        (0.9, 1.0),
    ]
    assert [row.mean_predicted for row in table] == pytest.approx([0.15, 0.35, 0.55, 0.75, 0.95])
    assert [row.mean_actual for row in table] == [0.0, 0.0, 0.5, 1.0, 1.0]


def test_calibration_keeps_equal_predictions_in_one_bin() -> None:
    table = calibration([0.5] * 6 + [0.1, 0.2, 0.8, 0.9], [1.0, 0.0] * 5)
    # The six equal rows hold ranks 3 to 8; their middle, 5.5, lies in the third fifth.
    assert [(row.n, row.low, row.high) for row in table] == [
        (2, 0.1, 0.2),
        (6, 0.5, 0.5),
        (2, 0.8, 0.9),
    ]


def test_calibration_with_fewer_rows_than_bins_leaves_bins_out() -> None:
    assert [row.mean_actual for row in calibration([0.9, 0.1], [1.0, 0.0])] == [0.0, 1.0]
    assert [row.n for row in calibration([0.3] * 4, [1.0] * 4)] == [4]
    assert calibration([], []) == ()


@settings(deadline=None, max_examples=60)
@given(st.lists(scores, min_size=1, max_size=40), st.integers(1, 8))
def test_calibration_splits_no_ties_and_loses_no_rows(predicted: list[float], n_bins: int) -> None:
    table = calibration(predicted, predicted, n_bins)
    assert sum(row.n for row in table) == len(predicted)
    assert len(table) <= n_bins
    assert all(a.high < b.low for a, b in pairwise(table))
    assert all(row.low <= row.mean_predicted + 1e-9 for row in table)


@pytest.mark.parametrize("function", [calibration, spearman, kendall_tau_b, auc])
def test_columns_of_different_length_are_refused(function: object) -> None:
    with pytest.raises(ValueError, match="one length"):
        function([0.1, 0.2], [1.0])


@pytest.mark.parametrize("function", [calibration, spearman, kendall_tau_b])
def test_missing_values_are_refused(function: object) -> None:
    with pytest.raises(ValueError, match="missing or not finite"):
        function([0.1, None], [1.0, 1.0])


def test_calibration_needs_a_bin() -> None:
    with pytest.raises(ValueError, match="at least one bin"):
        calibration([0.1], [0.1], n_bins=0)


def test_spearman_is_the_correlation_of_ranks() -> None:
    assert spearman([1, 2, 3], [10, 20, 1000]) == pytest.approx(1.0)
    assert spearman([1, 2], [5, 3]) == pytest.approx(-1.0)
    # No ties: 1 - 6 * (1 + 1 + 1 + 1) / (4 * 15)
    assert spearman([1, 2, 3, 4], [2, 1, 4, 3]) == pytest.approx(0.6)
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: 4.5 / sqrt(4.5 * 5)
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(math.sqrt(0.9))


def test_tau_b_corrects_for_ties_on_either_side() -> None:
    # 4 pairs agree, none disagree, (2,2) tied in the first, the last two tied in the second:
    # 4 / sqrt((4 + 1) * (4 + 1))
    assert kendall_tau_b([1, 2, 2, 3], [1, 2, 3, 3]) == pytest.approx(0.8)
    assert kendall_tau_b([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)
    assert kendall_tau_b([1, 2], [2, 1]) == pytest.approx(-1.0)


@pytest.mark.parametrize("function", [spearman, kendall_tau_b])
@pytest.mark.parametrize(
    ("a", "b"), [([1, 1, 1], [1, 2, 3]), ([1, 2, 3], [0, 0, 0]), ([1], [2]), ([], [])]
)
def test_a_constant_side_has_no_rank_correlation(
    function: object, a: list[float], b: list[float]
) -> None:
    assert function(a, b) is None


def test_auc_is_the_share_of_pairs_in_the_right_order() -> None:
    # True rows 0.8, 0.4; false rows 0.4, 0.1: right, right, tie, right.
    assert auc([0.8, 0.4, 0.4, 0.1], [True, True, False, False]) == pytest.approx(3.5 / 4)
    assert auc([1, 2, 3], [True, False, False]) == 0.0
    assert auc([5, 5, 5], [True, False, True]) == 0.5


@pytest.mark.parametrize("labels", [[True, True], [False, False]])
def test_auc_needs_both_kinds_of_rows(labels: list[bool]) -> None:
    assert auc([0.1, 0.2], labels) is None


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(scores, st.booleans()), min_size=1, max_size=25))
def test_auc_equals_its_definition_by_pairs(rows: list[tuple[float, bool]]) -> None:
    true = [score for score, label in rows if label]
    false = [score for score, label in rows if not label]
    pairs = [float(t > f) + 0.5 * (t == f) for t, f in product(true, false)]
    expected = pytest.approx(sum(pairs) / len(pairs)) if pairs else None
    assert auc(*zip(*rows, strict=True)) == expected


def ratings(table: dict[tuple[object, object], int]) -> tuple[list[object], list[object]]:
    rows = [pair for pair, n in table.items() for _ in range(n)]
    return [a for a, _ in rows], [b for _, b in rows]


def test_kappa_of_a_two_by_two_table() -> None:
    # Agreement 35/50 = 0.7; by chance 25/50 * 30/50 + 25/50 * 20/50 = 0.5; 0.2 / 0.5
    a, b = ratings({("y", "y"): 20, ("y", "n"): 5, ("n", "y"): 10, ("n", "n"): 15})
    assert cohen_kappa(a, b) == pytest.approx(0.4)


def test_kappa_of_raters_who_always_and_never_agree() -> None:
    assert cohen_kappa(["a", "b", "c"], ["a", "b", "c"]) == 1.0
    assert cohen_kappa(["a", "b"], ["b", "a"]) == pytest.approx(-1.0)


def test_quadratic_kappa_weighs_a_disagreement_by_its_squared_distance() -> None:
    # Squared distances 0, 1, 0, 4 (mean 1.25); over all pairs of 1 2 3 3 with 1 1 3 1:
    # (0 0 4 0), (1 1 1 1), (4 4 0 4), (4 4 0 4), mean 32/16 = 2
    assert cohen_kappa([1, 2, 3, 3], [1, 1, 3, 1], weights="quadratic") == pytest.approx(0.375)
    # Unweighted: agreement 2/4; by chance 1/4 * 3/4 + 2/4 * 1/4 = 5/16; (8 - 5) / (16 - 5)
    assert cohen_kappa([1, 2, 3, 3], [1, 1, 3, 1]) == pytest.approx(3 / 11)


def test_quadratic_kappa_of_two_labels_is_plain_kappa() -> None:
    a, b = ratings({(1, 1): 20, (1, 0): 5, (0, 1): 10, (0, 0): 15})
    assert cohen_kappa(a, b, weights="quadratic") == pytest.approx(cohen_kappa(a, b))


@pytest.mark.parametrize("weights", [None, "quadratic"])
@pytest.mark.parametrize("label", [[], [1, 1, 1]])
def test_kappa_of_one_single_label_is_not_defined(weights: str | None, label: list[int]) -> None:
    assert cohen_kappa(label, label, weights) is None


def test_quadratic_kappa_refuses_labels_without_a_distance() -> None:
    with pytest.raises(ValueError, match="numbers"):
        cohen_kappa(["low", "high"], ["low", "low"], weights="quadratic")
    with pytest.raises(ValueError, match="numbers"):
        cohen_kappa([1.0, math.nan], [1.0, 2.0], weights="quadratic")


def test_raters_of_different_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="do not pair up"):
        cohen_kappa([1, 2], [1])


def test_classification_of_three_labels() -> None:
    truth = ["a", "a", "a", "a", "b", "b", "c", "c"]
    said = ["a", "a", "a", "b", "b", "c", "c", "c"]
    found = classification(truth, said, ["a", "b", "c"])
    assert (found.n, found.accuracy) == (8, 0.75)
    a, b, c = found.labels
    assert (a.precision, a.recall, a.support, a.n_predicted) == (1.0, 0.75, 4, 3)
    assert (b.precision, b.recall, b.support, b.n_predicted) == (0.5, 0.5, 2, 2)
    assert (c.precision, c.recall, c.support, c.n_predicted) == (pytest.approx(2 / 3), 1.0, 2, 3)
    assert [row.f1 for row in found.labels] == pytest.approx([6 / 7, 1 / 2, 4 / 5])
    assert found.micro.f1 == found.micro.precision == found.micro.recall == 0.75
    assert found.macro.f1 == pytest.approx((6 / 7 + 1 / 2 + 4 / 5) / 3)
    assert found.weighted.f1 == pytest.approx((4 * 6 / 7 + 2 * 1 / 2 + 2 * 4 / 5) / 8)
    assert found.weighted.recall == pytest.approx(found.accuracy)


def test_labels_match_exactly_or_not_at_all() -> None:
    said = ["met", "unmet", "unmet", "met.", "Met", " met"]
    found = classification(["unmet", "met", "unmet", "met", "met", "met"], said, ["met", "unmet"])
    assert found.accuracy == pytest.approx(1 / 6)
    assert [row.n_predicted for row in found.labels] == [1, 2]


def test_a_prediction_outside_the_labels_is_a_miss_and_no_false_alarm() -> None:
    found = classification(["a", "a", "b"], ["a", None, "?"], ["a", "b"])
    a, b = found.labels
    assert (a.precision, a.recall) == (1.0, 0.5)
    assert (b.precision, b.recall, b.f1) == (None, 0.0, 0.0)
    assert (found.micro.precision, found.micro.recall) == (1.0, pytest.approx(1 / 3))
    # A label that is never predicted counts as 0 among the others.
    assert found.macro.precision == 0.5
    assert found.weighted.precision == pytest.approx(2 / 3)


def test_a_label_that_never_occurs_is_not_defined_and_left_out_of_the_averages() -> None:
    found = classification(["a", "b"], ["a", "b"], ["a", "b", "never"])
    never = found.labels[2]
    assert (never.precision, never.recall, never.f1) == (None, None, None)
    assert found.macro.f1 == 1.0


def test_a_false_alarm_for_a_label_that_is_never_true_lowers_the_macro_average() -> None:
    found = classification(["a", "a"], ["a", "b"], ["a", "b"])
    assert found.labels[1].recall is None
    assert (found.macro.precision, found.macro.recall) == (0.5, 0.25)


def test_nothing_to_classify_leaves_everything_undefined() -> None:
    found = classification([], [], ["a"])
    assert found.accuracy is None
    for averages in (found.micro, found.macro, found.weighted):
        assert (averages.precision, averages.recall, averages.f1) == (None, None, None)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abc")), min_size=1))
def test_pooled_scores_of_a_closed_set_of_labels_equal_the_accuracy(
    rows: list[tuple[str, str]],
) -> None:
    found = classification(*zip(*rows, strict=True), ["a", "b", "c"])
    assert found.micro.precision == found.micro.recall == pytest.approx(found.accuracy)
    assert found.weighted.recall == pytest.approx(found.accuracy)


@pytest.mark.parametrize(
    ("truth", "said", "labels", "message"),
    [
        (["a", "b"], ["a"], ["a", "b"], "do not pair up"),
        (["a", "d"], ["a", "a"], ["a", "b"], r"\['d'\] are not among"),
        (["a"], ["a"], ["a", "a"], "given twice"),
    ],
)
def test_labels_that_do_not_fit_are_refused(
    truth: list[str], said: list[str], labels: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        classification(truth, said, labels)
