"""Which queries should get a trial: what a budget wins under several orders, on probed edges.

For each base run a ranker takes one of its probed edges, an order says which runs come first, and
the first `budget` of them get the trial that the pool holds. Nothing is run. As a table holds a few
of all candidate edges, the numbers compare orders; they don't foretell the gain of a batch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from selector_training.counting import by_question, gain
from selector_training.fit import Fitted
from selector_training.tables import LabelledEdge
from splice.learned import edge_rank
from splice.records import Record
from splice.statistics import Gain

BUDGETS: Final = (0.3, 0.5, 1.0)


class Admission(Record):
    """One order under one budget."""

    order: str
    budget: float
    n_runs: int
    n_trials: int
    n_decisive: int
    """Of the trials, those that changed the answer."""
    always: Gain
    """Score change by question if every candidate answer is adopted."""
    oracle: Gain
    """The same if only better ones are."""


class _Choice(NamedTuple):
    """The edge of one base run, and when its trial comes."""

    edge: LabelledEdge
    rank: float
    """The highest comes first."""


Key: TypeAlias = tuple[str, str]
_Scores: TypeAlias = Mapping[int, float]
"""Score by place of an edge."""


def admissions(fitted: Fitted, edges: Sequence[LabelledEdge]) -> tuple[Admission, ...]:
    """Every order under every budget.

    Args:
        fitted: the parts.
        edges: the probed edges of one split.
    """
    if not edges:
        return ()
    runs: dict[Key, list[int]] = defaultdict(list)
    for place, edge in enumerate(edges):
        runs[edge.probe.base.key].append(place)
    found = []
    for order, (choose_by, rank_by) in _orders(fitted, edges).items():
        choices = []
        for places in runs.values():
            best = max(places, key=lambda place: (choose_by[place], edges[place].probe.edge))
            choices.append(_Choice(edges[best], rank_by[best]))
        found += [_admission(order, budget, choices) for budget in BUDGETS]
    return tuple(found)


def _orders(fitted: Fitted, edges: Sequence[LabelledEdge]) -> Mapping[str, tuple[_Scores, _Scores]]:
    """By order: what an edge is chosen by, and what its run is ranked by."""

    def each(value: Callable[[LabelledEdge], float]) -> _Scores:
        return {place: value(edge) for place, edge in enumerate(edges)}

    by_hand = each(lambda edge: edge.probe.p_decisive)
    headroom = each(lambda edge: 1 - edge.probe.base.predicted_score)
    orders: dict[str, tuple[_Scores, _Scores]] = {
        # A small share of the edge's promise stands for what breaks ties of headroom.
        "hand-set headroom": (by_hand, _sum(headroom, by_hand)),
        "hand-set promise": (by_hand, _product(headroom, by_hand)),
    }
    rows = [edge.features for edge in edges]
    if (trees := fitted.trees("headroom")) is not None:
        scores = trees.probabilities([edge.probe.base.features for edge in edges])
        headroom = {place: 1 - score for place, score in enumerate(scores)}
    if (trees := fitted.trees("decisive")) is not None:
        decisive = dict(enumerate(trees.probabilities(rows)))
        ranked = _ranked(decisive, by_hand)
        orders["learned headroom"] = (ranked, _sum(headroom, decisive))
        orders["learned headroom x decisive"] = (ranked, _product(headroom, decisive))
    if (trees := fitted.trees("beneficial")) is not None:
        beneficial = dict(enumerate(trees.probabilities(rows)))
        orders["learned promise"] = (_ranked(beneficial, by_hand), beneficial)
    return orders


def _ranked(learned: _Scores, by_hand: _Scores) -> _Scores:
    return {place: edge_rank(chance, by_hand[place]) for place, chance in learned.items()}


_TIE: Final = 1e-3


def _sum(first: _Scores, tie: _Scores) -> _Scores:
    return {place: value + _TIE * tie[place] for place, value in first.items()}


def _product(first: _Scores, second: _Scores) -> _Scores:
    return {place: value * second[place] for place, value in first.items()}


def _admission(order: str, budget: float, choices: Sequence[_Choice]) -> Admission:
    n = math.floor(budget * len(choices) + 1e-9)
    by_rank = sorted(choices, key=lambda c: (-c.rank, c.edge.probe.base.key))
    admitted = {id(choice) for choice in by_rank[:n]}
    changes = [
        choice.edge.probe.trial.delta
        if id(choice) in admitted and choice.edge.probe.trial is not None
        else 0.0
        for choice in choices
    ]
    questions = [choice.edge.probe.base.question for choice in choices]
    helped = [max(0.0, change) for change in changes]
    return Admission(
        order=order,
        budget=budget,
        n_runs=len(choices),
        n_trials=n,
        n_decisive=sum(choice.edge.is_decisive for choice in by_rank[:n]),
        always=gain(by_question(questions, changes)),
        oracle=gain(by_question(questions, helped)),
    )
