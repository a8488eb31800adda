"""Who gets which paragraphs, and how much of them.

The dealing follows the annotation: a researcher gets the paragraph of its own step. It is the same
for a question wherever and whenever it is loaded.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from skeletons.multihop.hosts import RESEARCHERS
from skeletons.multihop.questions import Paragraph, Question
from splice.records import Document, NodeId
from splice.text import contains

SEED = 20261130
"""Together with a question's id it decides the dealing."""

N_DISTRACTORS = 2
"""Paragraphs beside the evidence for each researcher. With 2, prompts stay near 200 tokens."""

N_WORDS = 45
"""Words to which a paragraph is cut; a sentence that the question needs is never cut."""

N_HAND_WORDS = 120
"""Words for all of a researcher's paragraphs; beside long evidence the others get shorter."""

_FEWEST_WORDS = 12
"""Words that are left of a paragraph in any case."""

_SHORTEST_REST = 6
"""Words; less of a sentence than this says nothing."""


class Hand(NamedTuple):
    """What one researcher holds."""

    paragraphs: tuple[int, ...]
    """Places of those paragraphs of the question that it holds, ascending."""
    documents: tuple[Document, ...]
    """What it reads, in its order; it may hold evidence of other questions as well."""


Archive: TypeAlias = Mapping[str, Sequence[tuple[str, Paragraph]]]
"""By relation: evidence of last steps, each with the id of its question."""


def archive(questions: Iterable[Question]) -> Archive:
    """The paragraphs that answer last steps, from which hard distractors are taken."""
    found: dict[str, list[tuple[str, Paragraph]]] = {}
    for question in questions:
        for step in question.steps:
            if step.needs and step.relation is not None:
                page = question.paragraphs[step.paragraph]
                found.setdefault(step.relation, []).append((question.id, page))
    return found


def own_steps(question: Question) -> Mapping[NodeId, tuple[int, ...]]:
    """The steps that each researcher is asked for, by their places.

    In a question of two stages (one step needs another, or two are compared) the first researcher
    is asked for the first stage, and both others for the second: neither knows which of them holds
    its evidence. In a longer one, researcher k is asked for what stands in the k-th paragraph that
    the steps need, and the last one for all the rest.
    """
    first, second, third = RESEARCHERS
    pages = list(dict.fromkeys(step.paragraph for step in question.steps))
    stages = _stages(question)
    numbers = range(len(question.steps))
    if max(stages) > 1:
        owners = [min(pages.index(step.paragraph), 2) for step in question.steps]
        return {
            name: tuple(n for n in numbers if owners[n] == place)
            for place, name in enumerate(RESEARCHERS)
        }
    if max(stages) == 1:
        early = tuple(n for n in numbers if stages[n] == 0)
    else:
        early = tuple(n for n in numbers if question.steps[n].paragraph == pages[0])
    late = tuple(n for n in numbers if n not in early)
    return {first: early, second: late, third: late}


def _stages(question: Question) -> list[int]:
    """Steps that come before each step, along the longest way."""
    stages: list[int] = []
    for step in question.steps:
        stages.append(1 + max((stages[n] for n in step.needs), default=-1))
    return stages


def deal(question: Question, others: Archive = MappingProxyType({})) -> Mapping[NodeId, Hand]:
    """The hand of each researcher.

    It holds the paragraphs of its steps and distractors. Of two researchers who are asked for the
    same steps, one holds their evidence, drawn by the seed. The distractors beside evidence that
    can't be told without an earlier step's answer say the same of others: in an archive with one
    entry there would be nothing to look for. No paragraph of the question is dealt twice.

    Args:
        question: the question.
        others: evidence of other questions; empty: all distractors are the question's own.
    """
    rng = random.Random(f"{SEED}:{question.id}")
    spare = [n for n, page in enumerate(question.paragraphs) if not page.is_supporting]
    rng.shuffle(spare)
    hands = {}
    for place, (name, evidence) in enumerate(_evidence(question, rng).items()):
        foreign = _alike(question, evidence, others, rng)
        own = spare[place :: len(RESEARCHERS)][: N_DISTRACTORS - len(foreign)]
        pages = [*(question.paragraphs[n] for n in (*evidence, *own)), *foreign]
        rng.shuffle(pages)
        hands[name] = Hand(tuple(sorted((*evidence, *own))), _documents(pages))
    return hands


def _evidence(question: Question, rng: random.Random) -> Mapping[NodeId, list[int]]:
    """Places of the supporting paragraphs of each researcher."""
    own = own_steps(question)
    first, second, third = RESEARCHERS
    holder = third
    if own[second] == own[third]:
        holder, other = rng.sample((second, third), 2)
        own = {**own, other: ()}
    dealt = {
        name: list(dict.fromkeys(question.steps[n].paragraph for n in numbers))
        for name, numbers in own.items()
    }
    used = {n for evidence in dealt.values() for n in evidence}
    supporting = [n for n, page in enumerate(question.paragraphs) if page.is_supporting]
    dealt[holder] += [n for n in supporting if n not in used]
    if own[first]:
        shared = set(dealt[first])
        dealt[holder] = [n for n in dealt[holder] if n not in shared]
    return dealt


def _alike(
    question: Question, evidence: Sequence[int], others: Archive, rng: random.Random
) -> list[Paragraph]:
    """Paragraphs that say of others what the evidence says, where an earlier step tells of whom."""
    told = [step for step in question.steps if step.needs and step.paragraph in evidence]
    titles = {page.title for page in question.paragraphs}
    answers = [question.answer, *(step.answer for step in question.steps if step.answer)]
    found: dict[str, Paragraph] = {}
    for step in told:
        for owner, page in others.get(step.relation or "", ()):
            is_other = owner != question.id and page.title not in titles
            if is_other and not any(contains(page.text, answer) for answer in answers):
                found.setdefault(page.title, page)
    return rng.sample(list(found.values()), min(N_DISTRACTORS, len(found)))


def _documents(pages: Sequence[Paragraph]) -> tuple[Document, ...]:
    evidence = {n: document(page, N_WORDS) for n, page in enumerate(pages) if page.key}
    room = N_HAND_WORDS - sum(len(found.text.split()) for found in evidence.values())
    share = room // max(1, len(pages) - len(evidence))
    n_words = max(_FEWEST_WORDS, min(N_WORDS, share))
    return tuple(evidence.get(n) or document(page, n_words) for n, page in enumerate(pages))


def document(page: Paragraph, n_words: int) -> Document:
    """A paragraph as a researcher reads it, in at most `n_words` words.

    Of evidence: the sentences that the question needs, whole even if they are longer, and as much
    of the first sentence as there is room for. Of others: their beginning.
    """
    if not page.key:
        kept = _cut(page.text.split(), n_words)
    else:
        texts = [sentence.split() for sentence in page.sentences]
        kept = [word for place in page.key for word in texts[place]]
        if 0 not in page.key:
            kept = [*_cut(texts[0], n_words - len(kept)), *kept]
    return Document(title=page.title, text=" ".join(kept))


def _cut(text: list[str], room: int) -> list[str]:
    """As many words as there is room for, with a mark where some are left out."""
    if len(text) <= room:
        return text
    return [*text[:room], "..."] if room >= _SHORTEST_REST else []
