"""Loading HumanEval, and scoring by running its tests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from skeletons.humaneval.programs import extract, header, self_testing
from skeletons.reading import read_rows, sha256, split_file
from splice.errors import DataError
from splice.queries import Split
from splice.records import Query
from splice.sandbox import run_program
from splice.workflow import load_workflow
from splice.workload import Example, Options, Workload, choose

_ABOUT = (
    "Python functions to complete. All three agents read the signature and the docstring and have "
    "no documents; their subtasks are the same for each question. Answers are run, in a sandbox."
)
TIMEOUT_S = 5.0
"""For one program with its tests, the start of Python included. The slowest solution of the data
set takes under a second."""


class Row(BaseModel):
    """One task of a file."""

    model_config = ConfigDict(frozen=True)

    task_id: str = Field(min_length=1)
    prompt: str
    entry_point: str = Field(pattern=r"^[A-Za-z_]\w*$")
    canonical_solution: str
    test: str = Field(pattern=r"def check\(")

    @model_validator(mode="after")
    def _has_function(self) -> Row:
        if header(self.prompt, self.entry_point) is None:
            raise ValueError(f"the prompt does not define {self.entry_point!r}")
        return self


def load(data: Path | None, *, split: Split, options: Options) -> Workload:
    """Load functions to complete with their tests.

    Args:
        data: a file, or a folder that holds `train`, `val` and `test`, each `.jsonl`.
        split: which file of a folder; a single file, such as the original, is taken whole.
        options: there are none.

    Raises:
        DataError: no data is given, or a file is missing or malformed.
        SettingsError: an option that does not exist.
    """
    choose(options, {})
    if data is None:
        raise DataError("humaneval ships no tasks: give a file or a folder of them")
    path = split_file(data, split)
    return Workload(
        name="humaneval",
        about=_ABOUT,
        workflow=load_workflow(Path(__file__).with_name("workflow.toml")),
        examples=tuple(_example(row) for row in read_rows(path, Row)),
        metrics=("passed",),
        score=score,
        sources={path.name: sha256(path)},
    )


def _example(row: Row) -> Example:
    query = Query(id=row.task_id, text=row.prompt)
    tests = {"prompt": row.prompt, "entry_point": row.entry_point, "test": row.test}
    return Example(query=query, reference=tests)


async def score(example: Example, answer: str | None) -> Mapping[str, float]:
    """1.0 if the program of the answer passes all tests, else 0.0.

    Raises:
        SettingsError: no sandbox can be had here.
    """
    if answer is None:
        return {"passed": 0.0}
    code = extract(answer, example.reference["entry_point"])
    program = self_testing(code, **example.reference)
    result = await asyncio.to_thread(run_program, program, timeout_s=TIMEOUT_S)
    return {"passed": float(result.outcome == "ok")}
