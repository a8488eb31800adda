"""Rows of HotpotQA, 2WikiMultihopQA and MuSiQue, as published and in a common format.

The format of a row is told from its fields, so a file may mix them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from skeletons.multihop.questions import Incomplete, Question
from skeletons.multihop.steps import asked_steps, marked, page_steps, triple_steps
from skeletons.reading import as_row, raw_rows
from splice.errors import DataError

Text = Annotated[str, StringConstraints(pattern=r"\S")]
"""A text that says something."""


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


class _Loose(BaseModel):
    """Published files carry more than is read here."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


Fact = tuple[str, int]
Triple = tuple[Text, Text, Text]


class _Row(_Loose):
    question: Text
    answer: Text

    @property
    def is_answerable(self) -> bool:
        """Whether there is an answer to look for."""
        return True

    def as_question(self) -> Question:
        """The row in the form that everything after works on.

        Raises:
            Incomplete: its evidence names what is not there.
        """
        raise NotImplementedError


class _Hotpot(_Row):
    """HotpotQA as published, distractor setting."""

    id: Annotated[Text, Field(alias="_id")]
    type: Text
    supporting_facts: tuple[Fact, ...]
    context: tuple[tuple[str, tuple[str, ...]], ...]

    def as_question(self) -> Question:
        paragraphs = marked(self.context, self.supporting_facts)
        return Question(
            id=self.id,
            source="hotpotqa",
            text=self.question,
            answer=self.answer,
            kind=self.type,
            paragraphs=paragraphs,
            steps=page_steps(
                self.question, self.answer, self.type, paragraphs, self.supporting_facts
            ),
        )


class _TwoWiki(_Hotpot):
    """2WikiMultihopQA as published."""

    evidences: Annotated[tuple[Triple, ...], Field(min_length=1)]

    def as_question(self) -> Question:
        paragraphs = marked(self.context, self.supporting_facts)
        return Question(
            id=self.id,
            source="2wiki",
            text=self.question,
            answer=self.answer,
            kind=self.type,
            paragraphs=paragraphs,
            steps=triple_steps(
                self.question, self.type, self.evidences, paragraphs, self.supporting_facts
            ),
        )


class _MusiqueStep(_Loose):
    question: Text
    answer: Text
    paragraph_support_idx: int | None


class _MusiquePage(_Loose):
    idx: int
    title: str
    paragraph_text: str
    is_supporting: bool


class _Musique(_Row):
    """MuSiQue as published."""

    id: Text
    answer_aliases: tuple[str, ...]
    answerable: bool
    paragraphs: tuple[_MusiquePage, ...]
    question_decomposition: Annotated[tuple[_MusiqueStep, ...], Field(min_length=1)]

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
        graph, mark, _ = self.id.partition("__")
        return Question(
            id=self.id,
            source="musique",
            text=self.question,
            answer=self.answer,
            aliases=self.answer_aliases,
            kind=graph if mark else f"{len(steps)}hop",
            paragraphs=paragraphs,
            steps=steps,
        )


class _Common(_Row):
    """What rows of the common format share."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Text
    dataset: Text
    answer_aliases: tuple[str, ...]
    type: Text
    source: str | None = None


class _CommonPage(_Strict):
    idx: int
    title: str
    sentences: tuple[str, ...]
    is_supporting: bool


class _CommonHotpot(_Common):
    level: str | None = None
    paragraphs: tuple[_CommonPage, ...]
    supporting_facts: tuple[Fact, ...]

    def as_question(self) -> Question:
        pages = [(page.title, page.sentences) for page in self.paragraphs]
        paragraphs = marked(pages, self.supporting_facts)
        return Question(
            id=self.id,
            source="hotpotqa",
            text=self.question,
            answer=self.answer,
            aliases=self.answer_aliases,
            kind=self.type,
            paragraphs=paragraphs,
            steps=page_steps(
                self.question, self.answer, self.type, paragraphs, self.supporting_facts
            ),
        )


class _CommonTwoWiki(_Common):
    paragraphs: tuple[_CommonPage, ...]
    supporting_facts: tuple[Fact, ...]
    evidence_triples: Annotated[tuple[Triple, ...], Field(min_length=1)]

    def as_question(self) -> Question:
        pages = [(page.title, page.sentences) for page in self.paragraphs]
        paragraphs = marked(pages, self.supporting_facts)
        return Question(
            id=self.id,
            source="2wiki",
            text=self.question,
            answer=self.answer,
            aliases=self.answer_aliases,
            kind=self.type,
            paragraphs=paragraphs,
            steps=triple_steps(
                self.question, self.type, self.evidence_triples, paragraphs, self.supporting_facts
            ),
        )


class _CommonText(_Strict):
    idx: int
    title: str
    text: str
    is_supporting: bool


class _CommonStep(_Strict):
    question: Text
    answer: Text
    paragraph_idx: int


class _CommonMusique(_Common):
    paragraphs: tuple[_CommonText, ...]
    decomposition: Annotated[tuple[_CommonStep, ...], Field(min_length=1)]

    def as_question(self) -> Question:
        paragraphs, steps = asked_steps(
            [(page.idx, page.title, page.text) for page in self.paragraphs],
            [(step.question, step.answer, step.paragraph_idx) for step in self.decomposition],
        )
        return Question(
            id=self.id,
            source="musique",
            text=self.question,
            answer=self.answer,
            aliases=self.answer_aliases,
            kind=self.type,
            paragraphs=paragraphs,
            steps=steps,
        )


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
