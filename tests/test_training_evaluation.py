"""What is said about learned parts, counted by hand on a few questions."""

from __future__ import annotations

import pytest
from test_training_fit import SETTINGS, base, planted, trial, tried

from selector_training.evaluation import Ranking, Report, Tier, evaluate, report_text
from selector_training.fit import Fitted, fit
from selector_training.tables import Tables


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    return fit(planted(80), SETTINGS)


@pytest.fixture(scope="module")
def report(fitted: Fitted) -> Report:
    return evaluate(fitted, planted(80, 60), "validation", SETTINGS)


def tier(report: Report, name: str, weighting: str | None = None) -> Tier:
    (found,) = [t for t in report.tiers if (t.name, t.weighting) == (name, weighting)]
    return found


def by_ranker(ranking: Ranking) -> dict[str, float]:
    return {ranker.name: ranker.hits.mean for ranker in ranking.rankers}


def literal() -> Tables:
    """Three questions of split validation: two edges each, three changed answers, one gap edge."""
    first = base("q1", 0.5, "validation")
    second = base("q2", 1.0, "validation")
    third = base("q3", 0.0, "validation")
    probes = (
        tried(first, "b", trial("beneficial", 0.5), dist_t=1.0, coverage=0.2),
        tried(first, "c", trial("harmful", -0.25), dist_t=1.0, coverage=0.9),
        tried(second, "b", trial("harmful", -1.0), bridge=1.0, dist_t=2.0, coverage=0.9),
        tried(second, "c", None, dist_t=1.0, coverage=0.1),
        tried(third, "b", None, dist_t=1.0),
        tried(third, "c", None, dist_t=1.0),
    )
    return Tables((first, second, third), probes, ())


# --- counted by hand -------------------------------------------------------------------------


def test_what_is_adopted_is_counted_by_probe_and_its_gain_by_question(fitted: Fitted) -> None:
    report = evaluate(fitted, literal(), "validation", SETTINGS)
    assert (report.n_questions, report.n_edges, report.n_decisive) == (3, 6, 3)
    assert report.n_decisive_questions == 2
    always = tier(report, "always")
    assert (always.n_adopted, always.n_fixed, always.n_broken) == (3, 1, 2)
    assert always.fix_ratio == pytest.approx(1 / 3)
    # By question: (0.5 - 0.25) / 2 and -1.
    assert always.gain.mean == pytest.approx((0.125 - 1.0) / 2)
    never = tier(report, "never")
    assert (never.n_adopted, never.fix_ratio, never.gain.mean) == (0, None, 0.0)
    oracle = tier(report, "oracle")
    assert (oracle.n_adopted, oracle.n_broken) == (1, 0)
    assert oracle.gain.mean == pytest.approx(0.25 / 2)


def test_rankers_are_judged_where_there_is_something_to_find_and_ties_by_expectation(
    fitted: Fitted,
) -> None:
    gap, decisive = evaluate(fitted, literal(), "validation", SETTINGS).rankings
    assert gap.n_questions == 1
    assert by_ranker(gap)["random"] == 0.5
    assert by_ranker(gap)["terminal distance"] == 0.0
    assert by_ranker(gap)["content coverage"] == 1.0
    assert by_ranker(gap)["learned"] == 1.0
    assert decisive.n_questions == 2
    assert by_ranker(decisive)["random"] == pytest.approx((1.0 + 0.5) / 2)
    assert by_ranker(decisive)["terminal distance"] == pytest.approx((1.0 + 0.0) / 2)


def test_rollouts_of_one_question_are_averaged_first(fitted: Fitted) -> None:
    probes = []
    bases = [base("q1", 0.5, "validation", rollout=r) for r in range(3)]
    for own, has_gap_first in zip(bases, (True, True, False), strict=True):
        probes += [
            tried(own, "b", trial("neutral", 0.0), bridge=1.0, coverage=float(has_gap_first)),
            tried(own, "c", trial("neutral", 0.0), coverage=0.5),
        ]
    gap, _ = evaluate(
        fitted, Tables(tuple(bases), tuple(probes), ()), "validation", SETTINGS
    ).rankings
    assert gap.n_questions == 1
    assert by_ranker(gap)["content coverage"] == pytest.approx(2 / 3)


def test_a_budget_goes_to_the_runs_that_an_order_puts_first(fitted: Fitted) -> None:
    found = {
        (a.order, a.budget): a
        for a in evaluate(fitted, literal(), "validation", SETTINGS).admissions
    }
    whole = found["hand-set headroom", 1.0]
    assert whole.n_trials == whole.n_runs
    assert found["hand-set headroom", 0.3].n_trials == int(0.3 * whole.n_runs)
    for admission in found.values():
        assert admission.oracle.mean >= max(0.0, admission.always.mean)
        assert admission.n_decisive <= admission.n_trials
    orders = {order for order, _ in found}
    assert orders == {
        "hand-set headroom",
        "hand-set promise",
        "learned headroom",
        "learned headroom x decisive",
        "learned promise",
    }


def test_learned_orders_take_the_edges_that_change_answers(report: Report) -> None:
    # Each run has one such edge of two, and a bridge tells which.
    found = {(a.order, a.budget): a.n_decisive for a in report.admissions}
    assert found["learned headroom", 1.0] == found["learned headroom x decisive", 1.0] == 60
    assert found["learned promise", 0.5] == 30
    assert found["hand-set headroom", 1.0] < 60


# --- a planted world -------------------------------------------------------------------------


def test_what_was_planted_shows(report: Report) -> None:
    learned, by_hand = report.base_scores
    assert learned.name == "learned"
    assert learned.auc is not None
    assert learned.spearman is not None
    assert learned.spearman > 0.8
    assert by_hand.spearman is None
    decisive, constant, beneficial = report.chances
    assert decisive.log_loss < 0.5 * constant.log_loss
    assert decisive.auc == 1.0
    assert beneficial.part == "beneficial"
    for ranking in report.rankings:
        assert by_ranker(ranking)["learned"] == 1.0
        assert by_ranker(ranking)["random"] == 0.5
        more = {ranker.name: ranker.learned_more for ranker in ranking.rankers}
        assert more["learned"] is None
        assert more["random"] is not None
        assert more["random"].interval.low > 0.0


@pytest.mark.parametrize("weighting", ["headroom", "none"])
def test_evidence_earns_its_gain_by_belonging_to_its_question(
    report: Report, weighting: str
) -> None:
    learned = tier(report, "learned", weighting)
    shuffled = tier(report, "shuffled", weighting)
    without = tier(report, "no attribution", weighting)
    for other in (shuffled, without):
        assert other.learned_more is not None
        assert other.learned_more.interval.low > 0.0
        assert other.learned_more.mean == pytest.approx(learned.gain.mean - other.gain.mean)
    assert learned.n_broken == 0
    assert learned.gain.mean <= tier(report, "oracle").gain.mean
    assert 0 < shuffled.n_adopted < 60


def test_a_forecast_of_the_gain_adopts_what_it_expects_to_help(report: Report) -> None:
    forecast = tier(report, "gain forecast")
    assert forecast.weighting is None
    assert forecast.n_broken == 0
    assert 0.0 < forecast.gain.mean <= tier(report, "oracle").gain.mean


def test_the_same_tables_give_the_same_report(fitted: Fitted, report: Report) -> None:
    assert evaluate(fitted, planted(80, 60), "validation", SETTINGS) == report


def test_without_training_rows_nothing_is_fitted_again(fitted: Fitted) -> None:
    own = planted(80, 60).of_split("validation")
    names = {t.name for t in evaluate(fitted, own, "validation", SETTINGS).tiers}
    assert not {"no attribution", "gain forecast"} & names
    assert "shuffled" in names


def test_missing_parts_leave_their_rows_out() -> None:
    tables = planted(20, 20)
    report = evaluate(fit(tables, SETTINGS), tables, "validation", SETTINGS)
    assert {t.name for t in report.tiers} == {"never", "always", "oracle"}
    assert [chance.name for chance in report.chances] == ["hand-set"]
    for ranking in report.rankings:
        assert all(ranker.learned_more is None for ranker in ranking.rankers)


# --- the page --------------------------------------------------------------------------------


def test_the_page_says_that_only_probed_edges_are_there(report: Report) -> None:
    text = report_text(report)
    assert "Learned parts on split validation: 60 questions, 60 base runs, 120 probed edges" in text
    assert "only the edges that were probed, here 2.0 for each base run" in text
    assert "fitted on these questions" not in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_the_page_warns_of_the_split_that_was_fitted_on(fitted: Fitted) -> None:
    assert "fitted on these questions" in report_text(
        evaluate(fitted, planted(80), "train", SETTINGS)
    )


def test_a_split_without_questions_has_nothing_to_say(fitted: Fitted) -> None:
    report = evaluate(fitted, planted(80), "test", SETTINGS)
    assert report_text(report) == "No questions of split test: nothing was measured."


def test_a_split_without_probes_has_base_scores_alone(fitted: Fitted) -> None:
    own = planted(0, 60)._replace(probes=())
    text = report_text(evaluate(fitted, own, "validation", SETTINGS))
    assert "Base score, learned" in text
    assert "0 probes of 0 questions" in text
