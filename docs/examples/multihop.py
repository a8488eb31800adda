"""Repair a three-node workflow on ten real two-hop questions.

    python docs/examples/multihop.py FOLDER [--model 1.5b] [--threads 1] [--cache FILE]

FOLDER holds `val.jsonl` of 2WikiMultihopQA, one question a line with the fields `id`, `question`,
`answer`, `answer_aliases`, `type`, `paragraphs` (`title`, `sentences`, `is_supporting`) and
`supporting_facts`. The first ten compositional questions whose form is known are taken.

Two researchers look up one fact each and a writer answers; the second researcher is not told what
the first one found, which is the edge that may be missing. Gold answers score what is printed at
the end and are used nowhere else.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from splice import Agent, CachedModel, LocalModel, Workflow, repair_many
from splice.queries import Case
from splice.records import Document, ModelSettings, Query
from splice.report.batch import batch_table, batch_totals, result_rows

N_QUESTIONS, N_DISTRACTORS = 10, 2
N_SENTENCES = 3
"""Sentences kept of each paragraph, so that calls stay below some 300 tokens."""

RELATION = (
    r"(?P<relation>director|performer|composer|founder|creator|author|father|mother|husband|wife"
    r"|spouse|child)"
)
OF = re.compile(
    rf"(?P<head>.*)\bthe {RELATION} of (?:film |song )?(?P<title>.+?)"
    r"(?P<tail>(?: (?:born|die|died|from|is from|got|study|graduate from|work at|buried)"
    r"| ?'s birthday)?)\?"
)
POSSESSIVE = re.compile(
    rf"(?P<head>.*?(?:of|was|is|did|does|the) )(?P<title>[A-Z].+?)'s {RELATION}(?P<tail>.*)\?"
)

SETTINGS = ModelSettings(temperature=0.0, max_tokens=24)


def subtasks(question: str) -> dict[str, str] | None:
    """What each researcher is to find, from the question's form alone; None if it is another form.

    >>> subtasks("When was the performer of song Dream born?")
    {'first': 'Who is the performer of Dream?', 'second': 'When was this person born?'}
    """
    found = OF.fullmatch(question) or POSSESSIVE.fullmatch(question)
    if found is None:
        return None
    first = f"Who is the {found['relation']} of {found['title']}?"
    second = f"{found['head']}this person{found['tail']}?".replace(" 's", "'s")
    return {"first": first, "second": second}


def workflow() -> Workflow:
    """Two researchers who report to a writer."""
    first = Agent(
        id="first",
        role="You look up one fact. If your documents don't say it, reply: not found",
        reads_query=False,
        reply="Reply with a few words only.",
        abstention_phrase="not found",
        model=SETTINGS,
    )
    writer = Agent(
        id="writer",
        role="You answer questions from what two researchers report.",
        subtask="Answer the question from the reports.",
        reply="Reply with the answer only, in a few words.",
        model=SETTINGS,
    )
    return Workflow(
        name="two-hop",
        description="Two researchers with private documents report to a writer.",
        nodes=(first, first.model_copy(update={"id": "second"}), writer),
        edges=(("first", "writer"), ("second", "writer")),
        output="writer",
    )


def documents(row: Mapping[str, Any]) -> dict[str, tuple[Document, ...]]:
    """One supporting paragraph and two others for each researcher, dealt by the question's id.

    Who gets which supporting paragraph is taken from the order of the annotated supporting facts.
    """
    rng = random.Random(row["id"])
    pages = {page["title"]: page for page in row["paragraphs"]}
    others = [page for page in row["paragraphs"] if not page["is_supporting"]]
    rng.shuffle(others)
    titles = list(dict.fromkeys(title for title, _ in row["supporting_facts"]))
    dealt = {}
    for place, name in enumerate(("first", "second")):
        own = [pages[titles[place]], *others[place * N_DISTRACTORS :][:N_DISTRACTORS]]
        rng.shuffle(own)
        dealt[name] = tuple(
            Document(title=page["title"], text=" ".join(page["sentences"][:N_SENTENCES]))
            for page in own
        )
    return dealt


def cases(path: Path) -> Iterator[Case]:
    """Compositional questions whose form is known, in the order of the file."""
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        tasks = subtasks(row["question"])
        if row["type"] != "compositional" or tasks is None:
            continue
        query = Query(id=row["id"], text=row["question"], context=documents(row), subtasks=tasks)
        yield Case(query=query, answers=(row["answer"], *row["answer_aliases"]))


def main() -> None:
    """Run, repair, and print what came out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="1.5b")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", type=Path, help="keep replies in this file")
    args = parser.parse_args()
    chosen = {case.query.id: case for case in list(cases(args.folder / "val.jsonl"))[:N_QUESTIONS]}
    model = CachedModel(LocalModel(args.model, threads=args.threads), args.cache)
    batch = repair_many(
        workflow(), [case.query for case in chosen.values()], model=model, budget_fraction=1.0
    )
    rows = result_rows(batch, lambda answer, name: bool(chosen[name].is_correct(answer)))
    console = Console(width=150)
    console.print(
        f"2WikiMultihopQA, validation: the first {len(chosen)} compositional questions whose form "
        f"is known. Model: {args.model}.\nThe researchers' tasks come from the question's form; "
        "the annotation says whose documents hold which supporting paragraph.\nRight: the gold "
        "answer, or an alias, stands in the answer."
    )
    console.print(batch_table(rows))
    console.print(batch_totals(rows, batch), markup=False)


if __name__ == "__main__":
    main()
