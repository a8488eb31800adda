"""Every policy on one small workflow whose agents are functions of what they read."""

from __future__ import annotations

import pytest

from splice import Agent, Document, Query, ScriptedModel, Workflow, diagnose
from splice.executor import execute
from splice.line import RepairSettings
from splice.policies import ABLATIONS, ALL_POLICIES, POLICIES, BaseRun, Bench, Outcome
from splice.records import Likelihoods, Request

CITY = {"Ada Quist": "Doha", "Bo Renner": "Lima"}


def agent(name: str, task: str, *documents: str) -> Agent:
    return Agent(
        id=name,
        role="You look up one fact.",
        subtask=task,
        reads_query=False,
        documents=tuple(Document(text=text) for text in documents),
        abstention_phrase="not found",
    )


WORKFLOW = Workflow(
    nodes=(
        agent("founder", "Who founded Acme?", "Acme was founded by Ada Quist."),
        agent(
            "home",
            "In which city was the founder of Acme born?",
            "Ada Quist was born in Doha.",
            "Bo Renner was born in Lima.",
        ),
        agent("staff", "How many people work at Acme?", "Acme has 40 workers."),
        Agent(id="writer", role="You answer.", subtask="Answer the question."),
    ),
    edges=(("founder", "writer"), ("home", "writer"), ("staff", "writer")),
    output="writer",
)
QUERY = Query(id="q1", text="In which city was the founder of Acme born?")


def prompt(request: Request) -> str:
    return request.messages[-1].content


def careful(request: Request) -> str:
    """Each agent says what its prompt bears out, and nothing else."""
    text = prompt(request)
    if request.node == "founder":
        return "Ada Quist"
    if request.node == "staff":
        return "40"
    if request.node == "home":
        heard = text.partition("Your documents:")[2].partition("From founder")[2]
        return next((city for name, city in CITY.items() if name in heard), "not found")
    if request.node == "writer":
        report = text.partition("From home")[2]
        return next((city for city in CITY.values() if city in report), "unknown")
    raise AssertionError(f"{request.node!r} at stage {request.stage!r} was not expected")


async def bench_and_base(
    responder: object = careful, workflow: Workflow = WORKFLOW, **values: object
) -> tuple[Bench, BaseRun, ScriptedModel]:
    model = ScriptedModel(responder)  # type: ignore[arg-type]
    trace = await execute(workflow, QUERY, model)
    base = BaseRun(workflow, trace, diagnose(workflow, trace))
    return Bench(model, **values), base, model  # type: ignore[arg-type]


async def outcome_of(name: str, responder: object = careful, **values: object) -> Outcome:
    bench, base, _ = await bench_and_base(responder, **values)
    return await ALL_POLICIES[name].run(bench, base)


async def test_the_base_answer_is_wrong_and_the_right_edge_comes_first() -> None:
    _, base, _ = await bench_and_base()
    assert base.trace.answer == "unknown"
    top = base.diagnosis.edges[0].edge
    assert (top.source, top.receiver) == ("founder", "home")


async def test_static_costs_nothing_and_answers_as_before() -> None:
    outcome = await outcome_of("static")
    assert outcome == Outcome(answer="unknown")


@pytest.mark.parametrize("name", ["splice", "always"])
async def test_a_repair_delivers_the_fact(name: str) -> None:
    outcome = await outcome_of(name)
    assert (outcome.answer, outcome.edge) == ("Doha", ("founder", "home"))
    assert [call.node for call in outcome.calls] == ["home", "writer"]


async def test_never_pays_for_the_trial_and_keeps_the_answer() -> None:
    splice, never = await outcome_of("splice"), await outcome_of("never")
    assert never.answer == "unknown"
    assert never.candidate == "Doha"
    assert len(never.calls) == len(splice.calls)


async def test_policies_share_a_trial_and_each_is_charged_for_it() -> None:
    bench, base, model = await bench_and_base()
    asked = len(model.requests)
    outcomes = [await POLICIES[name].run(bench, base) for name in ("splice", "always", "never")]
    assert len(model.requests) == asked + 2
    assert [len(outcome.calls) for outcome in outcomes] == [2, 2, 2]


async def test_a_selector_that_refuses_keeps_the_answer_of_splice_but_not_of_always() -> None:
    class Refusing:
        async def judge(self, case: object) -> Likelihoods:
            return Likelihoods(beneficial=0.0, neutral=0.0, harmful=1.0)

    assert (await outcome_of("splice", selector=Refusing())).answer == "unknown"
    assert (await outcome_of("always", selector=Refusing())).answer == "Doha"


@pytest.mark.parametrize(("is_better", "answer"), [(True, "Doha"), (False, "unknown")])
async def test_the_oracle_adopts_exactly_what_scores_higher(is_better: bool, answer: str) -> None:
    asked: list[tuple[str | None, str | None]] = []

    async def judged(query: Query, old: str | None, new: str | None) -> bool:
        asked.append((old, new))
        return is_better

    assert (await outcome_of("oracle", is_better=judged)).answer == answer
    assert asked == [("unknown", "Doha")]


async def test_a_random_edge_is_the_same_for_the_same_seed_and_all_edges_come_up() -> None:
    edges = set()
    for seed in range(40):
        first = await outcome_of("random_edge", seed=seed)
        again = await outcome_of("random_edge", seed=seed)
        assert (first.edge, first.answer) == (again.edge, again.answer)
        edges.add(first.edge)
    _, base, _ = await bench_and_base()
    assert edges == {(s.edge.source, s.edge.receiver) for s in base.diagnosis.edges}


async def test_a_rerun_asks_receiver_and_followers_again_without_any_message() -> None:
    bench, base, model = await bench_and_base()
    asked = len(model.requests)
    outcome = await POLICIES["rerun"].run(bench, base)
    again = model.requests[asked:]
    assert [request.node for request in again] == ["home", "writer"]
    assert {request.rollout for request in again} == {1}
    assert [prompt(request) for request in again] == [
        base.trace.by_node[node].input[-1].content for node in ("home", "writer")
    ]
    assert (outcome.answer, outcome.candidate) == ("unknown", "unknown")


async def test_a_rerun_that_comes_out_otherwise_goes_to_the_selector() -> None:
    def fickle(request: Request) -> str:
        if request.node == "home" and request.rollout:
            return "Doha"
        return careful(request)

    outcome = await outcome_of("rerun", fickle)
    assert outcome.candidate == "Doha"
    # What the receiver says now stands in its own documents, and it had nothing to say before.
    assert outcome.answer == "Doha"


async def test_a_full_rerun_asks_everybody_at_a_higher_temperature() -> None:
    bench, base, model = await bench_and_base(retry_temperature=0.9)
    asked = len(model.requests)
    outcome = await POLICIES["full_rerun"].run(bench, base)
    again = model.requests[asked:]
    assert sorted(request.node or "" for request in again) == ["founder", "home", "staff", "writer"]
    assert {request.settings.temperature for request in again} == {0.9}
    assert {request.settings.temperature for request in model.requests[:asked]} == {0.0}
    assert len(outcome.calls) == 4


@pytest.mark.parametrize(
    ("votes", "winner"),
    [
        (["Lima", "Lima"], "Lima"),
        (["Lima", "Doha"], "unknown"),
        (["unknown", "Lima"], "unknown"),
        (["Lima.", "LIMA."], "Lima."),
    ],
)
async def test_voting_needs_a_majority_and_else_keeps_the_base_answer(
    votes: list[str], winner: str
) -> None:
    def voter(request: Request) -> str:
        if request.node == "writer" and request.rollout:
            return votes[request.rollout - 1]
        return careful(request)

    outcome = await outcome_of("voting", voter)
    assert outcome.answer == winner
    assert len(outcome.calls) == 8


async def test_voting_and_full_rerun_share_their_first_run() -> None:
    bench, base, model = await bench_and_base()
    asked = len(model.requests)
    await POLICIES["full_rerun"].run(bench, base)
    await POLICIES["voting"].run(bench, base)
    assert len(model.requests) == asked + 8


async def test_edge_expansion_needs_no_base_run_and_relays_outputs_verbatim() -> None:
    bench, base, model = await bench_and_base()
    asked = len(model.requests)
    outcome = await POLICIES["edge_expansion"].run(bench, base)
    assert outcome.replaces_base
    assert outcome.answer == "Doha"
    staff = next(request for request in model.requests[asked:] if request.node == "staff")
    assert "From founder:\n> Ada Quist" in prompt(staff)
    assert "From home:\n> Doha" in prompt(staff)


async def test_nexa_joins_the_drafts_that_differ_most_and_runs_once_through() -> None:
    bench, base, model = await bench_and_base()
    asked = len(model.requests)
    outcome = await POLICIES["nexa"].run(bench, base)
    nodes = [request.node for request in model.requests[asked:]]
    assert len(nodes) == len(set(nodes))
    assert nodes[-1] == "writer"
    assert len(outcome.calls) == len(nodes)


async def test_nexa_without_an_edge_runs_nothing() -> None:
    def alike(request: Request) -> str:
        return "Ada Quist was here"

    bench, base, model = await bench_and_base(alike)
    asked = len(model.requests)
    outcome = await POLICIES["nexa"].run(bench, base)
    assert outcome == Outcome(answer="Ada Quist was here")
    assert len(model.requests) == asked


def comparing(choose: object) -> object:
    def respond(request: Request) -> str:
        if request.stage == "select":
            return choose(prompt(request))  # type: ignore[operator]
        return careful(request)

    return respond


def likes_doha(text: str) -> str:
    return "A" if text.index("> Doha") < text.index("> unknown") else "B"


@pytest.mark.parametrize(
    ("choose", "answer"),
    [
        (likes_doha, "Doha"),
        (lambda text: "A", "unknown"),
        (lambda text: "B", "unknown"),
        (lambda text: "unsure", "unknown"),
        (lambda text: "I would say\nA or B", "unknown"),
    ],
)
async def test_the_verifier_adopts_only_what_it_prefers_in_both_orders(
    choose: object, answer: str
) -> None:
    outcome = await outcome_of("verifier", comparing(choose))
    assert outcome.answer == answer
    assert [call.stage for call in outcome.calls] == ["trial", "trial", "select", "select"]


async def test_the_verifier_sees_question_and_answers_alone() -> None:
    bench, base, model = await bench_and_base(comparing(likes_doha))
    await POLICIES["verifier"].run(bench, base)
    asked = [prompt(request) for request in model.requests if request.stage == "select"]
    assert len(asked) == 2
    assert all("Ada Quist" not in text and QUERY.text in text for text in asked)


async def test_nexa_with_rollback_compares_nexas_answer_with_the_base_answer() -> None:
    outcome = await outcome_of("nexa_rollback", comparing(lambda text: "A"))
    nexa = await outcome_of("nexa")
    assert outcome.candidate == nexa.candidate
    assert outcome.answer == "unknown"


@pytest.mark.parametrize("name", POLICIES)
async def test_a_workflow_without_missing_edges_keeps_its_answer_where_edges_are_all_there_is(
    name: str,
) -> None:
    chain = Workflow(
        nodes=(WORKFLOW.nodes[0], Agent(id="writer", role="You answer.", subtask="Answer.")),
        edges=(("founder", "writer"),),
        output="writer",
    )
    bench, base, _ = await bench_and_base(lambda request: f"said {request.rollout}", chain)
    outcome = await POLICIES[name].run(bench, base)
    makes_new_runs = name in ("full_rerun", "voting")
    assert outcome.answer == ("said 1" if name == "full_rerun" else "said 0") or makes_new_runs
    assert bool(outcome.calls) == (makes_new_runs or name == "edge_expansion")


async def test_settings_reach_the_trial() -> None:
    outcome = await outcome_of("splice", settings=RepairSettings(min_headroom=1.0))
    abstained = await bench_and_base()
    # An abstention admits a trial whatever the headroom.
    assert abstained[1].diagnosis.admission == "abstention"
    assert outcome.is_tried


# --- ablations -------------------------------------------------------------------------------


class Refusing:
    """A selector that finds everything harmful."""

    async def judge(self, case: object) -> Likelihoods:
        return Likelihoods(beneficial=0.0, neutral=0.0, harmful=1.0)


def test_ablations_are_run_only_where_they_are_named() -> None:
    assert not POLICIES.keys() & ABLATIONS.keys()
    assert [name for name in ABLATIONS if ABLATIONS[name].admission == "random"] == ["random_query"]


async def test_other_selectors_judge_the_same_trial() -> None:
    bench, base, model = await bench_and_base(selector=Refusing(), language=Refusing())
    asked = len(model.requests)
    found = {
        name: await ALL_POLICIES[name].run(bench, base)
        for name in ("splice", "splice_rules", "splice_language")
    }
    assert len(model.requests) == asked + 2
    assert {name: outcome.answer for name, outcome in found.items()} == {
        "splice": "unknown",
        "splice_rules": "Doha",
        "splice_language": "unknown",
    }


async def test_a_key_statement_alone_repairs_what_one_fact_can() -> None:
    outcome = await outcome_of("key_statement")
    assert (outcome.answer, outcome.is_tried) == ("Doha", True)


async def test_filler_runs_the_receiver_again_and_tells_it_nothing() -> None:
    bench, base, model = await bench_and_base()
    asked = len(model.requests)
    outcome = await ALL_POLICIES["filler"].run(bench, base)
    told = prompt(model.requests[asked])
    assert model.requests[asked].node == "home"
    assert "additional evidence" in told
    assert "Ada Quist" not in told.partition("additional evidence")[2]
    assert (outcome.answer, outcome.is_tried) == ("unknown", True)


def writing(request: Request) -> str:
    """As `careful`, and able to write messages."""
    if request.stage == "generate":
        return 'KEY: The founder of Acme is Ada Quist | "Ada Quist"'
    return careful(request)


async def test_a_message_by_the_model_costs_one_call_more() -> None:
    plain, written = await outcome_of("splice"), await outcome_of("model_written", writing)
    assert written.answer == "Doha"
    assert [call.stage for call in written.calls] == ["generate", "trial", "trial"]
    assert len(written.calls) == len(plain.calls) + 1
