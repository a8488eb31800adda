"""GSM8K as a workload: both forms of the data, exact numbers, a run from end to end."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import realdata
from soon import soon

from skeletons.gsm8k import load
from skeletons.gsm8k.answers import is_correct, last_number
from skeletons.gsm8k.workload import score
from splice import ScriptedModel, repair
from splice.errors import DataError, SettingsError
from splice.queries import Split
from splice.records import Query, Request
from splice.workload import Example, Workload

ORIGINAL = {"question": "Ana has 3 pens and buys 4. How many?", "answer": "3+4=<<3+4=7>>7\n#### 7"}
APART = {
    "id": "pens",
    "question": "Ana has 3 pens and buys 4. How many?",
    "solution": "3+4=<<3+4=7>>7\n#### 7",
    "answer": "7",
}


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def loaded(path: Path, split: Split = "test") -> Workload:
    return load(path, split=split, options={})


# --- data ------------------------------------------------------------------------------------


def test_the_original_form_has_the_number_behind_its_mark_and_ids_by_line(tmp_path: Path) -> None:
    path = written(tmp_path / "test.jsonl", ORIGINAL, {**ORIGINAL, "answer": "#### 1,250"})
    examples = loaded(path).examples
    assert [example.reference for example in examples] == [{"answer": "7"}, {"answer": "1250"}]
    assert [example.query.id for example in examples] == ["gsm8k-1", "gsm8k-2"]


def test_the_form_with_the_answer_apart_is_read_too(tmp_path: Path) -> None:
    (example,) = loaded(written(tmp_path / "test.jsonl", APART)).examples
    assert example == Example(
        query=Query(id="pens", text=APART["question"]), reference={"answer": "7"}
    )


def test_no_solution_gets_into_a_query(tmp_path: Path) -> None:
    (example,) = loaded(written(tmp_path / "test.jsonl", APART)).examples
    assert "<<" not in example.query.model_dump_json()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "How many?"}, "field 'answer' is missing"),
        ({"answer": "#### 7"}, "field 'question' is missing"),
        ({"question": "", "answer": "7"}, "field 'question'"),
        ({"question": "How many?", "answer": 7}, "field 'answer'"),
        ({"question": "How many?", "answer": "seven"}, "field 'answer'.*no number"),
        ({"question": "How many?", "answer": "7\n####"}, "field 'answer'.*no number"),
        ({"question": "How many?", "answer": "#### 7 pens"}, "field 'answer'.*no number"),
        ([], "not a row"),
    ],
)
def test_a_malformed_row_is_named_by_file_line_and_field(
    row: Any, message: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "test.jsonl", APART, row)
    with pytest.raises(DataError, match=rf"test\.jsonl:2: {message}"):
        loaded(path)


def test_without_data_or_with_an_option_it_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gsm8k ships no questions"):
        load(None, split="test", options={})
    with pytest.raises(DataError, match=r"val\.jsonl"):
        loaded(tmp_path, "validation")
    with pytest.raises(SettingsError, match="unknown option 'host'"):
        load(None, split="test", options={"host": "chain"})


@pytest.mark.parametrize(("split", "n"), [("train", 600), ("validation", 150), ("test", 300)])
def test_every_real_question_loads_and_its_own_solution_is_right(split: Split, n: int) -> None:
    folder = realdata.data_set("math_gsm8k")
    workload = loaded(folder, split)
    assert len(workload.examples) == n
    stem = {"validation": "val"}.get(split, split)
    rows = map(json.loads, (folder / f"{stem}.jsonl").read_text("utf-8").splitlines())
    for example, row in zip(workload.examples, rows, strict=True):
        workload.workflow.check_query(example.query)
        assert score(example, row["solution"]) == {"correct": 1.0}, example.query.id


def test_verdicts_on_real_solutions_of_models_agree_with_those_that_came_with_them() -> None:
    folder = realdata.data_set("math_gsm8k")
    examples = {example.query.id: example for example in loaded(folder).examples}
    n_right = n_agreed = n_all = 0
    for line in (folder / "model_solutions.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        for answer in (value for value in row.values() if isinstance(value, dict)):
            verdict = score(examples[row["id"]], answer["solution"])["correct"] == 1.0
            n_all += 1
            n_right += verdict
            n_agreed += verdict == answer["is_correct"]
    assert (n_all, n_right) == (1200, 453)
    assert n_agreed == n_all


# --- numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("42", "42"),
        ("42.", "42"),
        ("42.0", "42"),
        ("42.00", "42"),
        ("042", "42"),
        ("The answer is 42", "42"),
        ("The answer is 42 apples.", "42"),
        ("42apples", "42"),
        ("**42**", "42"),
        ("$42", "42"),
        ("42%", "42"),
        ("42 %", "42"),
        ("€ 42,000", "42000"),
        ("1,234,567", "1234567"),
        ("1234567", "1234567"),
        ("$1,234.50", "1234.5"),
        (".5", "0.5"),
        ("1/2", "0.5"),
        ("1⁄2", "0.5"),
        ("3 1/2 hours", "3.5"),
        ("84/2", "42"),
        ("-42", "-42"),
        ("−42", "-42"),
        ("-$42", "-42"),
        ("$-42", "-42"),
        ("- 42", "-42"),
        ("50-8 = 42", "42"),
        ("between 40-42", "42"),
        ("3 * 14 = 42\n#### 42", "42"),
        ("Answer: 42\nThat took 3 steps.", "42"),
        ("Answer: 41\nNo, wait.\nAnswer: 42", "42"),
        ("> **Answer:** 6 * 7 = 42", "42"),
        ("Answer:\n42", "42"),
        (r"\boxed{42}", "42"),
        ("x2 = 42", "42"),
    ],
)
def test_these_answers_are_right(answer: str, gold: str) -> None:
    assert is_correct(answer, Fraction(gold))


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (None, "42"),
        ("", "42"),
        ("forty-two", "42"),
        ("not found", "0"),
        ("41", "42"),
        ("42.5", "42"),
        ("42.01", "42"),
        ("4.2", "42"),
        ("420", "42"),
        ("-42", "42"),
        ("42", "-42"),
        ("42/0", "42"),
        ("42, then 3 more", "42"),
        ("Answer: 3\n42", "42"),
        ("Answer: unknown\n42", "42000"),
        ("v1.42", "42"),
        ("x42", "42"),
        ("9" * 5000, "42"),
        ("0.3333333333333333", "1/3"),
    ],
)
def test_these_answers_are_wrong(answer: str | None, gold: str) -> None:
    assert not is_correct(answer, Fraction(gold))


def test_a_long_hostile_answer_is_read_in_linear_time() -> None:
    with soon():
        for piece in ("1", "1,", "1 ", "- ", "1/", "1.", "1,234", "$ -", "x1"):
            last_number(piece * 100_000)


# --- from end to end -------------------------------------------------------------------------


def colleague(request: Request) -> str:
    """Reads well, calculates badly, and checks what it is told to check."""
    prompt = request.messages[-1].content
    if request.node == "reader":
        return "3 pens\n4 pens more\nasked: how many pens"
    if request.node == "solver":
        return "3 + 4 = 8\nAnswer: 8"
    return "3 + 4 = 7\nAnswer: 7" if "Answer: 8" in prompt else "Answer: 0"


def test_a_repair_from_end_to_end_is_scored(tmp_path: Path) -> None:
    workload = loaded(written(tmp_path / "test.jsonl", APART))
    (example,) = workload.examples
    model = ScriptedModel(colleague)
    result = repair(workload.workflow, example.query, model=model)
    assert {request.node for request in model.requests} >= {"reader", "solver", "checker"}
    assert workload.score(example, result.answer) == {"correct": 1.0}
    assert workload.metrics == ("correct",)
