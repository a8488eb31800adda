"""Tasks from the annotated decomposition of a question.

A step that needs what an earlier one finds gets it described, never named: "What is the date of
birth of the director of Dream?".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from skeletons.multihop.dealing import own_steps
from skeletons.multihop.questions import Question, without_note
from skeletons.multihop.steps import REFERENCE
from splice.records import NodeId


class _Wording(NamedTuple):
    """How to ask for a relation of `{}`, and how to speak of what is found."""

    question: str
    phrase: str


_RELATIONS: Mapping[str, _Wording] = {
    "applies to jurisdiction": _Wording(
        "What is the jurisdiction of {}?", "the jurisdiction of {}"
    ),
    "award received": _Wording("Which award did {} receive?", "the award that {} received"),
    "educated at": _Wording("Where did {} study?", "the school where {} studied"),
    "followed by": _Wording("What came after {}?", "the successor of {}"),
    "follows": _Wording("What came before {}?", "the predecessor of {}"),
    "founded by": _Wording("Who founded {}?", "the founder of {}"),
    "instance of": _Wording("What kind of thing is {}?", "the kind of thing that {} is"),
    "located in the administrative territorial entity": _Wording(
        "In which county, district, state or province is {}?",
        "the county, district, state or province of {}",
    ),
    "member of political party": _Wording(
        "Which political party is {} in?", "the political party of {}"
    ),
    "member of sports team": _Wording("Which team did {} play for?", "the team of {}"),
    "mouth of the watercourse": _Wording("Where does {} flow to?", "the mouth of {}"),
    "named after": _Wording("What is {} named after?", "the namesake of {}"),
    "owned by": _Wording("Who owns {}?", "the owner of {}"),
    "part of": _Wording("What is {} part of?", "the whole that {} is part of"),
    "shares border with": _Wording("What does {} border?", "the neighbour of {}"),
}
"""Relations that don't read well as "the RELATION of"."""

_PEOPLE = re.compile(
    r"(?:.*\b)?(?:author|child|composer|creator|developer|director|father|founder|mother|owner"
    r"|performer|producer|screenwriter|sibling|spouse|student|advisor|head of \w+)"
)


def planned(question: Question) -> Mapping[NodeId, str]:
    """The task of each researcher that has a step to look up; several steps in a row."""
    return {
        name: " ".join(_asked(question, number) for number in own)
        for name, own in own_steps(question).items()
        if own
    }


def _asked(question: Question, number: int) -> str:
    parts = _parts(question, number)
    if parts is not None:
        relation, subject = parts
        return _wording(relation).question.replace("{}", subject)
    return _sentence(_filled(question, question.steps[number].asks or question.text))


def _described(question: Question, number: int) -> str:
    """What a step finds, in words that don't say what it is."""
    parts = _parts(question, number)
    if parts is not None:
        relation, subject = parts
        return _wording(relation).phrase.replace("{}", subject)
    asked = _asked(question, number)
    return _as_phrase(asked) or f'the answer to "{asked.replace(chr(34), chr(39))}"'


def _parts(question: Question, number: int) -> tuple[str, str] | None:
    """Relation and subject of a step that asks for a relation; None if it is asked otherwise."""
    step = question.steps[number]
    if step.relation is not None:
        needed = step.needs[:1]
        subject = _described(question, needed[0]) if needed else without_note(step.subjects[0])
        return step.relation.strip(), subject
    subject, mark, relation = (step.asks or "").partition(">>")
    return (relation.strip(), _filled(question, subject)) if mark else None


def _wording(relation: str) -> _Wording:
    asks = "Who" if _PEOPLE.fullmatch(relation) else "What"
    usual = _Wording(f"{asks} is the {relation} of {{}}?", f"the {relation} of {{}}")
    return _RELATIONS.get(relation, usual)


def _filled(question: Question, text: str) -> str:
    """A text of MuSiQue with each `#k` replaced by a description of what step k finds."""
    text = re.sub(r"\bthe\s+(?=#\d)", "", text, flags=re.IGNORECASE)
    text = REFERENCE.sub(lambda found: f" {_described(question, int(found[1]) - 1)} ", text)
    text = re.sub(r"\s+(?=[?,.;)]|'s\b)", "", " ".join(text.split()))
    return re.sub(r"\(\s+", "(", text)


def _sentence(text: str) -> str:
    text = text.strip().rstrip("?").strip()
    return f"{text[:1].upper()}{text[1:]}?"


_DONE = r"(born|located|based|situated|fought|held|built|signed|published)"
_PHRASES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), phrase)
    for pattern, phrase in (
        (r"(?:Who|What|Which) (?:is|was) (?:the name of )?(the \w+ (?:of|where|that) .+)\?", r"\1"),
        (r"(The (?:\w+ )?\w+ of .+) (?:is|was) who\?", r"\1"),
        (
            rf"(?:In |Of )?(?:which|what) (\w+) (is|was|were) (.+?) {_DONE}(?: in| at)?\?",
            r"the \1 where \3 \2 \4",
        ),
        (rf"Where (is|was|were) (.+?) {_DONE}(?: in| at)?\?", r"the place where \2 \1 \3"),
        (r"Where (is|was) (.+) from\?", r"the place that \2 \1 from"),
        (r"Of what (\w+) (is|was) (.+) (a citizen)\?", r"the \1 of which \3 \2 \4"),
        (
            r"(?:Which|What) (\w+) (is|was) (.+) (from|in|part of)\?",
            r"the \1 that \3 \2 \4",
        ),
        (r"(?:Which|What) (\w+) ((?:\w+ed|has|borders|won|held) .+)\?", r"the \1 that \2"),
        (r"Who ((?:\w+ed|broke|wrote|ruled|won|made|led) .+)\?", r"the person who \1"),
    )
)
"""Forms of a question, and what it asks for as a phrase."""


def _as_phrase(asked: str) -> str | None:
    for pattern, phrase in _PHRASES:
        if found := pattern.fullmatch(asked):
            text = found.expand(phrase)
            return f"{text[:1].lower()}{text[1:]}"
    return None
