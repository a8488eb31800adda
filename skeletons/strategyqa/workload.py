"""Loading StrategyQA: from a file of questions to a workflow, examples and a scorer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from skeletons.reading import sha256, split_file
from skeletons.strategyqa.answers import yes_or_no
from skeletons.strategyqa.dealing import Origin, deal, gap_edges, subtasks
from skeletons.strategyqa.questions import Question, read_questions
from splice.errors import DataError
from splice.queries import Split
from splice.records import Query
from splice.workflow import load_workflow
from splice.workload import Example, Options, Workload, choose

OPTIONS: Mapping[str, tuple[str, ...]] = {"subtasks": ("question", "planned")}
"""Choices by option; the first is taken where none is given."""

_ABOUT = (
    "Yes-or-no questions with hidden steps. The facts that decide them go round over three "
    "researchers, among facts about something else; only the writer reads the question."
)
_ABOUT_SUBTASKS: Mapping[Origin, str] = {
    "question": "Each researcher's task is to find what helps to answer the whole question.",
    "planned": "The researchers' tasks are the annotated steps, without any answer in them.",
}


def load(data: Path | None, *, split: Split, options: Options) -> Workload:
    """Load yes-or-no questions with their facts dealt to three researchers.

    Args:
        data: a file, or a folder that holds `train`, `val` and `test`, each `.jsonl` or `.json`.
        split: which file of a folder; a single file is taken whole.
        options: `subtasks`, `question` or `planned`.

    Raises:
        DataError: no data is given, or a file is missing or malformed.
        SettingsError: an option that does not exist.
    """
    origin = cast(Origin, choose(options, OPTIONS)["subtasks"])
    if data is None:
        raise DataError("strategyqa ships no questions: give a file or a folder of them")
    path = split_file(data, split)
    questions = read_questions(path)
    return Workload(
        name=f"strategyqa/{origin}",
        about=f"{_ABOUT} {_ABOUT_SUBTASKS[origin]}",
        workflow=load_workflow(Path(__file__).with_name("workflow.toml")),
        examples=tuple(_example(question, questions, origin) for question in questions),
        metrics=("correct",),
        score=score,
        sources={path.name: sha256(path)},
    )


def score(example: Example, answer: str | None) -> Mapping[str, float]:
    """1.0 if the answer says what the gold answer says and not the opposite too, else 0.0."""
    return {"correct": float(yes_or_no(answer) == example.reference["answer"])}


def _example(question: Question, questions: Sequence[Question], origin: Origin) -> Example:
    return Example(
        query=Query(
            id=question.id,
            text=question.question,
            context=deal(question, questions),
            subtasks=subtasks(question, origin),
        ),
        reference={"answer": question.answer},
        gap_edges=gap_edges(question, origin),
    )
