"""What may resolve an abstention: the readings that its rationale names, an item held elsewhere.

Both are found by rules on the wording and without a model. What they find is offered to the user or
to the node; neither decides anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from splice.material import is_finding, material
from splice.prompts import one_line
from splice.records import Abstention, NodeId, Trace
from splice.text import contains, is_refusal, items, norm, sentences, tokens
from splice.workflow import Workflow

# --- readings --------------------------------------------------------------------------------

_MOST_READINGS: Final = 3
_READING: Final = 80
"""Characters of a reading that is offered."""
_OR = re.compile(r"(?:,\s*+|\s++)or\s++", re.IGNORECASE)
_BETWEEN = re.compile(r"\bbetween\s++(.+)\sand\s(.+)", re.IGNORECASE)
_LEAD = re.compile(
    r"(?:\b(?:means?|meant|either|between|whether|about|refers? to|be|is|are)\b[,:]?|:)\s++",
    re.IGNORECASE,
)
_TAIL = re.compile(
    r"\s(?:is|are|was|were) (?:meant|intended|wanted|asked (?:for|about))$", re.IGNORECASE
)
_ARTICLE = re.compile(r"(?:an?|the)\b", re.IGNORECASE)
_AROUND: Final = " \t.,:\"'“”‘’"


def readings(abstention: Abstention) -> tuple[str, ...]:
    """The two or three readings that a rationale names; empty if it names none, or more.

    >>> readings(Abstention(category="Ambiguous Query", rationale="It may mean Ana Lima or Rui Sá."))
    ('Ana Lima', 'Rui Sá')
    """
    for clause in re.split(r"[;?]", one_line(abstention.rationale)):
        parts = _OR.split(clause)
        if len(parts) == 1 and (both := _BETWEEN.search(clause)):
            parts = list(both.groups())
        if len(parts) > 1:
            break
    else:
        return ()
    parts = [_TAIL.sub("", part.strip(_AROUND)) for part in parts]
    *_, first = _LEAD.split(parts[0])
    listed = first.split(", ")
    # "Ana, the singer" is one reading; "Oslo, Rome or Paris" are three.
    if len(listed) > 1 and any(map(_ARTICLE.match, listed[1:])):
        listed = [first]
    named = [part.strip(_AROUND) for part in (*listed, *parts[1:])]
    distinct = list({norm(name): one_line(name, limit=_READING) for name in named if name}.values())
    return tuple(distinct) if 2 <= len(distinct) <= _MOST_READINGS else ()


# --- what is held elsewhere ------------------------------------------------------------------

_HELD_SHARE: Final = 2 / 3
"""A statement that has this share of the words of an item is taken to be about it."""

_LINK = re.compile(
    r"of|for|in|on|at|to|by|with|from|and|or|as|is|was|are|were|be|been|its?|th(?:is|at|ese|ose)"
    r"|wh(?:ich|at|om?|ose|en|ere)|how|not?|any"
)


class Found(NamedTuple):
    """Where a missing item is held."""

    source: NodeId | None
    """The node that holds it; None: the question."""
    text: str
    """The statement, as one line."""


class Statement(NamedTuple):
    """What somebody said, with what says what it is about."""

    source: NodeId | None
    text: str
    context: str
    """A document's title, a finding's task, the question that an answer is to; may be empty."""
    is_finding: bool
    """The context is half of it: "Doha" says nothing without the task."""

    @property
    def told(self) -> str:
        """The statement with its context, as one line."""
        text = f"{self.context.rstrip('?:. ')}: {self.text}" if self.context else self.text
        return one_line(text, limit=1000)


def find_item(
    workflow: Workflow,
    trace: Trace,
    node: NodeId,
    item: str,
    answers: Iterable[Statement] = (),
) -> Found | None:
    """The statement, outside of what `node` could read, that most likely gives `item`.

    Looked through are the user's answers, the question, if the node does not see it, and what other
    nodes said, were told by tools and have as documents. A statement that has two thirds of the
    item's words and all names and numbers in it, and says something besides, is about the item.
    Outputs and tool returns of nodes that read `node` are left out: they come from its abstention.

    Args:
        workflow: the workflow.
        trace: the run so far.
        node: who lacks the item.
        item: as `missing_item` names it.
        answers: what the user has said in this run.
    """
    wanted, named = _terms(item), items(item)
    run = trace.by_node[node]
    read = "\n".join([*(m.content for m in run.input), *(call.result for call in run.tool_calls)])
    best, best_rank = None, (0.0, 0.0)
    for statement in (*answers, *_statements(workflow, trace, node)):
        own = _terms(statement.text)
        whole = own | _terms(statement.context)
        share, own_share = (len(wanted & terms) / max(1, len(wanted)) for terms in (whole, own))
        is_about = share >= _HELD_SHARE and (own_share > 0 or statement.is_finding)
        if not is_about or not own - wanted or not (share, own_share) > best_rank:
            continue
        told = f"{statement.context}\n{statement.text}"
        if not all(contains(told, name) for name in named) or is_refusal(statement.text):
            continue
        if not contains(read, statement.told if statement.is_finding else statement.text):
            best, best_rank = statement, (share, own_share)
    return Found(best.source, best.told) if best is not None else None


def _statements(workflow: Workflow, trace: Trace, node: NodeId) -> Iterator[Statement]:
    """Sentences that `node` may not have read, with where they come from."""
    for text in _sentences(trace.query.text):
        yield Statement(None, text, "", is_finding=False)
    heard = trace.by_node[node].received
    for other in workflow.plan.order:
        if other == node:
            continue
        titles = [document.title or "" for document in workflow.private(other, trace.query)]
        task = workflow.subtask(other, trace.query)
        is_after = other in workflow.hops[node]
        for piece in material(workflow, trace, other):
            kind, _, place = piece.origin.partition(":")
            if kind != "document" and (is_after or (kind == "output" and other in heard)):
                continue
            is_short = kind == "output" and is_finding(piece.text)
            context = task if is_short else titles[int(place)] if kind == "document" else ""
            for text in _sentences(piece.text):
                yield Statement(other, text, context, is_short and bool(task))


def _sentences(text: str) -> Iterator[str]:
    """The sentences of a text that state something."""
    for start, end in sentences(text):
        if not text[start:end].endswith("?"):
            yield text[start:end]


def _terms(text: str) -> frozenset[str]:
    """Words that say what a text is about, in the singular or the plural."""
    return frozenset(
        token.removesuffix("s") for token in tokens(text) if not _LINK.fullmatch(token)
    )
