"""Who gets which paragraphs, and how much of them.

The dealing follows the annotation: a researcher gets the paragraph of its own step. It is the same
for a question wherever and whenever it is loaded.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from skeletons.multihop.hosts import RESEARCHERS
from skeletons.multihop.questions import Paragraph, Question
from splice.records import Document, NodeId

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
    """Places of the paragraphs in the question."""
    documents: tuple[Document, ...]
    """The paragraphs as the researcher reads them, in the same order."""


def own_steps(question: Question) -> Mapping[NodeId, tuple[int, ...]]:
    """The steps that each researcher is to look up, by their places.

    Researcher k looks up what stands in the k-th paragraph that the steps need; the last one looks
    up all the rest.
    """
    last = len(RESEARCHERS) - 1
    pages = list(dict.fromkeys(step.paragraph for step in question.steps))
    owners = [min(pages.index(step.paragraph), last) for step in question.steps]
    return {
        name: tuple(n for n, owner in enumerate(owners) if owner == place)
        for place, name in enumerate(RESEARCHERS)
    }


def deal(question: Question) -> Mapping[NodeId, Hand]:
    """The hand of each researcher.

    It holds the paragraphs of its steps and distractors; the last one holds any other supporting
    paragraph as well. No paragraph is dealt twice.
    """
    rng = random.Random(f"{SEED}:{question.id}")
    others = [n for n, page in enumerate(question.paragraphs) if not page.is_supporting]
    rng.shuffle(others)
    hands = {}
    for place, evidence in enumerate(_evidence(question)):
        own = [*evidence, *others[place :: len(RESEARCHERS)][:N_DISTRACTORS]]
        rng.shuffle(own)
        documents = _documents([question.paragraphs[n] for n in own])
        hands[RESEARCHERS[place]] = Hand(tuple(own), documents)
    return hands


def _evidence(question: Question) -> list[list[int]]:
    """Places of the supporting paragraphs of each researcher."""
    dealt = [
        list(dict.fromkeys(question.steps[n].paragraph for n in own))
        for own in own_steps(question).values()
    ]
    used = {n for evidence in dealt for n in evidence}
    supporting = [n for n, page in enumerate(question.paragraphs) if page.is_supporting]
    dealt[-1] += [n for n in supporting if n not in used]
    return dealt


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
