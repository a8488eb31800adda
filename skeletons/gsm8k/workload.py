"""Loading GSM8K, in its original form and with solution and answer apart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator

from skeletons.gsm8k.answers import is_correct, last_number
from skeletons.reading import read_rows, sha256, split_file
from splice.errors import DataError
from splice.queries import Split
from splice.records import Query
from splice.workflow import load_workflow
from splice.workload import Example, Options, Workload, choose

_GOLD = re.compile(r"-?\d+(?:\.\d+)?")
_ABOUT = (
    "Grade-school word problems. All three agents read the whole question and have no documents; "
    "their subtasks are the same for each question."
)


class Row(BaseModel):
    """One problem of a file."""

    model_config = ConfigDict(frozen=True)

    question: str = Field(min_length=1)
    answer: str
    """The number. The original form has it behind `####`, after the solution."""
    id: str | None = None
    """The original form has none."""

    @field_validator("answer")
    @classmethod
    def _number(cls, answer: str) -> str:
        number = answer.rpartition("####")[2].strip().replace(",", "")
        if not _GOLD.fullmatch(number) or last_number(number) is None:
            raise ValueError("no number, and none behind a last '####'")
        return number


def load(data: Path | None, *, split: Split, options: Options) -> Workload:
    """Load word problems with their numbers.

    Args:
        data: a file, or a folder that holds `train`, `val` and `test`, each `.jsonl`.
        split: which file of a folder; a single file is taken whole.
        options: there are none.

    Raises:
        DataError: no data is given, or a file is missing or malformed.
        SettingsError: an option that does not exist.
    """
    choose(options, {})
    if data is None:
        raise DataError("gsm8k ships no questions: give a file or a folder of them")
    path = split_file(data, split)
    rows = read_rows(path, Row)
    return Workload(
        name="gsm8k",
        about=_ABOUT,
        workflow=load_workflow(Path(__file__).with_name("workflow.toml")),
        examples=tuple(_example(row, number) for number, row in enumerate(rows, 1)),
        metrics=("correct",),
        score=score,
        sources={path.name: sha256(path)},
    )


def _example(row: Row, number: int) -> Example:
    query = Query(id=row.id or f"gsm8k-{number}", text=row.question)
    return Example(query=query, reference={"answer": row.answer})


def score(example: Example, answer: str | None) -> Mapping[str, float]:
    """1.0 if the answer's last number is the gold number, else 0.0."""
    gold = last_number(example.reference["answer"])
    return {"correct": float(gold is not None and is_correct(answer, gold))}
