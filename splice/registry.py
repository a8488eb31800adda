"""What agents are there and what they do: which of them, or which function, an abstention names.

A rationale is a sentence of a model's, so names in it are found by rules that forgive spelling, and
where two are as good nothing is found: to guess would send a request to the wrong agent.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from splice.abstention import short_rationale
from splice.records import Abstention, NodeId
from splice.text import tokens
from splice.workflow import Agent, Workflow


def alternatives_for(agent: Agent, abstention: Abstention) -> tuple[str, ...]:
    """Supported functions to offer in place of the one that an abstention says is missing.

    The unsupported function is the one of `agent.alternatives` that the rationale names, in any
    case and with or without spaces and `_`; else the one of whose content words the rationale has
    the largest share, and more than half. Several that are as good are all taken.

    Returns:
        What the workflow declares for it, each once; empty for any category but *Missing
        Capability*, and where no unsupported function is meant.

    >>> agent = Agent(id="bus", role="r", alternatives={"BookBus": "FindBus", "BookHotel": "none"})
    >>> rationale = "I am not able to book buses."
    >>> alternatives_for(agent, Abstention(category="Missing Capability", rationale=rationale))
    ('FindBus',)
    """
    if abstention.category != "Missing Capability":
        return ()
    rationale = short_rationale(abstention.rationale)
    named = _named(rationale, agent.alternatives)
    said = _content(rationale)
    scores: dict[str, tuple[bool, float, int]] = {}
    for unsupported in agent.alternatives:
        own = _content(unsupported)
        shared = len(own & said)
        if unsupported in named or shared > len(own) / 2:
            scores[unsupported] = (unsupported in named, shared / max(len(own), 1), shared)
    best = max(scores.values(), default=None)
    meant = (unsupported for unsupported, score in scores.items() if score == best)
    return tuple(dict.fromkeys(agent.alternatives[unsupported] for unsupported in meant))


def named_agent(workflow: Workflow, node: NodeId, abstention: Abstention) -> NodeId | None:
    """The agent that an abstaining node says its request belongs to.

    It is another node or an agent elsewhere: the one that the rationale names as it is spelled;
    else in any case and with or without spaces and `_`; else the one with most of the rationale's
    content words in its name and in what it does, those aside that the abstaining node has too.

    Returns:
        None for any category but *Misrouting*, and where none or more than one is meant.
    """
    if abstention.category != "Misrouting":
        return None
    rationale = short_rationale(abstention.rationale)
    others = [name for name in (*workflow.by_id, *workflow.elsewhere) if name != node]
    # The node's own name is looked for as well, since the name of another may be a part of it.
    named = _named(rationale, (*others, node)) - {node}
    as_spelled = {name for name in named if _is_spelled(rationale, name)}
    if named:
        return _only(as_spelled or named)
    said = _content(rationale) - _content(f"{node} {what_it_does(workflow, node)}")
    shared = {
        name: len(said & _content(f"{name} {what_it_does(workflow, name)}")) for name in others
    }
    most = max(shared.values(), default=0)
    return _only([name for name, n in shared.items() if n == most]) if most else None


def what_it_does(workflow: Workflow, name: NodeId) -> str:
    """All that is declared of what a node, or an agent elsewhere, does."""
    if name not in workflow.by_id:
        return workflow.elsewhere[name]
    node = workflow.by_id[name]
    if not isinstance(node, Agent):
        return node.subtask
    tools = (workflow.tools_by_name[tool].spec for tool in node.tools)
    told = (f"{tool.name} {tool.description}" for tool in tools)
    return " ".join([node.role, node.subtask, *node.abilities, *told])


def _only(names: Collection[NodeId]) -> NodeId | None:
    return next(iter(names)) if len(names) == 1 else None


# --- names -----------------------------------------------------------------------------------

_PIECE = re.compile(r"[^\W_]+")


class _Mention(NamedTuple):
    """A name where it stands in a text without spaces and punctuation."""

    start: int
    end: int
    name: str


def _named(text: str, names: Iterable[str]) -> set[str]:
    """Names that stand in a text as whole words; what is part of a longer one is not named."""
    pieces = _PIECE.findall(text.casefold())
    starts, ends = set(), set()
    place = 0
    for piece in pieces:
        starts.add(place)
        place += len(piece)
        ends.add(place)
    joined = "".join(pieces)
    found = []
    for name in names:
        wanted = "".join(_PIECE.findall(name.casefold()))
        start = joined.find(wanted) if wanted else -1
        while start >= 0:
            end = start + len(wanted)
            if start in starts and end in ends:
                found.append(_Mention(start, end, name))
            start = joined.find(wanted, start + 1)
    return {
        one.name
        for one in found
        if not any(
            other.start <= one.start and one.end <= other.end and other[:2] != one[:2]
            for other in found
        )
    }


def _is_spelled(text: str, name: str) -> bool:
    """Whether a name stands in a text just so, and not as a part of another name."""
    return re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-]|\.\w)", text) is not None


# --- words -----------------------------------------------------------------------------------

_WORD_BREAK = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[_.]+")

_ENDINGS: Final = ("ing", "ed", "es", "s", "e")
_SHORTEST: Final = 3
"""Letters of a content word, and of what is left of one without its ending. `splice.text.words`
wants four: it compares long texts, and here `bus` and `car` tell agents apart."""

_FILLERS: Final = frozenset(
    tokens(
        "able about agent agents and another answer any are ask assistant because been being belong "
        "belongs but call can cannot cant could did does doesnt dont for from function functions give "
        "given handle handled handles has have help here his how information into its job may must "
        "need needed needs not one only other our please question request requests requires send "
        "should some task tasks tell than that the their them there this tool tools user uses using "
        "want wants was what when where which who will with work works would you your"
    )
)
"""Words of which rationales are made whatever they are about."""


def _content(text: str) -> frozenset[str]:
    """Content words without their endings; names are taken apart.

    >>> sorted(_content("You should ask FindBus: it finds buses."))
    ['bus', 'find']
    """
    found = tokens(_WORD_BREAK.sub(" ", text))
    return frozenset(
        _stem(word)
        for word in found
        if len(word) >= _SHORTEST and word not in _FILLERS and not word.isdigit()
    )


def _stem(word: str) -> str:
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= _SHORTEST:
            return word.removesuffix(ending)
    return word
