"""Interactions: requests that reached a sub-agent, what it replied, and what was right to do."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

from splice.abstention import SOLVABLE
from splice.records import AbstentionCategory, Record

Label: TypeAlias = AbstentionCategory | Literal["Solvable"]
"""What is right to do with a request: carry it out, or abstain and say which of the four it is."""

LABELS: Final[tuple[Label, ...]] = (SOLVABLE, *get_args(AbstentionCategory))
"""Every label, in the order of tables."""


class Interaction(Record):
    """One request that reached a sub-agent."""

    id: str
    source: str
    """Data set or workload that it comes from."""
    agent: str
    """Name of the agent that received it."""
    context: str
    """What the agent is told about itself: role, functions, limits, the other agents."""
    query: str
    reply: str | None = None
    """What the agent replied; None: it was not asked."""
    label: Label | None = None
    """What is right to do; None: nobody has judged it."""
    also_right: tuple[Label, ...] = ()
    """Labels that are as right, where whoever labelled it does not tell them apart."""
    rationale: str | None = None
    """Why it is right to abstain, in at most 40 words; None: it is not, or nobody has said why."""
