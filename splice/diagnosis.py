"""Diagnosis: is there room for improvement, which edge is missing, what does it lack.

Everything here reads the base trace alone. The two scores come from documented heuristics with
hand-set weights; nothing was fitted. `splice.learned` puts fitted scores in their place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from operator import attrgetter
from typing import Literal, TypeAlias

from splice.abstention import clarifying_question, is_declining, missing_item
from splice.features import bridges, declines, edge_features, most_concerned
from splice.material import delivered, emitted, material, readable
from splice.records import (
    Abstention,
    CandidateEdge,
    Diagnosis,
    EdgeScore,
    Gap,
    GapItem,
    NodeId,
    Trace,
)
from splice.registry import named_agent, what_it_does
from splice.text import contains, items, norm, words
from splice.workflow import Agent, Workflow

Diagnoser: TypeAlias = Callable[[Workflow, Trace], Diagnosis]

_MAX_SOURCE_ITEMS = 8
"""Items taken from the source's output when neither subtask nor question names one."""


# --- base score ------------------------------------------------------------------------------


def base_score(workflow: Workflow, trace: Trace) -> tuple[float, tuple[str, ...]]:
    """Predicted score of the base answer in [0.05, 0.95], and what moved it.

    Heuristic: an answer that declines is almost surely wrong. Any other answer starts at 0.7 and
    loses 0.25 if a node that the question concerns declined, 0.2 if a node failed or was skipped,
    0.1 if a reply was cut off. The order of these is measured (declining nodes are the strongest
    sign of a gap), their sizes are not.
    """
    if is_declining(trace.answer):
        return 0.05, ("the answer declines",)
    score, reasons = 0.7, []
    declining = [run.node for run in trace.node_runs if declines(run)]
    concerned = most_concerned(workflow, trace)
    asked = [node for node in declining if node in concerned]
    if asked:
        score -= 0.25
        reasons.append(f"{', '.join(asked)} declined although the question concerns it")
    elif declining:
        score -= 0.05
        reasons.append(f"{', '.join(declining)} declined")
    broken = [
        run.node for run in trace.node_runs if run.status in ("failed", "skipped", "withheld")
    ]
    if broken:
        score -= 0.2
        reasons.append(f"{', '.join(broken)} delivered nothing")
    if cut := [run.node for run in trace.node_runs if run.is_truncated]:
        score -= 0.1
        reasons.append(f"the reply of {', '.join(cut)} was cut off")
    return max(0.05, score), tuple(reasons) or ("every node answered",)


# --- edge scores -----------------------------------------------------------------------------

WEIGHTS: Mapping[str, float] = {
    "w_declines": 2.0,
    "bridge": 3.0,
    "named_held": 1.0,
    "fills": 1.0,
    "relevance": 1.5,
    "novel": 0.5,
    "redundancy": -0.5,
    "dist_t": -0.3,
    "u_silent": -3.0,
}
"""Hand-set weights of a logistic score. An item that the source has found and the receiver's own
documents know is the strongest sign: it says that this edge supplies something. A declining receiver
says only that something is missing, and comes next; distance to the end dilutes."""

INTERCEPT = -2.5
"""With no sign at all an edge changes the answer rarely."""


def score_edge(workflow: Workflow, trace: Trace, edge: CandidateEdge) -> EdgeScore:
    """Predicted probability that a trial of `edge` changes the answer, from `WEIGHTS`."""
    features = edge_features(workflow, trace, edge)
    z = INTERCEPT + sum(weight * features[name] for name, weight in WEIGHTS.items())
    return EdgeScore(
        edge=edge,
        p_decisive=1.0 / (1.0 + math.exp(-z)),
        features=features,
        reason=_edge_reason(workflow, trace, edge, features),
    )


def _edge_reason(
    workflow: Workflow, trace: Trace, edge: CandidateEdge, features: Mapping[str, float]
) -> str:
    said = []
    if features["w_declines"]:
        said.append(f"{edge.receiver} declined")
    if features["bridge"]:
        found = ", ".join(repr(item) for item in bridges(workflow, trace, edge)[:3])
        said.append(f"{edge.source} names {found}, which {edge.receiver}'s documents know")
    if features["named_held"] or features["fills"]:
        said.append(f"{edge.source} holds what {edge.receiver} lacks")
    if features["u_silent"]:
        said.append(f"{edge.source} itself found nothing")
    return "; ".join(said) or "no clear sign of a gap"


# --- the diagnosis ---------------------------------------------------------------------------


def diagnose(workflow: Workflow, trace: Trace) -> Diagnosis:
    """Say whether the base answer has room for improvement and which edges may close a gap."""
    score, reasons = base_score(workflow, trace)
    abstaining = {run.node: run.abstention for run in trace.node_runs if run.abstention is not None}
    allowed = [
        edge for edge in workflow.candidate_edges if _is_allowed(workflow, trace, edge, abstaining)
    ]
    ranked = rank_edges(workflow, trace, [score_edge(workflow, trace, edge) for edge in allowed])
    return Diagnosis(
        base_score=score,
        base_reasons=reasons,
        edges=ranked,
        admission=_admission(ranked, abstaining),
        clarifying_questions=tuple(
            clarifying_question(abstention)
            for abstention in abstaining.values()
            if abstention.category == "Ambiguous Query"
        ),
        missing_inputs=tuple(
            f"{node}: {missing_item(abstention)}"
            for node, abstention in abstaining.items()
            if abstention.category == "Insufficient Input"
        ),
        unsupported=tuple(
            f"{node}: {abstention.rationale}"
            for node, abstention in abstaining.items()
            if abstention.category == "Missing Capability"
            and not any(edge.receiver == node for edge in allowed)
        ),
    )


def rank_edges(
    workflow: Workflow,
    trace: Trace,
    edges: Iterable[EdgeScore],
    *,
    by: Callable[[EdgeScore], float] = attrgetter("p_decisive"),
) -> tuple[EdgeScore, ...]:
    """The edges by their chances, the best first.

    Before them those from a source that the receiver itself named as the right one for its request.

    Args:
        workflow: that recorded `trace`.
        trace: the base run.
        edges: to put in order; equal ones keep theirs.
        by: the higher, the earlier.
    """
    named = {
        run.node: named_agent(workflow, run.node, run.abstention)
        for run in trace.node_runs
        if run.abstention is not None
    }
    return tuple(
        sorted(
            edges,
            key=lambda scored: (
                named.get(scored.edge.receiver) != scored.edge.source,
                -by(scored),
            ),
        )
    )


def _admission(
    ranked: Collection[EdgeScore], abstaining: Mapping[NodeId, Abstention]
) -> Literal["headroom", "abstention", "never"]:
    """Whether a trial may be made, and whether it goes before others (method 7.2).

    An abstention admits a trial only where an edge could resolve it: one into the abstaining node,
    from a node that has something to say.
    """
    categories = {abstention.category for abstention in abstaining.values()}
    if "Ambiguous Query" in categories or not ranked:
        return "never"
    resolvable = any(
        scored.edge.receiver in abstaining
        and not scored.features["u_silent"]
        and (scored.features["bridge"] or scored.features["named_held"] or scored.features["fills"])
        for scored in ranked
    )
    return "abstention" if resolvable else "headroom"


def _is_allowed(
    workflow: Workflow,
    trace: Trace,
    edge: CandidateEdge,
    abstaining: Mapping[NodeId, Abstention],
) -> bool:
    """Whether an edge could carry anything that its receiver could use."""
    if not material(workflow, trace, edge.source):
        return False
    abstention = abstaining.get(edge.receiver)
    if abstention is not None and abstention.category == "Missing Capability":
        return _has_capability(workflow, edge.source, abstention.rationale)
    return True


def _has_capability(workflow: Workflow, node: NodeId, rationale: str) -> bool:
    """Whether a node's tools or description mention what is called unsupported."""
    if not isinstance(workflow.by_id[node], Agent):
        return False
    described = what_it_does(workflow, node).replace("_", " ")
    return bool(words(rationale) & words(described))


# --- the gap ---------------------------------------------------------------------------------


def find_gap(workflow: Workflow, trace: Trace, edge: CandidateEdge) -> Gap:
    """What the receiver of an edge needs and can't read (method 2.5).

    Items that its abstention names come first, then entities and numbers of its task that no parent
    delivered. If there are none, those of the question; if there are none either, items of the
    source's output that the receiver could not read.
    """
    receiver = trace.by_node[edge.receiver]
    parents = "\n".join(delivered(trace.by_node[parent]) for parent in receiver.received)
    held = "\n".join(piece.text for piece in material(workflow, trace, edge.source))
    named = items(receiver.abstention.rationale) if receiver.abstention else ()
    found = [
        GapItem(text=item, named_in="abstention", is_held=contains(held, item)) for item in named
    ]
    subtask = workflow.subtask(edge.receiver, trace.query)
    for text, where in ((subtask, "subtask"), (trace.query.text, "query")):
        lacking = [item for item in items(text) if not contains(parents, item)]
        seen = {norm(item.text) for item in found}
        found += [
            GapItem(text=item, named_in=where, is_held=contains(held, item))
            for item in lacking
            if norm(item) not in seen
        ]
        if found:
            break
    if not any(item.is_held for item in found):
        known = readable(workflow, trace, edge.receiver)
        seen = {norm(item.text) for item in found}
        new = [
            item
            for item in items(emitted(trace.by_node[edge.source]))
            if contains(held, item) and not contains(known, item) and norm(item) not in seen
        ]
        found += [
            GapItem(text=item, named_in="source", is_held=True) for item in new[:_MAX_SOURCE_ITEMS]
        ]
    return Gap(edge=edge, items=tuple(found))
