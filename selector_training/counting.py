"""Counting by question: rows of one question are averaged first, and intervals resample questions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from selector_training.tables import Question
from splice.statistics import Gain, paired_gain

SEED: Final = 0
"""Of shuffles and intervals: what is reported does not hang on a choice of the reader's."""


def by_question(questions: Sequence[Question], values: Sequence[float]) -> list[float]:
    """Mean by question, in the order of the questions."""
    found: dict[Question, list[float]] = defaultdict(list)
    for question, value in zip(questions, values, strict=True):
        found[question].append(value)
    return [sum(own) / len(own) for _, own in sorted(found.items())]


def gain(values: Sequence[float]) -> Gain:
    """Mean of what questions gained, with its interval."""
    return paired_gain([0.0] * len(values), values, seed=SEED)
