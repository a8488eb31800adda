"""Diagnosis: what the base trace says about missing edges and what they could carry."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import splice
from splice import diagnosis
from splice.abstention import wire
from splice.diagnosis import base_score, diagnose, find_gap, score_edge
from splice.features import (
    EDGE_FEATURES,
    QUERY_FEATURES,
    Feature,
    bridges,
    edge_features,
    query_features,
)
from splice.material import material, readable
from splice.models.scripted import ScriptedModel
from splice.records import (
    Abstention,
    CandidateEdge,
    Diagnosis,
    Document,
    EdgeScore,
    NodeFailure,
    NodeRun,
    Query,
    ToolCall,
    Trace,
)
from splice.text import contains
from splice.tools import tool
from splice.workflow import Agent, Workflow

QUESTION = "I fly from Lisbon. How many hours may I stay at the stop?"


def agent(node: str, subtask: str = "", *papers: str, **more: Any) -> Agent:
    documents = tuple(Document(text=text) for text in papers)
    return Agent(id=node, role=f"You are {node}.", subtask=subtask, documents=documents, **more)


def flow(*nodes: Agent, edges: str, **more: Any) -> Workflow:
    """A workflow with edges such as `a>b b>c`; the last node gives the answer."""
    pairs = tuple(tuple(edge.split(">")) for edge in edges.split())
    given = {"nodes": nodes, "edges": pairs, "output": nodes[-1].id, **more}
    return Workflow.model_validate(given)


def traced(
    workflow: Workflow,
    outputs: dict[str, str | Abstention | None],
    *,
    question: str = QUESTION,
    tools: Mapping[str, tuple[ToolCall, ...]] | None = None,
    **query: Any,
) -> Trace:
    """A trace in which nodes said this: a text, an abstention, or nothing since they failed."""
    runs = []
    for node in workflow.plan.order:
        said = outputs[node]
        parents = workflow.plan.parents[node]
        runs.append(
            NodeRun(
                node=node,
                status="abstained"
                if isinstance(said, Abstention)
                else "failed"
                if said is None
                else "ok",
                output=wire(said) if isinstance(said, Abstention) else said,
                abstention=said if isinstance(said, Abstention) else None,
                failure=NodeFailure(kind="model", message="gone") if said is None else None,
                expected=parents,
                received=tuple(parent for parent in parents if outputs[parent] is not None),
                tool_calls=(tools or {}).get(node, ()),
            )
        )
    last = outputs[workflow.output]
    return Trace(
        query=Query(text=question, **query),
        workflow=workflow.name,
        fingerprint=workflow.fingerprint,
        node_runs=tuple(runs),
        answer=last if isinstance(last, str) else None,
        engine_version="0",
    )


def lacks(what: str) -> Abstention:
    return Abstention(category="Insufficient Input", rationale=what)


def pairs(found: Diagnosis) -> list[tuple[str, str]]:
    return [(scored.edge.source, scored.edge.receiver) for scored in found.edges]


def desk(*others: Agent, **more: Any) -> Workflow:
    """Nodes that don't hear each other, and a desk that hears all."""
    edges = " ".join(f"{node.id}>desk" for node in others)
    return flow(*others, agent("desk", "Answer the question."), edges=edges, **more)


# --- what documents know ---


def test_the_title_of_a_document_is_known_to_its_reader_like_its_text() -> None:
    singer = agent("singer", "Who sings Indian Sunset?")
    birth = Agent(
        id="birth",
        role="You look up births.",
        subtask="Where was the singer born?",
        documents=(Document(title="Elton John", text="He was born in Pinner."),),
    )
    flat = agent("flat", "Where was the singer born?", "Somebody was born in Riga.")
    workflow = desk(singer, birth, flat)
    said: dict[str, str | Abstention | None] = {
        "singer": "Elton John",
        "birth": "Baltimore",
        "flat": lacks("not found"),
        "desk": "Baltimore",
    }
    trace = traced(workflow, said)
    edges = {(e.source, e.receiver): e for e in workflow.candidate_edges}
    assert bridges(workflow, trace, edges["singer", "birth"]) == ("Elton John",)
    assert "Elton John" in readable(workflow, trace, "birth")
    # What the edge supplies counts more than that somebody else declined.
    assert pairs(diagnose(workflow, trace))[0] == ("singer", "birth")


def test_a_bare_count_does_not_tell_what_something_is_about() -> None:
    recipes = agent("recipes", "How is the anvil made?")
    stock = agent("stock", "What helps?", "There are 3 chests and 1 iron_block.")
    workflow = desk(recipes, stock)
    said: dict[str, str | Abstention | None] = {
        "recipes": "craft 1 anvil with 3 iron_block",
        "stock": "3 chests",
        "desk": "unknown",
    }
    trace = traced(workflow, said)
    (edge,) = (e for e in workflow.candidate_edges if e.source == "recipes")
    assert bridges(workflow, trace, edge) == ("iron_block",)


# --- candidate edges -------------------------------------------------------------------------


def test_a_missing_edge_is_a_shortcut_or_joins_two_branches() -> None:
    workflow = flow(*map(agent, "abcd"), edges="a>b b>d a>c c>d")
    kinds = {(e.source, e.receiver): e.kind for e in workflow.candidate_edges}
    assert kinds == {("b", "c"): "parallel_branch", ("a", "d"): "distant_ancestor"}


def test_a_planted_fact_of_a_grandparent_is_proposed_for_the_node_at_the_end() -> None:
    workflow = flow(
        agent("archive", "Which file is it?", "File 7 belongs to the Meridian vessel."),
        agent("clerk", "Summarise what the archive says."),
        agent("writer", "Name the registration of the Meridian vessel.", "Meridian: REG-4471"),
        edges="archive>clerk clerk>writer",
    )
    outputs: dict[str, Any] = {
        "archive": "The file belongs to the Meridian vessel.",
        "clerk": "There is one file.",
        "writer": "unknown",
    }
    found = diagnose(workflow, traced(workflow, outputs, question="Which registration is it?"))
    assert pairs(found) == [("archive", "writer")]
    assert found.edges[0].edge.kind == "distant_ancestor"
    assert found.edges[0].features["fills"] == 1.0
    assert found.edges[0].features["hop"] == 2.0


def test_ties_follow_the_canonical_order() -> None:
    names = ("d", "b", "c", "a")
    workflow = desk(*(agent(name, "Say something.") for name in names))
    outputs: dict[str, Any] = dict.fromkeys([*names, "desk"], "the very same words")
    found = diagnose(workflow, traced(workflow, outputs))
    by_score: dict[float, list[tuple[str, str]]] = {}
    for scored in found.edges:
        edge = (scored.edge.source, scored.edge.receiver)
        by_score.setdefault(scored.p_decisive, []).append(edge)
    order = [(edge.source, edge.receiver) for edge in workflow.candidate_edges]
    for tied in by_score.values():
        assert tied == sorted(tied, key=order.index)
    assert sorted(pairs(found), key=order.index) == order


def test_edges_are_ordered_by_their_probability() -> None:
    workflow = desk(
        agent("routes", "Where is the stop?", "The stop from Lisbon is Doha."),
        agent("meals", "What is served?", "Soup."),
        agent("visas", "How many hours?", "Doha: 31 hours."),
    )
    outputs: dict[str, Any] = {
        "routes": "Doha",
        "meals": "soup",
        "visas": lacks("not found"),
        "desk": "unknown",
    }
    found = diagnose(workflow, traced(workflow, outputs))
    assert pairs(found)[0] == ("routes", "visas")
    scores = [scored.p_decisive for scored in found.edges]
    assert scores == sorted(scores, reverse=True)


# --- features --------------------------------------------------------------------------------

said = st.one_of(
    st.none(),
    st.sampled_from(["not found", "Doha", "31 hours in Doha, 9 in Rio", "Rio <b>", "\ud7ff \x00"]),
    st.text(max_size=30).filter(lambda text: text.strip() != ""),
    st.sampled_from([lacks("the stop from Lisbon"), lacks("31"), lacks("?")]),
)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Workflow, Trace]:
    n = draw(st.integers(2, 5))
    names = [f"n{place}" for place in range(n)]
    subtasks = st.sampled_from(["", "Find Doha.", "How many of 31 in Rio?", "List it."])
    papers = st.sampled_from(["", "Doha: 31 hours.", "Rio and Lisbon"])
    nodes = [agent(name, draw(subtasks), draw(papers)) for name in names]
    edges = {
        (names[a], names[b])
        for b in range(1, n)
        for a in draw(st.sets(st.integers(0, b - 1), max_size=2))
    }
    sources = {source for source, _ in edges}
    edges |= {(name, names[-1]) for name in names[:-1] if name not in sources}
    workflow = Workflow(nodes=tuple(nodes), edges=tuple(sorted(edges)), output=names[-1])
    tools = {
        name: (ToolCall(name="t", arguments="{}", result=draw(st.sampled_from(["Rio 9", ""]))),)
        for name in draw(st.sets(st.sampled_from(names), max_size=2))
    }
    return workflow, traced(workflow, {name: draw(said) for name in names}, tools=tools)


@settings(deadline=None, max_examples=150)
@given(run=runs())
def test_features_are_those_of_the_tables_and_stay_in_their_ranges(
    run: tuple[Workflow, Trace],
) -> None:
    workflow, trace = run
    assert_within(QUERY_FEATURES, query_features(workflow, trace, diagnose(workflow, trace)))
    for edge in workflow.candidate_edges:
        features = edge_features(workflow, trace, edge)
        assert_within(EDGE_FEATURES, features)
        assert features["parallel"] == (edge.kind == "parallel_branch")
        assert (features["hop"] == 0) == (edge.kind == "parallel_branch")


def assert_within(table: tuple[Feature, ...], found: Mapping[str, float]) -> None:
    assert list(found) == [feature.name for feature in table]
    for feature in table:
        value = found[feature.name]
        assert feature.low <= value <= feature.high + 1e-9, feature.name
        assert feature.kind == "float" or value == int(value), feature.name


@settings(deadline=None, max_examples=150)
@given(run=runs())
def test_every_run_can_be_diagnosed_and_twice_with_the_same_result(
    run: tuple[Workflow, Trace],
) -> None:
    workflow, trace = run
    found = diagnose(workflow, trace)
    assert found == diagnose(workflow, Trace.model_validate_json(trace.model_dump_json()))
    assert 0 < found.base_score < 1
    candidates = {(edge.source, edge.receiver) for edge in workflow.candidate_edges}
    assert set(pairs(found)) <= candidates
    assert len(set(pairs(found))) == len(pairs(found))
    for scored in found.edges:
        assert material(workflow, trace, scored.edge.source)
        gap = find_gap(workflow, trace, scored.edge)
        held = "\n".join(piece.text for piece in material(workflow, trace, scored.edge.source))
        assert all(contains(held, item.text) == item.is_held for item in gap.items)
    if found.admission == "abstention":
        assert any(run.status == "abstained" for run in trace.node_runs)


def test_nothing_but_the_base_trace_is_looked_at() -> None:
    for function in (diagnose, base_score):
        assert list(inspect.signature(function).parameters) == ["workflow", "trace"]
    for function in (edge_features, score_edge, find_gap):
        assert list(inspect.signature(function).parameters) == ["workflow", "trace", "edge"]
    hints = get_type_hints(score_edge)
    assert hints == {
        "workflow": Workflow,
        "trace": Trace,
        "edge": CandidateEdge,
        "return": EdgeScore,
    }
    assert not {"answers", "reference", "gold"} & set(Query.model_fields) | set(
        name for name in vars(diagnosis) if name in ("Case", "Trial", "Evidence")
    )


# --- the base score --------------------------------------------------------------------------


def test_an_answer_that_declines_scores_lowest() -> None:
    workflow = desk(agent("routes", "Where is the stop of the question?"), agent("visas"))
    worst = {"routes": None, "visas": lacks("the stop at hours"), "desk": "perhaps Doha"}
    declining = [
        base_score(workflow, traced(workflow, {"routes": "a", "visas": "b", "desk": answer}))[0]
        for answer in ("unknown", "not found", None, "I don't know.")
    ]
    answering = base_score(workflow, traced(workflow, worst))[0]
    perfect = base_score(workflow, traced(workflow, dict.fromkeys(worst, "Doha")))[0]
    assert max(declining) < answering < perfect


def test_the_base_score_says_what_moved_it() -> None:
    workflow = desk(agent("routes", "Where is the stop?"), agent("visas"))
    outputs: dict[str, Any] = {"routes": lacks("?"), "visas": None, "desk": "Doha"}
    _, reasons = base_score(workflow, traced(workflow, outputs))
    assert any("routes" in reason for reason in reasons)
    assert any("visas" in reason for reason in reasons)


# --- abstentions steer (method 7.2) ----------------------------------------------------------


def colleagues(rationale: str = "?") -> tuple[Workflow, dict[str, Any]]:
    """Three that hold something or nothing for a fourth, which lacks it."""
    workflow = desk(
        agent("empty", "Talk.", "The harbour opens at noon."),
        agent("half", "Talk.", "The Meridian has a crew."),
        agent("full", "Talk.", "The Meridian is registered as REG-4471."),
        agent("asks", "Look up the owner."),
    )
    outputs = {
        "empty": "At noon.",
        "half": "It has a crew.",
        "full": "It is registered.",
        "asks": lacks(rationale),
        "desk": "It sails soon.",
    }
    return workflow, outputs


def test_sources_are_ordered_by_how_much_they_hold_of_what_is_missing() -> None:
    workflow, outputs = colleagues("the Meridian and its number REG-4471 were not given")
    found = diagnose(workflow, traced(workflow, outputs))
    into = [source for source, receiver in pairs(found) if receiver == "asks"]
    assert into == ["full", "half", "empty"]


def test_a_node_that_lacks_input_is_the_preferred_receiver_and_admits_a_trial() -> None:
    workflow, outputs = colleagues("the Meridian and its number REG-4471 were not given")
    found = diagnose(workflow, traced(workflow, outputs))
    assert pairs(found)[0] == ("full", "asks")
    assert found.admission == "abstention"
    assert found.missing_inputs == ("asks: the Meridian and its number REG-4471",)


def test_what_the_abstention_names_stands_first_in_the_gap() -> None:
    workflow, outputs = colleagues("I need the Meridian and REG-4471")
    trace = traced(workflow, outputs)
    edge = next(e for e in workflow.candidate_edges if (e.source, e.receiver) == ("half", "asks"))
    gap = find_gap(workflow, trace, edge)
    told = [(item.text, item.named_in, item.is_held) for item in gap.items[:2]]
    assert told == [("Meridian", "abstention", True), ("REG-4471", "abstention", False)]


def test_an_abstention_that_nobody_could_resolve_is_not_put_first() -> None:
    workflow, outputs = colleagues("the tonnage of the Polaris was not given")
    found = diagnose(workflow, traced(workflow, outputs))
    assert found.admission != "abstention"


def ships(*tools: Any, rationale: str, **more: Any) -> tuple[Workflow, Trace]:
    workflow = desk(
        agent("reader", "Read.", "Some paper."),
        agent("currency", "Convert.", "Rates.", tools=tuple(t.spec.name for t in tools)),
        agent("asks", "Give the price in euro."),
        tools=tools,
    )
    unable = Abstention(category="Missing Capability", rationale=rationale)
    outputs: dict[str, Any] = {
        "reader": "Read it.",
        "currency": "The rate is 2.",
        "asks": unable,
        "desk": "?",
    }
    return workflow, traced(workflow, outputs, question="What is the price?", **more)


def test_a_missing_capability_is_sought_only_where_it_is() -> None:
    @tool
    def convert_currency(amount: float) -> float:
        """Convert an amount."""
        return amount

    workflow, trace = ships(convert_currency, rationale="currency conversion")
    found = diagnose(workflow, trace)
    into = [source for source, receiver in pairs(found) if receiver == "asks"]
    assert into == ["currency"]
    assert found.unsupported == ()


def test_a_capability_that_no_node_has_is_named_and_no_edge_leads_to_who_asked_for_it() -> None:
    workflow, trace = ships(rationale="telephone calls")
    found = diagnose(workflow, trace)
    assert [receiver for _, receiver in pairs(found) if receiver == "asks"] == []
    assert found.unsupported == ("asks: telephone calls",)


def test_a_node_that_says_whose_work_it_is_hears_that_one_first() -> None:
    workflow, outputs = colleagues()
    for named in ("empty", "half", "full"):
        wrong = Abstention(category="Misrouting", rationale=f"this belongs to {named}")
        found = diagnose(workflow, traced(workflow, {**outputs, "asks": wrong}))
        assert pairs(found)[0] == (named, "asks")


def test_an_ambiguous_query_gets_a_question_and_never_a_trial() -> None:
    workflow, outputs = colleagues()
    unclear = Abstention(category="Ambiguous Query", rationale="two ships are called Meridian")
    found = diagnose(workflow, traced(workflow, {**outputs, "asks": unclear}))
    assert found.admission == "never"
    assert found.clarifying_questions == (
        "Which reading do you mean: two ships are called Meridian?",
    )


# --- the gap ---------------------------------------------------------------------------------


def test_the_gap_is_what_the_task_names_and_no_parent_delivered() -> None:
    workflow = flow(
        agent("a", "", "Doha has 31 gates."),
        agent("b"),
        agent("c", "Compare Doha, Rio and 31."),
        edges="a>b b>c",
    )
    trace = traced(workflow, {"a": "Fine.", "b": "Rio is big.", "c": "unknown"})
    gap = find_gap(workflow, trace, workflow.candidate_edges[0])
    assert [(item.text, item.named_in, item.is_held) for item in gap.items] == [
        ("Doha", "subtask", True),
        ("31", "subtask", True),
    ]


def test_without_items_in_the_task_those_of_the_question_are_taken() -> None:
    workflow = flow(agent("a", "", "Lisbon"), agent("b"), agent("c", "Answer."), edges="a>b b>c")
    trace = traced(workflow, {"a": "yes", "b": "no", "c": "unknown"})
    gap = find_gap(workflow, trace, workflow.candidate_edges[0])
    assert [(item.text, item.named_in) for item in gap.items] == [("Lisbon", "query")]


def test_what_an_abstaining_source_emitted_is_no_item_that_it_holds() -> None:
    workflow = flow(agent("a", "", "Paper."), agent("b"), agent("c", "Go on."), edges="a>b b>c")
    trace = traced(workflow, {"a": lacks("the Polaris"), "b": "y", "c": "z"}, question="well?")
    assert find_gap(workflow, trace, workflow.candidate_edges[0]).items == ()


def test_an_item_stands_in_the_gap_once() -> None:
    workflow = flow(agent("a"), agent("b"), agent("c", "Find 31."), edges="a>b b>c")
    outputs: dict[str, Any] = {"a": "Rome has 31.", "b": "no", "c": lacks("31 of Rio in Rio")}
    trace = traced(workflow, outputs, question="Rio or 31?")
    gap = find_gap(workflow, trace, workflow.candidate_edges[0])
    texts = [item.text for item in gap.items]
    assert sorted(set(texts)) == sorted(texts)


def test_else_the_gap_is_what_the_sources_output_adds() -> None:
    workflow = flow(agent("a"), agent("b"), agent("c", "Answer."), edges="a>b b>c")
    trace = traced(
        workflow, {"a": "The Meridian sank in 1912.", "b": "In 1912.", "c": "?"}, question="well?"
    )
    gap = find_gap(workflow, trace, workflow.candidate_edges[0])
    told = [(item.text, item.named_in, item.is_held) for item in gap.items]
    assert told == [("Meridian", "source", True)]


def test_a_subtask_of_the_query_takes_the_place_of_the_nodes_own() -> None:
    workflow = flow(agent("a"), agent("b"), agent("c", "Find Rio."), edges="a>b b>c")
    trace = traced(workflow, {"a": "x", "b": "y", "c": "z"}, subtasks={"c": "Find Doha."})
    gap = find_gap(workflow, trace, workflow.candidate_edges[0])
    assert [item.text for item in gap.items if item.named_in == "subtask"] == ["Doha"]


def test_a_diagnosis_of_ones_own_takes_the_place_of_the_heuristics() -> None:
    workflow = desk(agent("routes", "", "Doha."), agent("visas", "", "31."))
    model = ScriptedModel(lambda request: "Doha" if request.node == "routes" else "unknown")

    def nothing(workflow: Workflow, trace: Trace) -> Diagnosis:
        return Diagnosis(base_score=0.9, base_reasons=("mine",), edges=(), admission="headroom")

    result = splice.repair(workflow, QUESTION, model=model, diagnoser=nothing)
    assert (result.diagnosis.base_reasons, result.stop_reason) == (("mine",), "no_edge")


# --- features of the query -------------------------------------------------------------------


def test_features_of_a_query_are_read_off_the_base_run() -> None:
    workflow = flow(
        agent("routes", "Where is the stop?"),
        agent("visas", "How many hours?"),
        agent("desk", "Answer."),
        edges="routes>desk visas>desk",
    )
    trace = traced(
        workflow,
        {
            "routes": "The stop from Lisbon is Doha.",
            "visas": Abstention(category="Insufficient Input", rationale="The stop is missing."),
            "desk": "From Lisbon: unknown stop, perhaps Doha.",
        },
        tools={
            "routes": (
                ToolCall(name="look", arguments="{}", result="Doha", outcome="ok"),
                ToolCall(name="look", arguments="{}", result="no", outcome="error"),
            )
        },
    )
    found = query_features(workflow, trace, diagnose(workflow, trace))
    assert found["q_words"] == len(QUESTION.split())
    assert found["q_items"] == 1
    assert found["q_in_a"] == 1.0
    assert found["a_words"] == len((trace.answer or "").split())
    assert found["a_in_out"] == 1.0
    assert found["a_declines"] == 0.0
    assert (found["n_declining"], found["n_failed"], found["n_truncated"]) == (1, 0, 0)
    assert found["tool_errors"] == 0.5
    assert found["survive"] == 1.0
    # from, lisbon, unknown, stop, perhaps, doha: of these the other nodes emitted four.
    assert (found["a_told"], found["a_read"]) == (4 / 6, 4 / 6)
    assert (found["a_yes_no"], found["a_numbers"], found["n_telling"]) == (0, 0, 0)
    assert found["said_words"] == 6
    assert found["n_edges"] == 1
    assert found["best_edge"] == diagnose(workflow, trace).edges[0].p_decisive


@pytest.mark.parametrize(
    ("answer", "yes_no", "numbers", "told", "read", "telling"),
    [
        ("Doha", 0.0, 0, 1.0, 0.0, 1),
        ("Yes, in 1994.", 1.0, 1, 0.0, 2 / 3, 0),
        ("No", 1.0, 0, 0.0, 0.0, 0),
        ("I don't know.", 0.0, 0, 0.0, 0.0, 0),
    ],
)
def test_features_of_an_answer_say_what_it_is_and_who_knew_it(
    answer: str, yes_no: float, numbers: int, told: float, read: float, telling: int
) -> None:
    workflow = flow(agent("routes", "What is open in 1994?"), agent("desk"), edges="routes>desk")
    trace = traced(workflow, {"routes": "The stop is Doha.", "desk": answer})
    found = query_features(workflow, trace, diagnose(workflow, trace))
    assert (found["a_yes_no"], found["a_numbers"]) == (yes_no, numbers)
    assert (found["a_told"], found["a_read"], found["n_telling"]) == (told, read, telling)


@given(runs())
@settings(deadline=None)
def test_features_of_a_query_are_finite_and_shares_are_shares(run: tuple[Workflow, Trace]) -> None:
    workflow, trace = run
    found = query_features(workflow, trace, diagnose(workflow, trace))
    counts = {
        feature.name for feature in QUERY_FEATURES if feature.unit not in ("share", "yes or no")
    }
    assert counts < found.keys()
    assert all(value >= 0 and value == int(value) for value in map(found.get, counts))
    assert all(0 <= value <= 1 for name, value in found.items() if name not in counts)
