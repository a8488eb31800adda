"""What learned parts may look at: features of a query, of an edge, and of a trial.

Each is a number with a name, a unit, a range and a definition, and says which stage it may read.
Features of queries and edges are computed from the base trace alone; those of a trial from its
process evidence and the two answers. None can see a reference answer, as no argument holds one.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection
from typing import Final, Literal, NamedTuple, TypeAlias

from splice.abstention import is_declining
from splice.material import delivered, emitted, material, readable, told
from splice.records import CandidateEdge, Diagnosis, Evidence, NodeId, NodeRun, Trace
from splice.text import contains, is_refusal, items, norm, numbers, token_f1, tokens, words
from splice.workflow import Agent, Workflow

Unit: TypeAlias = Literal[
    "words", "items", "nodes", "edges", "calls", "depths", "share", "yes or no", "ratio"
]


class Feature(NamedTuple):
    """One number that a learned part may look at."""

    name: str
    unit: Unit
    low: float
    high: float
    """Range that it can't leave; infinite where there is no bound."""
    definition: str
    stage: Literal["base", "trial"]
    """The latest stage of which it reads anything."""

    @property
    def kind(self) -> Literal["int", "float", "bool"]:
        """What it is in tables."""
        if self.unit == "yes or no":
            return "bool"
        return "float" if self.unit in ("share", "ratio") else "int"


def _share_of(name: str, definition: str, stage: Literal["base", "trial"] = "base") -> Feature:
    """A share in [0, 1]; 0 where there is nothing to count."""
    return Feature(name, "share", 0.0, 1.0, definition, stage)


def _yes(name: str, definition: str, stage: Literal["base", "trial"] = "base") -> Feature:
    return Feature(name, "yes or no", 0.0, 1.0, definition, stage)


def _number(
    name: str, unit: Unit, definition: str, stage: Literal["base", "trial"] = "base"
) -> Feature:
    return Feature(name, unit, 0.0, math.inf, definition, stage)


QUERY_FEATURES: Final = (
    _number("q_words", "words", "Words of the question."),
    _number("q_items", "items", "Entities and numbers in the question."),
    _number("a_words", "words", "Words of the base answer; 0 if it declines or is missing."),
    _yes("a_declines", "The base answer declines or is missing."),
    _share_of("q_in_a", "Share of the question's entities and numbers that the answer repeats."),
    _yes("a_yes_no", "The base answer begins with yes or no."),
    _number("a_numbers", "items", "Numbers in the base answer."),
    _share_of("a_told", "Share of the answer's tokens that the other nodes emitted."),
    _share_of("a_read", "Share of the answer's tokens that the other nodes could read."),
    _number("n_telling", "nodes", "Other nodes whose output contains the answer."),
    _number("said_words", "words", "Words that the other nodes emitted."),
    _share_of("a_in_out", "Token F1 of the answer and the whole output of the output node."),
    _number("n_declining", "nodes", "Nodes that declined."),
    _number("n_failed", "nodes", "Nodes that delivered nothing: failed, skipped or withheld."),
    _number("n_truncated", "nodes", "Nodes whose reply was cut off."),
    _yes("concerned_declines", "A node that the question concerns most declined."),
    _share_of("tool_errors", "Share of tool calls that gave an error."),
    _share_of("agree", "Mean token F1 over pairs of nodes with a common successor."),
    _share_of("survive", "Share of the other nodes' content words in the output node's output."),
    _share_of("best_edge", "Highest score that the hand-set weights give to an edge."),
    _number("n_edges", "edges", "Candidate edges that may be tried."),
)
"""Features of a query after its base run. The other nodes are all but the output node."""

EDGE_FEATURES: Final = (
    _number("dist_t", "edges", "Edges on the shortest path from the receiver to the output node."),
    _number(
        "hop", "edges", "Edges on the shortest path from source to receiver; 0: there is none."
    ),
    _yes("parallel", "No path leads from source to receiver."),
    _share_of(
        "coverage",
        "Share of the receiver's need that the source's material holds; the need is the entities "
        "and numbers in its task.",
    ),
    _share_of("uncovered_need", "Share of the receiver's need that its parents did not deliver."),
    _share_of("fills", "Share of the uncovered need in the source's material."),
    _share_of("fills_output", "Share of the uncovered need in the source's output."),
    _share_of("novel", "Share of the source's content words that the receiver could not read."),
    _share_of("redundancy", "Cosine of the word sets of the source and of the receiver's parents."),
    _yes(
        "bridge",
        "The source's output names an item that the receiver's own documents contain and that "
        "nothing else told the receiver.",
    ),
    _yes("w_declines", "The receiver abstained or declined."),
    _share_of("named_held", "Share of what the receiver's abstention names that the source holds."),
    _yes("u_silent", "The source emitted nothing, or nothing but a refusal."),
    _number(
        "tool_unused", "calls", "Tool returns of the source of which its output shows nothing."
    ),
    _share_of("agree_w", "Token F1 of the receiver's output and the base answer."),
    _share_of(
        "relevance", "Share of the question's content words in the receiver's role and task."
    ),
)
"""Features of an edge before a trial."""

BY_HAND: Final = _share_of(
    "by_hand", "Chance that the trial changes the answer, by the hand-set weights."
)
"""What learned parts may add to: with few pools to learn from it puts true gap edges first more
often than they do."""


EVIDENCE_FEATURES: Final = (
    _share_of("move_w", "How far the receiver's words moved: 1 - Jaccard index.", "trial"),
    Feature(
        "move_len", "ratio", -1.0, math.inf, "Relative change of the receiver's length.", "trial"
    ),
    _number("n_add", "words", "Content words that the receiver added.", "trial"),
    _number("n_del", "words", "Content words that the receiver dropped.", "trial"),
    _share_of("msg_only", "Share of the added words that only the message has.", "trial"),
    _share_of(
        "ctx_only", "Share of the added words that only the receiver's context has.", "trial"
    ),
    _share_of("both", "Share of the added words that message and context have.", "trial"),
    _share_of("untraceable", "Share of the added words that neither has.", "trial"),
    _share_of("uptake", "Share of the message's words that the receiver added.", "trial"),
    _yes("is_ignored", "The receiver added nothing of the message.", "trial"),
    _share_of("del_supported", "Share of the dropped words that its context supports.", "trial"),
    _share_of(
        "focus_new",
        "Share of what was added that documents about the message's focus hold.",
        "trial",
    ),
    _share_of(
        "focus_old",
        "Share of what was dropped that documents about the message's focus hold.",
        "trial",
    ),
    _share_of("num_msg", "Share of the added numbers that the message has.", "trial"),
    _share_of("num_ctx", "Share of the added numbers that only the context has.", "trial"),
    _share_of("num_untraceable", "Share of the added numbers that neither has.", "trial"),
    _share_of("num_dropped", "Share of the receiver's numbers that it dropped.", "trial"),
    _share_of("surv_final", "Share of the added words that reach the answer.", "trial"),
    _yes("is_absorbed", "The receiver moved and the answer stayed the same.", "trial"),
    _share_of("ans_change", "1 - token F1 of the two answers.", "trial"),
    _number("ans_len_ratio", "ratio", "Words of the new answer over words of the old.", "trial"),
    _yes("is_number_changed", "The numbers in the answer differ.", "trial"),
    Feature(
        "copies_source",
        "ratio",
        -1.0,
        1.0,
        "How much nearer the new answer is to the source's answer.",
        "trial",
    ),
    _yes("is_abstention_resolved", "The receiver abstained before and answers now.", "trial"),
    _yes("is_abstention_new", "A node abstains that did not before.", "trial"),
    _yes("is_answer_refusal_resolved", "The old answer declined, the new one does not.", "trial"),
    _yes("is_answer_refusal_new", "The new answer declines and the old one did not.", "trial"),
    _share_of("survival_first", "Share of the added words that reach depth 1.", "trial"),
    _share_of("survival_last", "Share of the added words at the deepest descendants.", "trial"),
    _number("n_depths", "depths", "Depths of descendants that the receiver has.", "trial"),
)
"""Features of a trial: the fields of `Evidence`. Of the survival by depth there are the nearest and
the farthest: how many depths there are differs by workflow and receiver."""

ATTRIBUTION: Final = frozenset(
    {"msg_only", "ctx_only", "both", "untraceable", "num_msg", "num_ctx", "num_untraceable"}
)
"""Evidence features that say where new content came from."""

ANSWER_FEATURES: Final = (
    _share_of("base_score", "Predicted score of the base answer."),
    _yes("base_declines", "The base answer declines or is missing."),
    _number("base_words", "words", "Words of the base answer; 0 if there is none."),
    _yes("new_declines", "The candidate answer declines or is missing.", "trial"),
    _number("new_words", "words", "Words of the candidate answer; 0 if there is none.", "trial"),
)
"""What a selector knows beside the evidence."""

CASE_FEATURES: Final = (*EVIDENCE_FEATURES, *ANSWER_FEATURES)
"""Everything that a selector of numbers may look at."""


# --- queries and edges -----------------------------------------------------------------------


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


def most_concerned(workflow: Workflow, trace: Trace) -> frozenset[NodeId]:
    """Nodes whose role and task share the most words with the question."""
    shares = {run.node: relevance(workflow, trace, run.node) for run in trace.node_runs}
    most = max(shares.values())
    return frozenset(node for node, share in shares.items() if share == most > 0)


def query_features(workflow: Workflow, trace: Trace, diagnosis: Diagnosis) -> dict[str, float]:
    """What is known about a query after its base run: a value for each of `QUERY_FEATURES`.

    Args:
        workflow: that recorded `trace`.
        trace: the base run.
        diagnosis: made of the same trace by `splice.diagnosis.diagnose`.

    Source: method 2.3; the list is our own.
    """
    runs = trace.by_node
    last = emitted(runs[workflow.output])
    others = [run for run in trace.node_runs if run.node != workflow.output]
    outputs = [emitted(run) for run in others]
    said = frozenset().union(*map(words, outputs))
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
        "a_yes_no": float(tokens(answer)[:1] in (["yes"], ["no"])),
        "a_numbers": float(len(numbers(answer))),
        "a_told": _told_share(answer, outputs),
        "a_read": _told_share(answer, [readable(workflow, trace, run.node) for run in others]),
        "n_telling": float(sum(bool(answer) and contains(text, answer) for text in outputs)),
        "said_words": float(sum(len(text.split()) for text in outputs)),
        "a_in_out": token_f1(answer, last),
        "n_declining": float(len(declining)),
        "n_failed": float(
            sum(run.status in ("failed", "skipped", "withheld") for run in trace.node_runs)
        ),
        "n_truncated": float(sum(run.is_truncated for run in trace.node_runs)),
        "concerned_declines": float(bool(declining & most_concerned(workflow, trace))),
        "tool_errors": sum(call.outcome != "ok" for call in calls) / max(1, len(calls)),
        "agree": _agreement(workflow, trace),
        "survive": len(said & words(last)) / max(1, len(said)),
        "best_edge": max(scores, default=0.0),
        "n_edges": float(len(scores)),
    }


def _told_share(answer: str, texts: Collection[str]) -> float:
    """Share of the distinct tokens of an answer that stand in any of some texts."""
    wanted = set(tokens(answer))
    held = set[str]().union(*map(tokens, texts))
    return len(wanted & held) / max(1, len(wanted))


def _agreement(workflow: Workflow, trace: Trace) -> float:
    """Mean token F1 of what nodes with a common successor emitted."""
    pairs = {pair for run in trace.node_runs for pair in itertools.combinations(run.expected, 2)}
    # In one order, as sums of floats depend on it.
    found = [token_f1(*(emitted(trace.by_node[node]) for node in pair)) for pair in sorted(pairs)]
    return sum(found) / max(1, len(found))


def edge_features(workflow: Workflow, trace: Trace, edge: CandidateEdge) -> dict[str, float]:
    """What is known about an edge before a trial: a value for each of `EDGE_FEATURES`.

    Source: method 2.4 for the named ones; the formulas and the rest are our own.
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


# --- trials ----------------------------------------------------------------------------------


def evidence_features(evidence: Evidence) -> dict[str, float]:
    """A value for each of `EVIDENCE_FEATURES`; 0 where the receiver has no descendants."""
    survival = evidence.survival
    derived = {
        "survival_first": survival[0] if survival else 0.0,
        "survival_last": survival[-1] if survival else 0.0,
        "n_depths": float(len(survival)),
    }
    return {
        feature.name: derived[feature.name]
        if feature.name in derived
        else float(getattr(evidence, feature.name))
        for feature in EVIDENCE_FEATURES
    }


def case_features(
    base_score: float, base_answer: str | None, candidate_answer: str | None, evidence: Evidence
) -> dict[str, float]:
    """A value for each of `CASE_FEATURES`."""
    return {
        **evidence_features(evidence),
        "base_score": base_score,
        "base_declines": float(is_declining(base_answer)),
        "base_words": float(len((base_answer or "").split())),
        "new_declines": float(is_declining(candidate_answer)),
        "new_words": float(len((candidate_answer or "").split())),
    }
