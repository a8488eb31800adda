"""Rows of HotpotQA, 2WikiMultihopQA and MuSiQue, as published and in a common format.

The format of a row is told from its fields, so a file may mix them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StringConstraints,
)

from skeletons.multihop.questions import Incomplete, Paragraph, Question, Source, Step
from skeletons.multihop.steps import (
    Page,
    Triple,
    asked_steps,
    marked,
    page_steps,
    triple_steps,
)
from skeletons.reading import as_row, raw_rows
from splice.errors import DataError

Text = Annotated[str, StringConstraints(pattern=r"\S")]
"""A text that says something."""

_MOST_STEPS = 16
"""Steps of a question. The data sets have up to 4."""


class Reading(NamedTuple):
    """The questions of a file, and how many of its rows are none."""

    questions: tuple[Question, ...]
    n_unanswerable: int
    """Rows that their data set marks as unanswerable."""
    n_incomplete: int
    """Rows whose evidence names a paragraph that is not there."""


def read_questions(path: Path) -> Reading:
    """All questions of a JSONL file, or of a JSON list, in the order of the file.

    Raises:
        DataError: the file can't be read, a row has no known format or does not keep to it, or two
            rows have the same id; the message names file, line and field.
    """
    questions: dict[str, Question] = {}
    left_out: Counter[str] = Counter()
    for place, value in raw_rows(path):
        row = _parsed(value, place)
        if not row.is_answerable:
            left_out["unanswerable"] += 1
            continue
        try:
            question = row.as_question()
        except Incomplete:
            left_out["incomplete"] += 1
            continue
        if question.id in questions:
            raise DataError(f"{place}: field 'id': {question.id!r} was there before")
        questions[question.id] = question
    return Reading(tuple(questions.values()), left_out["unanswerable"], left_out["incomplete"])


_PUBLISHED_ROW = ConfigDict(frozen=True, extra="ignore")
"""Published files carry more than is read here."""

_COMMON_ROW = ConfigDict(frozen=True, extra="forbid")


class _Row(BaseModel):
    model_config = _PUBLISHED_ROW

    id: Text
    question: Text
    answer: Text
    answer_aliases: tuple[str, ...] = ()

    @property
    def is_answerable(self) -> bool:
        """Whether there is an answer to look for."""
        return True

    def as_question(self) -> Question:
        """The row in the form that everything after reading works on.

        Raises:
            Incomplete: its evidence names what is not there.
        """
        raise NotImplementedError

    def _as(
        self, source: Source, kind: str, paragraphs: tuple[Paragraph, ...], steps: tuple[Step, ...]
    ) -> Question:
        return Question(
            id=self.id,
            source=source,
            text=self.question,
            answer=self.answer,
            aliases=self.answer_aliases,
            kind=kind,
            paragraphs=paragraphs,
            steps=steps,
        )


class _FactsRow(_Row):
    """A row whose evidence is marked by the titles and places of sentences."""

    type: Text
    supporting_facts: tuple[tuple[str, StrictInt], ...]

    def pages(self) -> Sequence[Page]:
        """Title and sentences of each paragraph."""
        raise NotImplementedError

    def _by_pages(self) -> Question:
        paragraphs = marked(self.pages(), self.supporting_facts)
        steps = page_steps(self.question, self.answer, self.type, paragraphs, self.supporting_facts)
        return self._as("hotpotqa", self.type, paragraphs, steps)

    def _by_triples(self, triples: Sequence[Triple]) -> Question:
        paragraphs = marked(self.pages(), self.supporting_facts)
        steps = triple_steps(self.question, self.type, triples, paragraphs, self.supporting_facts)
        return self._as("2wiki", self.type, paragraphs, steps)


Triples = Annotated[
    tuple[tuple[Text, Text, Text], ...], Field(min_length=1, max_length=_MOST_STEPS)
]


class _Hotpot(_FactsRow):
    """HotpotQA as published, distractor setting."""

    id: Annotated[Text, Field(alias="_id")]
    context: tuple[tuple[str, tuple[str, ...]], ...]

    def pages(self) -> Sequence[Page]:
        return self.context

    def as_question(self) -> Question:
        return self._by_pages()


class _TwoWiki(_Hotpot):
    """2WikiMultihopQA as published."""

    evidences: Triples

    def as_question(self) -> Question:
        return self._by_triples(self.evidences)


class _MusiqueStep(BaseModel):
    model_config = _PUBLISHED_ROW

    question: Text
    answer: Text
    paragraph_support_idx: StrictInt | None


class _MusiquePage(BaseModel):
    model_config = _PUBLISHED_ROW

    idx: StrictInt
    title: str
    paragraph_text: str
    is_supporting: StrictBool


class _Musique(_Row):
    """MuSiQue as published; the kind is the start of the id."""

    answer_aliases: tuple[str, ...]
    answerable: StrictBool
    paragraphs: tuple[_MusiquePage, ...]
    question_decomposition: Annotated[
        tuple[_MusiqueStep, ...], Field(min_length=1, max_length=_MOST_STEPS)
    ]

    @property
    def is_answerable(self) -> bool:
        return self.answerable

    def as_question(self) -> Question:
        paragraphs, steps = asked_steps(
            [(page.idx, page.title, page.paragraph_text) for page in self.paragraphs],
            [
                (step.question, step.answer, step.paragraph_support_idx)
                for step in self.question_decomposition
            ],
        )
        kind, mark, _ = self.id.partition("__")
        return self._as("musique", kind if mark else f"{len(steps)}hop", paragraphs, steps)


class _CommonPage(BaseModel):
    model_config = _COMMON_ROW

    idx: StrictInt
    title: str
    sentences: tuple[str, ...]
    is_supporting: StrictBool


class _CommonFacts(_FactsRow):
    model_config = _COMMON_ROW

    dataset: Text
    answer_aliases: tuple[str, ...]
    source: str | None = None
    paragraphs: tuple[_CommonPage, ...]

    def pages(self) -> Sequence[Page]:
        return [(page.title, page.sentences) for page in self.paragraphs]


class _CommonHotpot(_CommonFacts):
    level: str | None = None

    def as_question(self) -> Question:
        return self._by_pages()


class _CommonTwoWiki(_CommonFacts):
    evidence_triples: Triples

    def as_question(self) -> Question:
        return self._by_triples(self.evidence_triples)


class _CommonText(BaseModel):
    model_config = _COMMON_ROW

    idx: StrictInt
    title: str
    text: str
    is_supporting: StrictBool


class _CommonStep(BaseModel):
    model_config = _COMMON_ROW

    question: Text
    answer: Text
    paragraph_idx: StrictInt


class _CommonMusique(_Row):
    model_config = _COMMON_ROW

    dataset: Text
    answer_aliases: tuple[str, ...]
    type: Text
    source: str | None = None
    paragraphs: tuple[_CommonText, ...]
    decomposition: Annotated[tuple[_CommonStep, ...], Field(min_length=1, max_length=_MOST_STEPS)]

    def as_question(self) -> Question:
        paragraphs, steps = asked_steps(
            [(page.idx, page.title, page.text) for page in self.paragraphs],
            [(step.question, step.answer, step.paragraph_idx) for step in self.decomposition],
        )
        return self._as("musique", self.type, paragraphs, steps)


_COMMON: Mapping[str, type[_Row]] = {
    "hotpotqa": _CommonHotpot,
    "2wikimultihopqa": _CommonTwoWiki,
    "musique": _CommonMusique,
}
"""Formats by the field `dataset`, which only the common ones have."""

_PUBLISHED: Mapping[str, type[_Row]] = {
    "question_decomposition": _Musique,
    "evidences": _TwoWiki,
    "context": _Hotpot,
}
"""Formats by a field that tells them, the most telling first."""


def _parsed(value: Any, place: str) -> _Row:
    if not isinstance(value, dict):
        raise DataError(f"{place}: not an object")
    if "dataset" in value:
        name = value["dataset"]
        if not isinstance(name, str) or name not in _COMMON:
            raise DataError(f"{place}: field 'dataset': {name!r} is none of {', '.join(_COMMON)}")
        return as_row(value, _COMMON[name], place)
    for field, kind in _PUBLISHED.items():
        if field in value:
            return as_row(value, kind, place)
    fields = ", ".join(("dataset", *_PUBLISHED))
    raise DataError(f"{place}: no known format: it has none of the fields {fields}")
