"""Queries as a file: one JSON object a line, with reference answers apart from the query."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import ValidationError

from splice.errors import QueryError
from splice.files import read_text
from splice.records import Documents, NodeId, Query, Record
from splice.text import contains, is_refusal

Split: TypeAlias = Literal["train", "validation", "test"]
"""To fit or tune on; to choose by; to report once."""


class Case(Record):
    """A query and what a right answer to it would be."""

    query: Query
    answers: tuple[str, ...] = ()
    """The reference answer and other forms of it; empty: unknown."""
    split: Split | None = None
    """Which part of the questions it belongs to; parts are counted apart."""

    def is_correct(self, answer: str | None) -> bool | None:
        """Whether `answer` contains a reference answer as whole words; None if none is known.

        Letter case, punctuation and spacing don't count. Small models seldom give the bare answer,
        hence containment; a refusal is never correct.
        """
        if not self.answers:
            return None
        if answer is None or is_refusal(answer):
            return False
        return any(contains(answer, reference) for reference in self.answers)


class _Line(Record):
    id: str | None = None
    text: str
    context: Mapping[NodeId, Documents] = {}
    subtasks: Mapping[NodeId, str] = {}
    answers: tuple[str, ...] = ()
    split: Split | None = None


def load_cases(path: str | Path) -> tuple[Case, ...]:
    """Read queries from a JSONL file.

    Each line has `text`, and may have `id`, `context`, `subtasks`, `answers` and `split`.

    Raises:
        QueryError: the file can't be read, or a line is not a query; the message names the line.
    """
    path = Path(path)
    # Not `splitlines`: JSON strings may hold U+2028 and the like as they are.
    lines = read_text(path, QueryError).split("\n")
    cases = []
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        try:
            line = _Line.model_validate(json.loads(raw))
        except (ValueError, RecursionError) as error:
            raise QueryError(f"{path}:{number}: {_problem(error)}") from None
        query = Query(
            text=line.text,
            id=line.id or f"q{number}",
            context=line.context,
            subtasks=line.subtasks,
        )
        cases.append(Case(query=query, answers=line.answers, split=line.split))
    if not cases:
        raise QueryError(f"{path}: no queries")
    return tuple(cases)


def _problem(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return f"not JSON: {error}"
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"]))
    if not place:
        return "not a JSON object"
    if first["type"] == "extra_forbidden":
        return f"unknown key {place!r}; there are {', '.join(_Line.model_fields)}"
    if first["type"] == "missing":
        return f"key {place!r} is missing"
    return f"{place}: {first['msg']}"
