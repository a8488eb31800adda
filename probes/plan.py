"""Which probes a question gets: decided by its id and a seed, whatever ran before."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Annotated, Final, NamedTuple

from pydantic import Field

from probes.records import Arm, base_id, probe_id
from splice.executor import RunSettings
from splice.message import MessageSettings
from splice.queries import Split
from splice.records import CandidateEdge, Probability, Record
from splice.workflow import Workflow
from splice.workload import Example

CONTROLS: Final[tuple[Arm, ...]] = ("resample", "placebo")


class ProbeSettings(Record):
    """What makes two pools comparable; written into the manifest and never changed."""

    n_edges: Annotated[int, Field(ge=1)] = 2
    """Edges that are tried for each question, as far as there are so many."""
    control_share: Probability = 1 / 3
    """Share of the questions that also get a resample and a placebo."""
    n_rollouts: Annotated[int, Field(ge=1)] = 1
    """Base runs of each question, each with probes of its own."""
    resample_temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    """Temperature of nodes that are resampled, where it is above their own; None: their own, at
    which a model that always answers alike gives a copy."""
    metric: str | None = None
    """The score that classes are made of; None: the workload's first."""
    epsilon: Annotated[float, Field(ge=0.0)] = 0.01
    """Score changes up to this size are neutral. The paper calls a change of -0.0342 a loss."""
    seed: int = 0
    """Of the edges, the controls and the rollouts."""
    message: MessageSettings = MessageSettings()
    run: RunSettings = RunSettings()


def edges_in_order(workflow: Workflow, query_id: str, seed: int) -> tuple[CandidateEdge, ...]:
    """All candidate edges of a question in a uniformly random order.

    Its first `n` are a draw of `n` without replacement, and a larger `n` only adds to them.
    """
    edges = list(workflow.candidate_edges)
    random.Random(f"{seed}:edges:{query_id}").shuffle(edges)
    return tuple(edges)


def has_controls(query_id: str, seed: int, share: float) -> bool:
    """Whether a question belongs to the share that gets controls; a larger share only adds."""
    return random.Random(f"{seed}:controls:{query_id}").random() < share


class Question(NamedTuple):
    """One base run that the pool is to have."""

    workload: str
    split: Split
    example: Example
    workflow: Workflow
    rollout: int

    @property
    def base_id(self) -> str:
        """Id of its base record."""
        return base_id(self.workload, self.example.query.id, self.rollout)


class Planned(NamedTuple):
    """A probe that is to be made."""

    arm: Arm
    edge: CandidateEdge
    place: int
    """Place of the edge in the question's order."""


def next_probe(
    question: Question, settings: ProbeSettings, outcomes: Mapping[str, str]
) -> Planned | None:
    """The first probe of a question that has not been made; None: there are no more.

    Edges are tried in order until `n_edges` had something to deliver. The controls then share the
    receiver of the first of these.

    Args:
        question: with its workflow.
        settings: how many edges, and who gets controls.
        outcomes: outcome by id of the probes that were made.
    """
    base, query = question.base_id, question.example.query.id
    tried: list[Planned] = []
    for place, edge in enumerate(edges_in_order(question.workflow, query, settings.seed)):
        if len(tried) == settings.n_edges:
            break
        planned = Planned("edge", edge, place)
        outcome = outcomes.get(probe_id(base, "edge", edge.ends))
        if outcome is None:
            return planned
        if outcome != "no_message":
            tried.append(planned)
    if tried and has_controls(query, settings.seed, settings.control_share):
        for arm in CONTROLS:
            if probe_id(base, arm, tried[0].edge.ends) not in outcomes:
                return tried[0]._replace(arm=arm)
    return None
