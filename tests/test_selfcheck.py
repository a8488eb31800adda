"""The self-check holds, and it fails when somebody cheats or a part is broken."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping

import pytest
import typer
from scipy.stats import binom
from typer.testing import CliRunner

from splice.diagnosis import Diagnoser, diagnose
from splice.evaluation import PolicyResult
from splice.executor import execute
from splice.models.scripted import ScriptedModel
from splice.policies import BaseRun, Bench
from splice.records import Diagnosis, Likelihoods, Query, Request, Trace
from splice.selector import SelectorInput
from splice.selfcheck import (
    NOMINAL,
    SelfCheck,
    SelfCheckSettings,
    WorldCheck,
    chance_above,
    null_problems,
    planted_problems,
    policy_check,
    run_selfcheck,
    selfcheck_text,
)
from splice.selfcheck_cli import report, selfcheck
from splice.statistics import Gain, Interval, paired_gain
from splice.workflow import Workflow
from splice.workload import Example, Scores, Workload
from splice.worlds import WORLDS, World, right

PLANTED = [name for name, world in WORLDS.items() if world.kind == "planted"]
NULL = [name for name, world in WORLDS.items() if world.kind == "null"]


def run(settings: SelfCheckSettings, **options: object) -> SelfCheck:
    return asyncio.run(run_selfcheck(settings, **options))  # type: ignore[arg-type]


def changed(world: World, change: Callable[[Workload], Workload]) -> World:
    return world._replace(draw=lambda seed, n: change(world.draw(seed, n)))


@pytest.fixture(scope="module")
def healthy() -> SelfCheck:
    return run(SelfCheckSettings(n_seeds=4, n_questions=12))


@pytest.fixture(scope="module")
def found(healthy: SelfCheck) -> Mapping[str, WorldCheck]:
    return {check.world: check for check in healthy.worlds}


# --- what is built here ----------------------------------------------------------------------


def test_the_self_check_holds(healthy: SelfCheck) -> None:
    assert healthy.reasons == ()
    assert healthy.ok
    assert [check.world for check in healthy.worlds] == list(WORLDS)


@pytest.mark.parametrize("name", PLANTED)
def test_the_planted_edge_comes_first_and_the_repair_gains(
    name: str, found: Mapping[str, WorldCheck]
) -> None:
    check = found[name]
    policies = {policy.policy: policy for policy in check.policies}
    assert check.top_1 is not None
    assert check.top_1.value > 0.5
    assert check.top_1_by_chance == pytest.approx(1 / 6)
    assert policies["splice"].gain > policies["random_edge"].gain


def test_the_selector_keeps_right_answers_that_a_misleading_source_would_break(
    found: Mapping[str, WorldCheck],
) -> None:
    worse = found["misleading_upstream"].adopted_worse
    assert worse is not None
    assert worse.n > 5
    assert worse.n_hits < worse.n


def test_guesses_look_like_answers_so_that_not_all_repairs_of_them_are_adopted(
    found: Mapping[str, WorldCheck],
) -> None:
    better = found["careless_receivers"].adopted_better
    assert better is not None
    assert 0 < better.n_hits < better.n


@pytest.mark.parametrize("name", NULL)
def test_answers_change_in_null_worlds_or_the_check_would_check_nothing(
    name: str, found: Mapping[str, WorldCheck]
) -> None:
    assert found[name].top_1 is None
    assert max(policy.fixed + policy.broken for policy in found[name].policies) >= 12


def test_the_same_seed_gives_the_same_result_and_another_seed_another() -> None:
    worlds = {"careless_receivers": WORLDS["careless_receivers"]}
    settings = SelfCheckSettings(n_seeds=2, n_questions=10)
    first, second = run(settings, worlds=worlds), run(settings, worlds=worlds)
    assert first.model_dump_json() == second.model_dump_json()
    other = run(settings.model_copy(update={"seed": 1}), worlds=worlds)
    assert first.worlds != other.worlds


def test_progress_is_told_after_each_seed() -> None:
    told: list[tuple[str, int, int]] = []
    worlds = {"same_again": WORLDS["same_again"]}
    run(
        SelfCheckSettings(n_seeds=2, n_questions=10),
        worlds=worlds,
        progress=lambda *step: told.append(step),
    )
    assert told == [("same_again", 1, 2), ("same_again", 2, 2)]


class Once:
    """A diagnoser that says of every run what the real one says of the first."""

    def __init__(self) -> None:
        self.found: Diagnosis | None = None

    def __call__(self, workflow: Workflow, trace: Trace) -> Diagnosis:
        self.found = self.found or diagnose(workflow, trace)
        return self.found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policies", "diagnoser"),
    [
        # A whole run again tries no edge; which is best need not be found out 2,000 times.
        ("same_again", ("full_rerun",), Once()),
        ("placebo_edge", ("splice", "always"), diagnose),
    ],
)
def test_over_200_seeds_chance_explains_what_null_worlds_show(
    name: str, policies: tuple[str, ...], diagnoser: Diagnoser
) -> None:
    worlds = {name: WORLDS[name]._replace(policies=policies)}
    settings = SelfCheckSettings(n_seeds=200, n_questions=10)
    check = run(settings, worlds=worlds, diagnoser=diagnoser)
    assert check.reasons == ()
    policy = check.worlds[0].policies[-1]
    assert policy.fixed + policy.broken > 800
    assert abs(policy.gain) < 0.06


# --- it can fail -----------------------------------------------------------------------------

ENOUGH = SelfCheckSettings(n_seeds=5, n_questions=20)


class Peeking:
    """A selector that knows the right answers."""

    def __init__(self) -> None:
        self.towns: dict[str, str] = {}

    def spy(self, workload: Workload) -> Workload:
        for example in workload.examples:
            self.towns[example.query.text] = example.reference["town"]
        return workload

    async def judge(self, case: SelectorInput) -> Likelihoods:
        is_right = case.candidate_answer == self.towns[case.question]
        return Likelihoods(beneficial=is_right, neutral=0, harmful=not is_right)


class Eager:
    """A selector that adopts whatever it is shown."""

    async def judge(self, case: SelectorInput) -> Likelihoods:
        return Likelihoods(beneficial=1, neutral=0, harmful=0)


@pytest.mark.parametrize("name", ["no_gap", "placebo_edge"])
def test_a_selector_that_peeks_at_the_reference_fails(name: str) -> None:
    selector = Peeking()
    worlds = {name: changed(WORLDS[name], selector.spy)}
    check = run(ENOUGH, worlds=worlds, selector=selector)
    assert not check.ok
    assert any(reason.startswith(f"{name}: splice gains +0.") for reason in check.reasons)


def test_a_selector_that_adopts_everything_is_no_fault_where_nothing_can_be_won() -> None:
    check = run(ENOUGH, worlds={"placebo_edge": WORLDS["placebo_edge"]}, selector=Eager())
    assert check.ok
    better = check.worlds[0].adopted_better
    assert better is not None
    assert better.n_hits == better.n > 0


def test_the_oracle_gains_in_a_null_world_and_so_would_fail() -> None:
    world = WORLDS["placebo_edge"]._replace(policies=("oracle",))
    check = run(ENOUGH, worlds={"placebo_edge": world})
    assert any("oracle" in reason for reason in check.reasons)


def test_a_scorer_that_is_kinder_to_later_answers_fails() -> None:
    def kinder(workload: Workload) -> Workload:
        seen: set[str] = set()

        def score(example: Example, answer: str | None) -> Scores:
            is_later = example.query.id in seen
            seen.add(example.query.id)
            is_kind = is_later and int(example.query.id[-1]) % 2 == 0
            return {"right": 1.0} if is_kind else right(example, answer)

        return workload.model_copy(update={"score": score})

    settings = SelfCheckSettings(n_seeds=12, n_questions=20)
    worlds = {"same_again": changed(WORLDS["same_again"], kinder)}
    check = run(settings, worlds=worlds, diagnoser=Once())
    assert any("full_rerun" in reason for reason in check.reasons)


def reversed_diagnosis(workflow: Workflow, trace: Trace) -> Diagnosis:
    found = diagnose(workflow, trace)
    return found.model_copy(update={"edges": found.edges[::-1]})


def unranked_diagnosis(workflow: Workflow, trace: Trace) -> Diagnosis:
    found = diagnose(workflow, trace)
    order = sorted(found.edges, key=lambda score: (score.edge.source, score.edge.receiver))
    return found.model_copy(update={"edges": tuple(order)})


@pytest.mark.parametrize("name", PLANTED)
def test_a_ranker_that_is_turned_around_fails(name: str) -> None:
    settings = SelfCheckSettings(n_seeds=2, n_questions=12)
    check = run(settings, worlds={name: WORLDS[name]}, diagnoser=reversed_diagnosis)
    assert any("the planted edge comes first in" in reason for reason in check.reasons)
    assert any("splice gains" in reason for reason in check.reasons)


def test_a_ranker_that_goes_by_the_alphabet_fails() -> None:
    worlds = {"parallel_gap": WORLDS["parallel_gap"]}
    settings = SelfCheckSettings(n_seeds=2, n_questions=12)
    check = run(settings, worlds=worlds, diagnoser=unranked_diagnosis)
    assert any("the planted edge comes first in" in reason for reason in check.reasons)


# --- what is made of the numbers -------------------------------------------------------------


def result(
    fixed: int, broken: int, n: int = 14, *, bias: float = 0.0, is_above: bool = False
) -> PolicyResult:
    mean = (fixed - broken) / n + bias
    gain = Gain(
        mean=mean,
        interval=Interval(low=0.01 if is_above else -1.0, high=1.0),
        p_value=1.0,
        n=n,
    )
    return PolicyResult.model_construct(
        policy="always", n=n, fixed=fixed, broken=broken, gain=gain, base_score=0.5
    )


def world_check(*results: PolicyResult) -> WorldCheck:
    return WorldCheck(
        world="made up",
        kind="null",
        n_seeds=len(results),
        n=sum(one.n for one in results),
        base_score=0.5,
        top_1=None,
        top_1_by_chance=None,
        adopted_better=None,
        adopted_worse=None,
        policies=(policy_check("always", results),),
        problems=(),
    )


def test_fixed_as_often_as_broken_is_no_problem() -> None:
    assert list(null_problems(world_check(*[result(3, 3)] * 20))) == []


def test_a_mean_that_the_counts_do_not_bear_out_is_a_problem() -> None:
    [problem] = null_problems(world_check(*[result(3, 3, bias=0.15)] * 20))
    assert problem.startswith("always gains +0.150 where there is nothing to gain")
    [problem] = null_problems(world_check(*[result(0, 0, bias=0.001)] * 20))
    assert problem.startswith("always gains +0.001")


def test_intervals_above_0_are_a_problem_once_chance_does_not_explain_their_number() -> None:
    def problems(n_above: int) -> list[str]:
        results = [result(3, 3, is_above=place < n_above) for place in range(40)]
        return list(null_problems(world_check(*results)))

    assert problems(4) == []
    [problem] = problems(12)
    assert problem.startswith("always shows a gain in 12 seeds")


def test_a_loss_in_a_null_world_is_no_gain() -> None:
    assert list(null_problems(world_check(*[result(0, 6)] * 20))) == []


def test_a_planted_world_without_a_gap_among_the_candidates_is_a_problem() -> None:
    assert list(planted_problems(world_check(result(3, 3)))) == [
        "no question has a planted edge among its candidates"
    ]


@pytest.mark.parametrize("n", [10, 20])
def test_the_reported_interval_lies_above_0_no_more_often_than_the_check_allows(n: int) -> None:
    for n_changed in range(n + 1):
        share = sum(
            binom.pmf(fixed, n_changed, 0.5)
            for fixed in range(n_changed + 1)
            if interval_is_above(fixed, n_changed - fixed, n)
        )
        assert share <= max(NOMINAL, chance_above(n, n_changed)) + 1e-9, n_changed


def interval_is_above(fixed: int, broken: int, n: int) -> bool:
    after = [1.0] * fixed + [-1.0] * broken + [0.0] * (n - fixed - broken)
    return paired_gain([0.0] * n, after, seed=0).interval.low > 0


def test_the_chance_of_an_interval_above_0_is_exact() -> None:
    # Seven or eight of eight changed questions fixed put the interval above 0, six don't.
    counted = [
        fixed
        for fixed in range(9)
        if sum(
            math.comb(20, d) * 0.4**d * 0.6 ** (20 - d) * float(binom.cdf(d // 2, d, fixed / 8))
            for d in range(21)
        )
        < NOMINAL
    ]
    assert counted == [7, 8]
    assert chance_above(20, 8) == pytest.approx((8 + 1) / 2**8)


# --- worlds ----------------------------------------------------------------------------------


def base_of(world: World, workload: Workload, example: Example, seed: int) -> tuple[BaseRun, Bench]:
    model = ScriptedModel(world.agents(seed))
    trace = asyncio.run(execute(workload.workflow, example.query, model))
    base = BaseRun(workload.workflow, trace, diagnose(workload.workflow, trace))
    return base, Bench(model)


@pytest.mark.parametrize("name", ["parallel_gap", "distant_ancestor"])
def test_the_planted_edge_and_no_other_makes_the_answer_right(name: str) -> None:
    world = WORLDS[name]
    workload = world.draw(3, 6)
    for example in workload.examples:
        base, bench = base_of(world, workload, example, 3)
        assert len(base.diagnosis.edges) == len(workload.workflow.candidate_edges) == 6
        helping = set()
        for edge in base.diagnosis.edges:
            trial = asyncio.run(bench.repaired(base, edge)).trial
            if trial is not None and right(example, trial.trace.answer)["right"]:
                helping.add((edge.edge.source, edge.edge.receiver))
        assert helping == set(example.gap_edges or ())
        assert len(helping) == 1


@pytest.mark.parametrize("name", PLANTED)
def test_each_candidate_edge_is_the_planted_one_somewhere(name: str) -> None:
    workload = WORLDS[name].draw(0, 200)
    planted = {edge for example in workload.examples for edge in example.gap_edges or ()}
    assert planted == {(e.source, e.receiver) for e in workload.workflow.candidate_edges}


@pytest.mark.parametrize("name", NULL)
def test_null_worlds_have_no_gap(name: str) -> None:
    assert {example.gap_edges for example in WORLDS[name].draw(0, 20).examples} == {()}


def texts_of(query: Query) -> list[str]:
    documents = [doc.text for own in query.context.values() for doc in own]
    return [query.text, *query.subtasks.values(), *documents]


@pytest.mark.parametrize("name", list(WORLDS))
def test_no_two_questions_share_a_name(name: str) -> None:
    known = {"In", "The", "Who", "Report", "Hall", "Mill", "Tower", "Bridge", "Lodge"}
    queries = [example.query for example in WORLDS[name].draw(0, 20).examples]
    names = [set(re.findall(r"\b[A-Z]\w+", " ".join(texts_of(query)))) - known for query in queries]
    assert all(len(own) > 10 for own in names)
    assert all(not one & other for one, other in itertools.combinations(names, 2))


def test_an_equal_request_has_an_equal_reply_and_a_changed_one_is_a_fresh_draw() -> None:
    world = WORLDS["no_gap"]
    workload = world.draw(0, 1)
    model = ScriptedModel(world.agents(0))
    asyncio.run(execute(workload.workflow, workload.examples[0].query, model))
    [asked] = [r for r in model.requests if "lives in" in r.messages[-1].content]
    respond, again = world.agents(0), world.agents(0)

    def with_text(text: str) -> Request:
        last = asked.messages[-1]
        longer = last.model_copy(update={"content": f"{last.content}\n{text}"})
        return asked.model_copy(update={"messages": (*asked.messages[:-1], longer)})

    rollouts = [asked.model_copy(update={"rollout": place}) for place in range(20)]
    prompts = [with_text("!" * place) for place in range(20)]
    for requests in (rollouts, prompts):
        replies = [respond(request) for request in requests]
        assert replies == [again(request) for request in requests]
        assert len(set(replies)) > 1
    others = [WORLDS["no_gap"].agents(seed)(asked) for seed in range(20)]
    assert len(set(others)) > 1


def test_agents_answer_from_their_prompt_whatever_the_request_says_of_the_question() -> None:
    world = WORLDS["parallel_gap"]
    workload = world.draw(0, 2)
    model = ScriptedModel(world.agents(0))
    asyncio.run(execute(workload.workflow, workload.examples[0].query, model))
    respond = world.agents(0)
    for request in model.requests:
        other = request.model_copy(update={"query_id": workload.examples[1].query.id})
        assert respond(other) == respond(request)


# --- the command -----------------------------------------------------------------------------

app = typer.Typer()
app.command()(selfcheck)


def test_the_command_prints_json_alone_on_stdout_and_ends_with_0() -> None:
    done = CliRunner().invoke(app, ["--seeds", "2", "--questions", "10", "--json"])
    assert done.exit_code == 0
    printed = json.loads(done.stdout)
    assert printed["ok"] is True
    assert printed["settings"] == {"n_seeds": 2, "n_questions": 10, "seed": 0}
    assert "placebo_edge: 2 seeds done" in done.stderr


def test_a_check_that_fails_ends_with_1_and_says_why(
    healthy: SelfCheck, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = healthy.model_copy(update={"ok": False, "reasons": ("no_gap: splice gains",)})
    with pytest.raises(typer.Exit) as caught:
        report(bad)
    assert caught.value.exit_code == 1
    printed = capsys.readouterr().out
    assert "PROBLEM: no_gap: splice gains" in printed
    assert "The self-check FAILS." in printed


def test_the_text_names_every_world_and_policy(healthy: SelfCheck) -> None:
    text = selfcheck_text(healthy)
    assert all(name in text for name in WORLDS)
    assert text.endswith("The self-check holds.")
    assert max(map(len, text.splitlines())) <= 120
