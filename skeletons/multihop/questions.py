"""A multi-hop question in the one form that everything after reading works on."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from splice.records import Record

Source: TypeAlias = Literal["hotpotqa", "2wiki", "musique"]


class Paragraph(Record):
    """A paragraph of a question, split into sentences."""

    title: str
    sentences: tuple[str, ...]
    is_supporting: bool
    key: tuple[int, ...] = ()
    """Places of the sentences that say what the question needs, ascending."""

    @property
    def text(self) -> str:
        """The whole paragraph on one line."""
        return " ".join(" ".join(self.sentences).split())


class Step(Record):
    """One look-up on the way to the answer."""

    paragraph: Annotated[int, Field(ge=0)]
    """Place of the paragraph that says it."""
    needs: tuple[int, ...] = ()
    """Places of the earlier steps without whose answers it can't be asked, ascending."""
    subjects: tuple[str, ...]
    """Names of what it is about; a text that has one of them and the answer states the fact."""
    answer: str | None
    """What it finds; None: the annotation does not say."""
    relation: str | None = None
    """Relation of the triple that the step comes from; None: it comes from no triple."""
    asks: str | None = None
    """The annotated question of the step, with `#1` for the answer of the first step; None: there
    is none."""


class Question(Record):
    """One question with its evidence."""

    id: str
    source: Source
    text: str
    answer: str
    aliases: tuple[str, ...] = ()
    kind: str
    """The type that its data set gives it."""
    paragraphs: tuple[Paragraph, ...]
    steps: Annotated[tuple[Step, ...], Field(min_length=1)]
    """In the order in which they can be asked."""


class Incomplete(Exception):
    """The evidence of a row names a paragraph or a step that is not there."""


def without_note(title: str) -> str:
    """A title without the note that tells it from others of the same name.

    >>> without_note("Thomas Carr (director)")
    'Thomas Carr'
    """
    return re.sub(r"\s*\([^()]*\)$", "", title) or title
