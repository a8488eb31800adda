"""What each researcher is asked: from the form of the question, or from its decomposition.

Neither has an answer in it: where a task needs what an earlier step finds, it says how to find it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from skeletons.multihop.forms import by_form
from skeletons.multihop.hosts import RESEARCHERS
from skeletons.multihop.plans import planned
from skeletons.multihop.questions import Question
from splice.records import NodeId
from splice.text import contains

Origin: TypeAlias = Literal["form", "planned"]


def subtasks(question: Question, origin: Origin) -> Mapping[NodeId, str]:
    """The task of each researcher; from the form, both later ones have the same.

    A planned task that would give a step's answer away, as the same name may stand in the wording
    of another step, is replaced by the one from the form.
    """
    first, then = by_form(question.text)
    tasks = dict(zip(RESEARCHERS, (first, then, then), strict=True))
    if origin == "planned":
        tasks |= {
            name: task for name, task in planned(question).items() if not _reveals(question, task)
        }
    return tasks


def _reveals(question: Question, task: str) -> bool:
    answers = [question.answer, *(step.answer for step in question.steps)]
    return any(
        answer is not None and contains(task, answer) and not contains(question.text, answer)
        for answer in answers
    )
