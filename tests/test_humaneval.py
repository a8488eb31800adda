"""HumanEval as a workload: the data, programs out of answers, and tests that must be passed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import realdata
from soon import soon

from skeletons.humaneval import load
from skeletons.humaneval.programs import extract, self_testing
from skeletons.humaneval.workload import score
from splice import ScriptedModel, repair
from splice.errors import DataError, SettingsError
from splice.queries import Split
from splice.records import Request
from splice.workload import Example, Workload

PROMPT = (
    "import math\n\n\n"
    "def half(x):\n    return x / 2\n\n\n"
    'def halves(numbers):\n    """ Halve each number, rounding down.\n    >>> halves([3])\n'
    '    [1]\n    """\n'
)
BODY = "    return [math.floor(half(x)) for x in numbers]\n"
TEST = (
    "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate([3, 4]) == [1, 2]\n"
    "    assert candidate([]) == []\n    assert half(4) == 2\n"
)
ROW = {
    "task_id": "Halves/0",
    "prompt": PROMPT,
    "entry_point": "halves",
    "canonical_solution": BODY,
    "test": TEST,
}
WHOLE = "def halves(numbers):\n" + BODY


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def loaded(path: Path, split: Split = "test") -> Workload:
    return load(path, split=split, options={})


@pytest.fixture
def example(tmp_path: Path) -> Example:
    return loaded(written(tmp_path / "HumanEval.jsonl", ROW)).examples[0]


def passed(example: Example, answer: str | None) -> bool:
    return asyncio.run(score(example, answer)) == {"passed": 1.0}  # type: ignore[arg-type]


# --- data ------------------------------------------------------------------------------------


def test_the_query_is_the_prompt_and_holds_neither_solution_nor_test(example: Example) -> None:
    assert (example.query.id, example.query.text) == ("Halves/0", PROMPT)
    assert "floor" not in example.query.model_dump_json()
    assert "canonical_solution" not in example.reference


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task_id": None}, "field 'task_id'"),
        ({"prompt": "def thirds(x):\n"}, "not a row: .*does not define 'halves'"),
        ({"prompt": "def halves_of(x):\n"}, "not a row: .*does not define 'halves'"),
        ({"entry_point": "halves('x')"}, "field 'entry_point'"),
        ({"test": "assert halves([3]) == [1]"}, "field 'test'"),
    ],
)
def test_a_malformed_row_is_named_by_file_line_and_field(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "test.jsonl", ROW, {**ROW, "task_id": "Halves/1", **change})
    with pytest.raises(DataError, match=rf"test\.jsonl:2: {message}"):
        loaded(path)


@pytest.mark.parametrize("field", list(ROW))
def test_a_missing_field_is_named(field: str, tmp_path: Path) -> None:
    row = {name: value for name, value in ROW.items() if name != field}
    with pytest.raises(DataError, match=f"test.jsonl:1: field '{field}' is missing"):
        loaded(written(tmp_path / "test.jsonl", row))


def test_without_data_or_with_an_option_it_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="humaneval ships no tasks"):
        load(None, split="test", options={})
    with pytest.raises(DataError, match=r"val\.jsonl"):
        loaded(tmp_path, "validation")
    with pytest.raises(SettingsError, match="unknown option 'host'"):
        load(None, split="test", options={"host": "chain"})


@pytest.mark.parametrize(("split", "n"), [("train", 50), ("validation", 14), ("test", 50)])
def test_every_real_task_loads(split: Split, n: int) -> None:
    workload = loaded(realdata.data_set("code_humaneval"), split)
    assert len(workload.examples) == n
    for example in workload.examples:
        workload.workflow.check_query(example.query)


def test_real_solutions_pass_and_a_program_that_does_nothing_fails() -> None:
    folder = realdata.data_set("code_humaneval")
    lines = (folder / "test.jsonl").read_text("utf-8").splitlines()
    rows = {row["task_id"]: row for row in map(json.loads, lines)}
    for number, example in enumerate(loaded(folder).examples[::5]):
        solution = rows[example.query.id]["canonical_solution"]
        whole = f"It is:\n```python\n{example.query.text}{solution}```\n"
        assert passed(example, whole if number % 2 else solution), example.query.id
        assert not passed(example, "    return None\n"), example.query.id


# --- programs out of answers -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("def f(): pass", "def f(): pass"),
        ("Here:\n```python\ndef f(): pass\n```\nGood.", "def f(): pass\n"),
        ("```\ndef f(): 1\n```\n```\ndef f(): 2\n```", "def f(): 2\n"),
        ("```python\ndef f(): pass\n```\nUse it:\n```python\nf()\n```", "def f(): pass\n"),
        ("```python\ndef f():\n    return 1", "def f():\n    return 1"),
        ("~~~\nf = abs\n~~~", "f = abs\n"),
        ("1. So:\n   ```python\n   def f():\n       pass\n   ```", "def f():\n    pass\n"),
        ("````\ndef f(): '''\n```\n'''\n````", "def f(): '''\n```\n'''\n"),
        ("Use `f` so:\n```\nreturn 1\n```", "return 1\n"),
        ("", ""),
    ],
)
def test_the_code_of_an_answer_is_its_last_block(answer: str, code: str) -> None:
    assert extract(answer, "f") == code


def test_a_long_hostile_answer_is_read_in_linear_time() -> None:
    with soon():
        for piece in ("```\n", "```", "~~~\n```\n", "`", "```x\n\n", " ", "def f"):
            extract(piece * 200_000, "f")


@pytest.mark.parametrize(
    "answer",
    [
        BODY,
        f"```python\n{WHOLE}```",
        f"```python\n{PROMPT}{BODY}```",
        "return [math.floor(half(x)) for x in numbers]",
        "from __future__ import annotations\n" + WHOLE,
        "halves = lambda numbers: [x // 2 for x in numbers]",
        f"{WHOLE}\nprint(halves([1]))\nif __name__ == '__main__':\n    input()",
        "def half_of(x):\n    return x // 2\n\ndef halves(numbers):\n"
        "    return [half_of(x) for x in numbers]\n",
    ],
)
def test_right_programs_pass_however_they_are_given(example: Example, answer: str) -> None:
    assert passed(example, answer)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "",
        "I can't do that.",
        "    return None\n",
        "def halves(numbers):\n    return [3 / 2]\n",
        "def thirds(numbers):\n    return [1, 2]\n",
        "import os\nos._exit(0)\n" + WHOLE,
        "import sys\nsys.exit(0)\n" + WHOLE,
        "def halves(numbers):\n    import os\n    os._exit(0)\n",
        "def halves(numbers):\n    raise SystemExit\n",
        "def check(candidate): pass\ndef halves(numbers): pass\n",
        "def halves(numbers): pass\nprint('ok')\n'''",
        "def halves(numbers): pass\nx = (",
    ],
)
def test_wrong_programs_and_those_that_leave_before_the_tests_fail(
    example: Example, answer: str | None
) -> None:
    assert not passed(example, answer)


def test_the_program_sees_neither_its_tests_nor_what_surrounds_it() -> None:
    program = self_testing(
        "print(sorted(set(globals()) - {'__builtins__'}))\ndef f(): pass\n",
        prompt="import math\ndef f():\n",
        entry_point="f",
        test="def check(candidate): pass",
    )
    from splice.sandbox import run_program

    assert run_program(program).stdout == "['__name__', 'math']\n"


# --- from end to end -------------------------------------------------------------------------


def colleague(request: Request) -> str:
    """A programmer who forgets to round, and a reviewer who does not."""
    if request.node == "analyst":
        return "An empty list gives an empty list.\nOdd numbers are rounded down."
    if request.node == "programmer":
        return "```python\ndef halves(numbers):\n    return [x / 2 for x in numbers]\n```"
    return f"It did not round.\n```python\n{WHOLE}```"


def test_a_repair_from_end_to_end_is_scored(tmp_path: Path) -> None:
    workload = loaded(written(tmp_path / "test.jsonl", ROW))
    (example,) = workload.examples
    model = ScriptedModel(colleague)
    result = repair(workload.workflow, example.query, model=model)
    assert {request.node for request in model.requests} >= {"analyst", "programmer", "reviewer"}
    assert passed(example, result.answer)
    draft = colleague(Request(messages=(), node="programmer"))
    assert not passed(example, draft)
    assert workload.metrics == ("passed",)
