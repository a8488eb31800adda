"""Rows of StrategyQA: what is asked, the facts that decide it, and the steps to take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from skeletons.reading import read_rows
from skeletons.strategyqa.answers import YesNo

_REFERENCE = re.compile(r"#(\d{1,3})(?!\d)")


def _word(answer: Any) -> Any:
    """The original has the answer as a truth value."""
    return ("no", "yes")[answer] if isinstance(answer, bool) else answer


Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class Question(BaseModel):
    """One row of a file, in the original form or in that with `id` and a word as answer."""

    model_config = ConfigDict(frozen=True)

    id: Text = Field(validation_alias=AliasChoices("id", "qid"))
    question: Text
    answer: Annotated[YesNo, BeforeValidator(_word)]
    term: str
    """The page that its writer started from."""
    facts: Annotated[tuple[Text, ...], Field(min_length=1)]
    """Enough of them to answer."""
    decomposition: Annotated[tuple[Text, ...], Field(min_length=1)]
    """Steps to take; `#k` stands for the answer to step k."""


def read_questions(path: Path) -> tuple[Question, ...]:
    """The questions of a file.

    Raises:
        DataError: the file is missing or malformed.
    """
    return read_rows(path, Question)


def references(step: str) -> tuple[int, ...]:
    """Numbers of the steps whose answers a step needs, from 1, each once.

    >>> references("Is #2 larger than #1, or #2 older?")
    (2, 1)
    """
    return tuple(dict.fromkeys(int(number) for number in _REFERENCE.findall(step)))


def spelled_out(step: str) -> str:
    """A step as someone who does not see the others is asked.

    >>> spelled_out("Is #1 green?")
    'Is the answer to step 1 green?'
    """
    return _REFERENCE.sub(r"the answer to step \1", step)
