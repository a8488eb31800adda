"""Which missing edges are gaps, by the annotation (labels only; nothing that runs reads them).

A missing edge from u to w is a gap if for some step i:

    G1  u holds i: the paragraph of step i is among its documents;
    G2  w needs i: a step that w is asked for, and whose paragraph it holds, needs the answer of
        step i; or w is the writer and the answer to the question needs step i;
    G3  w can't read i: no document of w, nor the question, nor its task states i (has both what i
        is about and its answer); what parents report is taken to be their own steps;
    G4  w can't recover i: its answer stands neither in the question nor in w's task.

What a model may know by heart is not tested.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from skeletons.multihop.dealing import Hand, own_steps
from skeletons.multihop.hosts import WRITER
from skeletons.multihop.questions import Question, Step
from splice.records import Document, Edge, NodeId
from splice.text import contains
from splice.workflow import Workflow


def gap_edges(
    question: Question,
    workflow: Workflow,
    hands: Mapping[NodeId, Hand],
    subtasks: Mapping[NodeId, str],
) -> tuple[Edge, ...]:
    """The missing edges of the workflow that are gaps, in the order of its candidate edges.

    Args:
        question: the question with its steps.
        workflow: who reads whom.
        hands: what each researcher holds.
        subtasks: what each researcher is asked.
    """
    found = []
    for edge in workflow.candidate_edges:
        source, receiver = edge.source, edge.receiver
        material = Material(
            documents=hands[receiver].documents if receiver in hands else (),
            texts=(question.text, subtasks.get(receiver, "")),
        )
        if any(
            holds(hands[source], question.steps[number])
            and is_unreadable(material, question.steps[number])
            and is_unrecoverable(material, question.steps[number])
            for number in needed(question, receiver, hands)
        ):
            found.append((source, receiver))
    return tuple(found)


class Material(NamedTuple):
    """What a node reads."""

    documents: tuple[Document, ...]
    """Its own ones."""
    texts: tuple[str, str]
    """The question, whether or not the node is shown it, and its task."""


def holds(hand: Hand, step: Step) -> bool:
    """G1: whether the paragraph of a step is in a hand."""
    return step.paragraph in hand.paragraphs


def needed(question: Question, node: NodeId, hands: Mapping[NodeId, Hand]) -> tuple[int, ...]:
    """G2: steps whose answers a node needs, ascending.

    A researcher has no use for an answer where it doesn't hold the paragraph to look up with it.
    """
    if node == WRITER:
        return _decisive(question)
    asked = own_steps(question)[node]
    own = [number for number in asked if holds(hands[node], question.steps[number])]
    return tuple(sorted({n for number in own for n in question.steps[number].needs}))


def _decisive(question: Question) -> tuple[int, ...]:
    """Steps that the answer is drawn from: those that no other step needs.

    An answer that is a choice among what the question names needs all of them, as the names stand
    in the first steps and what decides in the last.
    """
    numbers = range(len(question.steps))
    used = {n for step in question.steps for n in step.needs}
    last = tuple(n for n in numbers if n not in used)
    is_choice = len(last) > 1 and contains(question.text, question.answer)
    return tuple(numbers) if is_choice else last


def is_unreadable(material: Material, step: Step) -> bool:
    """G3: whether nothing that a node reads states the fact of a step.

    What a parent reports is taken to be its own steps, and nobody else holds these.
    """
    texts = [f"{document.title}: {document.text}" for document in material.documents]
    texts += material.texts
    return not any(_states(text, step) for text in texts)


def is_unrecoverable(material: Material, step: Step) -> bool:
    """G4: whether a step's answer stands neither in the question nor in the node's task."""
    return step.answer is None or not any(contains(text, step.answer) for text in material.texts)


def _states(text: str, step: Step) -> bool:
    """Whether one text has both what a step is about and what it finds."""
    if step.answer is None or not contains(text, step.answer):
        return False
    return any(contains(text, subject) for subject in step.subjects)
