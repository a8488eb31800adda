import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from splice.records import Evidence, Likelihoods
from splice.selector import RULES, RuleSelector, Selector, SelectorInput, decide


def likelihoods(better: float, worse: float) -> Likelihoods:
    return Likelihoods(beneficial=better, neutral=max(0.0, 1 - better - worse), harmful=worse)


@pytest.mark.parametrize(
    ("better", "worse", "base_score", "action"),
    [
        (0.6, 0.2, 0.5, "adopt"),  # .30 > .10
        (0.2, 0.6, 0.5, "retain"),  # .10 < .30
        (0.5, 0.2, 0.7, "adopt"),  # .15 > .14
        (0.5, 0.2, 0.72, "retain"),  # .14 < .144
        (0.4, 0.4, 0.5, "retain"),  # a tie
        (0.7, 0.3, 0.7, "retain"),  # a tie that rounding would break
        (0.0, 0.0, 0.5, "retain"),
        (1.0, 0.0, 1.0, "retain"),
        (1.0, 0.0, 0.999, "adopt"),
        (0.001, 0.999, 0.0, "adopt"),
        (0.0, 1.0, 0.0, "retain"),
        (0.0, 0.0, 0.0, "retain"),
    ],
)
def test_an_answer_is_adopted_if_the_weighted_gain_exceeds_the_weighted_loss(
    better: float, worse: float, base_score: float, action: str
) -> None:
    assert decide(likelihoods(better, worse), base_score=base_score).action == action


@pytest.mark.parametrize(
    ("better", "worse", "action"),
    [(0.5, 0.4, "adopt"), (0.4, 0.5, "retain"), (0.4, 0.4, "retain"), (0.1, 0.0, "adopt")],
)
@pytest.mark.parametrize("base_score", [0.0, 0.5, 1.0])
def test_without_weighting_the_bare_likelihoods_decide(
    better: float, worse: float, action: str, base_score: float
) -> None:
    chosen = decide(likelihoods(better, worse), base_score=base_score, weighting="none")
    assert chosen.action == action
    assert (chosen.gain_side, chosen.loss_side) == (better, worse)


def test_the_gain_must_exceed_the_loss_by_more_than_the_margin() -> None:
    case = likelihoods(0.6, 0.2)
    assert decide(case, base_score=0.5, margin=0.15).action == "adopt"
    assert decide(case, base_score=0.5, margin=0.2).action == "retain"
    assert decide(case, base_score=0.5, margin=0.25).action == "retain"


def test_a_decision_tells_both_sides_in_one_line() -> None:
    decision = decide(likelihoods(0.5, 0.2), base_score=0.6)
    assert decision.reason == (
        "chance of better (0.50 x headroom 0.40 = 0.200) outweighs "
        "chance of worse (0.20 x base score 0.60 = 0.120)"
    )
    assert decision.gain_side == pytest.approx(0.2)
    assert decision.loss_side == pytest.approx(0.12)
    assert decision.likelihoods == likelihoods(0.5, 0.2)
    assert (decision.weighting, decision.margin, decision.base_score) == ("headroom", 0.0, 0.6)
    decision = decide(likelihoods(0.5, 0.2), base_score=0.6, weighting="none", margin=0.4)
    assert decision.reason == (
        "chance of better (0.50) does not outweigh chance of worse (0.20) by more than 0.4"
    )


UNIT = st.floats(0, 1)


@st.composite
def triples(draw: st.DrawFn) -> Likelihoods:
    weights = [draw(UNIT) for _ in range(3)]
    total = sum(weights)
    assume(total > 1e-9)
    return Likelihoods(
        beneficial=weights[0] / total, neutral=weights[1] / total, harmful=weights[2] / total
    )


@settings(deadline=None)
@given(triples(), UNIT, UNIT)
def test_a_better_original_is_never_given_up_more_easily(
    case: Likelihoods, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    if decide(case, base_score=high).action == "adopt":
        assert decide(case, base_score=low).action == "adopt"


@settings(deadline=None)
@given(UNIT, UNIT, UNIT, UNIT, st.sampled_from(["headroom", "none"]))
def test_more_risk_never_makes_adoption_easier_and_more_promise_never_harder(
    better: float, one: float, other: float, base_score: float, weighting: str
) -> None:
    low, high = sorted((one, other))
    options = {"base_score": base_score, "weighting": weighting}
    if decide(likelihoods(better, high), **options).action == "adopt":
        assert decide(likelihoods(better, low), **options).action == "adopt"
    if decide(likelihoods(low, better), **options).action == "adopt":
        assert decide(likelihoods(high, better), **options).action == "adopt"


@settings(deadline=None)
@given(triples(), UNIT, UNIT)
def test_the_neutral_likelihood_does_not_matter(
    case: Likelihoods, neutral: float, base_score: float
) -> None:
    other = case.model_copy(update={"neutral": neutral})
    assert decide(case, base_score=base_score).action == decide(other, base_score=base_score).action


@settings(deadline=None)
@given(triples())
def test_a_perfect_answer_is_kept_and_a_worthless_one_given_up_for_any_hope(
    case: Likelihoods,
) -> None:
    assert decide(case, base_score=1.0).action == "retain"
    is_adopted = decide(case, base_score=0.0).action == "adopt"
    assert is_adopted is (case.beneficial > 0)


@settings(deadline=None)
@given(triples(), st.floats(0.01, 0.99))
def test_the_rule_compares_the_odds_with_the_base_score(
    case: Likelihoods, base_score: float
) -> None:
    decided = case.beneficial + case.harmful
    assume(decided > 1e-6)
    share = case.beneficial / decided
    assume(abs(share - base_score) > 1e-6)
    assert (decide(case, base_score=base_score).action == "adopt") is (share > base_score)


NOTHING = Evidence(
    move_w=0,
    move_len=0,
    n_add=0,
    n_del=0,
    msg_only=0,
    ctx_only=0,
    both=0,
    untraceable=0,
    uptake=0,
    is_ignored=False,
    del_supported=0,
    focus_new=0,
    focus_old=0,
    num_msg=0,
    num_ctx=0,
    num_untraceable=0,
    num_dropped=0,
    survival=(),
    surv_final=0,
    is_absorbed=False,
    ans_change=0,
    ans_len_ratio=1,
    is_number_changed=False,
    copies_source=0,
    is_abstention_resolved=False,
    is_abstention_new=False,
    is_answer_refusal_resolved=False,
    is_answer_refusal_new=False,
)
# The receiver revised its answer with the message's words, and they reached the answer.
REVISED = {"n_add": 2, "msg_only": 1.0, "surv_final": 0.5, "ans_change": 1.0, "uptake": 0.5}


def case(
    answers: tuple[str | None, str | None] = ("Rome", "Doha"), **evidence: object
) -> SelectorInput:
    return SelectorInput(
        question="Where?",
        workflow="two hops",
        base_score=0.5,
        base_answer=answers[0],
        candidate_answer=answers[1],
        evidence=Evidence.model_validate({**NOTHING.model_dump(), **evidence}),
    )


async def odds(given_case: SelectorInput) -> float:
    """How much likelier better is than worse."""
    judged = await RuleSelector().judge(given_case)
    return judged.beneficial / judged.harmful


async def action(given_case: SelectorInput, base_score: float) -> str:
    return decide(await RuleSelector().judge(given_case), base_score=base_score).action


def test_the_rules_are_a_selector() -> None:
    assert isinstance(RuleSelector(), Selector)


def test_every_rule_gives_a_reason_and_has_a_weight() -> None:
    assert all(rule.reason.endswith(".") for rule in RULES)
    assert all(rule.beneficial or rule.neutral or rule.harmful for rule in RULES)


async def test_an_answer_where_the_receiver_abstained_before_is_adopted() -> None:
    resolved = case(**REVISED, is_abstention_resolved=True)
    assert await action(resolved, base_score=0.8) == "adopt"


async def test_a_looked_up_answer_is_adopted_though_it_repeats_nothing_of_the_message() -> None:
    found = {**REVISED, "msg_only": 0.0, "ctx_only": 1.0, "uptake": 0.0, "is_ignored": True}
    assert await action(case(**found, is_abstention_resolved=True), base_score=0.8) == "adopt"


async def test_made_up_content_counts_less_where_the_receiver_abstained_before() -> None:
    made_up = {**REVISED, "msg_only": 0.0, "untraceable": 1.0, "is_abstention_resolved": True}
    assert await action(case(**made_up), base_score=0.3) == "retain"


async def test_an_answer_in_the_place_of_a_refusal_is_adopted() -> None:
    resolved = case(("unknown", "Doha"), **REVISED, is_answer_refusal_resolved=True)
    assert await action(resolved, base_score=0.8) == "adopt"


async def test_a_substantive_answer_gives_way_to_strong_traceability_alone() -> None:
    assert await action(case(**REVISED), base_score=0.5) == "adopt"
    weaker = {**REVISED, "msg_only": 0.7, "untraceable": 0.3}
    assert await action(case(**weaker), base_score=0.5) == "retain"
    assert await action(case(**REVISED), base_score=0.8) == "retain"


async def test_another_entry_gives_way_to_the_one_that_the_message_names() -> None:
    other_entry = {
        **REVISED,
        "msg_only": 0.0,
        "ctx_only": 1.0,
        "is_ignored": True,
        "n_del": 2,
        "del_supported": 1.0,
    }
    assert await action(case(**other_entry), base_score=0.5) == "retain"
    named = {**other_entry, "focus_new": 1.0}
    assert await action(case(**named), base_score=0.5) == "adopt"
    assert await action(case(**named, focus_old=1.0), base_score=0.5) == "retain"


async def test_a_mostly_made_up_revision_that_drops_what_was_known_is_retained() -> None:
    bad = {**REVISED, "msg_only": 0.24, "untraceable": 0.76, "del_supported": 0.6, "n_del": 5}
    assert await action(case(**bad), base_score=0.1) == "retain"


@pytest.mark.parametrize(
    "change",
    [
        {"is_answer_refusal_new": True},
        {"is_abstention_new": True},
        {"msg_only": 0.5, "untraceable": 0.5},
        {"num_untraceable": 1.0},
        {"num_msg": 0.5, "num_untraceable": 0.5},
        {"n_del": 3, "del_supported": 0.7},
        {"is_ignored": True},
        {"surv_final": 0.0},
        {"copies_source": 0.8},
    ],
    ids=lambda change: "+".join(change),
)
@pytest.mark.parametrize("is_abstention_resolved", [False, True])
async def test_each_warning_lowers_the_odds(
    change: dict[str, object], is_abstention_resolved: bool
) -> None:
    before = {**REVISED, "is_abstention_resolved": is_abstention_resolved}
    assert await odds(case(**{**before, **change})) < await odds(case(**before))


@pytest.mark.parametrize(
    "change",
    [
        {"is_abstention_resolved": True},
        {"is_answer_refusal_resolved": True},
        {"msg_only": 1.0, "untraceable": 0.0},
        {"ctx_only": 0.2, "untraceable": 0.0},
        {"both": 0.2, "untraceable": 0.0},
        {"ans_change": 0.2},
        {"focus_new": 1.0},
    ],
    ids=lambda change: "+".join(change),
)
async def test_each_good_sign_raises_the_odds(change: dict[str, object]) -> None:
    before = {**REVISED, "msg_only": 0.8, "untraceable": 0.2}
    assert await odds(case(**{**before, **change})) > await odds(case(**before))


async def test_where_nothing_was_added_traceability_says_nothing_ill() -> None:
    # "Rio": too short to be a content word.
    short = case(ans_change=1.0, is_abstention_resolved=True)
    assert await odds(short) > 1


async def test_two_refusals_are_neutral() -> None:
    judged = await RuleSelector().judge(case(("unknown", "not found"), ans_change=1.0))
    assert judged.neutral > 0.8


@pytest.mark.parametrize("answers", [("Rome", "Doha"), ("unknown", "Doha"), (None, "not found")])
async def test_padding_of_answers_changes_nothing(answers: tuple[str | None, str | None]) -> None:
    padded = tuple(f" \n{answer}\t " if answer is not None else " " for answer in answers)
    judged = await RuleSelector().judge(case(answers, **REVISED))
    assert await RuleSelector().judge(case((padded[0], padded[1]), **REVISED)) == judged


async def test_the_names_of_question_and_workflow_do_not_matter_to_the_rules() -> None:
    one = case(**REVISED)
    other = one.model_copy(update={"question": "Who?", "workflow": "x", "base_score": 0.1})
    assert await RuleSelector().judge(one) == await RuleSelector().judge(other)


@settings(deadline=None)
@given(st.data())
async def test_likelihoods_are_proper_for_any_evidence(data: st.DataObject) -> None:
    fields = {}
    for name, value in NOTHING.model_dump().items():
        if name == "copies_source":
            fields[name] = data.draw(st.floats(-1, 1), name)
        elif name in ("move_len", "ans_len_ratio"):
            fields[name] = data.draw(st.floats(0, 1e9), name)
        elif isinstance(value, bool):
            fields[name] = data.draw(st.booleans(), name)
        elif name in ("n_add", "n_del"):
            fields[name] = data.draw(st.integers(0, 10**6), name)
        elif name != "survival":
            fields[name] = data.draw(UNIT, name)
    answers = data.draw(st.tuples(st.none() | st.text(), st.none() | st.text()))
    judged = await RuleSelector().judge(case(answers, **fields))
    assert judged.beneficial + judged.neutral + judged.harmful == pytest.approx(1)
    assert min(judged.beneficial, judged.neutral, judged.harmful) > 0
