"""Loading the workload: from a file of questions to a workflow, examples and a scorer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from skeletons.multihop import hosts
from skeletons.multihop.dealing import Archive, archive, deal
from skeletons.multihop.gaps import gap_edges
from skeletons.multihop.hosts import Declining, Host
from skeletons.multihop.questions import Question
from skeletons.multihop.rows import Reading, read_questions
from skeletons.multihop.subtasks import Origin, subtasks
from skeletons.reading import sha256, split_file
from skeletons.scoring import METRICS, short_answer_scores
from splice.errors import DataError, SettingsError
from splice.queries import Split
from splice.records import Query
from splice.workflow import Workflow
from splice.workload import Example, Options, Workload, choose

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "host": ("parallel", "chain"),
    "subtasks": ("form", "planned"),
    "abstention": ("phrase", "typed", "none"),
}
"""Choices by option; the first is taken where none is given."""


_ABOUT_HOST: Mapping[str, str] = {
    "parallel": "Three researchers report to a writer, and only the writer reads the question.",
    "chain": "Three researchers work in a row, each reads the one before it; a writer reads the "
    "last, and only the writer reads the question.",
}
_ABOUT_SUBTASKS: Mapping[str, str] = {
    "form": "Their tasks come from the form of the question alone",
    "planned": "Their tasks come from the annotated decomposition, without any answer in it",
}
_ABOUT_ABSTENTION: Mapping[str, str] = {
    "phrase": "",
    "typed": " The second and the third researcher may abstain in the typed form.",
    "none": " No researcher is offered a way to say that it does not know.",
}
_ABOUT_DEALING = (
    "who holds which paragraph follows the annotation, and a draw decides which of the last two "
    "holds what both are asked for."
)


def load(data: Path | None, *, split: Split, options: Options) -> Workload:
    """Load multi-hop questions with their paragraphs dealt to three researchers.

    Args:
        data: a file, or a folder that holds `train`, `val` and `test`, each `.jsonl` or `.json`.
        split: which file of a folder; a single file is taken whole.
        options: `host`, `parallel` or `chain`; `subtasks`, `form` or `planned`; `abstention`,
            `phrase`, `typed` or `none`.

    Raises:
        DataError: no data is given, or a file is missing or malformed.
        SettingsError: an option that does not exist, or `planned` where nothing is planned.
    """
    chosen = choose(options, OPTIONS)
    if data is None:
        raise DataError("multihop ships no questions: give a file or a folder of them")
    path = split_file(data, split)
    reading = read_questions(path)
    if not reading.questions:
        raise DataError(f"{path}: no row that can be used")
    host, origin = cast(Host, chosen["host"]), cast(Origin, chosen["subtasks"])
    declining = cast(Declining, chosen["abstention"])
    if origin == "planned" and any(q.source == "hotpotqa" for q in reading.questions):
        raise SettingsError(
            f"option subtasks='planned': {path} holds questions of HotpotQA, which has no "
            "decomposition; use 'form'"
        )
    workflow = hosts.variant(host, declining)
    others = archive(reading.questions)
    sources = "+".join(sorted({question.source for question in reading.questions}))
    # Tables and pools know the default by its name from before there was this option.
    suffix = "" if declining == "phrase" else f"/{declining}"
    return Workload(
        name=f"multihop/{sources}/{host}/{origin}{suffix}",
        about=_about(host, origin, declining, reading),
        workflow=workflow,
        examples=tuple(
            _example(question, workflow, origin, others) for question in reading.questions
        ),
        metrics=METRICS,
        score=score,
        sources={path.name: sha256(path)},
    )


def score(example: Example, answer: str | None) -> Mapping[str, float]:
    """Scores of a short answer by the gold answer or the alias that suits it best."""
    return short_answer_scores(answer, example.reference["answers"])


def _example(question: Question, workflow: Workflow, origin: Origin, others: Archive) -> Example:
    hands = deal(question, others)
    tasks = subtasks(question, origin)
    return Example(
        query=Query(
            id=question.id,
            text=question.text,
            context={name: hand.documents for name, hand in hands.items()},
            subtasks=tasks,
        ),
        reference={"answers": (question.answer, *question.aliases)},
        kind=question.kind,
        gap_edges=gap_edges(question, workflow, hands, tasks),
    )


def _about(host: Host, origin: Origin, declining: Declining, reading: Reading) -> str:
    said = f"{_ABOUT_HOST[host]} {_ABOUT_SUBTASKS[origin]}; {_ABOUT_DEALING}"
    said += _ABOUT_ABSTENTION[declining]
    if reading.n_incomplete:
        said += f" Left out: {reading.n_incomplete} whose evidence names what is not there."
    if reading.n_unanswerable:
        said += f" Left out as unanswerable: {reading.n_unanswerable}."
    return said
