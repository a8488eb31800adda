"""Which probes a question gets."""

from __future__ import annotations

from collections import Counter

import probed

from probes.plan import (
    Planned,
    ProbeSettings,
    Question,
    edges_in_order,
    has_controls,
    next_probe,
)
from probes.records import base_id, probe_id


def question(n: int = 0) -> Question:
    return Question("toy", "train", probed.example(n), probed.WORKFLOW, 0)


def plan(
    n: int, settings: ProbeSettings, silent: tuple[tuple[str, str], ...] = ()
) -> list[Planned]:
    """All probes of a question, if the edges in `silent` have nothing to deliver."""
    asked, outcomes, made = question(n), {}, []
    while (planned := next_probe(asked, settings, outcomes)) is not None:
        outcome = "no_message" if planned.edge.ends in silent else "done"
        outcomes[probe_id(asked.base_id, planned.arm, planned.edge.ends)] = outcome
        made.append(planned)
        assert len(made) < 20
    return made


def test_each_question_gets_as_many_different_edges_as_asked_for() -> None:
    for n_edges in (1, 2, 3):
        for n in range(20):
            made = plan(n, ProbeSettings(n_edges=n_edges, control_share=0.0))
            assert len({planned.edge for planned in made}) == len(made) == n_edges


def test_a_question_with_fewer_edges_gets_all_of_them() -> None:
    assert len(plan(0, ProbeSettings(n_edges=50, control_share=0.0))) == 3


def test_edges_are_drawn_uniformly() -> None:
    first = Counter(edges_in_order(probed.WORKFLOW, f"q{n}", 0)[0].ends for n in range(3000))
    assert set(first) == {("a", "b"), ("a", "c"), ("b", "c")}
    assert all(900 < n < 1100 for n in first.values())


def test_an_edge_with_nothing_to_deliver_is_recorded_and_gives_way_to_the_next() -> None:
    order = edges_in_order(probed.WORKFLOW, "q0", 0)
    made = plan(0, ProbeSettings(n_edges=2, control_share=0.0), silent=(order[0].ends,))
    assert [planned.place for planned in made] == [0, 1, 2]


def test_controls_share_the_receiver_of_the_first_edge_that_was_delivered() -> None:
    order = edges_in_order(probed.WORKFLOW, "q0", 0)
    made = plan(0, ProbeSettings(n_edges=1, control_share=1.0), silent=(order[0].ends,))
    arms = [(planned.arm, planned.place) for planned in made]
    assert arms == [("edge", 0), ("edge", 1), ("resample", 1), ("placebo", 1)]


def test_without_anything_delivered_there_are_no_controls() -> None:
    silent = tuple(edge.ends for edge in probed.WORKFLOW.candidate_edges)
    made = plan(0, ProbeSettings(control_share=1.0), silent=silent)
    assert [planned.arm for planned in made] == ["edge"] * 3


def test_the_share_of_questions_with_controls_is_the_one_asked_for() -> None:
    n = sum(has_controls(f"q{n}", 0, 1 / 3) for n in range(6000))
    assert 1880 < n < 2120


def test_a_larger_share_and_more_edges_only_add() -> None:
    small = {n for n in range(300) if has_controls(f"q{n}", 0, 0.2)}
    large = {n for n in range(300) if has_controls(f"q{n}", 0, 0.5)}
    assert small < large
    one = plan(3, ProbeSettings(n_edges=1, control_share=1.0))
    two = plan(3, ProbeSettings(n_edges=2, control_share=1.0))
    assert set(one) < set(two)


def test_another_seed_draws_other_edges() -> None:
    orders = {edges_in_order(probed.WORKFLOW, "q0", seed) for seed in range(20)}
    assert len(orders) > 1


def test_ids_are_those_of_content_not_of_place() -> None:
    ids = {
        base_id("w", "q", 0),
        base_id("w", "q", 1),
        base_id("w", "q2", 0),
        base_id("w2", "q", 0),
        probe_id(base_id("w", "q", 0), "edge", ("a", "b")),
        probe_id(base_id("w", "q", 0), "placebo", ("a", "b")),
        probe_id(base_id("w", "q", 0), "edge", ("b", "a")),
    }
    assert len(ids) == 7
