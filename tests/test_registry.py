"""Which agent, or which supported function, an abstention's rationale names."""

from __future__ import annotations

import pytest

from splice.records import Abstention, AbstentionCategory
from splice.registry import alternatives_for, named_agent, what_it_does
from splice.tools import tool
from splice.workflow import Agent, Function, Workflow


@tool
def reserve_table(place: str) -> str:
    """Reserve a table."""
    return place


WORKFLOW = Workflow(
    nodes=(
        Agent(id="bus_desk", role="You are a colleague.", subtask="Find bus journeys."),
        Agent(id="desk", role="You are a colleague.", subtask="Answer travellers."),
        Agent(id="meals", role="You are a colleague.", tools=("reserve_table",)),
        Function(id="sums", subtask="Add up prices.", call=lambda given: "0"),
        Agent(id="asks", role="You are a colleague.", subtask="Look up visa rules."),
    ),
    edges=(("bus_desk", "asks"), ("desk", "asks"), ("meals", "asks"), ("sums", "asks")),
    output="asks",
    tools=(reserve_table,),
    elsewhere={
        "RentalCars_2": "Rents out cars for days.",
        "Hotels_1": "Finds hotels and books rooms.",
    },
)


def lost(rationale: str, category: AbstentionCategory = "Misrouting") -> Abstention:
    return Abstention(category=category, rationale=rationale)


@pytest.mark.parametrize(
    ("rationale", "agent"),
    [
        ("This belongs to bus_desk.", "bus_desk"),
        ('ask "Hotels_1", which does hotels', "Hotels_1"),
        ("RentalCars_2 handles this", "RentalCars_2"),
        # In another spelling.
        ("The Bus Desk should do it", "bus_desk"),
        ("busdesk", "bus_desk"),
        ("ask rental cars 2", "RentalCars_2"),
        ("HOTELS-1", "Hotels_1"),
        # As it is spelled goes before in another spelling.
        ("ask meals, for the desk", None),
        ("ask desk; the Meals are something else", "desk"),
        # A name inside a longer one is not named.
        ("this is for the bus desk", "bus_desk"),
        ("this is for the desk", "desk"),
        ("desktop publishing", None),
        # By what it does.
        ("An agent that finds hotels should do this.", "Hotels_1"),
        ("it needs a rented car", "RentalCars_2"),
        ("somebody must reserve a table first", "meals"),
        ("the prices must be added up", "sums"),
        ("this is about buses", "bus_desk"),
        # More than one, or none.
        ("ask bus_desk or Hotels_1", None),
        ("a journey by bus, with hotels and rooms to book", "Hotels_1"),
        ("hotel and bus", None),
        ("This is the work of another agent.", None),
        ("I look up visa rules, and this is something else", None),
        ("asks", None),
        ("?!", None),
    ],
)
def test_a_rationale_names_one_agent_or_none(rationale: str, agent: str | None) -> None:
    assert named_agent(WORKFLOW, "asks", lost(rationale)) == agent


def test_the_abstaining_node_is_never_the_one_that_is_named() -> None:
    assert named_agent(WORKFLOW, "bus_desk", lost("not for bus_desk but for asks")) == "asks"
    assert named_agent(WORKFLOW, "bus_desk", lost("this is not for the bus desk")) is None


@pytest.mark.parametrize(
    "category", ["Ambiguous Query", "Insufficient Input", "Missing Capability"]
)
def test_only_a_misrouted_request_belongs_to_an_agent(category: AbstentionCategory) -> None:
    assert named_agent(WORKFLOW, "asks", lost("bus_desk", category)) is None


def test_two_names_that_differ_in_spelling_alone_are_told_apart_only_by_spelling() -> None:
    twins = Workflow(
        nodes=(Agent(id="asks", role="r"),),
        edges=(),
        output="asks",
        elsewhere={"bus_desk": "Finds buses.", "BusDesk": "Cleans buses."},
    )
    assert named_agent(twins, "asks", lost("ask BusDesk")) == "BusDesk"
    assert named_agent(twins, "asks", lost("ask the bus desk")) is None


def test_abilities_say_what_an_agent_does() -> None:
    able = Agent(id="n1", role="r", abilities=("FindTrain: a railway journey",))
    workflow = Workflow(
        nodes=(able, Agent(id="asks", role="r")), edges=(("n1", "asks"),), output="asks"
    )
    assert "FindTrain" in what_it_does(workflow, "n1")
    assert named_agent(workflow, "asks", lost("finding trains")) == "n1"


def test_a_long_rationale_is_read_as_far_as_one_may_go() -> None:
    rationale = "bus desk " * 50_000 + "ask Hotels_1"
    assert named_agent(WORKFLOW, "asks", lost(rationale)) == "bus_desk"


# --- alternatives ----------------------------------------------------------------------------

DESK = Agent(
    id="desk",
    role="r",
    alternatives={
        "BookBus": "FindBus",
        "cancel_ticket": "give the number of the office",
        "Cancel bus ticket": "FindBus",
        "pay by card": "pay in cash",
        "pay by cheque": "pay in cash",
    },
)


@pytest.mark.parametrize(
    ("rationale", "found"),
    [
        ("BookBus is not supported", ("FindBus",)),
        ("I can not book a bus.", ("FindBus",)),
        ("booking buses", ("FindBus",)),
        ("no way to cancel tickets", ("give the number of the office",)),
        # The longer name, where both would do.
        ("to cancel a bus ticket", ("FindBus",)),
        # Half of the words is not enough.
        ("I can't book a hotel", ()),
        ("I have no web access", ()),
        # Several mean the same.
        ("I can neither pay by card nor pay by cheque", ("pay in cash",)),
    ],
)
def test_alternatives_are_those_of_the_function_that_is_named(
    rationale: str, found: tuple[str, ...]
) -> None:
    assert alternatives_for(DESK, lost(rationale, "Missing Capability")) == found


def test_functions_that_are_meant_alike_are_all_offered_for_in_order() -> None:
    desk = DESK.model_copy(update={"alternatives": {"book bus": "b", "book train": "a"}})
    both = lost("book bus, book train", "Missing Capability")
    assert alternatives_for(desk, both) == ("b", "a")


def test_other_abstentions_and_other_agents_have_no_alternatives() -> None:
    assert alternatives_for(DESK, lost("BookBus")) == ()
    assert alternatives_for(Agent(id="a", role="r"), lost("BookBus", "Missing Capability")) == ()
