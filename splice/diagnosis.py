"""Diagnosis: is there room for improvement, which edge is missing, what does it lack.

Everything here reads the base trace alone. The two scores come from documented heuristics with
hand-set weights; nothing was fitted. Learned models take the place of `base_score` and
`score_edge` behind the same signatures.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Literal, TypeAlias

from splice.abstention import clarifying_question, is_declining, missing_item
from splice.material import delivered, emitted, material, readable, told
from splice.records import (
    Abstention,
    CandidateEdge,
    Diagnosis,
    EdgeScore,
    Gap,
    GapItem,
    NodeId,
    NodeRun,
    Trace,
)
from splice.text import contains, is_refusal, items, norm, token_f1, words
from splice.workflow import Agent, Workflow

Diagnoser: TypeAlias = Callable[[Workflow, Trace], Diagnosis]

_MAX_SOURCE_ITEMS = 8
"""Items taken from the source's output when neither subtask nor question names one."""


# --- base score ------------------------------------------------------------------------------


def relevance(workflow: Workflow, trace: Trace, node: NodeId) -> float:
    """Share of the question's content words that a node's role and task contain, in [0, 1]."""
    asked = words(trace.query.text)
    described = workflow.subtask(node, trace.query)
    own = workflow.by_id[node]
    if isinstance(own, Agent):
        described = f"{described} {own.role}"
    return len(asked & words(described)) / max(1, len(asked))


def declines(run: NodeRun) -> bool:
    """Whether a node said that it has no answer, in the typed form or in words."""
    return run.status == "abstained" or (run.status == "ok" and is_refusal(run.output))


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
    concerned = _most_concerned(workflow, trace)
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


def _most_concerned(workflow: Workflow, trace: Trace) -> frozenset[NodeId]:
    """Nodes whose role and task share the most words with the question."""
    shares = {run.node: relevance(workflow, trace, run.node) for run in trace.node_runs}
    most = max(shares.values())
    return frozenset(node for node, share in shares.items() if share == most > 0)


def query_features(workflow: Workflow, trace: Trace, diagnosis: Diagnosis) -> dict[str, float]:
    """What is known about a query after its base run; what a learned base score is fitted on.

    Args:
        workflow: that recorded `trace`.
        trace: the base run.
        diagnosis: made of the same trace by `diagnose`.

    Returns:
        q_words, q_items: words of the question, and entities and numbers in it.
        a_words: words of the answer; 0 if there is none.
        a_declines: 1 if the answer declines or is missing.
        q_in_a: share of the question's entities and numbers that the answer repeats.
        a_in_out: token F1 of the answer and the output node's whole output.
        n_declining, n_failed, n_truncated: nodes that declined; that delivered nothing; whose
            reply was cut off.
        concerned_declines: 1 if a node that the question concerns most declined.
        tool_errors: share of tool calls that gave an error.
        agree: mean token F1 over pairs of nodes with a common successor; 0 without such a pair.
        survive: share of the content words of all other nodes that reach the output node's output.
        best_edge: highest predicted probability of the candidate edges that may be tried.
        n_edges: candidate edges that may be tried.
        Ratios are in [0, 1], and 0 where there is nothing to count.

    Source: method 2.3; the list is our own.
    """
    runs = trace.by_node
    last = emitted(runs[workflow.output])
    said = frozenset().union(
        *(words(emitted(run)) for run in trace.node_runs if run.node != workflow.output)
    )
    asked = items(trace.query.text)
    answer = "" if is_declining(trace.answer) else trace.answer or ""
    declining = {run.node for run in trace.node_runs if declines(run)}
    calls = [call for run in trace.node_runs for call in run.tool_calls]
    scores = [scored.p_decisive for scored in diagnosis.edges]
    return {
        "q_words": float(len(trace.query.text.split())),
        "q_items": float(len(asked)),
        "a_words": float(len(answer.split())),
        "a_declines": float(not answer),
        "q_in_a": _share(asked, answer),
        "a_in_out": token_f1(answer, last),
        "n_declining": float(len(declining)),
        "n_failed": float(
            sum(run.status in ("failed", "skipped", "withheld") for run in trace.node_runs)
        ),
        "n_truncated": float(sum(run.is_truncated for run in trace.node_runs)),
        "concerned_declines": float(bool(declining & _most_concerned(workflow, trace))),
        "tool_errors": sum(call.outcome != "ok" for call in calls) / max(1, len(calls)),
        "agree": _agreement(workflow, trace),
        "survive": len(said & words(last)) / max(1, len(said)),
        "best_edge": max(scores, default=0.0),
        "n_edges": float(len(scores)),
    }


def _agreement(workflow: Workflow, trace: Trace) -> float:
    """Mean token F1 of what nodes with a common successor emitted."""
    pairs = {pair for run in trace.node_runs for pair in itertools.combinations(run.expected, 2)}
    found = [token_f1(*(emitted(trace.by_node[node]) for node in pair)) for pair in pairs]
    return sum(found) / max(1, len(found))


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


def edge_features(workflow: Workflow, trace: Trace, edge: CandidateEdge) -> dict[str, float]:
    """What is known about an edge before a trial.

    Returns:
        dist_t: edges on the shortest path from receiver to output node, >= 0.
        hop: edges on the shortest path from source to receiver, 0 if there is none.
        parallel: 1 if no path leads from source to receiver.
        coverage: share of the receiver's need that the source's material holds; need = entities
            and numbers in the receiver's task.
        uncovered_need: share of the need that the receiver's parents did not deliver.
        fills, fills_output: share of the uncovered need in the source's material / output.
        novel: share of the content words of the source's output that the receiver could not read.
        redundancy: cosine of the word sets of the source's output and the receiver's parents.
        bridge: 1 if the source's output names an item that the receiver's own documents contain and
            that nothing else told the receiver.
        w_declines: 1 if the receiver abstained or declined.
        named_held: share of the items that the receiver's abstention names which the source holds.
        u_silent: 1 if the source emitted nothing but a refusal, or nothing.
        tool_unused: number of tool returns of the source of which its output shows no item.
        agree_w: token F1 of the receiver's output and the answer.
        relevance: share of the question's content words in the receiver's role and task.
        Ratios are in [0, 1], and 0 where there is nothing to count.
    """
    source, receiver = trace.by_node[edge.source], trace.by_node[edge.receiver]
    held = "\n".join(piece.text for piece in material(workflow, trace, edge.source))
    output = emitted(source)
    u_silent = not output or is_refusal(output)
    parents = "\n".join(delivered(trace.by_node[parent]) for parent in receiver.received)
    need = items(workflow.subtask(edge.receiver, trace.query))
    uncovered = [item for item in need if not contains(parents, item)]
    known = readable(workflow, trace, edge.receiver)
    said, read = words(output), words(known)
    beside = words(parents)
    named = items(receiver.abstention.rationale) if receiver.abstention else ()
    return {
        "dist_t": float(workflow.distances[edge.receiver]),
        "hop": float(workflow.hops[edge.source].get(edge.receiver, 0)),
        "parallel": float(edge.kind == "parallel_branch"),
        "coverage": _share(need, held),
        "uncovered_need": len(uncovered) / max(1, len(need)),
        "fills": _share(uncovered, held),
        "fills_output": _share(uncovered, output),
        "novel": 0.0 if u_silent else len(said - read) / max(1, len(said)),
        "redundancy": len(said & beside) / max(1.0, math.sqrt(len(said) * len(beside))),
        "bridge": float(not u_silent and bool(bridges(workflow, trace, edge))),
        "w_declines": float(declines(receiver)),
        "named_held": _share(named, held),
        "u_silent": float(u_silent),
        "tool_unused": float(
            sum(
                not any(contains(output, item) for item in items(call.result))
                for call in source.tool_calls
            )
        ),
        "agree_w": token_f1(receiver.output or "", trace.answer or ""),
        "relevance": relevance(workflow, trace, edge.receiver),
    }


def _share(wanted: Collection[str], text: str) -> float:
    return sum(contains(text, item) for item in wanted) / max(1, len(wanted))


def bridges(workflow: Workflow, trace: Trace, edge: CandidateEdge) -> tuple[str, ...]:
    """Items of the source's output that the receiver's documents contain and nobody told it.

    Two-hop gaps look like this: the source has found which entry of the receiver's documents the
    question is about.
    """
    documents = "\n".join(
        document.shown for document in workflow.private(edge.receiver, trace.query)
    )
    heard = told(workflow, trace, edge.receiver)
    named = telling_items(emitted(trace.by_node[edge.source]))
    return tuple(item for item in named if contains(documents, item) and not contains(heard, item))


_COUNT = re.compile(r"[-+]?\d{1,2}")


def telling_items(output: str) -> tuple[str, ...]:
    """Items of an output that can tell what something is about: a bare count such as 3 can't."""
    return tuple(item for item in named_items(output) if not _COUNT.fullmatch(item))


def named_items(output: str) -> tuple[str, ...]:
    """Entities and numbers of an output; a short output without any is taken as an item itself."""
    found = items(output)
    short = output.strip().strip(".\"'")
    if short and len(short.split()) <= 4 and norm(short) not in {norm(item) for item in found}:
        return (short, *found)
    return found


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
    ranked = sorted(
        (score_edge(workflow, trace, edge) for edge in allowed),
        key=lambda scored: (
            not _is_named_source(workflow, scored.edge, abstaining),
            -scored.p_decisive,
        ),
    )
    return Diagnosis(
        base_score=score,
        base_reasons=reasons,
        edges=tuple(ranked),
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
    own = workflow.by_id[node]
    if not isinstance(own, Agent):
        return False
    tools = (workflow.tools_by_name[name].spec for name in own.tools)
    described = " ".join([own.role, own.subtask, *(f"{t.name} {t.description}" for t in tools)])
    return bool(words(rationale) & words(described.replace("_", " ")))


def _is_named_source(
    workflow: Workflow, edge: CandidateEdge, abstaining: Mapping[NodeId, Abstention]
) -> bool:
    """Whether the receiver says that its request belongs to this very source."""
    abstention = abstaining.get(edge.receiver)
    return (
        abstention is not None
        and abstention.category == "Misrouting"
        and contains(abstention.rationale, edge.source)
    )


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
