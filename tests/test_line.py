"""The whole line, from a query to a decision, on scripted models and function nodes."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback import LoopbackServer, Reply

import splice
from splice.errors import QueryError, SettingsError, TraceMismatch
from splice.executor import NodeInput, RunSettings
from splice.ledger import Budget
from splice.line import RepairSettings, admit
from splice.message import MessageSettings
from splice.models.endpoint import Endpoint
from splice.models.scripted import Responder, ScriptedModel
from splice.records import (
    Abstention,
    CandidateEdge,
    Diagnosis,
    EdgeScore,
    Likelihoods,
    Query,
    RepairResult,
    Request,
    Trace,
)
from splice.selector import SelectorInput
from splice.store import TraceStore
from splice.tools import tool
from splice.workflow import Agent, Function, Workflow

QUESTION = "I fly from Lisbon. How many hours may I stay at the stop?"
DELIVERED = "additional evidence"


def trip(**changes: Any) -> Workflow:
    """Two colleagues that don't hear each other, and a desk that hears both."""
    routes = Agent(
        id="routes",
        role="You look up routes.",
        subtask="Where is the stop?",
        documents="The stop from Lisbon is Doha.",
        abstention_phrase="not found",
    )
    visas = Agent(
        id="visas",
        role="You look up visas.",
        subtask="How many hours at the stop?",
        documents="Doha: 31 hours. Madrid: 9 hours.",
        abstention_phrase="not found",
    )
    given = {
        "name": "trip",
        "nodes": (routes, visas, Agent(id="desk", role="You answer.")),
        "edges": (("routes", "desk"), ("visas", "desk")),
        "output": "desk",
    }
    return Workflow.model_validate({**given, **changes})


def prompt(request: Request) -> str:
    return request.messages[-1].content


def colleagues(request: Request) -> str:
    """Visas knows the answer as soon as it is told where the stop is."""
    if request.node == "routes":
        return "Doha"
    if request.node == "visas":
        return "31 hours" if DELIVERED in prompt(request) else "not found"
    return "31 hours" if "31" in prompt(request) else "unknown"


def answering(**replies: str | tuple[str, str]) -> Responder:
    """One reply by node, or two: without and with a delivered message or what follows from one."""

    def respond(request: Request) -> str:
        reply = replies[request.node or request.stage]
        if isinstance(reply, str):
            return reply
        return reply[request.stage == "trial"]

    return respond


class Fixed:
    """A selector that always says the same, and remembers what it was shown."""

    def __init__(self, beneficial: float, harmful: float) -> None:
        self.likelihoods = Likelihoods(
            beneficial=beneficial, neutral=1 - beneficial - harmful, harmful=harmful
        )
        self.cases: list[SelectorInput] = []

    async def judge(self, case: SelectorInput) -> Likelihoods:
        self.cases.append(case)
        return self.likelihoods


def diagnosis(
    *,
    base_score: float = 0.5,
    admission: Any = "headroom",
    edges: tuple[tuple[str, str], ...] = (("routes", "visas"),),
    p_decisive: float = 0.5,
) -> Diagnosis:
    return Diagnosis(
        base_score=base_score,
        base_reasons=("given",),
        edges=tuple(
            EdgeScore(
                edge=CandidateEdge(source=s, receiver=r, kind="parallel_branch"),
                p_decisive=p_decisive,
                features={},
                reason="given",
            )
            for s, r in edges
        ),
        admission=admission,
    )


# --- how a repair can end --------------------------------------------------------------------


def test_an_answer_that_a_missing_edge_withheld_is_fixed() -> None:
    model = ScriptedModel(colleagues)
    result = splice.repair(trip(), QUESTION, model=model)
    assert result.base.answer == "unknown"
    assert result.answer == "31 hours"
    assert (result.stop_reason, result.decision.action) == ("decided", "adopt")
    assert result.edge is not None
    assert (result.edge.edge.source, result.edge.edge.receiver) == ("routes", "visas")
    assert result.trial is not None
    assert result.trial.rerun == ("visas", "desk")
    assert result.message is not None
    assert result.message.text in prompt(model.requests[-2]).replace("> ", "")


def test_an_answer_that_the_selector_distrusts_is_not_adopted() -> None:
    result = splice.repair(
        trip(), QUESTION, model=ScriptedModel(colleagues), selector=Fixed(0.1, 0.8)
    )
    # The base answer declines, so hardly anything can be lost: the rule still adopts.
    assert result.decision.action == "adopt"
    model = ScriptedModel(answering(routes="Doha", visas="20 hours", desk=("20", "31")))
    kept = splice.repair(
        trip(),
        QUESTION,
        model=model,
        selector=Fixed(0.1, 0.8),
        diagnoser=lambda *_: diagnosis(base_score=0.7),
    )
    assert kept.stop_reason == "not_decisive"
    model = ScriptedModel(
        answering(routes="Doha", visas=("20 hours", "31 hours"), desk=("20", "31"))
    )
    kept = splice.repair(
        trip(),
        QUESTION,
        model=model,
        selector=Fixed(0.1, 0.8),
        diagnoser=lambda *_: diagnosis(base_score=0.7),
    )
    assert (kept.stop_reason, kept.decision.action) == ("decided", "retain")
    assert kept.answer == kept.base.answer == "20"
    assert kept.trial is not None
    assert kept.trial.trace.answer == "31"


def test_a_trial_that_gives_the_same_answer_is_not_judged() -> None:
    model = ScriptedModel(answering(routes="Doha", visas=("not found", "31 hours"), desk="unknown"))
    selector = Fixed(1.0, 0.0)
    result = splice.repair(trip(), QUESTION, model=model, selector=selector)
    assert (result.stop_reason, result.decision.action) == ("not_decisive", "retain")
    assert result.evidence is not None
    assert selector.cases == []


def test_without_a_missing_edge_the_base_answer_stands() -> None:
    workflow = trip(edges=(("routes", "visas"), ("routes", "desk"), ("visas", "desk")))
    result = splice.repair(workflow, QUESTION, model=ScriptedModel(colleagues))
    assert result.diagnosis.edges == ()
    assert (result.stop_reason, result.trial) == ("no_trial_admitted", None)
    assert result.answer == result.base.answer


def test_an_edge_below_the_wanted_probability_is_not_tried() -> None:
    model = ScriptedModel(colleagues)
    result = splice.repair(
        trip(),
        QUESTION,
        model=model,
        settings=RepairSettings(min_p_decisive=0.6),
        diagnoser=lambda *_: diagnosis(p_decisive=0.59),
    )
    assert (result.stop_reason, len(model.requests)) == ("no_edge", 3)


def test_little_headroom_saves_the_trial_but_an_abstention_is_admitted_all_the_same() -> None:
    wanted = RepairSettings(min_headroom=0.4)
    for admission, stop in (("headroom", "no_trial_admitted"), ("abstention", "decided")):
        result = splice.repair(
            trip(),
            QUESTION,
            model=ScriptedModel(colleagues),
            settings=wanted,
            diagnoser=lambda *_, admission=admission: diagnosis(
                base_score=0.7, admission=admission
            ),
        )
        assert result.stop_reason == stop


def test_a_source_with_nothing_new_is_said_to_hold_nothing() -> None:
    nodes = (
        Agent(id="echo", role="You echo."),
        Agent(id="other", role="You do something else."),
        Agent(id="desk", role="You answer."),
    )
    workflow = trip(nodes=nodes, edges=(("echo", "desk"), ("other", "desk")))
    question = "Is the harbour of Lisbon open?"
    model = ScriptedModel(lambda request: question)
    result = splice.repair(
        workflow, question, model=model, diagnoser=lambda *_: diagnosis(edges=(("echo", "other"),))
    )
    assert (result.stop_reason, result.message, len(model.requests)) == ("no_message", None, 3)
    assert result.decision.reason == "echo holds nothing that other lacks"


def test_a_node_that_fails_in_the_trial_alone_stops_it() -> None:
    def respond(request: Request) -> Any:
        if request.node == "desk" and request.stage == "trial":
            return splice.ModelError("the server is gone", reason="connection")
        return colleagues(request)

    result = splice.repair(trip(), QUESTION, model=ScriptedModel(respond))
    assert (result.stop_reason, result.answer) == ("trial_stopped", "unknown")
    assert result.decision.reason == (
        "the trial stopped: node 'desk' failed: connection: the server is gone"
    )


def test_a_trial_never_writes_anew() -> None:
    sent: list[str] = []

    @tool(effects="write")
    def send(text: str) -> str:
        """Send a letter."""
        sent.append(text)
        return "sent"

    def respond(request: Request) -> Any:
        if request.node == "visas" and request.messages[-1].role != "tool":
            asked = splice.records.ToolRequest(
                id="1", name="send", arguments='{"text": "%s"}' % (DELIVERED in prompt(request))
            )
            return splice.records.Completion(text="", tool_requests=(asked,), model="scripted")
        return {"routes": "Doha", "visas": "not found", "desk": "unknown"}[request.node or ""]

    plain = trip()
    visas = plain.by_id["visas"].model_copy(update={"tools": ("send",)})
    workflow = trip(nodes=(plain.nodes[0], visas, plain.nodes[2]), tools=(send,))
    result = splice.repair(workflow, QUESTION, model=ScriptedModel(respond))
    assert sent == ["False"]
    assert result.stop_reason == "trial_stopped"
    assert "'visas' would write anew: send" in result.decision.reason


def test_an_ambiguous_query_is_answered_with_a_question_and_no_trial() -> None:
    def ambiguous(given: NodeInput) -> Abstention:
        return Abstention(category="Ambiguous Query", rationale="Lisbon in Portugal or in Ohio")

    nodes = (
        Function(id="routes", call=lambda given: "Doha"),
        Function(id="visas", call=ambiguous),
        Function(id="desk", call=lambda given: "unknown"),
    )
    result = splice.repair(trip(nodes=nodes), QUESTION)
    assert (result.stop_reason, result.trial) == ("no_trial_admitted", None)
    assert result.diagnosis.clarifying_questions == (
        "Which reading do you mean: Lisbon in Portugal or in Ohio?",
    )
    assert "ambiguous" in result.decision.reason


def test_what_was_missing_is_in_the_result() -> None:
    result = splice.repair(trip(), QUESTION, model=ScriptedModel(colleagues))
    assert result.diagnosis.missing_inputs == ("visas: not found",)
    assert result.gap is not None
    assert [item.text for item in result.gap.items] == ["Lisbon"]


@pytest.mark.parametrize(
    ("max_calls", "stop"), [(3, "budget"), (4, "budget"), (5, "decided"), (None, "decided")]
)
def test_a_trial_beyond_the_budget_is_stopped_and_the_call_not_made(
    max_calls: int | None, stop: str
) -> None:
    model = ScriptedModel(colleagues)
    wanted = RepairSettings(run=RunSettings(budget=Budget(max_calls=max_calls)))
    result = splice.repair(trip(), QUESTION, model=model, settings=wanted)
    assert result.stop_reason == stop
    assert result.answer == ("31 hours" if stop == "decided" else "unknown")
    assert len(model.requests) == min(max_calls or 5, 5)


# --- the decision ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base_score", "weighting", "margin", "action"),
    [
        (0.7, "headroom", 0.0, "retain"),  # 0.5 * 0.3 < 0.3 * 0.7
        (0.7, "none", 0.0, "adopt"),
        (0.5, "headroom", 0.0, "adopt"),
        (0.5, "headroom", 0.2, "retain"),  # 0.25 - 0.15 < 0.2
        (0.7, "none", 0.25, "retain"),
        (1.0, "headroom", 0.0, "retain"),
        (0.0, "headroom", 0.0, "adopt"),
    ],
)
def test_the_candidate_is_adopted_by_the_rule_alone(
    base_score: float, weighting: Any, margin: float, action: str
) -> None:
    selector = Fixed(beneficial=0.5, harmful=0.3)
    result = splice.repair(
        trip(),
        QUESTION,
        model=ScriptedModel(colleagues),
        settings=RepairSettings(weighting=weighting, margin=margin),
        selector=selector,
        diagnoser=lambda *_: diagnosis(base_score=base_score),
    )
    assert result.decision.action == action
    assert result.answer == ("31 hours" if action == "adopt" else "unknown")
    assert (result.decision.weighting, result.decision.margin) == (weighting, margin)
    assert result.decision.likelihoods == selector.likelihoods
    [case] = selector.cases
    assert (case.base_answer, case.candidate_answer) == ("unknown", "31 hours")
    assert (case.question, case.base_score) == (QUESTION, base_score)


# --- the record ------------------------------------------------------------------------------


def test_calls_are_those_of_the_base_run_then_the_message_then_the_trial() -> None:
    def respond(request: Request) -> str:
        if request.stage == "generate":
            return 'KEY: The stop from Lisbon is Doha. | "The stop from Lisbon is Doha."'
        return colleagues(request)

    wanted = RepairSettings(message=MessageSettings(writer="model"))
    model = ScriptedModel(respond)
    result = splice.repair(trip(), QUESTION, model=model, settings=wanted)
    assert result.message is not None
    assert result.message.writer == "model"
    assert [call.stage for call in result.calls] == ["run"] * 3 + ["generate"] + ["trial"] * 2
    assert result.calls[:3] == result.base.calls
    assert len(model.requests) == len(result.calls)


def test_a_result_comes_back_from_json_as_it_was() -> None:
    for model in (
        ScriptedModel(colleagues),
        ScriptedModel(answering(routes="Doha", visas="9 hours", desk="9 hours")),
    ):
        result = splice.repair(trip(), QUESTION, model=model)
        assert RepairResult.model_validate_json(result.to_json()) == result


def test_the_same_query_gives_the_same_result_twice() -> None:
    first, second = (
        splice.repair(trip(), QUESTION, model=ScriptedModel(colleagues)) for _ in range(2)
    )
    assert first.base.content() == second.base.content()
    assert first.trial is not None
    assert second.trial is not None
    assert first.trial.trace.content() == second.trial.trace.content()
    assert first.decision == second.decision


def test_a_recorded_base_run_is_repaired_without_running_it_again() -> None:
    base = splice.run(trip(), QUESTION, model=ScriptedModel(colleagues))
    again = Trace.model_validate_json(base.model_dump_json())
    model = ScriptedModel(colleagues)
    result = splice.repair(trip(), base=again, model=model)
    assert result.answer == "31 hours"
    assert [request.node for request in model.requests] == ["visas", "desk"]
    assert [request.stage for request in model.requests] == ["trial", "trial"]


def test_a_base_run_of_another_workflow_is_refused_and_the_changed_node_named() -> None:
    base = splice.run(trip(), QUESTION, model=ScriptedModel(colleagues))
    other = trip(nodes=(*trip().nodes[:2], Agent(id="desk", role="You answer in French.")))
    model = ScriptedModel(colleagues)
    with pytest.raises(TraceMismatch, match="node 'desk' has changed"):
        splice.repair(other, base=base, model=model)
    assert model.requests == []


def test_a_query_beside_a_base_run_must_be_the_one_it_answered() -> None:
    base = splice.run(trip(), QUESTION, model=ScriptedModel(colleagues))
    assert splice.repair(trip(), QUESTION, base=base, model=ScriptedModel(colleagues)).answer
    with pytest.raises(QueryError, match="is about another query: 'I fly from Lisbon"):
        splice.repair(trip(), "And from Porto?", base=base, model=ScriptedModel(colleagues))


def test_repair_needs_a_query_or_a_base_run() -> None:
    with pytest.raises(QueryError, match="needs a query or a base run"):
        splice.repair(trip(), model=ScriptedModel(colleagues))


def test_other_models_than_those_of_the_base_run_are_refused() -> None:
    base = splice.run(trip(), QUESTION, model=ScriptedModel(colleagues, name="one"))
    with pytest.raises(SettingsError, match=r"'one' .* base run and would be by 'two'"):
        splice.repair(trip(), base=base, model=ScriptedModel(colleagues, name="two"))


def test_a_stored_repair_makes_no_call_again_and_its_result_is_in_the_store(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    with TraceStore(path) as store:
        first = splice.repair(trip(), QUESTION, model=ScriptedModel(colleagues), store=store)
        assert [stored.to_json() for stored in store.results().values()] == [first.to_json()]
    model = ScriptedModel(colleagues)
    with TraceStore(path) as store:
        second = splice.repair(trip(), QUESTION, model=model, store=store)
    assert model.requests == []
    assert second.answer == first.answer
    assert second.calls == ()


def test_a_stored_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    def dies_at_the_desk(request: Request) -> Any:
        return OSError("power cut") if request.node == "desk" else colleagues(request)

    with TraceStore(tmp_path / "store.jsonl") as store:
        broken = splice.run(trip(), QUESTION, model=ScriptedModel(dies_at_the_desk), store=store)
        assert broken.by_node["desk"].status == "failed"
        model = ScriptedModel(colleagues)
        whole = splice.run(trip(), QUESTION, model=model, store=store)
    assert [request.node for request in model.requests] == ["desk"]
    assert whole.answer == "unknown"


# --- many queries ----------------------------------------------------------------------------


def score(headroom: float, admission: Any) -> Diagnosis:
    edges = () if admission == "never" else (("routes", "visas"),)
    return diagnosis(base_score=1 - headroom, admission=admission, edges=edges)


cases = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.25, 0.5, 1.0]),
        st.sampled_from(["headroom", "abstention", "never"]),
    ),
    max_size=12,
)


@settings(deadline=None)
@given(cases=cases, budget=st.floats(0.0, 1.0), least=st.sampled_from([0.0, 0.3]))
def test_admission_keeps_to_the_budget_and_to_its_order(
    cases: list[tuple[float, Any]], budget: float, least: float
) -> None:
    diagnoses = [score(headroom, admission) for headroom, admission in cases]
    ids = [f"q{(7 * place) % 13}" for place in range(len(cases))]
    wanted = RepairSettings(min_headroom=least)
    chosen = admit(diagnoses, ids, budget_fraction=budget, settings=wanted)

    def rank(place: int) -> tuple[bool, float, str]:
        headroom, admission = cases[place]
        return admission != "abstention", -headroom, ids[place]

    eligible = [
        place
        for place, (headroom, admission) in enumerate(cases)
        if admission == "abstention" or (admission == "headroom" and headroom >= least)
    ]
    n = min(math.floor(budget * len(cases) + 1e-9), len(eligible))
    assert chosen == frozenset(sorted(eligible, key=rank)[:n])


def test_of_equal_queries_that_with_the_more_promising_edge_is_admitted() -> None:
    equal = [score(0.5, "headroom") for _ in range(4)]
    promising = [
        found.model_copy(update={"edges": (found.edges[0].model_copy(update={"p_decisive": p}),)})
        for found, p in zip(equal, (0.2, 0.9, 0.4, 0.9), strict=True)
    ]
    ids = ["a", "d", "b", "c"]
    for budget, chosen in ((0.25, {3}), (0.5, {1, 3}), (0.75, {1, 2, 3})):
        found = admit(promising, ids, budget_fraction=budget, settings=RepairSettings())
        assert found == chosen


def test_by_promise_a_likely_gain_goes_before_headroom_and_abstention() -> None:
    def found(headroom: float, admission: Any, p: float, gain: float | None) -> Diagnosis:
        one = score(headroom, admission)
        edge = one.edges[0].model_copy(update={"p_decisive": p, "p_beneficial": gain})
        return one.model_copy(update={"edges": (edge,)})

    diagnoses = [
        found(1.0, "abstention", 0.1, None),
        found(0.5, "headroom", 0.9, None),
        found(0.9, "headroom", 0.2, None),
        found(0.1, "headroom", 0.1, 0.4),
    ]
    ids = ["a", "b", "c", "d"]
    wanted = RepairSettings(admit_by="promise")
    for budget, chosen in ((0.25, {1}), (0.5, {1, 3}), (0.75, {1, 2, 3})):
        assert admit(diagnoses, ids, budget_fraction=budget, settings=wanted) == chosen


@settings(deadline=None, max_examples=20)
@given(n=st.integers(0, 7), budget=st.sampled_from([0.0, 0.3, 1 / 3, 0.5, 0.7, 1.0]))
def test_a_batch_makes_no_more_trials_than_its_budget(n: int, budget: float) -> None:
    batch = splice.repair_many(
        trip(), [QUESTION] * n, model=ScriptedModel(colleagues), budget_fraction=budget
    )
    assert batch.n_trials == sum(result.trial is not None for result in batch.results)
    assert batch.n_trials == math.floor(budget * n + 1e-9)
    assert len(batch.results) == n


def test_the_share_of_a_budget_is_not_lost_to_rounding() -> None:
    chosen = admit(
        [score(0.5, "headroom")] * 10,
        [f"q{place}" for place in range(10)],
        budget_fraction=0.1 + 0.2,
        settings=RepairSettings(),
    )
    assert len(chosen) == 3


def test_results_are_in_the_order_of_the_queries_however_long_each_takes() -> None:
    async def slow(given: NodeInput) -> str:
        await asyncio.sleep(0.001 * int(given.query.text))
        return f"answer {given.query.text}"

    workflow = Workflow(nodes=(Function(id="one", call=slow),), edges=(), output="one")
    texts = ["5", "1", "4", "2", "3"]
    batch = splice.repair_many(workflow, texts)
    assert [result.answer for result in batch.results] == [f"answer {text}" for text in texts]
    assert [result.query.id for result in batch.results] == ["q1", "q2", "q3", "q4", "q5"]
    assert batch.stop_reason == "done"


def test_a_query_without_a_trial_says_that_the_budget_went_elsewhere() -> None:
    batch = splice.repair_many(
        trip(), [QUESTION] * 2, model=ScriptedModel(colleagues), budget_fraction=0.5
    )
    first, second = batch.results
    assert (first.stop_reason, second.stop_reason) == ("decided", "no_trial_admitted")
    assert "the batch's budget went to queries with more room" in second.decision.reason


def test_a_batch_that_runs_out_of_budget_says_so() -> None:
    wanted = RepairSettings(run=RunSettings(budget=Budget(max_calls=7)))
    model = ScriptedModel(colleagues)
    batch = splice.repair_many(
        trip(), [QUESTION] * 2, model=model, settings=wanted, budget_fraction=1.0
    )
    assert batch.stop_reason == "budget"
    assert len(model.requests) == 7


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        ([Query(text="a", id="x"), Query(text="b", id="x")], "two queries with the id 'x'"),
        (["fine", " \n"], "query 'q2' is empty"),
        (["fine", Query(text="b", context={"visa": ["?"]})], "unknown node 'visa'; there are rou"),
        (["fine", Query(text="b", subtasks={"nobody": "?"})], "subtasks names unknown node"),
        (["fine", "half a \ud83d"], "query 'q2' is not Unicode text"),
        ("not a list", "queries is one text; give a list of them"),
    ],
)
def test_queries_that_do_not_fit_are_refused_before_the_first_call(
    queries: Any, message: str
) -> None:
    model = ScriptedModel(colleagues)
    with pytest.raises(QueryError, match=message):
        splice.repair_many(trip(), queries, model=model)
    assert model.requests == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"budget_fraction": 1.1}, "budget_fraction is 1.1; it lies between 0 and 1"),
        ({"budget_fraction": math.nan}, "budget_fraction is nan"),
        ({"concurrency": 0}, "concurrency is 0; it is at least 1"),
    ],
)
def test_numbers_out_of_range_are_refused_before_the_first_call(
    wrong: dict[str, Any], message: str
) -> None:
    model = ScriptedModel(colleagues)
    with pytest.raises(SettingsError, match=message):
        splice.repair_many(trip(), [QUESTION], model=model, **wrong)
    assert model.requests == []


def test_a_node_that_names_an_unknown_model_is_refused_before_the_first_call() -> None:
    nodes = (*trip().nodes[:2], Agent(id="desk", role="You answer.", model={"name": "big"}))
    model = ScriptedModel(colleagues)
    with pytest.raises(SettingsError, match="node 'desk' names unknown model 'big'; there are 's"):
        splice.repair(trip(nodes=nodes), QUESTION, model={"small": model})
    assert model.requests == []


def test_progress_counts_each_query_of_each_stage() -> None:
    told: list[tuple[str, int, int]] = []
    splice.repair_many(
        trip(),
        [QUESTION] * 3,
        model=ScriptedModel(colleagues),
        progress=lambda *counts: told.append(counts),
    )
    assert told == [(stage, n, 3) for stage in ("run", "repair") for n in (1, 2, 3)]


def test_an_error_in_one_query_cancels_the_others_and_is_raised() -> None:
    ended: list[str] = []

    async def work(given: NodeInput) -> str:
        if given.query.text == "bad":
            raise splice.SettingsError("this can't go on")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(given.query.text)
        return "never"

    workflow = Workflow(nodes=(Function(id="one", call=work),), edges=(), output="one")
    with pytest.raises(SettingsError, match="this can't go on"):
        splice.repair_many(workflow, ["waits", "waits too", "bad"])
    assert sorted(ended) == ["waits", "waits too"]


def test_no_more_queries_than_allowed_are_in_flight() -> None:
    in_flight, most = 0, 0

    async def work(given: NodeInput) -> str:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await asyncio.sleep(0)
        in_flight -= 1
        return "done"

    workflow = Workflow(nodes=(Function(id="one", call=work),), edges=(), output="one")
    splice.repair_many(workflow, [str(n) for n in range(9)], concurrency=3)
    assert most == 3


# --- the doors -------------------------------------------------------------------------------


async def test_the_sync_doors_work_where_a_loop_is_running() -> None:
    asyncio.get_running_loop()
    model = ScriptedModel(colleagues)
    assert splice.run(trip(), QUESTION, model=model).answer == "unknown"
    assert splice.repair(trip(), QUESTION, model=model).answer == "31 hours"
    assert splice.repair_many(trip(), [QUESTION], model=model).n_trials == 0


async def test_the_async_doors_do_what_the_sync_ones_do() -> None:
    run = await splice.arun(trip(), QUESTION, model=ScriptedModel(colleagues))
    result = await splice.arepair(trip(), QUESTION, model=ScriptedModel(colleagues))
    batch = await splice.arepair_many(
        trip(), [QUESTION], model=ScriptedModel(colleagues), budget_fraction=1.0
    )
    assert (run.answer, result.answer) == ("unknown", "31 hours")
    assert batch.results[0].answer == "31 hours"
    assert run.content() == result.base.content()


def test_a_workflow_of_functions_needs_no_model() -> None:
    def visas(given: NodeInput) -> str | Abstention:
        if given.message is None:
            return Abstention(category="Insufficient Input", rationale="the stop from Lisbon")
        return given.documents[0].text

    nodes = (
        Function(id="routes", call=lambda given: "The stop from Lisbon is Doha.", subtask="Stop?"),
        Function(id="visas", call=visas, subtask="Hours?", documents="31 hours in Doha"),
        Function(id="desk", call=lambda given: given.parents["visas"]),
    )
    result = splice.repair(trip(nodes=nodes), QUESTION)
    assert result.answer == "31 hours in Doha"
    assert result.calls == ()


def by_words(request: dict[str, Any]) -> Reply:
    """The colleagues behind a server, which sees no node: told apart by their role."""
    system, user = (message["content"] for message in request["messages"])
    node = "routes" if "routes" in system else "visas" if "visas" in system else "desk"
    if node == "routes":
        return Reply(text="Doha")
    if node == "visas":
        return Reply(text="31 hours" if DELIVERED in user else "not found")
    return Reply(text="31 hours" if "31" in user else "unknown")


def test_one_endpoint_serves_repair_after_repair() -> None:
    with LoopbackServer(by_words) as server:
        model = Endpoint(model="m", base_url=server.base_url)
        answers = [splice.repair(trip(), QUESTION, model=model).answer for _ in range(2)]
    assert answers == ["31 hours"] * 2
    assert server.n_requests == 10


async def test_one_endpoint_serves_a_running_loop_and_the_sync_doors_in_it() -> None:
    with LoopbackServer(by_words) as server:
        model = Endpoint(model="m", base_url=server.base_url)
        first = await splice.arepair(trip(), QUESTION, model=model)
        second = splice.repair(trip(), QUESTION, model=model)
        third = await splice.arepair(trip(), QUESTION, model=model)
        await model.aclose()
    assert first.answer == second.answer == third.answer == "31 hours"


def test_a_scripted_model_and_an_endpoint_take_the_same_path() -> None:
    with LoopbackServer(by_words) as server:
        model = Endpoint(model="scripted", base_url=server.base_url)
        served = splice.repair(trip(), QUESTION, model=model)
    scripted = splice.repair(trip(), QUESTION, model=ScriptedModel(colleagues))

    def told(trace: Trace) -> Any:
        differing = {"model", "usage", "started_s", "elapsed_s"}
        return [run.model_dump(exclude=differing) for run in trace.node_runs]

    assert told(served.base) == told(scripted.base)
    assert served.trial is not None
    assert scripted.trial is not None
    assert told(served.trial.trace) == told(scripted.trial.trace)
    assert served.trial.receipt == scripted.trial.receipt
    for field in ("query", "answer", "diagnosis", "gap", "message", "evidence", "decision"):
        assert getattr(served, field) == getattr(scripted, field), field
    assert [call.stage for call in served.calls] == [call.stage for call in scripted.calls]


@pytest.mark.live
def test_the_embedded_model_gives_results_of_the_right_shape() -> None:
    pytest.importorskip("xllamacpp")
    from splice.models import weights

    if not weights.is_present("smollm2-135m"):
        pytest.skip("the weights of smollm2-135m are not here")
    result = splice.repair(trip(), QUESTION, model=splice.LocalModel("smollm2-135m"))
    assert [run.node for run in result.base.node_runs] == ["routes", "visas", "desk"]
    assert result.decision.action in ("adopt", "retain")
    assert RepairResult.model_validate_json(result.to_json()) == result
