"""Worlds: made-up questions on scripted agents, in which what an edge can carry is known.

In a planted world one missing edge of a question carries a fact that its receiver needs, can't read
and can't recover; in a null world no edge can help, so that a gain is chance, or a fault of whoever
measures it. Names are invented, and no two questions of a workload share one. Agents go by their
rendered prompt and nothing else. What they draw depends on seed, node, prompt and rollout, so an
equal request has an equal reply and a changed one is a fresh draw.

Every question asks for the town of a person who has some role at some building. One node, the
*knower*, has a table of people and towns; one node before it, the *finder*, looks up a person; the
others look up people who have nothing to do with the question, or pass on what the knower says.
What is found on worlds is synthetic: it checks the machinery and says nothing about real tasks.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

from splice.models.scripted import Responder
from splice.records import Document, NodeId, Query, Request
from splice.text import norm
from splice.workflow import Agent, Workflow
from splice.workload import Example, Scores, Workload

MISLEADING_SHARE = 0.4
"""Probability that a question of `misleading_upstream` has a source that is wrong."""

_N_ROWS = 4
_NOT_FOUND = "not found"


class Habits(NamedTuple):
    """How the agents of a world deal with a table that they look something up in."""

    p_right: float = 1.0
    """Probability of the right row, if it is known whose town is wanted; else it is another row."""
    p_believes: float = 1.0
    """Probability that a name in a message is preferred to the one that the task gives."""
    p_guesses: float = 0.0
    """Probability of taking any row rather than abstaining, if nobody says whose town is wanted."""


Draw: TypeAlias = Callable[[int, int], Workload]
"""Makes the workload of a seed with so many questions."""


class World(NamedTuple):
    """A kind of workload with the agents that answer it."""

    kind: Literal["planted", "null"]
    draw: Draw
    habits: Habits
    policies: tuple[str, ...]
    """What is run. In a null world none of these gains on average, whatever its selector adopts."""

    def agents(self, seed: int) -> Responder:
        """What answers the requests of the workload of the same seed."""
        return _responder(seed, self.habits)


# --- planted worlds --------------------------------------------------------------------------


def parallel_gap(seed: int, n_questions: int) -> Workload:
    """Two researchers, each with half of what is needed, and no edge between them.

    The finder looks up who the person is. The knower is asked for the town of "this person", can't
    tell whom that means, and abstains. Two further researchers find somebody else. The planted edge
    leads from finder to knower; which two of the four these are varies, so that a random edge is
    the planted one with probability 1/6.
    """
    return _workload("parallel_gap", _parallel(), seed, n_questions, lambda rng: _GAP)


def distant_ancestor(seed: int, n_questions: int) -> Workload:
    """A chain of five in which the fact is found early and the next node drops it.

    As `parallel_gap`, but the finder stands before the knower in the chain, with at least one node
    between them that reports its own finding alone. The planted edge skips what is between; a
    random edge is the planted one with probability 1/6.
    """
    return _workload("distant_ancestor", _chain(), seed, n_questions, lambda rng: _GAP)


def misleading_upstream(seed: int, n_questions: int) -> Workload:
    """As `parallel_gap`, but some sources are wrong, where their receiver needs nothing.

    With probability `MISLEADING_SHARE` the knower's task names the right person, and the finder's
    document states another one of the knower's table. A knower that believes the message then
    breaks a right answer. These questions have no gap; the others are those of `parallel_gap`.
    """

    def case(rng: random.Random) -> _Case:
        return _MISLED if rng.random() < MISLEADING_SHARE else _GAP

    return _workload("misleading_upstream", _parallel(), seed, n_questions, case)


def careless_receivers(seed: int, n_questions: int) -> Workload:
    """As `parallel_gap`, but most knowers guess a row of their table rather than abstain.

    So the base answer looks like any other, and one guess in four is right.
    """
    return _workload("careless_receivers", _parallel(), seed, n_questions, lambda rng: _GAP)


# --- null worlds -----------------------------------------------------------------------------


def no_gap(seed: int, n_questions: int) -> Workload:
    """Every node has what it needs, and no edge carries anything that could help.

    The knower's task names the person whom the finder finds as well. The knower never abstains; it
    takes the right row with a fixed probability, drawn afresh whenever its prompt changes. A trial
    is as likely to fix an answer as to break one.
    """
    return _workload("no_gap", _parallel(), seed, n_questions, lambda rng: _NO_GAP)


def placebo_edge(seed: int, n_questions: int) -> Workload:
    """As `no_gap`, but no source holds anything that has to do with the question.

    Messages are delivered that carry nothing, and the receiver draws again.
    """
    return _workload("placebo_edge", _parallel(), seed, n_questions, lambda rng: _PLACEBO)


def same_again(seed: int, n_questions: int) -> Workload:
    """The A/A comparison: questions as in `no_gap`, and a workflow that is run twice."""
    return _workload("same_again", _parallel(), seed, n_questions, lambda rng: _NO_GAP)


_CAREFUL = Habits()
_UNSTEADY = Habits(p_right=0.5)
_TRIALS = ("splice", "always", "random_edge")
_REDRAWS = (*_TRIALS, "rerun")
"""Where agents draw, a rerun may change something as well."""

WORLDS: Mapping[str, World] = {
    "parallel_gap": World("planted", parallel_gap, _CAREFUL, _TRIALS),
    "distant_ancestor": World("planted", distant_ancestor, _CAREFUL, _TRIALS),
    "misleading_upstream": World("planted", misleading_upstream, Habits(p_believes=0.7), _TRIALS),
    "careless_receivers": World("planted", careless_receivers, Habits(p_guesses=0.6), _REDRAWS),
    "no_gap": World("null", no_gap, _UNSTEADY, _REDRAWS),
    "placebo_edge": World("null", placebo_edge, _UNSTEADY, _REDRAWS),
    "same_again": World("null", same_again, _UNSTEADY, ("full_rerun",)),
}
"""All worlds by name."""


# --- questions -------------------------------------------------------------------------------


class _Case(NamedTuple):
    """Who knows what in one question."""

    kind: str
    is_told: bool
    """Whether the knower's task names the person whose town is asked for."""
    stated: Literal["right", "wrong", "unrelated"]
    """Whom the finder finds: that person; another one of the knower's table; somebody else."""


_GAP = _Case("gap", is_told=False, stated="right")
_MISLED = _Case("misled", is_told=True, stated="wrong")
_NO_GAP = _Case("no gap", is_told=True, stated="right")
_PLACEBO = _Case("placebo", is_told=True, stated="unrelated")


def _workload(
    name: str,
    workflow: Workflow,
    seed: int,
    n_questions: int,
    case_of: Callable[[random.Random], _Case],
) -> Workload:
    rng = random.Random(f"{seed}:{name}")
    names = _names(rng)
    return Workload(
        name=name,
        about="Synthetic: invented names, scripted agents. Scores say nothing about real tasks.",
        workflow=workflow,
        examples=tuple(
            _example(f"{name}-{seed}-{place}", workflow, case_of(rng), rng, names)
            for place in range(n_questions)
        ),
        metrics=("right",),
        score=right,
    )


def right(example: Example, answer: str | None) -> Scores:
    """1 if the answer is the town, else 0."""
    return {"right": float(norm(answer or "") == norm(example.reference["town"]))}


def _example(
    query_id: str, workflow: Workflow, case: _Case, rng: random.Random, names: Iterator[str]
) -> Example:
    edge = rng.choice(workflow.candidate_edges)
    finder, knower = edge.source, edge.receiver
    towns = {_person(names): next(names) for _ in range(_N_ROWS)}
    asked, other = rng.sample(list(towns), 2)
    role, building = rng.choice(_ROLES), _building(rng, names)
    documents = {knower: " ".join(f"{person} lives in {towns[person]}." for person in towns)}
    tasks = {knower: _where(asked if case.is_told else "this person")}
    after = workflow.hops[knower]
    for node in workflow.plan.order:
        if node == finder and case.stated != "unrelated":
            found = asked if case.stated == "right" else other
            tasks[node], documents[node] = _lookup(role, building, found, names)
        elif node not in after:
            unrelated = rng.choice(_ROLES), _building(rng, names), _person(names)
            tasks[node], documents[node] = _lookup(*unrelated, names)
        elif node != knower:
            [heard] = (parent for parent in workflow.plan.parents[node] if parent in after)
            tasks[node] = f"Report what {heard} found."
    return Example(
        query=Query(
            id=query_id,
            text=_where(f"the {role} of {building}"),
            context={node: (Document(text=text),) for node, text in documents.items()},
            subtasks=tasks,
        ),
        reference={"town": towns[asked]},
        kind=case.kind,
        gap_edges=((finder, knower),) if case == _GAP else (),
    )


def _where(person: str) -> str:
    return f"In which town does {person} live?"


def _lookup(role: str, building: str, person: str, names: Iterator[str]) -> tuple[str, str]:
    """A researcher's task, and its document, which says more than what is asked."""
    task = f"Who is the {role} of {building}?"
    document = (
        f"The {role} of {building} is {person}. {person} had a garden laid out by {_person(names)}."
    )
    return task, document


_ONSETS = ("b", "br", "d", "dr", "f", "g", "gr", "j", "k", "kl", "l", "m", "n", "p", "r", "t", "v")
_CODAS = ("l", "n", "r", "rn", "sk", "th", "x", "m")
_ROLES = ("keeper", "founder", "painter", "builder", "owner")
_BUILDINGS = ("Hall", "Mill", "Tower", "Bridge", "Lodge")


def _names(rng: random.Random) -> Iterator[str]:
    """Invented words with a capital, no two alike."""
    used: set[str] = set()
    while True:
        syllables = (rng.choice(_ONSETS) + rng.choice("aeiou") for _ in range(3))
        name = ("".join(syllables) + rng.choice(_CODAS)).capitalize()
        if name not in used:
            used.add(name)
            yield name


def _person(names: Iterator[str]) -> str:
    return f"{next(names)} {next(names)}"


def _building(rng: random.Random, names: Iterator[str]) -> str:
    return f"{next(names)} {rng.choice(_BUILDINGS)}"


# --- workflows -------------------------------------------------------------------------------


def _agent(node: NodeId) -> Agent:
    return Agent(
        id=node,
        role="You do one small task with what you are given.",
        reads_query=False,
        reply=f"Reply with a name only, or: {_NOT_FOUND}",
        abstention_phrase=_NOT_FOUND,
    )


@cache
def _parallel() -> Workflow:
    """Four researchers that don't hear each other, and a writer; six edges are missing."""
    researchers = ("first", "second", "third", "fourth")
    return Workflow(
        name="parallel",
        description="Four researchers with private documents report to a writer.",
        nodes=tuple(map(_agent, (*researchers, "writer"))),
        edges=tuple((node, "writer") for node in researchers),
        output="writer",
    )


@cache
def _chain() -> Workflow:
    """Five agents, each of which hears the one before it alone; six edges are missing."""
    agents = ("first", "second", "third", "fourth", "fifth")
    return Workflow(
        name="chain",
        description="Five agents with private documents, each of which reports to the next.",
        nodes=tuple(map(_agent, agents)),
        edges=tuple(pairwise(agents)),
        output=agents[-1],
    )


# --- agents ----------------------------------------------------------------------------------

_BLOCK = re.compile(r"^(.*):\n((?:> .*(?:\n|$))+)", re.MULTILINE)
_TASK = re.compile(r"^Your task: (.*)$", re.MULTILINE)
_LOOKUP = re.compile(r"Who is the (.+ of .+)\?")
_REPORT = re.compile(r"Report what (\w+) found\.")
_WHERE = re.compile(r"In which town does (.+) live\?")
_ROW = re.compile(r"(\w+ \w+) lives in (\w+)\.")


def _responder(seed: int, habits: Habits) -> Responder:
    """Agents that go by what stands in their prompt."""

    def respond(request: Request) -> str:
        prompt = request.messages[-1].content
        blocks: dict[str, str] = {
            head: body.replace("> ", "") for head, body in _BLOCK.findall(prompt)
        }
        documents = blocks.pop("Your documents", "")
        [task] = _TASK.findall(prompt)
        if found := _REPORT.fullmatch(task):
            return blocks.get(f"From {found[1]}", _NOT_FOUND).strip()
        if found := _LOOKUP.fullmatch(task):
            stated = re.search(rf"The {re.escape(found[1])} is (\w+ \w+)\.", documents)
            return stated[1] if stated else _NOT_FOUND
        [asked] = _WHERE.findall(task)
        towns = dict(_ROW.findall(documents))
        named = [person for person in towns if any(person in text for text in blocks.values())]
        rng = random.Random(f"{seed}:{request.node}:{request.rollout}:{prompt}")
        return _town(towns, asked, named, habits, rng)

    return respond


def _town(
    towns: Mapping[str, str],
    asked: str,
    named: Sequence[str],
    habits: Habits,
    rng: random.Random,
) -> str:
    """What a knower replies.

    Args:
        towns: its table.
        asked: whom its task names, if anybody that it knows.
        named: people of the table that others told it about.
        habits: how careful it is.
        rng: of this very request.
    """
    people = list(towns)
    person = asked if asked in towns else None
    if named and (person is None or rng.random() < habits.p_believes):
        person = named[0]
    if person is None:
        is_guessing = rng.random() < habits.p_guesses
        return towns[rng.choice(people)] if is_guessing else _NOT_FOUND
    if rng.random() >= habits.p_right:
        person = rng.choice([other for other in people if other != person])
    return towns[person]
