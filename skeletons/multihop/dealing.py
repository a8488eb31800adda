"""Who gets which paragraphs, and how much of them.

The dealing follows the annotation and a seed. It is the same for a question wherever it stands in
its file; only what else is in the file may change which distractors come with it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
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

N_WORDS = 32
"""Words to which a paragraph is cut; the sentences that make it evidence are never cut."""

N_HAND_WORDS = 90
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
    """What it reads, in its order; there may be evidence of other questions among it."""


Archive: TypeAlias = Mapping[str, Sequence[Paragraph]]
"""Evidence of steps that need an earlier one, by relation."""


def archive(questions: Iterable[Question]) -> Archive:
    """What hard distractors are taken from; the order of the questions makes no difference."""
    found: dict[str, list[Paragraph]] = {}
    for question in sorted(questions, key=lambda question: question.id):
        for step in question.steps:
            if step.needs and step.relation:
                found.setdefault(step.relation, []).append(question.paragraphs[step.paragraph])
    return found


def own_steps(question: Question) -> Mapping[NodeId, tuple[int, ...]]:
    """The steps that each researcher is asked for, by their places.

    In a question of two stages (a step needs another, or two things are compared) the first
    researcher is asked for the first stage and both others for the second: neither knows which of
    them holds its evidence. In a longer one, researcher k is asked for what stands in the k-th
    paragraph that the steps need, and the last one for all the rest.
    """
    first, second, third = RESEARCHERS
    pages = list(dict.fromkeys(step.paragraph for step in question.steps))
    turns = [pages.index(step.paragraph) for step in question.steps]
    stages = _stages(question)
    if max(stages) > 1:
        return {
            first: tuple(n for n, turn in enumerate(turns) if turn == 0),
            second: tuple(n for n, turn in enumerate(turns) if turn == 1),
            third: tuple(n for n, turn in enumerate(turns) if turn > 1),
        }
    order = stages if any(stages) else turns
    early = tuple(n for n, place in enumerate(order) if place == 0)
    late = tuple(n for n, place in enumerate(order) if place > 0)
    return {first: early, second: late, third: late}


def _stages(question: Question) -> list[int]:
    """Steps that come before each step, along the longest way."""
    stages: list[int] = []
    for step in question.steps:
        stages.append(1 + max((stages[n] for n in step.needs), default=-1))
    return stages


def deal(question: Question, others: Archive = MappingProxyType({})) -> Mapping[NodeId, Hand]:
    """The hand of each researcher: the paragraphs of its steps, and distractors.

    Of two researchers who are asked for the same steps, one holds their evidence, drawn by the
    seed. Where a step can't be asked without an earlier answer, the distractors beside its evidence
    say of others what the evidence says of its subject: who reads only one such paragraph needs no
    earlier answer to report it. No paragraph is dealt twice.

    Args:
        question: the question.
        others: evidence of other questions; empty: all distractors are the question's own.
    """
    rng = random.Random(f"{SEED}:{question.id}")
    spare = _spare(question)
    rng.shuffle(spare)
    titles = {page.title for page in question.paragraphs}
    hands = {}
    for place, (name, evidence) in enumerate(_evidence(question, rng).items()):
        alike = (p for p in _alike(question, evidence, others, rng) if p.title not in titles)
        hard = list(islice(alike, N_DISTRACTORS))
        titles |= {page.title for page in hard}
        easy = spare[place :: len(RESEARCHERS)][: N_DISTRACTORS - len(hard)]
        documents = _documents(
            [question.paragraphs[n] for n in evidence],
            [*(question.paragraphs[n] for n in easy), *hard],
        )
        rng.shuffle(documents)
        hands[name] = Hand(tuple(sorted((*evidence, *easy))), tuple(documents))
    return hands


def _spare(question: Question) -> list[int]:
    """Places of the paragraphs that support nothing; of those that say the same, the first."""
    said = {(page.title, page.text) for page in question.paragraphs if page.is_supporting}
    spare = []
    for place, page in enumerate(question.paragraphs):
        if (page.title, page.text) not in said:
            said.add((page.title, page.text))
            spare.append(place)
    return spare


def _evidence(question: Question, rng: random.Random) -> Mapping[NodeId, list[int]]:
    """Places of the supporting paragraphs of each researcher, each place once.

    What no step needs goes with the evidence of the last steps.
    """
    own = own_steps(question)
    first, second, third = RESEARCHERS
    is_drawn = own[second] == own[third]
    last = rng.choice((second, third)) if is_drawn else third
    left = [n for n, page in enumerate(question.paragraphs) if page.is_supporting]
    dealt: dict[NodeId, list[int]] = {name: [] for name in RESEARCHERS}
    for name in (first,) if is_drawn else (first, second):
        pages = {question.steps[n].paragraph for n in own[name]}
        dealt[name] = [n for n in left if n in pages]
        left = [n for n in left if n not in pages]
    dealt[last] = left
    return dealt


def _alike(
    question: Question, evidence: Sequence[int], others: Archive, rng: random.Random
) -> Iterator[Paragraph]:
    """Paragraphs that have the relations of the evidence and no answer, in a drawn order.

    Only relations of steps that need an earlier one count. A title comes once.
    """
    found = {
        page.title: page
        for step in question.steps
        if step.needs and step.relation and step.paragraph in evidence
        for page in others.get(step.relation, ())
    }
    answers = [question.answer, *question.aliases]
    answers += [step.answer for step in question.steps if step.answer]
    for page in rng.sample(list(found.values()), len(found)):
        text = f"{page.title}: {page.text}"
        if not any(contains(text, answer) for answer in answers):
            yield page


def _documents(evidence: Sequence[Paragraph], others: Sequence[Paragraph]) -> list[Document]:
    """A researcher's paragraphs as it reads them; the others share the room that is left."""
    found = [document(page, N_WORDS) for page in evidence]
    room = N_HAND_WORDS - sum(len(read.text.split()) for read in found)
    n_words = max(_FEWEST_WORDS, min(N_WORDS, room // max(1, len(others))))
    return [*found, *(document(page, n_words) for page in others)]


def document(page: Paragraph, n_words: int) -> Document:
    """A paragraph as a researcher reads it, in at most `n_words` words.

    Of evidence, also that of another question: its key sentences, whole even if they are longer,
    and as much of the first sentence as there is room for. Of others: their beginning.
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
