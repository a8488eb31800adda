"""Process evidence: what a trial changed inside the workflow (method 2.7).

Three questions are answered from the two traces and the message, never from a reference answer: how
far did the receiver move, where did its new content come from, did the change survive?

A node that has no output, or that abstains or does nothing but decline, counts as the empty text:
the words of a refusal are no content, so dropping them is no loss.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from splice.abstention import parse_reply
from splice.material import delivered
from splice.records import (
    Edge,
    Evidence,
    NodeId,
    NodeRun,
    Query,
    SpliceMessage,
    Trace,
    Trial,
)
from splice.text import contains, is_refusal, last_answer_line, norm, numbers, token_f1, words

Units: TypeAlias = Callable[[str], frozenset[str]]
"""What a text is made of: its content words, or its numbers."""


def gather_evidence(
    base: Trace,
    trial: Trial,
    *,
    query: Query,
    subtask: str,
    private: Sequence[str],
    edges: Sequence[Edge],
) -> Evidence:
    """Compare a trial with the base run.

    Args:
        base: the base run.
        trial: the receiver, and what its change reaches, run again with one message.
        query: what both runs worked on.
        subtask: the receiver's, for this query.
        private: texts that only the receiver could read.
        edges: of the workflow, without the one that was tried.

    Source: SPLICE A.4 for the word sets; the fields are our own.
    """
    message = trial.message
    before, after = base.by_node.get(message.receiver), trial.trace.by_node.get(message.receiver)
    old, new = _content(before), _content(after)
    readable = _readable(base, before, query=query, subtask=subtask, private=private)
    w = _compare(words, old=old, new=new, message=message.text, readable=readable)
    n = _compare(numbers, old=old, new=new, message=message.text, readable=readable)
    pointed_at = _pointed_at(message, private)
    old_answer, new_answer = _answer_text(base.answer), _answer_text(trial.trace.answer)
    is_moved = norm(old) != norm(new)
    was_refusal, is_now_refusal = is_refusal(old_answer), is_refusal(new_answer)
    return Evidence(
        move_w=1 - _share(w.old & w.new, w.old | w.new) if w.old | w.new else 0.0,
        move_len=_relative_change(len(old.split()), len(new.split())),
        n_add=len(w.added),
        n_del=len(w.dropped),
        msg_only=_share(w.added & (w.message - w.readable), w.added),
        ctx_only=_share(w.added & (w.readable - w.message), w.added),
        both=_share(w.added & w.message & w.readable, w.added),
        untraceable=_share(w.added - w.message - w.readable, w.added),
        uptake=_share(w.added & w.message, w.message),
        is_ignored=not (w.added & w.message or n.added & n.message),
        del_supported=_share(w.dropped & w.readable, w.dropped),
        focus_new=_share((w.added | n.added) & pointed_at, w.added | n.added),
        focus_old=_share((w.dropped | n.dropped) & pointed_at, w.dropped | n.dropped),
        num_msg=_share(n.added & n.message, n.added),
        num_ctx=_share(n.added & (n.readable - n.message), n.added),
        num_untraceable=_share(n.added - n.message - n.readable, n.added),
        num_dropped=_share(n.dropped, n.old),
        survival=_survival(base, trial.trace, w.added, message.receiver, edges),
        surv_final=_share(w.added & (words(new_answer) - words(old_answer)), w.added),
        is_absorbed=is_moved and norm(new_answer) == norm(old_answer),
        ans_change=1 - token_f1(old_answer, new_answer),
        ans_len_ratio=_ratio(len(new_answer.split()), len(old_answer.split())),
        is_number_changed=numbers(old_answer) != numbers(new_answer),
        copies_source=_copying(base.by_node.get(message.source), old_answer, new_answer),
        is_abstention_resolved=_declines(before) and _answers(after),
        is_abstention_new=any(
            _declines(run) and not _declines(base.by_node.get(run.node))
            for run in trial.trace.node_runs
        ),
        is_answer_refusal_resolved=was_refusal and not is_now_refusal,
        is_answer_refusal_new=is_now_refusal and not was_refusal,
    )


class _Comparison(NamedTuple):
    """The sets of method 2.7, of words or of numbers."""

    old: frozenset[str]
    new: frozenset[str]
    message: frozenset[str]
    readable: frozenset[str]

    @property
    def added(self) -> frozenset[str]:
        return self.new - self.old

    @property
    def dropped(self) -> frozenset[str]:
        return self.old - self.new


def _compare(
    units: Units, *, old: str, new: str, message: str, readable: Sequence[str]
) -> _Comparison:
    could_read = frozenset[str]().union(*map(units, readable))
    return _Comparison(units(old), units(new), units(message), could_read)


def _readable(
    base: Trace, receiver: NodeRun | None, *, query: Query, subtask: str, private: Sequence[str]
) -> list[str]:
    """Every text that the receiver could read in the base run."""
    parents = receiver.received if receiver is not None else ()
    returned = [call.result for call in receiver.tool_calls] if receiver is not None else []
    heard = [delivered(base.by_node.get(parent)) for parent in parents]
    return [query.text, subtask, *heard, *private, *returned]


def _pointed_at(message: SpliceMessage, private: Sequence[str]) -> frozenset[str]:
    """Words and numbers of the receiver's documents that name what the message is about."""
    if message.focus is None:
        return frozenset()
    about = (message.focus, *message.also)
    found = [text for text in private if any(contains(text, name) for name in about)]
    return frozenset().union(*map(words, found), *map(numbers, found))


def _declines(run: NodeRun | None) -> bool:
    """Whether a node says, in the typed form or in prose, that it can't act.

    A node that failed or emitted nothing says nothing at all.
    """
    if run is None or run.status == "abstained":
        return run is not None
    return run.status == "ok" and bool((run.output or "").strip()) and is_refusal(run.output)


def _answers(run: NodeRun | None) -> bool:
    return run is not None and run.status == "ok" and not is_refusal(run.output)


def _content(run: NodeRun | None) -> str:
    """What a node's run emitted, if that is a contribution to the task."""
    return run.output or "" if run is not None and _answers(run) else ""


def _answer_text(answer: str | None) -> str:
    """The answer; the empty text where it is missing or the output node's abstention."""
    if answer is None or parse_reply(answer).kind == "abstention":
        return ""
    return answer


def _share(part: Collection[str], whole: Collection[str]) -> float:
    return len(part) / len(whole) if whole else 0.0


def _ratio(new: int, old: int) -> float:
    return new / old if old else 0.0


def _relative_change(old: int, new: int) -> float:
    return (new - old) / max(1, old)


def _copying(source: NodeRun | None, old_answer: str, new_answer: str) -> float:
    """How much nearer the new answer is to the source's answer; 0 if the source has none."""
    content = _content(source)
    if not content:
        return 0.0
    source_answer = last_answer_line(content) or content
    return token_f1(new_answer, source_answer) - token_f1(old_answer, source_answer)


def _survival(
    base: Trace,
    trial: Trace,
    added: frozenset[str],
    receiver: NodeId,
    edges: Sequence[Edge],
) -> tuple[float, ...]:
    """Mean share of the receiver's added words that the nodes at depth 1, 2, ... added too."""
    return tuple(
        sum(_share(added & _added_words(base, trial, node), added) for node in nodes) / len(nodes)
        for nodes in _by_depth(receiver, edges)
    )


def _added_words(base: Trace, trial: Trace, node: NodeId) -> frozenset[str]:
    old, new = base.by_node.get(node), trial.by_node.get(node)
    return frozenset() if new is old else words(_content(new)) - words(_content(old))


def _by_depth(receiver: NodeId, edges: Sequence[Edge]) -> list[list[NodeId]]:
    """Descendants of the receiver by length of the shortest path, nearest first."""
    below: Mapping[NodeId, list[NodeId]] = {source: [] for source, _ in edges}
    for source, target in edges:
        below[source].append(target)
    seen = {receiver}
    levels = [[receiver]]
    while levels[-1]:
        reached = dict.fromkeys(child for node in levels[-1] for child in below.get(node, ()))
        levels.append([node for node in reached if node not in seen])
        seen.update(levels[-1])
    return levels[1:-1]


def evidence_block(evidence: Evidence) -> str:
    """The evidence as text, one line a group, in fixed order and with two decimals.

    The same block is shown to people and to language-model selectors, in training and in use.
    """
    e = evidence
    depths = [f"depth {depth} {_two(share)}" for depth, share in enumerate(e.survival, start=1)]
    lines = (
        f"movement: receiver {_two(e.move_w)}, length {_signed(e.move_len)}, "
        f"words added {e.n_add}, words dropped {e.n_del}",
        f"origin of added words: message only {_two(e.msg_only)}, own context only "
        f"{_two(e.ctx_only)}, both {_two(e.both)}, neither {_two(e.untraceable)}",
        f"uptake: {_two(e.uptake)} of the message's words, message ignored {_yes(e.is_ignored)}",
        f"loss: {_two(e.del_supported)} of the dropped words are in the receiver's own context",
        f"documents about what the message names: {_two(e.focus_new)} of what was added, "
        f"{_two(e.focus_old)} of what was dropped",
        f"origin of added numbers: message {_two(e.num_msg)}, own context {_two(e.num_ctx)}, "
        f"neither {_two(e.num_untraceable)}; share of numbers dropped {_two(e.num_dropped)}",
        f"survival of added words: {', '.join([*depths, f'answer {_two(e.surv_final)}'])}; "
        f"absorbed {_yes(e.is_absorbed)}",
        f"answer: change {_two(e.ans_change)}, length ratio {_two(e.ans_len_ratio)}, "
        f"numbers changed {_yes(e.is_number_changed)}",
        f"agreement with the source's answer: {_signed(e.copies_source)}",
        f"abstention: receiver's resolved {_yes(e.is_abstention_resolved)}, a new one "
        f"{_yes(e.is_abstention_new)}",
        f"refusal in the answer: resolved {_yes(e.is_answer_refusal_resolved)}, new "
        f"{_yes(e.is_answer_refusal_new)}",
    )
    return "\n".join(lines)


def _two(number: float) -> str:
    return f"{number:z.2f}"


def _signed(number: float) -> str:
    return f"{number:+z.2f}"


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"
