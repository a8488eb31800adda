"""The workflows that the questions are put to."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

from splice.workflow import Agent, Workflow, load_workflow

Host: TypeAlias = Literal["parallel", "chain"]

Declining: TypeAlias = Literal["phrase", "typed", "none"]
"""How a researcher says that it can't do its part: by the phrase of the TOML file, in the typed form
of agents that may abstain, or not at all."""

RESEARCHERS = ("first", "second", "third")
"""Nodes with private paragraphs; what the first one finds the others may need."""

WRITER = "writer"
"""The only node that reads the question."""

_MAY_ABSTAIN = frozenset(RESEARCHERS[1:])
"""Those whose tasks may only describe whom they are about; the first one's always names it."""

_HAS_TO_BE_TOLD = (
    'If your task only describes the person or thing, as "this person" does, you need to be told '
    "who or what it is."
)
_N_TOKENS = 96
"""For a rationale of forty words and the JSON around it; one that is cut off is no abstention."""


@cache
def workflow(host: Host) -> Workflow:
    """The workflow of a host, the same object at each call."""
    return load_workflow(Path(__file__).with_name(f"{host}.toml"))


@cache
def variant(host: Host, declining: Declining) -> Workflow:
    """The workflow of a host, with another way to decline; with `phrase` it is the host's own."""
    own = workflow(host)
    if declining == "phrase":
        return own
    nodes = tuple(
        _without_phrase(node, declining) if isinstance(node, Agent) else node for node in own.nodes
    )
    return own.changed(name=f"{own.name}-{declining}", nodes=nodes)


def _without_phrase(node: Agent, declining: Declining) -> Agent:
    if declining == "typed" and node.id in _MAY_ABSTAIN:
        return node.model_copy(
            update={
                "role": f"{_own_part(node.role)} {_HAS_TO_BE_TOLD}",
                "model": node.model.model_copy(update={"max_tokens": _N_TOKENS}),
                "may_abstain": True,
                "abstention_phrase": None,
            }
        )
    if declining == "none" and node.id in RESEARCHERS:
        return node.model_copy(update={"role": _own_part(node.role), "abstention_phrase": None})
    return node


def _own_part(role: str) -> str:
    """A role up to the sentence that asks for the phrase."""
    return role.partition(" If ")[0]
