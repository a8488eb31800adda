"""The records of a probe pool: one for each base run, one for each probe.

They are the file format. Texts of node runs stand in the trace store beside them and are referred
to by the id of their trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from splice.ledger import Spending
from splice.queries import Split
from splice.records import (
    CandidateEdge,
    Diagnosis,
    Edge,
    Evidence,
    NodeId,
    Probability,
    Record,
    SpliceMessage,
    digest,
)
from splice.workload import Scores

POOL_VERSION = 1
"""Version of the pool format. Raised when a reader of the old form would misread."""

Arm: TypeAlias = Literal["edge", "resample", "placebo"]
"""`edge`: a message over a missing edge. `resample`: the same receiver once more, without edge and
message. `placebo`: a message of the same length that says nothing about the query."""

OutcomeClass: TypeAlias = Literal["beneficial", "neutral", "harmful"]
"""Sign of the score change of a probe (method 2.1)."""


class BaseRecord(Record):
    """A question with its base run: one line of `bases-*.jsonl`."""

    schema_version: Literal[1] = 1
    id: str
    workload: str
    split: Split
    query_id: str
    query: str
    """Digest of the whole query, so that another question under the same id is noticed."""
    rollout: int
    question_kind: str | None = None
    """Type of the question as its data set names it."""
    workflow: str
    """Fingerprint of the workflow that it ran on."""
    answer: str | None = None
    scores: Scores | None = None
    """None if the run failed."""
    score: float | None = None
    """The score that probes are compared by."""
    diagnosis: Diagnosis | None = None
    features: Mapping[str, float] = {}
    """What is known about the query after its base run; see `splice.features.QUERY_FEATURES`."""
    n_candidates: int = 0
    """Missing forward edges of its workflow."""
    gap_edges: tuple[Edge, ...] | None = None
    """True gap edges, where the workload knows them."""
    failed_nodes: tuple[NodeId, ...] = ()
    """Nodes that failed by what their model wrote; the run counts."""
    failure: str | None = None
    """Why there is no base run to probe: a model that could not be reached, a scorer that raised.
    None: there is one."""
    trace: str | None = None
    """Id of the trace in the trace store of the same number."""
    ledger: Spending = Spending()
    elapsed_s: float = 0.0


class ProbeRecord(Record):
    """One probe: one line of `probes-*.jsonl`."""

    schema_version: Literal[1] = 1
    id: str
    base: str
    """Id of the base record."""
    workload: str
    split: Split
    query_id: str
    rollout: int
    arm: Arm
    edge: CandidateEdge
    """The edge that was tried; of a control, the one whose receiver it shares."""
    place: int
    """Place of the edge in the random order of the question's candidate edges, from 0."""
    is_gap: bool | None = None
    """Whether the edge is a true gap edge; None: not known."""
    p_decisive: Probability
    """What the diagnosis predicted for the edge."""
    features: Mapping[str, float]
    """What is known about the edge before the trial; see `splice.features.EDGE_FEATURES`."""
    outcome: Literal["done", "no_message", "stopped", "failed"]
    """`no_message`: the source holds nothing that the receiver lacks, so nothing ran. `stopped`:
    the trial ended without a candidate answer, as the engine stops one. `failed`: something outside
    of the workflow went wrong; tried again with `--retry-failed`."""
    reason: str | None = None
    """Why the probe is not done."""
    message: SpliceMessage | None = None
    rerun: tuple[NodeId, ...] = ()
    """Nodes that ran again."""
    evidence: Evidence | None = None
    answer: str | None = None
    """The candidate answer."""
    scores: Scores | None = None
    delta: float | None = None
    """Score of the candidate answer less that of the base answer."""
    outcome_class: OutcomeClass | None = None
    is_decisive: bool | None = None
    """Whether the candidate answer differs from the base answer, byte for byte."""
    trace: str | None = None
    """Id of the trial's trace in the trace store of the same number."""
    ledger: Spending = Spending()
    """What the message and the trial used, beyond the base run."""
    elapsed_s: float = 0.0


def base_id(workload: str, query_id: str, rollout: int) -> str:
    """Id of a base record: the same wherever and in whatever order it is made."""
    return digest(f"base\0{workload}\0{query_id}\0{rollout}")[:20]


def probe_id(base: str, arm: Arm, edge: Edge) -> str:
    """Id of a probe record."""
    return digest(f"probe\0{base}\0{arm}\0{edge[0]}\0{edge[1]}")[:20]


def classify(delta: float, epsilon: float) -> OutcomeClass:
    """The class of a score change.

    >>> classify(0.2, 0.01), classify(0.0, 0.01), classify(-0.0342, 0.01)
    ('beneficial', 'neutral', 'harmful')
    """
    if delta > epsilon:
        return "beneficial"
    return "harmful" if delta < -epsilon else "neutral"
