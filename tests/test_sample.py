"""The sample that `splice init` writes: whole, fair between its halves, and repairable."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from splice import ScriptedModel, Workflow, load_workflow, repair_many
from splice.queries import Case, load_cases
from splice.records import RepairResult, Request
from splice.sample import write_sample

N_HALF = 10
MISSING = {
    "stay-after-stop": ("routing", "visa"),
    "change-after-stop": ("routing", "transfer"),
}
"""The edge that each kind of question lacks; the other kinds lack none."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sample(tmp_path / "demo")
    return tmp_path / "demo"


@pytest.fixture
def workflow(folder: Path) -> Workflow:
    return load_workflow(folder / "workflow.toml")


@pytest.fixture
def cases(folder: Path) -> tuple[Case, ...]:
    return load_cases(folder / "queries.jsonl")


def kind(query_id: str) -> str:
    """`01-stop` is of the kind `stop`."""
    return query_id.partition("-")[2]


def test_every_query_fits_the_workflow(workflow: Workflow, cases: tuple[Case, ...]) -> None:
    for case in cases:
        workflow.check_query(case.query)


def test_both_halves_ask_the_same_mix_and_no_question_twice(cases: tuple[Case, ...]) -> None:
    first, second = cases[:N_HALF], cases[N_HALF:]
    mixes = [Counter(kind(case.query.id) for case in half) for half in (first, second)]
    assert mixes[0] == mixes[1]
    assert [{case.split for case in half} for half in (first, second)] == [{"train"}, {"test"}]
    assert set(MISSING) < set(mixes[0])
    assert len({case.query.text for case in cases}) == len(cases) == 2 * N_HALF


def test_every_answer_stands_in_one_line_of_the_papers(
    workflow: Workflow, cases: tuple[Case, ...]
) -> None:
    lines = [
        line
        for node in workflow.nodes
        for document in node.documents
        for line in document.text.splitlines()
    ]
    for case in cases:
        assert any(case.is_correct(line) for line in lines), case.query.id


def test_only_the_desk_reads_the_question(workflow: Workflow, cases: tuple[Case, ...]) -> None:
    model = ScriptedModel(perfect_reader)
    repair_many(workflow, [case.query for case in cases], model=model)
    for request in model.requests:
        assert ("Question:" in shown(request)) == (request.node == "desk")


def test_a_perfect_reader_is_repaired_by_the_missing_edge_and_left_alone_without_one(
    workflow: Workflow, cases: tuple[Case, ...]
) -> None:
    batch = repair_many(
        workflow, [case.query for case in cases], model=ScriptedModel(perfect_reader)
    )
    by_id = {case.query.id: case for case in cases}
    for result in batch.results:
        case = by_id[result.query.id]
        expected = MISSING.get(kind(result.query.id))
        assert case.is_correct(result.base.answer) == (expected is None), result.query.id
        assert case.is_correct(result.answer), result.query.id
        assert adopted_edge(result) == expected


def adopted_edge(result: RepairResult) -> tuple[str, str] | None:
    if result.decision.action == "retain" or result.message is None:
        return None
    return result.message.source, result.message.receiver


# --- a reader that makes no mistakes ---------------------------------------------------------


def perfect_reader(request: Request) -> str:
    """Reads what it is shown and nothing else: looks up a line, or answers from the reports."""
    prompt = shown(request)
    return answer(prompt) if request.node == "desk" else look_up(prompt)


def shown(request: Request) -> str:
    return request.messages[-1].content


def look_up(prompt: str) -> str:
    """The line of the documents that holds every name of the task; else `not found`."""
    lines = quoted(prompt, "Your documents:")
    task = re.search(r'^Your task: (.*)(?:\nThis is about "(.*)"\.)?$', prompt, re.MULTILINE)
    assert task is not None
    given = re.match(r"The \w+ is (?:from )?(?!unknown)(.+?)\. ", task[1])
    names = given[1].split(" to ") if given else [task[2]] if task[2] else []
    found = [line for line in lines if names and all(name in line for name in names)]
    return found[0] if found else "not found"


def answer(prompt: str) -> str:
    """What the reports say in the unit that the question asks for; else `not found`."""
    question = quoted(prompt, "Question:")[0]
    reports = [line for line in quoted(prompt, "") if line not in (question, "not found")]
    unit = re.search(r"How many (\w+)", question)
    wanted = rf"\d+ {unit[1]}" if unit else r"(?<=stop in ).*(?=\.)"
    found = [match[0] for line in reports if (match := re.search(wanted, line))]
    return found[0] if found else "not found"


def quoted(prompt: str, heading: str) -> list[str]:
    """Quoted lines of a prompt, of the block under `heading` only if one is named."""
    blocks = [block for block in prompt.split("\n\n") if block.startswith(heading)]
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("> ")]
