"""Who holds which fact, who gets which task, and which edges are missing for it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from skeletons.strategyqa.questions import Question, references, spelled_out
from splice.records import Document, Edge, NodeId

Origin: TypeAlias = Literal["question", "planned"]

RESEARCHERS: tuple[NodeId, ...] = ("first", "second", "third")
N_DISTRACTORS = 2
"""Facts about something else for each researcher. Without them whoever holds one fact could copy
it, whatever the task; with many more, prompts outgrow small models."""


def deal(
    question: Question, questions: Sequence[Question]
) -> Mapping[NodeId, tuple[Document, ...]]:
    """Documents of each researcher: its facts among distractors, in an order drawn by the id.

    Facts go round: fact 1 to `first`, fact 4 to `first` again. Distractors are facts of other
    questions of the same file that start from another page, one of each.
    """
    rng = random.Random(question.id)
    foreign = [other for other in questions if other.term != question.term]
    drawn = rng.sample(foreign, min(len(foreign), N_DISTRACTORS * len(RESEARCHERS)))
    distractors = [rng.choice(other.facts) for other in drawn]
    dealt = {}
    for place, name in enumerate(RESEARCHERS):
        own = [*_round(question.facts, place), *_round(distractors, place)]
        rng.shuffle(own)
        dealt[name] = tuple(Document(text=fact) for fact in own)
    return dealt


def subtasks(question: Question, origin: Origin) -> Mapping[NodeId, str]:
    """What each researcher is to find: something for the whole question, or its own steps.

    Steps go round as facts do. A researcher for whom no step is left gets the whole question.
    """
    whole = f"Which fact in your documents helps to answer this: {question.question}"
    if origin == "question":
        return dict.fromkeys(RESEARCHERS, whole)
    tasks = {}
    for place, name in enumerate(RESEARCHERS):
        steps = _round(question.decomposition, place)
        tasks[name] = " ".join(map(spelled_out, steps)) or whole
    return tasks


def gap_edges(question: Question, origin: Origin) -> tuple[Edge, ...] | None:
    """Edges that bring a researcher what its step refers to; None: not known.

    A step that mentions `#k` needs what the researcher of step k finds. That this one holds the
    fact for it is known only where each step has a fact of its own, that is, where there are as
    many facts as steps, and a researcher for each.
    """
    steps = question.decomposition
    if origin == "question" or len(steps) != len(question.facts) or len(steps) > len(RESEARCHERS):
        return None
    edges = []
    for number, step in enumerate(steps, 1):
        for needed in references(step):
            if not 0 < needed < number:
                return None
            edges.append((RESEARCHERS[needed - 1], RESEARCHERS[number - 1]))
    return tuple(sorted(edges, key=lambda edge: tuple(map(RESEARCHERS.index, edge))))


def _round(values: Sequence[str], place: int) -> Sequence[str]:
    """What falls to the researcher at `place` if values go round."""
    return values[place :: len(RESEARCHERS)]
