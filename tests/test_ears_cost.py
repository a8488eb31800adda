"""What judging costs: by hand, by its invariants, and as published."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splice.ears.cost import break_even, ensemble_cost, gate_cost, offline_cost

PRICE = 0.009
JUDGES = (4.1, 6.0, 9.3, 1.0)

amounts = st.floats(0.001, 1e6)


def test_an_ensemble_costs_the_sum_of_its_judges() -> None:
    assert ensemble_cost([1, 2.5]) == 3.5
    assert ensemble_cost([]) == 0.0


def test_a_gate_costs_a_judgement_for_every_query() -> None:
    assert gate_cost(200, 0.5, 3) == 300.0
    assert gate_cost(0, 0.5, 3) == 0.0


def test_training_costs_curation_and_gpu_hours() -> None:
    assert offline_cost(100, 10, 2.5) == 125.0


def test_the_break_even_is_where_a_gate_has_cost_as_much() -> None:
    assert break_even(300, 0.5, 3) == 200.0
    assert break_even(0, 0.5, 3) == 0.0


@pytest.mark.parametrize(("price", "relative_cost"), [(0.0, 3.0), (0.5, 0.0)])
def test_a_gate_that_costs_nothing_has_no_break_even(price: float, relative_cost: float) -> None:
    assert break_even(300, price, relative_cost) is None


@pytest.mark.parametrize("amount", [-0.01, math.nan, math.inf])
def test_amounts_that_are_none_are_refused(amount: float) -> None:
    message = "finite and at least 0"
    with pytest.raises(ValueError, match=message):
        ensemble_cost([1.0, amount])
    for function in (gate_cost, offline_cost, break_even):
        for place in range(3):
            given_amounts = [1.0, 1.0, 1.0]
            given_amounts[place] = amount
            with pytest.raises(ValueError, match=message):
                function(*given_amounts)


@given(st.lists(amounts, max_size=8), st.randoms(use_true_random=False))
def test_the_order_of_the_judges_does_not_matter(costs: list[float], random: object) -> None:
    shuffled = list(costs)
    random.shuffle(shuffled)
    assert ensemble_cost(shuffled) == ensemble_cost(costs)


@given(st.integers(1, 10**9), amounts, amounts)
def test_the_break_even_of_what_a_gate_cost_is_its_number_of_queries(
    n_queries: int, price: float, relative_cost: float
) -> None:
    spent = gate_cost(n_queries, price, relative_cost)
    assert break_even(spent, price, relative_cost) == pytest.approx(n_queries)


def test_published_ensemble_costs_20_4_cheap_calls() -> None:
    assert ensemble_cost(JUDGES) == 20.4


@pytest.mark.parametrize(
    ("judges", "published", "unit"),
    [((1.0,), 90_000, 1_000), (JUDGES, 1_830_000, 10_000)],
    ids=["one judge", "four judges"],
)
def test_published_cost_of_a_gate_for_ten_million_queries(
    judges: tuple[float, ...], published: int, unit: int
) -> None:
    found = gate_cost(10_000_000, PRICE, ensemble_cost(judges))
    # 1,836,000 is printed as 1.83M: digits are cut, not rounded.
    assert math.floor(round(found) / unit) * unit == published


def test_published_offline_cost_is_3293() -> None:
    assert offline_cost(0, 24 * 8, 4) == 768
    assert offline_cost(2525, 24 * 8, 4) == 3293


@pytest.mark.parametrize(
    ("judges", "published"), [((1.0,), 366), (JUDGES, 18)], ids=["one judge", "four judges"]
)
def test_published_break_evens_in_thousands_of_queries(
    judges: tuple[float, ...], published: int
) -> None:
    offline = offline_cost(2525, 24 * 8, 4)
    assert round(break_even(offline, PRICE, ensemble_cost(judges)) / 1000) == published
