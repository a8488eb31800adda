"""From annotations to steps: who needs whose answer, and which sentences say it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

from skeletons.multihop.questions import Incomplete, Paragraph, Step, without_note
from skeletons.scoring import normalised
from splice.text import contains, entities, sentences, words

Page: TypeAlias = tuple[str, Sequence[str]]
"""Title and sentences."""

Fact: TypeAlias = tuple[str, int]
"""Title of a paragraph and the place of a sentence in it."""

Triple: TypeAlias = tuple[str, str, str]
"""Subject, relation, object."""

REFERENCE = re.compile(r"#(\d{1,3})\b")
"""Stands for the answer of a step of MuSiQue, counted from 1."""

_MOST_REFERENCES = 4
"""References in one question, as each grows by what it refers to. MuSiQue has up to 3."""


def marked(pages: Sequence[Page], facts: Sequence[Fact]) -> tuple[Paragraph, ...]:
    """Paragraphs with the sentences that the facts name; one that is not there is ignored.

    Raises:
        Incomplete: a fact names a title that is not there, or there is no fact.
    """
    places = _places([title for title, _ in pages])
    key: dict[int, set[int]] = {}
    for title, sentence in facts:
        if title not in places:
            raise Incomplete
        key.setdefault(places[title], set()).add(sentence)
    if not key:
        raise Incomplete
    return tuple(
        Paragraph(
            title=title,
            sentences=tuple(texts),
            is_supporting=place in key,
            key=tuple(n for n in sorted(key.get(place, ())) if 0 <= n < len(texts)),
        )
        for place, (title, texts) in enumerate(pages)
    )


def triple_steps(
    text: str,
    kind: str,
    triples: Sequence[Triple],
    paragraphs: Sequence[Paragraph],
    facts: Sequence[Fact],
) -> tuple[Step, ...]:
    """One step for each evidence triple of 2WikiMultihopQA.

    Comparisons are annotated in any order; their steps are put in that of the question.
    """
    pages = _in_order_of_facts(paragraphs, facts)
    steps: list[Step] = []
    for number, (subject, relation, answer) in enumerate(triples):
        titled = [place for place in pages if _is_same(paragraphs[place].title, subject)]
        place = titled[0] if titled else pages[min(number, len(pages) - 1)]
        steps.append(
            Step(
                paragraph=place,
                needs=_needs(kind, triples, number),
                subjects=_names(subject, paragraphs[place].title, other_than=answer),
                answer=answer,
                relation=relation,
            )
        )
    return _as_named(text, steps)


def page_steps(
    text: str,
    answer: str,
    kind: str,
    paragraphs: Sequence[Paragraph],
    facts: Sequence[Fact],
) -> tuple[Step, ...]:
    """One step for each supporting paragraph of HotpotQA, which annotates nothing finer.

    The second step of a `bridge` question needs the first if one of the two paragraphs names the
    other; what the first one finds is then the title that links them. The steps of a `comparison`
    are independent.
    """
    pages = _in_order_of_facts(paragraphs, facts)
    if kind == "bridge" and len(pages) == 2:
        pages = _bridge_order(text, answer, paragraphs, pages)
        near, far = (paragraphs[place] for place in pages)
        if _names_other(near, far) or _names_other(far, near):
            titles = without_note(near.title), without_note(far.title)
            bridge = titles[0] if _is_same(titles[1], answer) else titles[1]
            found = None if normalised(answer) in ("yes", "no") else answer
            return (
                Step(paragraph=pages[0], subjects=(titles[0],), answer=bridge),
                Step(paragraph=pages[1], needs=(0,), subjects=(titles[1],), answer=found),
            )
    steps = [
        Step(paragraph=place, subjects=(without_note(paragraphs[place].title),), answer=None)
        for place in pages
    ]
    return _as_named(text, steps)


def asked_steps(
    pages: Sequence[tuple[int, str, str]], asked: Sequence[tuple[str, str, int | None]]
) -> tuple[tuple[Paragraph, ...], tuple[Step, ...]]:
    """Paragraphs and steps of MuSiQue, whose paragraphs come without marks in them.

    Args:
        pages: number, title and text of each paragraph.
        asked: question, answer and number of the paragraph of each step.

    Raises:
        Incomplete: a step names a paragraph that is not there, or a step that is not before it.
    """
    places = {number: place for place, (number, _, _) in enumerate(pages)}
    split = [_split(text) for _, _, text in pages]
    key: dict[int, set[int]] = {}
    steps: list[Step] = []
    for question, answer, number in asked:
        referred = REFERENCE.findall(question)
        needs = tuple(sorted({int(n) - 1 for n in referred}))
        if number is None or number not in places or len(referred) > _MOST_REFERENCES:
            raise Incomplete
        if not all(0 <= n < len(steps) for n in needs):
            raise Incomplete
        place = places[number]
        full = REFERENCE.sub(lambda found: asked[int(found[1]) - 1][1], question)
        telling = _telling(split[place], full, answer)
        split[place][telling] = _shortened(split[place][telling], answer)
        key.setdefault(place, set()).add(telling)
        subjects = _names(*_subjects(full), pages[place][1], other_than=answer)
        steps.append(
            Step(paragraph=place, needs=needs, subjects=subjects, answer=answer, asks=question)
        )
    paragraphs = tuple(
        Paragraph(
            title=title,
            sentences=tuple(split[place]),
            is_supporting=place in key,
            key=tuple(sorted(key.get(place, ()))),
        )
        for place, (_, title, _) in enumerate(pages)
    )
    return paragraphs, tuple(steps)


def _places(titles: Sequence[str]) -> dict[str, int]:
    """Place by title; the first one of a title that occurs twice."""
    places: dict[str, int] = {}
    for place, title in enumerate(titles):
        places.setdefault(title, place)
    return places


def _in_order_of_facts(paragraphs: Sequence[Paragraph], facts: Sequence[Fact]) -> list[int]:
    places = _places([page.title for page in paragraphs])
    return [places[title] for title in dict.fromkeys(title for title, _ in facts)]


def _is_same(name: str, other: str) -> bool:
    return normalised(without_note(name)) == normalised(without_note(other))


def _names(*names: str, other_than: str) -> tuple[str, ...]:
    """Names without their notes, each once, without one that is the answer itself."""
    found = dict.fromkeys(without_note(name) for name in names)
    return tuple(name for name in found if name.strip() and not _is_same(name, other_than))


def _needs(kind: str, triples: Sequence[Triple], number: int) -> tuple[int, ...]:
    """The earlier triples that find the subject of this one.

    Where the subject is spelled otherwise than the object that it stands for, the kind tells: a
    chain is given in its order, and of two chains both first steps come before both second ones.
    """
    subject = triples[number][0]
    finders = tuple(n for n in range(number) if _is_same(triples[n][2], subject))
    if finders or number == 0:
        return finders
    if kind in ("compositional", "inference"):
        return (number - 1,)
    n_chains = (len(triples) + 1) // 2
    if kind == "bridge_comparison" and number >= n_chains:
        return (number - n_chains,)
    return ()


def _as_named(text: str, steps: Sequence[Step]) -> tuple[Step, ...]:
    """Steps in the order in which the question names what they begin with.

    Chains stay in their order: first come all first steps, then all second ones.
    """
    folded = text.casefold()

    def sign(number: int) -> tuple[int, int, int]:
        depth = 0
        while steps[number].needs:
            number, depth = steps[number].needs[0], depth + 1
        named = [folded.find(name.casefold()) for name in steps[number].subjects]
        return depth, min((at for at in named if at >= 0), default=len(text)), number

    order = sorted(range(len(steps)), key=sign)
    new = {old: place for place, old in enumerate(order)}
    return tuple(
        steps[old].model_copy(update={"needs": tuple(sorted(new[n] for n in steps[old].needs))})
        for old in order
    )


def _bridge_order(
    text: str, answer: str, paragraphs: Sequence[Paragraph], pages: Sequence[int]
) -> list[int]:
    """The two paragraphs of a bridge question, the one to be looked up first in front.

    Last is the one whose title is the answer; else first is the one that the question names; else
    first is the one that names the other.
    """
    a, b = (paragraphs[place] for place in pages)
    signs = (
        (_is_same(b.title, answer), _is_same(a.title, answer)),
        (contains(text, without_note(a.title)), contains(text, without_note(b.title))),
        (_names_other(a, b), _names_other(b, a)),
    )
    for is_a_first, is_b_first in signs:
        if is_a_first != is_b_first:
            return list(pages) if is_a_first else list(reversed(pages))
    return list(pages)


def _names_other(page: Paragraph, other: Paragraph) -> bool:
    return contains(page.text, without_note(other.title))


def _subjects(question: str) -> tuple[str, ...]:
    """What a question of MuSiQue is about: what stands before `>>`, else the names in it."""
    subject, mark, _ = question.partition(">>")
    return (subject.strip(),) if mark else entities(question)


def _split(text: str) -> list[str]:
    """The sentences of a text; what stands between two of them goes with the first."""
    starts = [start for start, _ in sentences(text)]
    if not starts:
        return [text]
    bounds = [0, *starts[1:], len(text)]
    return [text[start:end].strip() for start, end in pairwise(bounds)]


_LONGEST_SENTENCE = 50
"""Words; MuSiQue has tables without a full stop, of which only a part is kept."""


def _shortened(sentence: str, answer: str) -> str:
    """A sentence, or the part around the answer of one that is too long."""
    parts = sentence.split()
    if len(parts) <= _LONGEST_SENTENCE:
        return sentence
    length = len(answer.split())
    starts = range(len(parts) - length + 1)
    at = next((n for n in starts if contains(" ".join(parts[n : n + length]), answer)), 0)
    start = max(0, min(at - _LONGEST_SENTENCE // 2, len(parts) - _LONGEST_SENTENCE))
    end = max(start + _LONGEST_SENTENCE, at + length)
    return " ".join(parts[start:end])


def _telling(texts: Sequence[str], question: str, answer: str) -> int:
    """Place of the sentence that answers best: it has the answer, and words of the question."""
    wanted = words(question)
    said = words(answer)

    def sign(place: int) -> tuple[bool, int, int, int]:
        found = words(texts[place])
        is_literal = contains(texts[place], answer)
        return is_literal, len(found & said), len(found & wanted), -place

    return max(range(len(texts)), key=sign)
