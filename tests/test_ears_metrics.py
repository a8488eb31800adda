"""Grades and scores of agents' replies: counted by hand, by invariants, and as published."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splice.abstention import wire
from splice.ears.interactions import Interaction, Label
from splice.ears.metrics import (
    ABSTENTION,
    LABELS,
    Graded,
    LabelResult,
    Scores,
    compare,
    comparison_text,
    grade,
    scores,
    scores_by_source,
    scores_text,
)
from splice.records import Abstention
from splice.statistics import Averages, Share, share

SOLVED = "SELECT customers WHERE city = 'Lima'"
UNREADABLE = '{"Response": "Misrouting"}'
CATEGORIES = LABELS[1:]


def interaction(label: Label | None, id: str = "i1", source: str = "desk") -> Interaction:
    return Interaction(
        id=id, source=source, agent="segments", context="You select.", query="Who?", label=label
    )


def abstaining(category: str) -> str:
    return wire(Abstention(category=category, rationale="no year given"))


def graded(label: Label, reply: str, *, n: int = 1, source: str = "desk", **known: object) -> list:
    """`n` interactions of one label that got the same reply; ids tell labels and replies apart."""
    kind = json.dumps([label, reply, sorted(known)])
    return [
        grade(interaction(label, f"{kind} {place}", source), reply, **known) for place in range(n)
    ]


def value(found: Share | None) -> float:
    assert found is not None
    return found.value


def row_of(found: Scores, label: str) -> LabelResult:
    return next(row for row in (*found.labels, found.abstention) if row.label == label)


# --- one reply -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "reply", "known", "predicted", "syntax", "overall", "abstention"),
    [
        ("Solvable", SOLVED, {"is_right": True}, "Solvable", True, True, None),
        ("Solvable", SOLVED, {"is_right": False}, "Solvable", True, False, None),
        ("Solvable", SOLVED, {}, "Solvable", True, None, None),
        ("Solvable", abstaining("Misrouting"), {}, "Misrouting", True, False, None),
        ("Solvable", abstaining("Misrouting"), {"is_right": True}, "Misrouting", True, False, None),
        ("Solvable", UNREADABLE, {"is_right": True}, None, False, False, None),
        ("Solvable", " \n", {"is_right": True}, "Solvable", False, False, None),
        ("Misrouting", abstaining("Misrouting"), {}, "Misrouting", True, True, True),
        (
            "Misrouting",
            abstaining("Misrouting"),
            {"is_rationale_right": True},
            "Misrouting",
            True,
            True,
            True,
        ),
        (
            "Misrouting",
            abstaining("Misrouting"),
            {"is_rationale_right": False},
            "Misrouting",
            True,
            False,
            False,
        ),
        (
            "Misrouting",
            abstaining("Ambiguous Query"),
            {"is_rationale_right": True},
            "Ambiguous Query",
            True,
            False,
            False,
        ),
        ("Misrouting", UNREADABLE, {}, None, False, False, False),
        ("Misrouting", SOLVED, {"is_right": True}, "Solvable", True, False, False),
    ],
)
def test_a_reply_is_graded_by_form_then_by_what_was_right_to_do(
    label: Label,
    reply: str,
    known: dict[str, bool],
    predicted: str | None,
    syntax: bool,
    overall: bool | None,
    abstention: bool | None,
) -> None:
    found = grade(interaction(label), reply, **known)
    assert (found.id, found.source, found.label) == ("i1", "desk", label)
    assert found.predicted == predicted
    assert found.syntax_ok is syntax
    assert found.semantic_ok is overall
    assert found.overall_ok is overall
    assert found.abstention_ok is abstention
    assert (found.problem is None) is syntax


def test_a_task_output_of_the_wrong_form_is_not_judged() -> None:
    found = grade(
        interaction("Solvable"),
        SOLVED,
        is_right=True,
        is_well_formed=lambda output: output.endswith(";"),
    )
    assert (found.predicted, found.syntax_ok, found.semantic_ok) == ("Solvable", False, False)
    assert found.problem == "the task output is not well-formed"


def test_the_form_of_an_output_is_checked_on_what_the_reply_carries() -> None:
    reply = json.dumps({"Response": "Solvable", "Reasoning": "clear", "Output": SOLVED})
    seen: list[str] = []
    grade(interaction("Solvable"), reply, is_well_formed=lambda output: not seen.append(output))
    grade(interaction("Solvable"), abstaining("Misrouting"), is_well_formed=seen.append)
    assert seen == [SOLVED]


def test_the_problem_of_an_unreadable_abstention_is_kept() -> None:
    assert grade(interaction("Solvable"), UNREADABLE).problem == "the key 'Reasoning' is missing"


def test_a_label_that_is_as_right_is_taken_for_the_right_one() -> None:
    vague = interaction("Ambiguous Query").model_copy(
        update={"also_right": ("Insufficient Input",)}
    )
    found = grade(vague, abstaining("Insufficient Input"))
    assert found.predicted == found.label == "Ambiguous Query"
    assert found.overall_ok is True
    assert grade(vague, abstaining("Misrouting")).overall_ok is False


def test_an_interaction_without_a_label_is_refused() -> None:
    with pytest.raises(ValueError, match="'i1' has no label"):
        grade(interaction(None), SOLVED)


# --- scores ----------------------------------------------------------------------------------


def by_hand() -> list[Graded]:
    """Ten solvable interactions and ten that call for one of two abstentions."""
    return [
        *graded("Solvable", SOLVED, n=6, is_right=True),
        *graded("Solvable", SOLVED, n=1, is_right=False),
        *graded("Solvable", SOLVED, n=1),
        *graded("Solvable", abstaining("Misrouting"), n=1),
        *graded("Solvable", UNREADABLE, n=1),
        *graded("Misrouting", abstaining("Misrouting"), n=3),
        *graded("Misrouting", abstaining("Misrouting"), n=1, is_rationale_right=False),
        *graded("Misrouting", abstaining("Ambiguous Query"), n=1),
        *graded("Ambiguous Query", abstaining("Ambiguous Query"), n=2),
        *graded("Ambiguous Query", SOLVED, n=2),
        *graded("Ambiguous Query", UNREADABLE, n=1),
    ]


def test_passes_are_shares_of_all_interactions() -> None:
    found = scores(by_hand())
    assert (found.n, found.n_abstentions, found.n_unchecked) == (20, 10, 1)
    assert found.syntax == share(18, 20)
    assert found.semantic == share(6 + 3 + 2, 20)
    assert found.overall == found.semantic


def test_each_label_has_precision_recall_and_f1() -> None:
    found = scores(by_hand())
    assert [row.label for row in found.labels] == list(LABELS)
    # Given to 8 + 2; right 8 of 10.
    assert row_of(found, "Solvable").precision == share(8, 10)
    assert row_of(found, "Solvable").recall == share(8, 10)
    assert row_of(found, "Solvable").f1 == pytest.approx(0.8)
    # Given to 1 + 4; right 4 of 5.
    assert row_of(found, "Misrouting").precision == share(4, 5)
    assert row_of(found, "Misrouting").recall == share(4, 5)
    # Given to 1 + 2; right 2 of 5; 2 * 2 / (3 + 5).
    assert row_of(found, "Ambiguous Query").precision == share(2, 3)
    assert row_of(found, "Ambiguous Query").recall == share(2, 5)
    assert row_of(found, "Ambiguous Query").f1 == pytest.approx(0.5)
    missing = row_of(found, "Missing Capability")
    assert (missing.support, missing.n_predicted) == (0, 0)
    assert (missing.precision, missing.recall, missing.f1) == (None, None, None)


def test_weighted_means_count_labels_by_their_support() -> None:
    found = scores(by_hand())
    assert found.accuracy == share(14, 20)
    assert found.weighted.precision == pytest.approx((10 * 0.8 + 5 * 0.8 + 5 * 2 / 3) / 20)
    assert found.weighted.recall == pytest.approx(14 / 20)
    assert found.weighted.f1 == pytest.approx((10 * 0.8 + 5 * 0.8 + 5 * 0.5) / 20)


def test_abstaining_or_not_is_scored_whatever_the_category() -> None:
    found = scores(by_hand())
    # Abstained from 1 solvable and 7 others; two more were carried out, one is unreadable.
    assert found.abstention.label == ABSTENTION
    assert found.abstention.precision == share(7, 8)
    assert found.abstention.recall == share(7, 10)
    assert found.abstention.f1 == pytest.approx(14 / 18)
    assert found.binary_accuracy == share(8 + 7, 20)
    assert found.abstained == share(8, 20)
    assert found.abstention_ok == share(5, 10)
    assert found.over_abstention == share(1, 10)
    assert found.under_abstention == share(2, 10)


def test_shares_of_nothing_are_none() -> None:
    nothing = scores([])
    assert (nothing.n, nothing.overall, nothing.accuracy) == (0, None, None)
    assert nothing.weighted == Averages(precision=None, recall=None, f1=None)
    solvable = scores(graded("Solvable", SOLVED, is_right=True))
    assert (solvable.under_abstention, solvable.abstention_ok) == (None, None)
    assert solvable.over_abstention == share(0, 1)


def test_scores_of_each_source_come_in_alphabetical_order() -> None:
    rows = [
        *graded("Solvable", SOLVED, n=2, source="b", is_right=True),
        *graded("Solvable", SOLVED, n=1, source="a", is_right=False),
        *(row for name in "fdec" for row in graded("Solvable", SOLVED, source=name)),
    ]
    found = scores_by_source(rows)
    assert list(found) == list("abcdef")
    assert (value(found["a"].overall), value(found["b"].overall)) == (0.0, 1.0)
    assert found["b"] == scores(rows[:2])


def test_scores_go_through_json() -> None:
    found = scores(by_hand())
    assert Scores.model_validate_json(found.model_dump_json()) == found
    row = by_hand()[0]
    assert Graded.model_validate_json(row.model_dump_json()) == row


# --- invariants ------------------------------------------------------------------------------

REPLIES = (SOLVED, "", UNREADABLE, *map(abstaining, CATEGORIES))

unnumbered = st.tuples(
    st.sampled_from(LABELS),
    st.sampled_from(REPLIES),
    st.sampled_from((True, False, None)),
    st.sampled_from((True, False, None)),
    st.sampled_from(("desk", "phone")),
)


def numbered(rows: Sequence[tuple[Label, str, bool | None, bool | None, str]]) -> list[Graded]:
    return [
        grade(
            interaction(label, f"i{place}", source),
            reply,
            is_right=is_right,
            is_rationale_right=is_rationale_right,
        )
        for place, (label, reply, is_right, is_rationale_right, source) in enumerate(rows)
    ]


some_graded = st.lists(unnumbered, min_size=1, max_size=25).map(numbered)


@settings(deadline=None, max_examples=40)
@given(some_graded)
def test_weighted_recall_is_accuracy(rows: list[Graded]) -> None:
    found = scores(rows)
    assert found.weighted.recall == pytest.approx(value(found.accuracy))


@settings(deadline=None, max_examples=40)
@given(some_graded)
def test_nothing_passes_overall_that_fails_in_form_or_sense(rows: list[Graded]) -> None:
    found = scores(rows)
    assert value(found.overall) <= min(value(found.syntax), value(found.semantic))
    assert not any(row.overall_ok and not row.syntax_ok for row in rows)
    assert not any(row.overall_ok and row.predicted != row.label for row in rows)


@settings(deadline=None, max_examples=40)
@given(some_graded)
def test_shares_and_their_intervals_lie_in_0_to_1(rows: list[Graded]) -> None:
    found = scores(rows)
    labels = (*found.labels, found.abstention)
    shares = [part for _, part in found if isinstance(part, Share)]
    shares += [part for row in labels for part in (row.precision, row.recall) if part]
    assert len(shares) > 5
    assert all(0.0 <= s.interval.low <= s.value <= s.interval.high <= 1.0 for s in shares)
    assert all(row.f1 is None or 0.0 <= row.f1 <= 1.0 for row in labels)


@settings(deadline=None, max_examples=40)
@given(some_graded)
def test_telling_five_labels_apart_is_no_easier_than_telling_two(rows: list[Graded]) -> None:
    found = scores(rows)
    assert value(found.accuracy) <= value(found.binary_accuracy)
    assert value(found.overall) <= value(found.accuracy)


@settings(deadline=None, max_examples=25)
@given(some_graded, st.randoms(use_true_random=False))
def test_the_order_of_the_replies_does_not_matter(rows: list[Graded], random: object) -> None:
    shuffled = list(rows)
    random.shuffle(shuffled)
    assert scores(shuffled) == scores(rows)
    assert list(scores_by_source(shuffled)) == list(scores_by_source(rows))


@settings(deadline=None, max_examples=25)
@given(some_graded)
def test_sources_add_up_to_the_whole(rows: list[Graded]) -> None:
    whole, parts = scores(rows), scores_by_source(rows).values()
    assert sum(part.n for part in parts) == whole.n
    assert sum(part.overall.n_hits for part in parts if part.overall) == whole.overall.n_hits


# --- two agents ------------------------------------------------------------------------------


def passing(*passes: bool | None) -> list[Graded]:
    return [
        grade(interaction("Solvable", f"i{place}"), SOLVED, is_right=is_right)
        for place, is_right in enumerate(passes)
    ]


def test_a_comparison_counts_what_the_other_agent_fixed_and_broke() -> None:
    base = passing(*[False] * 10, *[True] * 2, *[True] * 28)
    other = passing(*[True] * 10, *[False] * 2, *[True] * 28)
    found = compare(base, other, seed=0)
    assert (found.counts.n_fixed, found.counts.n_broken, found.counts.n_equal) == (10, 2, 28)
    assert (found.base, found.other) == (share(30, 40), share(38, 40))
    assert found.gain.mean == pytest.approx(0.2)
    assert 0 < found.gain.interval.low < 0.2 < found.gain.interval.high
    assert found.p_mcnemar == pytest.approx(158 / 4096)
    assert found.relative_gain == pytest.approx(0.2 / 0.75)


def test_agents_are_paired_by_interaction_not_by_place() -> None:
    base, other = passing(True, False, False), passing(True, True, False)
    assert compare(base, other[::-1], seed=0) == compare(base, other, seed=0)


def test_what_nothing_could_check_is_left_out_of_a_comparison() -> None:
    found = compare(passing(True, None, False, False), passing(None, True, True, False), seed=0)
    assert (found.n_unchecked, found.gain.n) == (2, 2)
    assert (found.counts.n_fixed, found.counts.n_broken) == (1, 0)


def test_a_base_that_passes_nothing_has_no_relative_gain() -> None:
    assert compare(passing(False), passing(True), seed=0).relative_gain is None


def test_agents_on_different_interactions_are_not_compared() -> None:
    with pytest.raises(
        ValueError, match=r"1 interactions have one reply, such as \('desk', 'i1'\)"
    ):
        compare(passing(True), passing(True, True), seed=0)
    with pytest.raises(ValueError, match="more than once"):
        compare(passing(True) * 2, passing(True), seed=0)
    with pytest.raises(ValueError, match="labelled 'Solvable' and 'Misrouting'"):
        compare(passing(True), [grade(interaction("Misrouting", "i0"), SOLVED)], seed=0)
    with pytest.raises(ValueError, match="checked for both"):
        compare(passing(None), passing(True), seed=0)


# --- text ------------------------------------------------------------------------------------


def test_the_page_shows_labels_intervals_and_over_abstention() -> None:
    page = scores_text(scores(by_hand()))
    lines = page.splitlines()
    assert lines[0] == "all sources: 20 interactions, 10 of which call for abstention"
    assert "syntax pass                20  0.900  [0.699, 0.972]" in lines
    assert "over-abstention            10  0.100  [0.018, 0.404]" in lines
    (row,) = (line for line in lines if line.startswith("Ambiguous Query"))
    shown = " ".join(row.split())
    assert shown == "Ambiguous Query 5 3 0.667 [0.208, 0.939] 0.400 [0.118, 0.769] 0.500"
    (none,) = (line for line in lines if line.startswith("Missing Capability"))
    assert none.split()[2:] == ["0", "0", "-", "-", "-", "-", "-"]
    (mean,) = (line for line in lines if line.startswith("weighted mean  "))
    assert mean.split()[2:] == ["20", "18", "0.767", "0.700", "0.725"]
    assert "lower bounds: nothing could check 1 of" in page
    assert max(map(len, lines)) <= 100


def test_the_page_of_checked_outputs_speaks_of_no_bounds() -> None:
    assert "bounds" not in scores_text(scores(graded("Solvable", SOLVED, is_right=True)))


def test_the_page_of_nothing_is_a_page() -> None:
    assert "all sources: 0 interactions" in scores_text(scores([]))


def test_the_page_shows_each_source_and_makes_what_its_name_hides_visible() -> None:
    rows = graded("Solvable", SOLVED, source="desk\x1b[31m\nfake: 9 interactions", is_right=True)
    page = scores_text(scores(rows), scores_by_source(rows))
    assert "\ndesk\\x1b[31m fake: 9 interactions: 1 interactions, 0 of which" in page
    assert page.count("over-abstention  ") == 2


def test_a_comparison_is_shown_as_a_line_for_each_agent() -> None:
    found = compare(passing(True, False, None), passing(True, True, True), seed=0)
    lines = comparison_text(found).splitlines()
    assert lines[1].split()[:3] == ["base", "2", "0.500"]
    assert lines[2].split()[:3] == ["other", "2", "1.000"]
    assert lines[2].split()[-4:] == ["1.000", "1", "0", "1"]
    page = " ".join(lines)
    assert "other minus base, +100.0% of the base" in page
    assert "could check one of the replies: 1." in page
    assert max(map(len, lines)) <= 100


# --- published numbers -----------------------------------------------------------------------


def agent_passing(n: int, n_passed: int) -> list[Graded]:
    return passing(*[True] * n_passed, *[False] * (n - n_passed))


@pytest.mark.parametrize(
    ("base", "other", "gain", "relative"),
    [
        (685, 789, 0.104, 0.152),  # EARS over the untuned agent
        (705, 789, 0.084, 0.119),  # EARS over prompting alone
        (685, 755, 0.070, 0.102),  # human data over the untuned agent
        (755, 765, 0.010, 0.013),  # the best single judge over human data
        (755, 789, 0.034, 0.045),  # four judges over human data
    ],
)
def test_published_gains_follow_from_the_published_passes(
    base: int, other: int, gain: float, relative: float
) -> None:
    found = compare(agent_passing(1000, base), agent_passing(1000, other), seed=0)
    assert found.gain.mean == pytest.approx(gain)
    assert round(found.relative_gain, 3) == relative


def test_published_ablation_steps_multiply_to_the_published_pass() -> None:
    human = compare(agent_passing(1000, 685), agent_passing(1000, 755), seed=0)
    judges = compare(agent_passing(1000, 755), agent_passing(1000, 789), seed=0)
    steps = [round(1 + step.relative_gain, 3) for step in (human, judges)]
    assert steps == [1.102, 1.045]
    assert round(68.5 * steps[0] * steps[1], 1) == 78.9


def published_agent(source: str, n_syntax: int, n_semantic: int) -> list[Graded]:
    """2,000 solvable interactions of which so many are well-formed and so many right."""
    return [
        grade(
            interaction("Solvable", f"i{place}", source),
            SOLVED,
            is_right=place < n_semantic,
            is_well_formed=lambda _, place=place: place < n_syntax,
        )
        for place in range(2000)
    ]


@pytest.mark.parametrize(
    ("segmentation", "analytics", "overall", "published"),
    [
        ((0.927, 0.619), (0.963, 0.751), 0.685, 68.5),
        ((0.935, 0.658), (0.962, 0.751), 0.7045, 70.5),
        ((0.972, 0.827), (0.969, 0.750), 0.7885, 78.9),
    ],
)
def test_published_overall_passes_are_means_of_the_semantic_passes(
    segmentation: tuple[float, float],
    analytics: tuple[float, float],
    overall: float,
    published: float,
) -> None:
    rows = [
        row
        for source, passes in (("segmentation", segmentation), ("analytics", analytics))
        for row in published_agent(source, *(round(2000 * passed) for passed in passes))
    ]
    parts = scores_by_source(rows)
    for source, (syntax, semantic) in (("segmentation", segmentation), ("analytics", analytics)):
        assert value(parts[source].syntax) == pytest.approx(syntax)
        assert value(parts[source].semantic) == pytest.approx(semantic)
    assert value(scores(rows).overall) == pytest.approx(overall)
    # The published column rounds a half up.
    assert 100 * overall == pytest.approx(published, abs=0.05001)


@pytest.mark.parametrize(
    ("segmentation", "analytics", "abstentions", "total"),
    [(5967, 6800, 1086, 13853), (1524, 2000, 476, 4000), (600, 0, 602, 1202)],
    ids=["train", "test", "seed"],
)
def test_published_data_sizes_add_up(
    segmentation: int, analytics: int, abstentions: int, total: int
) -> None:
    right = abstaining("Misrouting")
    rows = [
        *graded("Solvable", SOLVED, n=segmentation, source="segmentation", is_right=True),
        *graded("Solvable", SOLVED, n=analytics, source="analytics", is_right=True),
        *graded("Misrouting", right, n=abstentions, source="segmentation"),
    ]
    found = scores(rows)
    assert (found.n, found.n_abstentions) == (total, abstentions)
    parts = scores_by_source(rows)
    assert parts["segmentation"].n == segmentation + abstentions


def test_published_share_of_abstentions_is_476_of_2000() -> None:
    rows = [
        *graded("Solvable", SOLVED, n=1524, is_right=True),
        *graded("Misrouting", abstaining("Misrouting"), n=476),
    ]
    assert value(scores(rows).abstained) == pytest.approx(0.238)


def test_published_f1_follows_from_precision_93_and_recall_70() -> None:
    # 651 / 700 = 0.93 and 651 / 930 = 0.70; the rest makes the published accuracy of 0.93.
    found = scores(
        [
            *graded("Misrouting", abstaining("Misrouting"), n=651),
            *graded("Misrouting", SOLVED, n=279),
            *graded("Solvable", abstaining("Misrouting"), n=49),
            *graded("Solvable", SOLVED, n=3707, is_right=True),
        ]
    )
    assert value(found.abstention.precision) == pytest.approx(0.93)
    assert value(found.abstention.recall) == pytest.approx(0.70)
    assert value(found.binary_accuracy) == pytest.approx(0.93, abs=5e-5)
    assert found.abstention.f1 == pytest.approx(0.799, abs=5e-4)
