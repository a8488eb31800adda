"""A workflow file and a file of queries are a workload too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from splice.errors import SettingsError
from splice.workload import open_workload

WORKFLOW = """\
name = "desk"
description = "Answers travellers."
output = "desk"

[[nodes]]
id = "desk"
kind = "function"
call = "answer"
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, Path, Path]:
    workflow, code = tmp_path / "desk.toml", tmp_path / "code.py"
    workflow.write_text(WORKFLOW, "utf-8")
    code.write_text("def answer(given):\n    return given.query.text\n", "utf-8")
    return str(workflow), tmp_path / "queries.jsonl", code


def write(path: Path, *lines: dict[str, object]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def test_queries_of_the_split_are_scored_by_their_answers(files: tuple[str, Path, Path]) -> None:
    name, data, code = files
    write(
        data,
        {"id": "a", "text": "31?", "answers": ["31", "thirty-one"], "split": "train"},
        {"id": "b", "text": "9?", "answers": ["9"], "split": "test"},
        {"id": "c", "text": "7?", "answers": ["7"]},
    )
    workload = open_workload(name, data, split="train", options={}, code=code)
    assert (workload.name, workload.about) == ("desk", "Answers travellers.")
    assert [example.query.id for example in workload.examples] == ["a", "c"]
    first = workload.examples[0]
    assert workload.score(first, "It is 31 hours.") == {"correct": 1.0}
    assert workload.score(first, "It is 310 hours.") == {"correct": 0.0}
    assert workload.score(first, None) == {"correct": 0.0}


def test_what_can_not_be_scored_is_refused(files: tuple[str, Path, Path]) -> None:
    name, data, code = files
    write(data, {"id": "a", "text": "31?"})
    with pytest.raises(SettingsError, match="query 'a' has no reference answer"):
        open_workload(name, data, split="train", options={}, code=code)


def test_a_split_without_queries_is_refused(files: tuple[str, Path, Path]) -> None:
    name, data, code = files
    write(data, {"id": "a", "text": "31?", "answers": ["31"], "split": "test"})
    with pytest.raises(SettingsError, match="no query of 'desk' belongs to split 'train'"):
        open_workload(name, data, split="train", options={}, code=code)


def test_mistakes_are_named(files: tuple[str, Path, Path]) -> None:
    name, data, code = files
    with pytest.raises(SettingsError, match="needs a JSONL file of queries"):
        open_workload(name, None, split="train", options={})
    with pytest.raises(SettingsError, match="unknown option 'host'"):
        open_workload(name, data, split="train", options={"host": "chain"})
    with pytest.raises(SettingsError, match="code goes with a workflow file"):
        open_workload("gsm8k", data, split="train", options={}, code=code)
